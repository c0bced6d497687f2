"""The process group, the device mesh and seeds: the only file that knows what a mesh looks like.

Ranks are data-parallel. They form one axis, ``dp_shard``, over which parameters are sharded and rows are split.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class World:
    """This process among all; a context manager that leaves the process group at its end.

    Args:
        rank: 0 .. size - 1 over all nodes.
        size: Processes in all.
        device: Where this rank computes.
        mesh: 1-D, all ranks.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_reporter(self) -> bool:
        """Whether this rank writes logs and files."""
        return self.rank == 0

    def sum_over_ranks(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adds tensors of the same names and shapes over ranks, in one collective and in float64."""
        flat = torch.cat([value.detach().to(torch.float64).flatten() for value in sums.values()])
        if self.size > 1:
            dist.all_reduce(flat)
        parts = flat.split([value.numel() for value in sums.values()])
        return {name: part.view(value.shape) for (name, value), part in zip(sums.items(), parts, strict=True)}

    def wait_for_device(self) -> None:
        """Returns when all work queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Adds a tensor over the ranks that hold shards of the same parameters: all of them."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        dist.destroy_process_group()


def join_world() -> World:
    """Joins the process group of the launcher's environment variables, or makes one of this process alone.

    CUDA if there is any, else the CPU.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    else:
        dist.init_process_group(backend)
    return World(rank, size, device, init_device_mesh(device.type, (size,), mesh_dim_names=("dp_shard",)))


def seed_everything(seed: int, *, deterministic: bool) -> None:
    """Seeds torch on all devices.

    Args:
        seed: ``training.seed``; the same on all ranks.
        deterministic: Only deterministic kernels; an operation that has none raises.
    """
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
