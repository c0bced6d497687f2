"""Which linears multiply in few bits, and the plugin that exchanges them; the formats have modules of their own."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from spider_titan.distributed import num_shards
from spider_titan.plugins import block_scaled, float8
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import Block, ModelSpec

if TYPE_CHECKING:
    from spider_titan.plugins.context import PluginContext

logger = logging.getLogger(__name__)

FORMATS = {"fp8_dynamic": "float8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
ALIGNMENT = {"fp8_dynamic": 16, "mxfp8": 32, "nvfp4": 128}
"""Products need sizes that are multiples of this."""
USED_IN = {
    "fp8_recipe": ("fp8_dynamic",),
    "fp8_all_gather": ("fp8_dynamic",),
    "emulate": tuple(FORMATS),
    "skip": tuple(FORMATS),
}
"""The modes that read a setting."""


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
    """Exchanges linears, in place, and lists them.

    Raises:
        ValueError: If nothing can be converted, or if a pattern matches nothing.
    """
    config = context.precision
    _warn_of_unused(config)
    if not config.is_quantised:
        return model
    linears = plain_linears(model)
    choice = choose_linears(linears, spec.blocks(model), config, num_shards(context.mesh))
    if config.mode == "fp8_dynamic":
        float8.convert(model, choice.local, config, is_gathered=False)
        float8.convert(model, choice.gathered, config, is_gathered=True)
    else:
        block_scaled.convert(model, choice.local, config)
    _report(linears, choice, config)
    return model


def after_step(model: nn.Module, context: PluginContext) -> None:
    """Scales of weights that are gathered as float8."""
    config = context.precision
    # A weight that comes from the CPU leaves such a scale behind.
    if config.mode == "fp8_dynamic" and config.fp8_all_gather and not context.parallelism.enable_cpu_offload:
        float8.precompute_scales(model)


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
        config: ``[precision]``, of a mode that quantises.
        shards: Ranks that a weight is sharded over.

    Raises:
        ValueError: If there are none, or if a pattern matches none.
    """
    _require_matches(linears, config.skip, "precision.skip")
    candidates: list[str] = []
    for block in blocks:
        if block.float8:
            _require_matches(linears, block.high_precision, f"high_precision of block '{block.fqn}' of the model spec")
            excluded = (*block.high_precision, *config.skip)
            candidates += [fqn for fqn in linears if _is_inside(fqn, block) and not _matches(fqn, excluded)]
    multiple = ALIGNMENT[config.mode]
    fitting = [
        fqn
        for fqn in candidates
        if linears[fqn].in_features % multiple == 0 and linears[fqn].out_features % multiple == 0
    ]
    if not fitting:
        raise ValueError(
            f'precision.mode = "{config.mode}" finds no linear to convert: of those in blocks that allow it, '
            f"{len(candidates)} are left by precision.skip, and none of these has sizes that are multiples of "
            f'{multiple}; skip less, or set precision.mode = "bf16"'
        )
    # torchao gathers shards as they are, and uneven ones cannot be.
    gathers = config.mode == "fp8_dynamic" and config.fp8_all_gather
    gathered = [fqn for fqn in fitting if gathers and linears[fqn].out_features % shards == 0]
    return Choice(
        local=tuple(fqn for fqn in fitting if fqn not in gathered),
        gathered=tuple(gathered),
        misfits=tuple(fqn for fqn in candidates if fqn not in fitting),
    )


def by_kind(linears: Mapping[str, nn.Linear], fqns: Collection[str]) -> list[str]:
    """``core.layers.*.attention.q_up x6, 64 -> 192``: linears of the same sizes whose names differ in numbers alone."""
    kinds = Counter((re.sub(r"\b\d+\b", "*", fqn), linears[fqn].in_features, linears[fqn].out_features) for fqn in fqns)
    return [f"{name} x{count}, {dim_in} -> {dim_out}" for (name, dim_in, dim_out), count in kinds.items()]


def _report(linears: Mapping[str, nn.Linear], choice: Choice, config: PrecisionConfig) -> None:
    converted = (*choice.local, *choice.gathered)
    name, is_float8 = FORMATS[config.mode], config.mode == "fp8_dynamic"
    logger.info(
        "%s: %d of %d linears compute in %s%s%s%s; the others stay in high precision",
        name,
        len(converted),
        len(linears),
        name,
        f", {config.fp8_recipe} scales" if is_float8 else "",
        f", {len(choice.gathered)} gathered as float8" if is_float8 and config.fp8_all_gather else "",
        ", emulated" if config.emulate else "",
    )
    for line in by_kind(linears, converted):
        logger.info("%s: %s", name, line)
    if choice.misfits:
        logger.warning(
            "%s: kept out for sizes that are not multiples of %d: %s",
            name,
            ALIGNMENT[config.mode],
            "; ".join(by_kind(linears, choice.misfits)),
        )
    if is_float8 and config.fp8_all_gather and choice.local:
        logger.warning(
            "%s: gathered in bf16 because the ranks do not divide their outputs: %s",
            name,
            "; ".join(by_kind(linears, choice.local)),
        )


def _warn_of_unused(config: PrecisionConfig) -> None:
    defaults = PrecisionConfig(mode=config.mode)
    unused = [
        key
        for key, modes in USED_IN.items()
        if config.mode not in modes and getattr(config, key) != getattr(defaults, key)
    ]
    if unused:
        logger.warning('precision: not used with precision.mode = "%s": %s', config.mode, ", ".join(unused))


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
