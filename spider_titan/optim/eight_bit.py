"""AdamW with its averages in 8 bits, by torchao (after Dettmers et al. 2022, arXiv 2110.02861).

256 neighbouring values share a scale, and each is stored as the nearest of 256 levels. The update reads both averages
back, computes in fp32 and rounds them again, in one compiled kernel.

A matrix is quantised if each of its rows is a whole number of blocks. Then no block reaches from one rank's rows into
another's, whatever the number of ranks, and a checkpoint can be read at any. Everything else keeps fp32 averages.

State is codes and scales as plain tensors, sharded as the parameter is; torchao's tensor class is put round them for
the update alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spider_titan.optim.adamw import ParameterwiseAdamW
from spider_titan.optim.config import OptimizerConfig
from spider_titan.optim.shards import local
from spider_titan.quiet import torchao_import

BLOCK_SIZE = 256
"""Values that share a scale."""
MIN_SIZE = 4096
"""Parameters below this keep fp32 averages: there is little to save (as in bitsandbytes and torchao)."""


def is_quantised(parameter: Tensor) -> bool:
    """Whether the averages of a parameter are kept in 8 bits."""
    if parameter.ndim < 2 or parameter.numel() < MIN_SIZE or parameter.shape[-1] % BLOCK_SIZE:
        return False
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return not any(placement.is_shard(parameter.ndim - 1) for placement in placements)


class AdamW8bit(ParameterwiseAdamW):
    """torchao's 8-bit AdamW over parameters for which ``is_quantised`` holds.

    Args:
        parameters: The parameters.
        config: ``[optimizer]``.
        weight_decay: Of all of them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, weight_decay: float) -> None:
        # A tensor: a number would be compiled in, and every change of it would compile again.
        super().__init__(parameters, {"lr": torch.tensor(config.lr)})
        self._constants = {
            "beta1": config.beta1,
            "beta2": config.beta2,
            "weight_decay": weight_decay,
            "eps": config.eps,
            "IS_ADAMW": True,
            "BF16_STOCHASTIC_ROUND": False,
        }

    def set_lr(self, lr: float) -> None:
        """The learning rate of the next step."""
        self.param_groups[0]["lr"].fill_(lr)

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """``step``, and codes and scales of both averages."""
        blocks = parameter.detach().narrow(-1, 0, parameter.shape[-1] // BLOCK_SIZE)
        # On the CPU: the kernel takes its value, which would have to be waited for.
        state = {"step": torch.zeros((), device="cpu")}
        for name in ("exp_avg", "exp_avg_sq"):
            state[f"{name}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            # Scales of 0 make any code a 0.
            state[f"{name}_scale"] = torch.zeros_like(
                blocks, dtype=torch.float32, memory_format=torch.contiguous_format
            )
        return state

    def update(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Moves a parameter and rounds its averages again."""
        assert parameter.grad is not None
        state["step"] += 1
        weight, grad = local(parameter.detach()), local(parameter.grad)
        if not weight.numel():
            return  # With fewer rows than ranks, some have none.
        mean = _average(state, "exp_avg", signed=True, dtype=weight.dtype)
        square = _average(state, "exp_avg_sq", signed=False, dtype=weight.dtype)
        blocks = (_as_blocks(weight), _as_blocks(grad.contiguous()))
        # torchao's tensor classes collide in this cache, in that of earlier processes too.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            _compiled_update()(
                *blocks, state["step"], mean, square, None, self.param_groups[0]["lr"], **self._constants
            )


def _average(state: dict[str, Tensor], name: str, *, signed: bool, dtype: torch.dtype) -> Any:
    """An average as torchao's tensor, on the memory of the state."""
    codes = _as_blocks(local(state[f"{name}_codes"]))
    scale = local(state[f"{name}_scale"]).view(-1).data
    return _torchao().OptimState8bit(codes, scale, _levels(signed, codes.device), signed, dtype=dtype)


def _as_blocks(tensor: Tensor) -> Tensor:
    """The same memory as [blocks, BLOCK_SIZE]: with two dims throughout, one compiled kernel serves every shape."""
    # A view would be compiled for the shape of what it is a view of.
    return tensor.view(-1, BLOCK_SIZE).data


@cache
def _levels(signed: bool, device: torch.device) -> Tensor:
    subclass = _torchao()
    levels = subclass.get_qmap_signed() if signed else subclass.get_qmap_unsigned()
    return torch.tensor(levels, dtype=torch.float32, device=device)


@cache
def _compiled_update() -> Callable[..., None]:
    with torchao_import():
        from torchao.optim.adam import single_param_adam

    return torch.compile(single_param_adam, fullgraph=True, dynamic=True)


@cache
def _torchao() -> Any:
    """``torchao.optim.subclass_8bit``, imported where it is needed: that takes seconds."""
    with torchao_import():
        from torchao.optim import subclass_8bit

        return subclass_8bit
