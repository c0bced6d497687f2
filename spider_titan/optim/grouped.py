"""The optimizer of all parameter groups, their learning rates and their clipping.

Which parameters form a group, and how it departs from the base settings, is the model spec's (``ParamGroup``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spider_titan.optim.adamw import DenseAdamW, GroupOptimizer
from spider_titan.optim.config import LRSchedulerConfig, OptimizerConfig
from spider_titan.optim.eight_bit import AdamW8bit, is_quantised
from spider_titan.optim.lazy import LazyRowsAdamW
from spider_titan.optim.schedule import lr_factor
from spider_titan.optim.shards import local
from spider_titan.spec import ParamGroup


class GroupedAdamW:
    """AdamW over a model's parameter groups.

    A step is ``clip`` then ``step`` then ``zero_grad``. A group that ``starts_after_warmup`` is frozen until then: the
    model computes no gradient for it, so it has no update, no state and no share in the gradient norm.

    A parameter's update is one of three: of rows that were hit, in a group with ``lazy_rows``; in 8 bits, if
    ``optimizer.name`` asks for it and the parameter is fit for it; else torch's AdamW.

    Args:
        groups: From the spec; together all parameters.
        config: ``[optimizer]``.
        schedule: ``[lr_scheduler]``.
        total_steps: Optimizer steps of the whole run.
        sum_over_shards: Adds a tensor over the ranks that hold shards of the same parameters.

    Raises:
        ValueError: If a group with ``lazy_rows`` holds anything but matrices.
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
        self._optimizers = [
            (group, kind(parameters.values(), config, config.weight_decay if group.weight_decay else 0.0), parameters)
            for group in groups
            for kind, parameters in _by_kind(group, config)
        ]

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
            skip: Bool scalar: if it is true, weights and state stay as they are, and gradients may be zeroed. The
                fused kernel and the update of tables read it on the device; other updates, and parameters that are
                offloaded from it, wait to know it.
        """
        lr = self.lr(step)
        for group, optimizer, parameters in self._optimizers:
            optimizer.set_lr(lr * group.lr_factor)
            if optimizer.skips_on_device:
                # What torch's gradient scalers do.
                device = next(iter(parameters.values())).device
                optimizer.found_inf = skip.to(device, torch.float32) if skip is not None else None
            elif skip is not None and skip:
                continue
            optimizer.step()

    def zero_grad(self) -> None:
        """Frees the gradients."""
        for _, optimizer, _ in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def names(self) -> frozenset[str]:
        """FQNs of all parameters."""
        return frozenset(name for group in self.groups for name in group.parameters)

    def state_tensors(self) -> dict[str, Tensor]:
        """The live state of parameters that were updated, as ``FQN.KEY``: all plain tensors, sharded as parameters are.

        Keys are ``step``, ``exp_avg`` and ``exp_avg_sq``; of averages in 8 bits ``exp_avg_codes``, ``exp_avg_scale``
        and the same of the square.
        """
        return {
            f"{name}.{key}": value
            for _, optimizer, parameters in self._optimizers
            for name, parameter in parameters.items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    @torch.no_grad()
    def allocate_state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Makes state to be filled, and drops what there is.

        Args:
            names: As ``state_tensors`` has them.

        Raises:
            ValueError: If one is of no parameter, or not of the optimizer that is configured.
        """
        wanted: dict[str, set[str]] = {}
        for full_name in names:
            name, _, key = full_name.rpartition(".")
            wanted.setdefault(name, set()).add(key)
        for _, optimizer, parameters in self._optimizers:
            optimizer.state.clear()
            for name, parameter in parameters.items():
                if name in wanted:
                    optimizer.state[parameter] = self._checked_state(optimizer, name, parameter, wanted.pop(name))
        if wanted:
            raise ValueError(f"optimizer state '{next(iter(wanted))}' belongs to no parameter of this model")
        return self.state_tensors()

    def state_bytes(self) -> int:
        """Bytes of state on this rank once every parameter has been updated; parameters may be on the meta device."""
        return sum(
            local(value).numel() * value.element_size()
            for _, optimizer, parameters in self._optimizers
            for parameter in parameters.values()
            for value in optimizer.new_state(parameter.detach().to("meta")).values()
        )

    def summary(self) -> str:
        """``adamw8bit, averages of 1,966,080 of 2,575,001 parameters in 8 bits; rows of 2 tables move when hit``."""
        sizes = {AdamW8bit: 0, LazyRowsAdamW: 0, DenseAdamW: 0}
        for _, optimizer, parameters in self._optimizers:
            sizes[type(optimizer)] += sum(parameter.numel() for parameter in parameters.values())
        text = str(self._config.name)
        if self._config.name == "adamw8bit":
            text += f", averages of {sizes[AdamW8bit]:,} of {sum(sizes.values()):,} parameters in 8 bits"
        tables = sum(len(group.parameters) for group in self.groups if group.lazy_rows)
        return f"{text}; rows of {tables} table{'' if tables == 1 else 's'} move when hit" if tables else text

    def _checked_state(
        self, optimizer: GroupOptimizer, name: str, parameter: Tensor, keys: set[str]
    ) -> dict[str, Tensor]:
        state = optimizer.new_state(parameter)
        if keys != state.keys():
            raise ValueError(
                f'optimizer.name = "{self._config.name}" keeps {", ".join(state)} for {name}, but the saved state has '
                f"{', '.join(sorted(keys))}; go on with the optimizer that saved it"
            )
        return state


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


def _by_kind(group: ParamGroup, config: OptimizerConfig) -> list[tuple[Any, dict[str, nn.Parameter]]]:
    """The parameters of a group by the class that updates them."""
    if group.lazy_rows:
        return [(LazyRowsAdamW, group.parameters)]
    if config.name == "adamw":
        return [(DenseAdamW, group.parameters)]
    parts: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in group.parameters.items():
        parts.setdefault(AdamW8bit if is_quantised(parameter) else DenseAdamW, {})[name] = parameter
    return list(parts.items())


def _local_grads(group: ParamGroup) -> list[Tensor]:
    """This rank's shards of the gradients that exist."""
    return [local(parameter.grad) for parameter in group.parameters.values() if parameter.grad is not None]


def _sum_of_squares(group: ParamGroup) -> Tensor:
    grads = _local_grads(group)
    if not grads:
        return torch.zeros((), device=next(iter(group.parameters.values())).device)
    return torch.stack(torch._foreach_norm(grads)).square().sum()


def _clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
