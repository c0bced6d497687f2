"""This rank's part of tensors that may be sharded."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard as a plain tensor on the same memory."""
    if isinstance(tensor, DTensor):
        shard = tensor.to_local()
        # torchao wraps shards that are gathered as float8.
        return getattr(shard, "_tensor", shard)
    return tensor
