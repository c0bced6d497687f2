"""Matrix products of groups of rows, each group with a matrix of its own; they compile in every dtype.

torch's own operator can be traced by the compiler in bfloat16 only: its shape rule refuses other dtypes, though its
kernels do not. For those it is called from within an operator that brings a shape rule and a derivative of its own.

Letters: A rows, E groups, D and M dims.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def grouped_mm(x_AD: Tensor, weight_EDM: Tensor, ends_E: Tensor) -> Tensor:
    """``out[a] = x[a] @ weight[e]`` for the rows a of group e.

    Args:
        x_AD: Rows sorted by group.
        weight_EDM: A matrix for each group.
        ends_E: int32, where each group ends; the last is A. A group may be empty.

    Returns:
        [A, M], equal to ``F.grouped_mm`` to the bit, in value and gradients.
    """
    if x_AD.dtype == torch.bfloat16:
        return F.grouped_mm(x_AD, weight_EDM, offs=ends_E)
    return _grouped_mm(x_AD, weight_EDM, ends_E)


@torch.library.custom_op("spider_titan::grouped_mm", mutates_args=())
def _grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """[A, D] x [E, D, M] -> [A, M], or with groups along what is summed: [D, A] x [A, M] -> [E, D, M]."""
    # Where kernels want aligned rows the result may be padded, which the shape rule does not know of.
    return F.grouped_mm(a, b, offs=ends_E).contiguous()


@_grouped_mm.register_fake
def _(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    shape = (a.shape[0], b.shape[-1])
    return a.new_empty(shape if b.ndim == 3 else (ends_E.shape[0], *shape))


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_AM: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_AD, weight_EDM, ends_E = ctx.saved_tensors
    # The kernels refuse gradients that are broadcast.
    grad_AM = grad_AM.contiguous()
    grad_x = _grouped_mm(grad_AM, weight_EDM.mT, ends_E) if ctx.needs_input_grad[0] else None
    grad_weight = _grouped_mm(x_AD.mT, grad_AM, ends_E) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


_grouped_mm.register_autograd(_backward, setup_context=_setup_context)

OPERATOR = torch.ops.spider_titan.grouped_mm.default
"""What dispatch modes see of it."""


@register_flop_formula(torch.ops.spider_titan.grouped_mm)
def _flops(a_shape: torch.Size, b_shape: torch.Size, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[-1]
