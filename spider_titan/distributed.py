"""The process group, the device mesh and seeds: the only file that knows what a mesh looks like.

All ranks are data-parallel. They form one axis, ``dp_shard``, over which parameters are sharded, or a grid of
``dp_replicate`` x ``dp_shard``: copies of the sharded model, each within the ranks of a row. Rows of the batch are
split over all ranks either way.
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

REPLICATE, SHARD = "dp_replicate", "dp_shard"

_GROUPS = itertools.count()


@dataclass(frozen=True)
class ParallelismConfig:
    """The section ``[parallelism]``."""

    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model; gradients are summed over them. With more than one, ranks form a grid (HSDP)."""
    data_parallel_shard_degree: int = -1
    """Ranks that one copy is sharded over; -1: all that are left, ranks / data_parallel_replicate_degree."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered weights are freed between forward and backward. default: all but the last block's."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory; the optimizer then runs on the CPU."""

    def __post_init__(self) -> None:
        if self.data_parallel_replicate_degree < 1:
            raise ValueError(
                f"data_parallel_replicate_degree = {self.data_parallel_replicate_degree} must be at least 1"
            )
        if self.data_parallel_shard_degree < 1 and self.data_parallel_shard_degree != -1:
            raise ValueError(
                f"data_parallel_shard_degree = {self.data_parallel_shard_degree} must be at least 1, or -1 for the rest"
            )

    def degrees(self, world_size: int) -> tuple[int, int]:
        """(replicate, shard) for a number of ranks.

        Raises:
            ValueError: If they do not multiply to ``world_size``.
        """
        replicate, shard = self.data_parallel_replicate_degree, self.data_parallel_shard_degree
        if shard == -1:
            shard = max(1, world_size // replicate)
        if replicate * shard != world_size:
            raise ValueError(
                f"parallelism.data_parallel_replicate_degree * data_parallel_shard_degree = {replicate} * {shard} is "
                f"not the number of ranks, {world_size}; give degrees whose product it is, or start "
                f"{replicate * shard} ranks"
            )
        return replicate, shard


@dataclass(frozen=True)
class CommConfig:
    """The section ``[comm]``."""

    init_timeout_seconds: int = 300
    """How long a rank waits for the others until the first step is done; it may contain compilation."""
    train_timeout_seconds: int = 100
    """The same from then on: a rank that is silent for longer ends the run."""

    def __post_init__(self) -> None:
        for name in ("init_timeout_seconds", "train_timeout_seconds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")


@dataclass(frozen=True)
class World:
    """This process among all; a context manager that leaves the process group at its end.

    Args:
        rank: 0 .. size - 1 over all nodes.
        size: Processes in all.
        device: Where this rank computes.
        mesh: ``dp_shard``, or ``dp_replicate`` x ``dp_shard``.
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

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Adds a tensor over the ranks that hold shards of the same copy of the parameters."""
        if num_shards(self.mesh) > 1:
            dist.all_reduce(value, group=self.mesh.get_group(SHARD))
        return value

    def wait_for_device(self) -> None:
        """Returns when all work queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def set_timeout(self, seconds: int) -> None:
        """From now on a collective fails when a rank has not joined it after ``seconds``; call it on all ranks."""
        self.wait_for_device()
        if self.size == 1:
            return
        dist.barrier()
        names = self.mesh.mesh_dim_names or ()
        for group in (dist.group.WORLD, *(self.mesh.get_group(name) for name in names)):
            _set_pg_timeout(datetime.timedelta(seconds=seconds), group)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self.size == 1:
            dist.destroy_process_group()


def join_world(parallelism: ParallelismConfig, comm: CommConfig) -> World:
    """Joins the process group of the launcher's environment variables, or makes one of this process alone.

    CUDA if there is any, else the CPU.

    Raises:
        ValueError: If the degrees of parallelism do not fit the number of ranks.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    replicate, shard = parallelism.degrees(size)
    timeout = datetime.timedelta(seconds=comm.init_timeout_seconds)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    store = dist.HashStore() if size == 1 else _attempt_store(rank, size, timeout)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return World(rank, size, device, _mesh(device.type, replicate, shard))


def imagine_world(parallelism: ParallelismConfig, size: int) -> World:
    """Rank 0 of ``size`` ranks that do not exist, for a dry run: collectives return at once and move nothing.

    Raises:
        ValueError: If the degrees of parallelism do not fit ``size``.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    replicate, shard = parallelism.degrees(size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    device = torch.device("cpu")
    return World(0, size, device, _mesh(device.type, replicate, shard))


def num_shards(mesh: DeviceMesh) -> int:
    """Ranks that one copy of the parameters is sharded over."""
    return mesh.size(mesh.ndim - 1)


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


def _mesh(device_type: str, replicate: int, shard: int) -> DeviceMesh:
    if replicate == 1:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=(REPLICATE, SHARD))


def _attempt_store(rank: int, size: int, timeout: datetime.timedelta) -> Store:
    """The launcher's store, with keys of this attempt and of this process group alone.

    torchrun keeps one store through its restarts, and a process that leaves its group and joins another comes back to
    it: without a prefix ranks would read the addresses of the last time.
    """
    store, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timeout)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt_{attempt}/group_{next(_GROUPS)}", store)
