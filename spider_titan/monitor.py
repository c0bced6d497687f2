"""Warnings about a run that goes wrong while its loss may still look well.

The monitor knows metrics and sums by their names, and no model: a model without a metric is not asked about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

import numpy as np
from torch import Tensor

FEWEST_LOSSES = 20
"""Steps before a spread can be told."""


@dataclass(frozen=True)
class MonitorConfig:
    """The section ``[monitor]``."""

    enable: bool = True
    """Warn, with the numbers, when a metric leaves its bounds."""
    drift_ratio: float = 10.0
    """Warn when the hidden norm after the last loop is more than this many times that after the first."""
    min_routing_entropy: float = 0.2
    """Warn of collapse when the entropy of the mean routing falls below this share of its maximum in some loop."""
    min_expert_load: float = 0.02
    """An expert is dead when its load is below this share of an even one."""
    expert_window: int = 10
    """Logged steps over which the load of the experts is added up before it is judged."""
    min_boundary_rate: float = 0.05
    """Warn when fewer bytes, as a share, close a segment."""
    max_boundary_rate: float = 0.44
    """Warn when more bytes, as a share, close a segment. Rows of adaptive phases have room for 0.45, unless set."""
    max_boundary_dropped: float = 0.05
    """Warn when more boundaries, as a share, found no slot in their row."""
    spike_deviations: float = 6.0
    """Warn when a step's loss is this many standard deviations above the mean of the steps before it."""
    spike_window: int = 100
    """Steps whose losses give that mean and deviation."""
    repeat_steps: int = 500
    """Steps before a warning of the same kind is given again."""
    sample_freq: int = 10
    """Logged steps from one sample of segments and map of the experts in TensorBoard to the next; 0: none."""

    def __post_init__(self) -> None:
        if self.drift_ratio <= 1:
            raise ValueError(f"drift_ratio = {self.drift_ratio} must be above 1")
        shares = ("min_routing_entropy", "min_expert_load", "min_boundary_rate", "max_boundary_rate")
        for name in (*shares, "max_boundary_dropped"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} = {getattr(self, name)} is not in [0, 1]")
        if self.min_boundary_rate > self.max_boundary_rate:
            raise ValueError(
                f"min_boundary_rate = {self.min_boundary_rate} is above max_boundary_rate = {self.max_boundary_rate}"
            )
        if self.spike_deviations <= 0:
            raise ValueError(f"spike_deviations = {self.spike_deviations} must be above 0")
        if self.spike_window < FEWEST_LOSSES:
            raise ValueError(f"spike_window = {self.spike_window} must be at least {FEWEST_LOSSES}")
        for name, least in (("expert_window", 1), ("repeat_steps", 1), ("sample_freq", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {least}")


class RecurrentMonitor:
    """Watches what a run logs.

    All ranks see the same numbers and so have the same state.

    Args:
        config: ``[monitor]``.
        state: What an earlier leg of the run has left, or an empty dict. Kept up to date in place, in JSON values.
        warn: Called with each warning, one line.
    """

    def __init__(self, config: MonitorConfig, state: dict[str, Any], warn: Callable[[str], None]) -> None:
        self._config, self._state, self._warn = config, state, warn
        state.setdefault("losses", [])
        state.setdefault("load", None)
        state.setdefault("load_steps", 0)
        state.setdefault("warned", {})

    def observe_loss(self, step: int, loss: float) -> None:
        """Takes the loss of one step, counted from 1; to be called for every step that counted."""
        if not self._config.enable:
            return
        losses = self._state["losses"]
        if len(losses) >= FEWEST_LOSSES:
            mean, deviation = float(np.mean(losses)), float(np.std(losses))
            if loss > mean + self._config.spike_deviations * deviation:
                self._report(
                    step,
                    "loss spike",
                    f"the loss is {loss:.4f}, while the last {len(losses)} steps had {mean:.4f} +- {deviation:.4f}",
                )
        losses.append(loss)
        del losses[: -self._config.spike_window]

    def observe(self, step: int, values: Mapping[str, float], totals: Mapping[str, Tensor]) -> None:
        """Takes the metrics of a logged step, counted from 1, and the sums that they were made of."""
        if not self._config.enable:
            return
        self._check_drift(step, _series(values, "hidden_norm"))
        self._check_routing(step, _series(values, "routing_entropy"))
        if "expert_load" in totals:
            self._check_experts(step, totals["expert_load"])
        if "boundary_rate" in values:
            self._check_boundaries(step, values["boundary_rate"])
        if "boundary_dropped_share" in values:
            self._check_dropped(step, values["boundary_dropped_share"])

    def _check_drift(self, step: int, norms: list[float]) -> None:
        if norms and norms[-1] > self._config.drift_ratio * norms[0]:
            self._report(
                step,
                "drift",
                f"the hidden norm grows from {norms[0]:.4g} after loop 1 to {norms[-1]:.4g} after loop {len(norms)}, "
                f"more than monitor.drift_ratio = {self._config.drift_ratio:g} times",
            )

    def _check_routing(self, step: int, entropies: list[float]) -> None:
        if entropies and min(entropies) < self._config.min_routing_entropy:
            lowest = min(entropies)
            self._report(
                step,
                "collapse",
                f"the routing entropy is {lowest:.3f} of its maximum in loop {entropies.index(lowest) + 1}, below "
                f"monitor.min_routing_entropy = {self._config.min_routing_entropy:g}",
            )

    def _check_experts(self, step: int, load: Tensor) -> None:
        state, window = self._state, self._config.expert_window
        new = load.cpu().numpy().sum(0)
        if not np.isfinite(new).all():
            return
        state["load"] = (new if state["load"] is None else new + np.array(state["load"])).tolist()
        state["load_steps"] += 1
        if state["load_steps"] < window:
            return
        relative = relative_load(np.array(state["load"]))
        state["load"], state["load_steps"] = None, 0
        dead = np.argwhere(relative < self._config.min_expert_load)
        if len(dead):
            named = ", ".join(f"layer {layer + 1} expert {expert + 1}" for layer, expert in dead[:8])
            self._report(
                step,
                "dead experts",
                f"{len(dead)} of {relative.size} had less than monitor.min_expert_load = "
                f"{self._config.min_expert_load:g} of an even load over {window} logged steps: {named}"
                f"{', ...' if len(dead) > 8 else ''}; the lowest had {relative.min():.4f}",
            )

    def _check_boundaries(self, step: int, rate: float) -> None:
        low, high = self._config.min_boundary_rate, self._config.max_boundary_rate
        if rate < low or rate > high:
            self._report(
                step,
                "boundary rate",
                f"{rate:.4f} of the bytes close a segment, outside monitor.min_boundary_rate = {low:g} .. "
                f"monitor.max_boundary_rate = {high:g}",
            )

    def _check_dropped(self, step: int, share: float) -> None:
        if share > self._config.max_boundary_dropped:
            self._report(
                step,
                "dropped boundaries",
                f"{share:.4f} of the boundaries found no slot, above monitor.max_boundary_dropped = "
                f"{self._config.max_boundary_dropped:g}: the rate is at the phase's max_boundary_rate",
            )

    def _report(self, step: int, kind: str, text: str) -> None:
        last = self._state["warned"].get(kind)
        if last is None or step - last >= self._config.repeat_steps:
            self._state["warned"][kind] = step
            self._warn(f"monitor: step {step}: {kind}: {text}")


def relative_load(load: np.ndarray) -> np.ndarray:
    """Load of each expert as a multiple of an even load of its layer: [layers, E] -> [layers, E]; 0 without any."""
    return load / np.maximum(load.mean(-1, keepdims=True), np.finfo(np.float64).tiny)


def _series(values: Mapping[str, float], name: str) -> list[float]:
    """The values of ``name/1``, ``name/2`` and so on."""
    return [values[key] for key in takewhile(values.__contains__, (f"{name}/{number}" for number in count(1)))]
