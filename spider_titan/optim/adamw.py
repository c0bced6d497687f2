"""torch's AdamW, with the state of a parameter made on demand so that a checkpoint can be read into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from spider_titan.optim.config import OptimizerConfig


class GroupOptimizer(Protocol):
    """What ``GroupedAdamW`` asks of an optimizer of one parameter group."""

    state: dict[Tensor, dict[str, Tensor]]
    skips_on_device: bool
    """Whether it looks at ``found_inf``, without waiting to know it."""
    found_inf: Tensor | None
    """fp32 scalar where the parameters are, named as in torch's optimizers: where it is 1, a step changes nothing."""

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""

    def step(self) -> None:
        """Updates the parameters that have gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees the gradients."""

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter before its first update: plain tensors, sharded as the parameter is."""


class ParameterwiseAdamW(torch.optim.Optimizer, ABC):
    """AdamW that updates one parameter after another; a subclass says by what state and how."""

    skips_on_device = False
    found_inf: Tensor | None = None

    @abstractmethod
    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """As ``GroupOptimizer``; has ``step``, the updates so far."""

    @abstractmethod
    def update(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Moves a parameter that has a gradient, and counts that in ``step``."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the parameters that have gradients."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update(self.new_state(parameter))
            self.update(parameter, state)


class DenseAdamW(torch.optim.AdamW):
    """AdamW with fp32 averages in torch's kernels."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, weight_decay: float) -> None:
        super().__init__(
            parameters,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=weight_decay,
            foreach=config.implementation == "foreach",
            fused=config.implementation == "fused",
        )
        self.skips_on_device = config.implementation == "fused"
        self.found_inf: Tensor | None = None

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        self.param_groups[0]["lr"] = lr

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """``step``, ``exp_avg`` and ``exp_avg_sq``."""
        return {
            # The fused kernel reads it where the parameter is.
            "step": torch.zeros((), device=parameter.device if self.skips_on_device else "cpu"),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
