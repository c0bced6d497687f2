"""Initial weights that depend on the seed and the parameter's name alone.

Each parameter has a generator of its own, seeded by (seed, name), and its full tensor is drawn on the CPU; a sharded
parameter then keeps its slice. So the weights are the same on every device and at every world size, and adding a
parameter changes no other. (Drawing into local shards in place gives every rank of a CPU mesh the same shard.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Initializer = Callable[[Tensor, torch.Generator], Tensor]
"""Fills a full fp32 CPU tensor in place."""

WRAPPER_PARTS = ("_checkpoint_wrapped_module", "_orig_mod")


def clean_fqn(name: str) -> str:
    """Drops what wrappers add to a parameter's name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def normal(std: float) -> Initializer:
    """Normal with mean 0."""
    return lambda tensor, generator: tensor.normal_(0.0, std, generator=generator)


def constant(value: float) -> Initializer:
    """The same value everywhere."""
    return lambda tensor, generator: tensor.fill_(value)


def logit(probability: float) -> float:
    """Inverse of the sigmoid."""
    return math.log(probability / (1.0 - probability))


@torch.no_grad()
def init_parameters(model: nn.Module, rules: Sequence[tuple[str, Initializer]], seed: int) -> None:
    """Fills every parameter by the first rule whose pattern matches its name.

    Args:
        model: Materialised; its parameters may be DTensors.
        rules: (glob pattern over the fully qualified name, initializer), most specific first.
        seed: Any integer.

    Raises:
        ValueError: If no rule matches a parameter.
    """
    for wrapped_name, parameter in model.named_parameters():
        name = clean_fqn(wrapped_name)
        initializer = next((rule for pattern, rule in rules if fnmatchcase(name, pattern)), None)
        if initializer is None:
            raise ValueError(f"no initialisation rule matches parameter '{name}'")
        full = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        initializer(full, _generator(seed, name))
        copy_full_(parameter, full)


@torch.no_grad()
def copy_full_(parameter: Tensor, full: Tensor) -> None:
    """Copies a full tensor into a plain or sharded one, without communication: every rank holds the same ``full``."""
    full = full.to(parameter.device)
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(full)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
