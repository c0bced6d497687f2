"""float8: linears inside blocks multiply in float8, by torchao; everything else stays as the precision policy has it.

Input, weight and output gradient of a linear are scaled, rounded to float8 and multiplied; products come out in the
compute dtype. Scales are taken from the values at hand (dynamic scaling), so there is no state to keep or to save.
Masters stay the fp32 parameters of the same names.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spider_titan.distributed import num_shards
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import Block, ModelSpec

if TYPE_CHECKING:
    from spider_titan.plugins.context import PluginContext

logger = logging.getLogger(__name__)

ALIGNMENT = 16
"""float8 products need sizes that are multiples of this."""
MIN_CAPABILITY = (8, 9)
"""CUDA compute capability of the first devices with float8 products."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which linears are converted, by FQN.

    Args:
        local: Their weights are gathered in the compute dtype and cast by each rank.
        gathered: Their weights are cast before they are gathered.
        misfits: Not converted, for their sizes.
    """

    local: tuple[str, ...]
    gathered: tuple[str, ...]
    misfits: tuple[str, ...]


def apply(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Exchanges linears for float8 ones, in place, and lists them.

    Raises:
        ValueError: If the device has no float8 products, if nothing can be converted, or if a pattern matches nothing.
    """
    config = context.precision
    if not config.uses_float8:
        _warn_of_unused(config)
        return model
    _require_float8_products(config, context.mesh)
    linears = plain_linears(model)
    choice = choose_linears(linears, spec.blocks(model), config, num_shards(context.mesh))
    _convert(model, choice.local, config, is_gathered=False)
    _convert(model, choice.gathered, config, is_gathered=True)
    _report(linears, choice, config)
    return model


def after_step(model: nn.Module, context: PluginContext) -> None:
    """Computes the scales of all weights that are gathered as float8, in one all-reduce instead of one a gather."""
    config = context.precision
    # A weight that comes from the CPU leaves such a scale behind.
    if config.uses_float8 and config.fp8_all_gather and not context.parallelism.enable_cpu_offload:
        _torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def plain_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """FQN -> linear. A subclass of nn.Linear computes something of its own and is none."""
    return {fqn: module for fqn, module in model.named_modules() if type(module) is nn.Linear}


def choose_linears(
    linears: Mapping[str, nn.Linear], blocks: Iterable[Block], config: PrecisionConfig, shards: int
) -> Choice:
    """The linears that blocks, the user's patterns and their sizes let be converted.

    Args:
        linears: All of the model.
        blocks: Of its spec.
        config: ``[precision]``.
        shards: Ranks that a weight is sharded over.

    Raises:
        ValueError: If there are none, or if a pattern matches none.
    """
    _require_matches(linears, config.fp8_skip, "precision.fp8_skip")
    candidates: list[str] = []
    for block in blocks:
        if block.float8:
            _require_matches(linears, block.high_precision, f"high_precision of block '{block.fqn}' of the model spec")
            excluded = (*block.high_precision, *config.fp8_skip)
            candidates += [fqn for fqn in linears if _is_inside(fqn, block) and not _matches(fqn, excluded)]
    fitting = [fqn for fqn in candidates if _fits(linears[fqn])]
    if not fitting:
        raise ValueError(
            'precision.mode = "fp8_dynamic" finds no linear to convert: of those in blocks that allow float8, '
            f"{len(candidates)} are left by precision.fp8_skip, and none of these has sizes that are multiples of "
            f'{ALIGNMENT}; skip less, or set precision.mode = "bf16"'
        )
    # torchao gathers shards as they are, and uneven ones cannot be.
    gathered = [fqn for fqn in fitting if config.fp8_all_gather and linears[fqn].out_features % shards == 0]
    return Choice(
        local=tuple(fqn for fqn in fitting if fqn not in gathered),
        gathered=tuple(gathered),
        misfits=tuple(fqn for fqn in candidates if fqn not in fitting),
    )


