"""The modes ``mxfp8`` and ``nvfp4``: linears multiply in formats with a scale for every few values, by torchao.

mxfp8 has float8 values and a power of 2 for every 32 of them (OCP Microscaling Formats 1.0). nvfp4 has 4-bit values, a
float8 scale for every 16 and one fp32 scale a tensor; operands of the weight gradient are mixed by a random Hadamard
transform first, and gradients are rounded at random, which keeps them true on average.

All three products of a linear are in the format. Masters stay the fp32 parameters of the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.quiet import torchao_import

Product = Callable[[Tensor, Tensor], Tensor]
"""[N, in] and [out, in] -> [N, out], with gradients."""

ROW_MULTIPLE = {"mxfp8": 32, "nvfp4": 128}
"""Rows of an operand must be a multiple of this: the weight gradient sums over them."""

SIGNS = (1, -1, -1, 1, 1, 1, -1, 1, -1, 1, -1, -1, -1, 1, 1, -1)
"""Of the Hadamard transform: any will do, so long as it is the same on all ranks and after a resume."""


class BlockScaledLinear(nn.Linear):
    """A linear whose products are given.

    The number of rows is that of bytes or segments, which need not be aligned: zeros are added, and neither outputs nor
    gradients know of them.

    Args:
        linear: The one it replaces; parameters are taken over.
        product: Multiplies, in the format.
        row_multiple: Rows that ``product`` takes a multiple of.
    """

    def __init__(self, linear: nn.Linear, product: Product, row_multiple: int) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.product, self.row_multiple = product, row_multiple

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        num_rows = rows.shape[0]
        if missing := -num_rows % self.row_multiple:
            rows = F.pad(rows, (0, 0, 0, missing))
        out = self.product(rows, self.weight)[:num_rows].reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def convert(model: nn.Module, fqns: Collection[str], config: PrecisionConfig) -> None:
    """Exchanges the named linears in place.

    Args:
        model: On the meta device.
        fqns: Of plain linears.
        config: ``[precision]``, of one of the two modes.
    """
    product = _mxfp8_product(config.emulate) if config.mode == "mxfp8" else _nvfp4_product()
    for fqn in fqns:
        linear = model.get_submodule(fqn)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(fqn, BlockScaledLinear(linear, product, ROW_MULTIPLE[config.mode]))


def _mxfp8_product(emulate: bool) -> Product:
    with torchao_import():
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    recipe = MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL if emulate else MXFP8TrainingRecipe.MXFP8_RCEIL
    settings = MXFP8TrainingOpConfig.from_recipe(recipe)
    return partial(
        _to_mxfp8_then_scaled_mm,
        kernel_preference=settings.kernel_preference,
        scale_calculation_mode=settings.scale_calculation_mode,
        wgrad_with_hp=settings.wgrad_with_hp,
    )


def _nvfp4_product() -> Product:
    with torchao_import():
        from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear
    # Without a seed of ours it draws one from the device's generator, whose state is saved with the run.
    return partial(nvfp4_linear, sign_vector=SIGNS)
