"""AdamW for tables that a step reads few rows of: a row without a gradient keeps its weights and its averages.

torch's AdamW moves every row at every step: averages decay, and what is left of them moves the weights of rows that
no batch has touched. Here a row whose gradient is zero throughout is left as it is, as in torch's SparseAdam, but from
dense gradients, which reductions over ranks and micro-batches need. Rows are sharded whole (dim 0), so a rank can tell
from its own shard.

The bias correction counts the steps of the table, as SparseAdam's does, not those of the row. Of a row first hit late
the averages are young and the correction is not: its first step is (1 - beta1) / sqrt(1 - beta2) of a full one, 0.45
with the default betas. A count a row would cost another column of state.

The count is kept on the device, where alone it is known whether a step is skipped: nothing waits for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from spider_titan.optim.adamw import ParameterwiseAdamW
from spider_titan.optim.config import OptimizerConfig
from spider_titan.optim.shards import local


class LazyRowsAdamW(ParameterwiseAdamW):
    """AdamW over matrices whose rows move only when hit; a step that is skipped is one that hits none.

    Args:
        parameters: Matrices, whole or sharded on dim 0.
        config: ``[optimizer]``.
        weight_decay: Of the rows that are hit.

    Raises:
        ValueError: If a parameter has another shape or is sharded on another dim.
    """

    skips_on_device = True

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": config.lr})
        self._beta1, self._beta2, self._eps = config.beta1, config.beta2, config.eps
        self._weight_decay = weight_decay
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim != 2 or any(cut.is_shard() and cut != Shard(0) for cut in _placements(parameter)):
                raise ValueError(
                    "a parameter group with lazy_rows holds matrices that are sharded by rows; "
                    f"{list(parameter.shape)}, {_placements(parameter)} is none"
                )

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        self.param_groups[0]["lr"] = lr

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """``step``, ``exp_avg`` and ``exp_avg_sq``."""
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }

    def update(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Moves the rows whose gradients are not zero."""
        assert parameter.grad is not None
        grad, step = local(parameter.grad), state["step"]
        # A skipped step has a count too, so that it does not divide by 0. In fp32 powers near 1 would be coarse.
        count = step.double() + 1.0
        if self.found_inf is not None:
            grad.masked_fill_(self.found_inf.bool(), 0.0)
            step.add_(1.0 - self.found_inf)
        else:
            step.add_(1.0)
        self._update_rows(local(parameter), grad, local(state["exp_avg"]), local(state["exp_avg_sq"]), count)

    def _update_rows(self, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, count: Tensor) -> None:
        """Updates by masks: factors of 1 and additions of 0 are exact, so rows that are not hit do not change.

        With c1 = 1 - beta1**count and c2 = 1 - beta2**count, mean / c1 / (sqrt(square / c2) + eps) is computed as
        mean / (sqrt(square) * c1 / sqrt(c2) + eps * c1), which multiplies the table by one scalar of the device.

        Args:
            weight: [rows, dim], as are the next three.
            grad: Gradient.
            mean: Its average.
            square: Average of its square.
            count: float64 scalar, steps of the table, this one included.
        """
        lr: float = self.param_groups[0]["lr"]
        c1, c2 = 1.0 - self._beta1**count, 1.0 - self._beta2**count
        sizes = grad.abs()
        hit = sizes.sum(dim=1, keepdim=True) != 0
        if self._weight_decay:
            weight.mul_(torch.where(hit, 1.0 - lr * self._weight_decay, 1.0))
        mean.mul_(torch.where(hit, self._beta1, 1.0)).add_(grad, alpha=1.0 - self._beta1)
        square.mul_(torch.where(hit, self._beta2, 1.0)).addcmul_(grad, grad, value=1.0 - self._beta2)
        root = torch.sqrt(square, out=sizes).mul_((c1 / c2.sqrt()).to(weight.dtype))
        # What is divided by infinity moves nothing.
        root.add_(torch.where(hit, (self._eps * c1).to(weight.dtype), math.inf))
        weight.addcdiv_(mean, root, value=-lr)


def _placements(parameter: Tensor) -> Sequence[Placement]:
    return parameter.placements if isinstance(parameter, DTensor) else ()
