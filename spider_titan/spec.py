"""The contract between a model and everything around it.

A model package builds one ``ModelSpec`` and registers it by name. The trainer and the plugins know models only through
it: they read no module names, no model config and no model-specific metric of their own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spider_titan.vocabulary import PAD_ID


@dataclass
class Batch:
    """One micro-batch of packed rows.

    Args:
        input_ids: int64 [B, L].
        targets: int64 [B, L], the id that follows each input id; ``PAD_ID`` where there is none to predict.
        position: Where the data goes on after this batch, as the loader that made it wants to be told.
    """

    input_ids: Tensor
    targets: Tensor
    position: Any = None

    def to(self, device: torch.device) -> Batch:
        """A copy on ``device``."""
        ids, targets = self.input_ids, self.targets
        if device.type == "cuda":
            # From other memory the copy would wait for the work that is queued.
            ids, targets = ids.pin_memory(), targets.pin_memory()
        return Batch(ids.to(device, non_blocking=True), targets.to(device, non_blocking=True), self.position)

    @property
    def num_targets(self) -> int:
        """Targets that count in the loss."""
        return int((self.targets != PAD_ID).sum())


@dataclass(frozen=True)
class StepContext:
    """What a model's loss may know of the training step it is computed in.

    Args:
        num_targets: Valid targets of the whole optimizer step, over all ranks and micro-batches; every loss term is
            normalised by it, so that summing micro-batches and ranks gives the mean.
        boundary_mode: ``topk`` or ``threshold``: how the forward turns boundary probabilities into boundaries.
        boundary_phase: ``fixed`` or ``adaptive``: which boundary loss and bias rule apply.
        max_boundary_rate: Boundaries a row may hold, as a share of its length.
        frozen_groups: Names of parameter groups that do not train at this step.
        num_loops: Loops to run; None: as many as the model's config says, or the model has none.
    """

    num_targets: int
    boundary_mode: Literal["topk", "threshold"] = "threshold"
    boundary_phase: Literal["fixed", "adaptive"] = "adaptive"
    max_boundary_rate: float = 1.0
    frozen_groups: frozenset[str] = frozenset()
    num_loops: int | None = None


@dataclass
class LossTerms:
    """The loss of one micro-batch.

    Args:
        total: Scalar to call ``backward()`` on, already divided by ``StepContext.num_targets``.
        sums: Detached fp32 (or wider) tensors that are plain sums over tokens, rows or segments. Added over
            micro-batches and ranks they stay meaningful; ``ModelSpec.metrics`` turns the totals into ratios. They are
            read after the backward, which may fill some of them in.
        boundaries: Bool [B, L], input ids that close a segment, to be shown; None if the model has no segments.
    """

    total: Tensor
    sums: dict[str, Tensor]
    boundaries: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """A unit that plugins act on: it is sharded as one, and its applications are recomputed and compiled one by one.

    Args:
        fqn: Fully qualified name in the model.
        kind: ``once`` if its forward runs once a step, ``looped`` if it loops inside.
        parts: FQNs of the modules that a looped block applies again in every loop.
        compute_dtype: ``policy`` follows the precision policy; ``float32`` computes in fp32 whatever the policy says.
        float8: Whether its inner linears may be converted to float8.
        high_precision: Those that may not all the same: patterns over FQNs in the model.
    """

    fqn: str
    kind: Literal["once", "looped"] = "once"
    parts: tuple[str, ...] = ()
    compute_dtype: Literal["policy", "float32"] = "policy"
    float8: bool = True
    high_precision: tuple[str, ...] = ()

    @property
    def applications(self) -> tuple[str, ...]:
        """FQNs of the modules whose every call is recomputed, or compiled, by itself."""
        return self.parts or (self.fqn,)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share optimizer settings.

    Args:
        name: Shown in logs and metrics.
        parameters: FQN -> parameter.
        lr_factor: Multiplies the scheduled learning rate.
        weight_decay: Whether ``optimizer.weight_decay`` applies.
        starts_after_warmup: No update, no optimizer state and no share in the gradient norm until warm-up is over.
        max_norm: Own clipping bound, applied after the global one.
        lazy_rows: All are matrices of which a step uses few rows: one with a gradient of zero keeps its weights and its
            averages.
    """

    name: str
    parameters: dict[str, nn.Parameter]
    lr_factor: float = 1.0
    weight_decay: bool = True
    starts_after_warmup: bool = False
    max_norm: float | None = None
    lazy_rows: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """What a model is made of, for the trainer and the plugins.

    The functions take the module that ``construct`` makes; each model types them with its own class.

    Args:
        name: ``[model] name`` in TOML.
        config_class: Dataclass of hyper-parameters; each field is a key of ``[model]``.
        flavors: Named instances of ``config_class``.
        construct: Config -> module. Called under the meta device; must not compute values.
        init_weights: ``(model, seed)``; fills parameters and buffers of a materialised, possibly sharded model in
            place. The values depend on the seed and the names alone, not on device, world size or sharding.
        blocks: Model -> the units plugins act on, in the order they run.
        param_groups: Model -> groups in which every parameter stands exactly once.
        loss: ``(model, batch, context)`` -> ``LossTerms``.
        metrics: Totals of ``LossTerms.sums`` over a step (or a validation) -> named ratios. Has at least ``loss``,
            ``lm_loss`` and ``bpb``.
        flops_per_byte: ``(config, seq_len)`` -> forward FLOPs a byte of input, matrix products and attention.
        parameter_counts: Model -> parameters by part, among them ``total`` and ``active per byte``.
        after_step: ``(model, totals, context)``; rules that move buffers after the optimizer step. ``totals`` are
            summed over ranks.
        draw_loops: ``(config, seed, step)`` -> loops of that training step, the same on all ranks. None: the model
            does not loop, or not a number of times that ``StepContext.num_loops`` could say.
        max_loops: Config -> the most that ``draw_loops`` returns; given with it.
        training_flops_per_byte: ``(config, seq_len, num_loops)`` -> FLOPs a byte of forward and backward of a step that
            runs that many loops. None: three forwards. Recomputed activations do not count.
    """

    name: str
    config_class: type
    flavors: Mapping[str, Any]
    construct: Callable[[Any], nn.Module]
    init_weights: Callable[[Any, int], None]
    blocks: Callable[[Any], Sequence[Block]]
    param_groups: Callable[[Any], list[ParamGroup]]
    loss: Callable[[Any, Batch, StepContext], LossTerms]
    metrics: Callable[[Mapping[str, Tensor]], dict[str, float]]
    flops_per_byte: Callable[[Any, int], float]
    parameter_counts: Callable[[Any], dict[str, int]]
    after_step: Callable[[Any, Mapping[str, Tensor], StepContext], None]
    draw_loops: Callable[[Any, int, int], int] | None = None
    max_loops: Callable[[Any], int] | None = None
    training_flops_per_byte: Callable[[Any, int, int | None], float] | None = None

    def training_flops(self, config: Any, seq_len: int, num_loops: int | None = None) -> float:
        """FLOPs a byte of forward and backward.

        Args:
            config: An instance of ``config_class``.
            seq_len: Bytes a row.
            num_loops: ``StepContext.num_loops``.
        """
        if self.training_flops_per_byte is not None:
            return self.training_flops_per_byte(config, seq_len, num_loops)
        return 3 * self.flops_per_byte(config, seq_len)

    def build(self, config: Any, *, device: torch.device | str | None = None, seed: int = 0) -> nn.Module:
        """Builds the model on the meta device, then materialises and initialises it on ``device``.

        Args:
            config: An instance of ``config_class``.
            device: Default: torch's default device. ``"meta"`` leaves the model without storage, for sharding first.
            seed: Seed of the initial weights.
        """
        target = torch.device(device) if device is not None else torch.get_default_device()
        with torch.device("meta"):
            model = self.construct(config)
        if target.type == "meta":
            return model
        model.to_empty(device=target)
        self.init_weights(model, seed)
        return model


_REGISTRY: dict[str, ModelSpec] = {}
_BUILT_IN = {
    "spider": "spider_titan.models.spider",
    "byte_transformer": "spider_titan.models.byte_transformer",
}


def register_model_spec(spec: ModelSpec) -> None:
    """Makes ``spec`` available by its name.

    Raises:
        ValueError: If another spec has that name.
    """
    if _REGISTRY.setdefault(spec.name, spec) is not spec:
        raise ValueError(f"a model spec named '{spec.name}' is registered already; give yours another name")


def get_model_spec(name: str) -> ModelSpec:
    """Returns the spec registered as ``name``, importing a built-in model on first use.

    Raises:
        ValueError: If there is none; names the known ones.
    """
    if name not in _REGISTRY and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name not in _REGISTRY:
        known = ", ".join(sorted({*_REGISTRY, *_BUILT_IN}))
        raise ValueError(f"no model spec named '{name}'; known: {known}. A model of your own needs [job] import")
    return _REGISTRY[name]
