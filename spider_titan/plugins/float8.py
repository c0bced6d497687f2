"""The mode ``fp8_dynamic``: linears multiply in float8, by torchao.

Input, weight and output gradient of a linear are scaled, rounded to float8 and multiplied; products come out in the
compute dtype. Scales are taken from the values at hand (dynamic scaling), so there is no state to keep or to save.
Masters stay the fp32 parameters of the same names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from torch import nn

from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.quiet import torchao_import


def convert(model: nn.Module, fqns: Collection[str], config: PrecisionConfig, *, is_gathered: bool) -> None:
    """Exchanges the named linears in place.

    Args:
        model: On the meta device.
        fqns: Of plain linears.
        config: ``[precision]``.
        is_gathered: Whether their weights are cast before they are gathered.
    """
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


def precompute_scales(model: nn.Module) -> None:
    """Computes the scales of all weights that are gathered as float8, in one all-reduce instead of one a gather."""
    _torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def _torchao() -> Any:
    """``torchao.float8``, imported where it is needed: that takes seconds."""
    with torchao_import():
        import torchao.float8

        return torchao.float8
