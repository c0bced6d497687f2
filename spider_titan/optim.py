"""The optimizer of all parameter groups, their learning rates and their clipping: the one place that owns them.

Which parameters form a group, and how it departs from the base settings, is the model spec's (``ParamGroup``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spider_titan.spec import ParamGroup


@dataclass(frozen=True)
class OptimizerConfig:
    """The section ``[optimizer]``: AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

    lr: float = 3e-4
    """Base learning rate; groups multiply it by factors of their own."""
    beta1: float = 0.9
    """Decay of the gradient's average."""
    beta2: float = 0.95
    """Decay of the squared gradient's average."""
    eps: float = 1e-8
    """Added to the root of the squared average."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the groups that decay."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Kernels of the update: fused is one kernel, foreach batches parameters, for-loop is the reference."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr = {self.lr} must be above 0")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} = {getattr(self, name)} is not in [0, 1)")
        if self.eps <= 0:
            raise ValueError(f"eps = {self.eps} must be above 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay = {self.weight_decay} is negative")


@dataclass(frozen=True)
class LRSchedulerConfig:
    """The section ``[lr_scheduler]``: linear warm-up, then a cosine to ``min_lr_factor``."""

    warmup_steps: int = 200
    """Steps until the full learning rate; the first step already has a share of it."""
    min_lr_factor: float = 0.1
    """Learning rate of the last step as a factor of the full one."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps = {self.warmup_steps} is negative")
        if not 0.0 <= self.min_lr_factor <= 1.0:
            raise ValueError(f"min_lr_factor = {self.min_lr_factor} is not in [0, 1]")


def lr_factor(config: LRSchedulerConfig, step: int, total_steps: int) -> float:
    """Scheduled factor of the learning rate at ``step``, counted from 0; ``min_lr_factor`` at the last step."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = (step + 1 - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * cosine


class GroupedAdamW:
    """AdamW over a model's parameter groups.

    A step is ``clip`` then ``step`` then ``zero_grad``. A group that ``starts_after_warmup`` is frozen until then: the
    model computes no gradient for it, so it has no update, no state and no share in the gradient norm.

    Args:
        groups: From the spec; together all parameters.
        config: ``[optimizer]``.
        schedule: ``[lr_scheduler]``.
        total_steps: Optimizer steps of the whole run.
        sum_over_shards: Adds a tensor over the ranks that hold shards of the same parameters.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        config: OptimizerConfig,
        schedule: LRSchedulerConfig,
        total_steps: int,
        sum_over_shards: Callable[[Tensor], Tensor],
    ) -> None:
        self._sum_over_shards = sum_over_shards
        self.groups = list(groups)
        self._config, self._schedule, self._total_steps = config, schedule, total_steps
        self.adamw = torch.optim.AdamW(
            [
                {
                    "params": list(group.parameters.values()),
                    "weight_decay": config.weight_decay if group.weight_decay else 0.0,
                }
                for group in groups
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            foreach=config.implementation == "foreach",
            fused=config.implementation == "fused",
        )

    def lr(self, step: int) -> float:
        """Base learning rate at ``step``, counted from 0."""
        return self._config.lr * lr_factor(self._schedule, step, self._total_steps)

    def frozen_groups(self, step: int) -> frozenset[str]:
        """Names of the groups that do not train at ``step``, counted from 0."""
        if step >= self._schedule.warmup_steps:
            return frozenset()
        return frozenset(group.name for group in self.groups if group.starts_after_warmup)

    @torch.no_grad()
    def clip(self, max_norm: float) -> dict[str, Tensor]:
        """Scales all gradients so that their norm is at most ``max_norm``, then groups with a bound of their own.

        Returns:
            Norms before clipping, as tensors: ``grad_norm`` in all and ``grad_norm/NAME`` a group.
        """
        squares = torch.stack([_sum_of_squares(group) for group in self.groups])
        squares = self._sum_over_shards(squares)
        total, norms = squares.sum().sqrt(), squares.sqrt()
        scale = _clip_factor(total, max_norm)
        for group, norm in zip(self.groups, norms, strict=True):
            factor = scale
            if group.max_norm is not None:
                factor = scale * _clip_factor(norm * scale, group.max_norm)
            if grads := _local_grads(group):
                torch._foreach_mul_(grads, factor)
        by_group = zip(self.groups, norms, strict=True)
        return {"grad_norm": total, **{f"grad_norm/{group.name}": norm for group, norm in by_group}}

    def step(self, step: int, skip: Tensor | None = None) -> None:
        """Updates the parameters with the learning rates of ``step``, counted from 0.

        Args:
            step: Optimizer steps done.
            skip: Bool scalar: if it is true, weights and state stay as they are. The fused kernel reads it on the
                device; other implementations, and parameters that are offloaded from it, wait to know it.
        """
        lr = self.lr(step)
        for settings, group in zip(self.adamw.param_groups, self.groups, strict=True):
            settings["lr"] = lr * group.lr_factor
        if skip is not None and self._config.implementation == "fused":
            # What torch's gradient scalers do: the kernel leaves everything alone where this is 1.
            device = next(iter(self.groups[0].parameters.values())).device
            self.adamw.found_inf = skip.to(device, torch.float32)  # type: ignore[attr-defined]
        elif skip is not None and skip:
            return
        self.adamw.step()

    def names(self) -> set[str]:
        """FQNs of all parameters."""
        return set(self._named_parameters())

    def state_tensors(self) -> dict[str, Tensor]:
        """The live state, ``FQN.exp_avg``, ``FQN.exp_avg_sq`` and ``FQN.step``, of parameters that were updated."""
        return {
            f"{name}.{key}": value
            for name, parameter in self._named_parameters().items()
            for key, value in self.adamw.state.get(parameter, {}).items()
        }

    @torch.no_grad()
    def allocate_state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Makes state to be filled, and drops what there is."""
        parameters = self._named_parameters()
        self.adamw.state.clear()
        for full_name in names:
            name, _, key = full_name.rpartition(".")
            parameter = parameters[name]
            if key == "step":
                device = parameter.device if self._config.implementation == "fused" else "cpu"
                value = torch.zeros((), dtype=torch.float32, device=device)
            else:
                value = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            self.adamw.state[parameter][key] = value
        return self.state_tensors()

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for group in self.groups for name, parameter in group.parameters.items()}

    def zero_grad(self) -> None:
        """Frees the gradients."""
        self.adamw.zero_grad(set_to_none=True)


def check_groups(model: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """Raises ValueError unless every parameter stands in exactly one group; names the first that does not."""
    seen: dict[int, str] = {}
    for group in groups:
        for name, parameter in group.parameters.items():
            if id(parameter) in seen:
                raise ValueError(f"parameter '{name}' is in the groups '{seen[id(parameter)]}' and '{group.name}'")
            seen[id(parameter)] = group.name
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            raise ValueError(f"parameter '{name}' is in no parameter group of its model spec")


def _local_grads(group: ParamGroup) -> list[Tensor]:
    """This rank's shards of the gradients that exist."""
    grads = (parameter.grad for parameter in group.parameters.values() if parameter.grad is not None)
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def _sum_of_squares(group: ParamGroup) -> Tensor:
    grads = _local_grads(group)
    if not grads:
        return torch.zeros((), device=next(iter(group.parameters.values())).device)
    return torch.stack(torch._foreach_norm(grads)).square().sum()


def _clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