def by_kind(linears: Mapping[str, nn.Linear], fqns: Collection[str]) -> list[str]:
    """``core.layers.*.attention.q_up x6, 64 -> 192``: linears of the same sizes whose names differ in numbers alone."""
    kinds = Counter((re.sub(r"\b\d+\b", "*", fqn), linears[fqn].in_features, linears[fqn].out_features) for fqn in fqns)
    return [f"{name} x{count}, {dim_in} -> {dim_out}" for (name, dim_in, dim_out), count in kinds.items()]


def _convert(model: nn.Module, fqns: Collection[str], config: PrecisionConfig, *, is_gathered: bool) -> None:
    if not fqns:
        return
    torchao = _torchao()
    recipe = dataclasses.replace(
        torchao.Float8LinearConfig.from_recipe_name(config.fp8_recipe),
        emulate=config.emulate,
        enable_fsdp_float8_all_gather=is_gathered,
        # The weight gradient is a product over tokens or segments, whose number need not be aligned.
        pad_inner_dim=True,
    )
    torchao.convert_to_float8_training(model, config=recipe, module_filter_fn=lambda module, fqn: fqn in fqns)


def _report(linears: Mapping[str, nn.Linear], choice: Choice, config: PrecisionConfig) -> None:
    converted = (*choice.local, *choice.gathered)
    logger.info(
        "float8: %d of %d linears compute in float8, %s scales%s%s; the others stay in high precision",
        len(converted),
        len(linears),
        config.fp8_recipe,
        f", {len(choice.gathered)} gathered as float8" if config.fp8_all_gather else "",
        ", emulated" if config.emulate else "",
    )
    for line in by_kind(linears, converted):
        logger.info("float8: %s", line)
    if choice.misfits:
        logger.warning(
            "float8: kept out for sizes that are not multiples of %d: %s",
            ALIGNMENT,
            "; ".join(by_kind(linears, choice.misfits)),
        )
    if config.fp8_all_gather and choice.local:
        logger.warning(
            "float8: gathered in bf16 because the ranks do not divide their outputs: %s",
            "; ".join(by_kind(linears, choice.local)),
        )


def _warn_of_unused(config: PrecisionConfig) -> None:
    defaults = PrecisionConfig(mode=config.mode)
    changed = [key for key, value in vars(config).items() if value != getattr(defaults, key)]
    if changed:
        logger.warning('float8: off with precision.mode = "%s"; not used: %s', config.mode, ", ".join(changed))


def _require_float8_products(config: PrecisionConfig, mesh: DeviceMesh) -> None:
    # A dry run stands for devices that are not there.
    if config.emulate or dist.get_backend(mesh.get_group(0)) == "fake":
        return
    if mesh.device_type != "cuda":
        found = "this run is on the CPU"
    elif (capability := torch.cuda.get_device_capability()) < MIN_CAPABILITY:
        found = f"{torch.cuda.get_device_name()} has {'.'.join(map(str, capability))}"
    else:
        return
    raise ValueError(
        f'precision.mode = "fp8_dynamic" needs CUDA devices of compute capability '
        f"{'.'.join(map(str, MIN_CAPABILITY))} or more, but {found}; set precision.emulate = true for float8 numerics "
        f'without the speed, or precision.mode = "bf16"'
    )


def _require_matches(linears: Mapping[str, nn.Linear], patterns: Sequence[str], source: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(fqn, pattern) for fqn in linears):
            example = next(iter(linears), "none")
            raise ValueError(
                f"{source}: the pattern '{pattern}' matches no linear of the model; their full names are like {example}"
            )


def _is_inside(fqn: str, block: Block) -> bool:
    return fqn == block.fqn or fqn.startswith(f"{block.fqn}.")


def _matches(fqn: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)


def _fits(linear: nn.Linear) -> bool:
    return linear.in_features % ALIGNMENT == 0 and linear.out_features % ALIGNMENT == 0


def _torchao() -> Any:
    """``torchao.float8``, imported where it is needed: that takes seconds."""
    # It warns of kernels that it cannot load, none of which float8 training uses.
    with _only_errors("torchao", "torch.utils._pytree"):
        import torchao.float8

        return torchao.float8


@contextmanager
def _only_errors(*names: str) -> Iterator[None]:
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
