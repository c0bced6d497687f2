"""The section ``[checkpoint]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointConfig:
    """The section ``[checkpoint]``."""

    enable: bool = False
    """Save the whole state of training, and go on from the newest complete save when the same command runs again."""
    interval: int = 500
    """Steps from one save to the next; the end of the run is saved too."""
    keep_latest_k: int = 2
    """Saves to keep, the newest ones; 0: all. The best, the epoch ends and the final one are kept besides."""
    keep_best: bool = True
    """Also save and keep the step with the lowest held-out bits per byte; without validation, the lowest loss saved."""
    keep_epoch_ends: bool = False
    """Also save and keep the step at which every source of the phase has been read once more."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """disabled: training waits for the disk. async: for a copy in memory alone. async_with_pinned_mem: hardly at all,
    with a process of its own that writes; needs an accelerator."""
    load_step: int = -1
    """Step to go on from; -1: the newest complete one. Newer saves are set aside, not deleted."""
    initial_load_path: str = ""
    """A step-N folder to take weights from, and nothing else, when there is no save to go on from."""
    create_seed_checkpoint: bool = False
    """Save the initial weights as step-0 and end, for runs that are to start from the same weights."""

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"interval = {self.interval} must be at least 1; to save nothing set enable = false")
        if self.keep_latest_k < 0:
            raise ValueError(f"keep_latest_k = {self.keep_latest_k} is negative; 0 keeps all")
        if self.load_step < -1:
            raise ValueError(f"load_step = {self.load_step} is negative; -1 takes the newest")
        if not self.enable:
            for name, default in (("load_step", -1), ("create_seed_checkpoint", False)):
                if getattr(self, name) != default:
                    raise ValueError(f"{name} = {getattr(self, name)} needs checkpoint.enable = true")
