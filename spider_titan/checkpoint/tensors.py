"""Tensors of a checkpoint: names, writing and reading through torch.distributed.checkpoint.

Sharded tensors are written shard by shard and read into whatever shards there are now, so a checkpoint does not depend
on the number of ranks. Names are those of the bare model, whatever wraps it:

    model.FQN                                  parameters and buffers
    optimizer.FQN.exp_avg, .exp_avg_sq, .step  per parameter that has been updated
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.tensor import DTensor

from spider_titan.models.common.init import clean_fqn
from spider_titan.optim.shards import local

MODEL, OPTIMIZER = "model.", "optimizer."


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live parameters and buffers; writing into them changes the model."""
    return {MODEL + clean_fqn(name): plain(value) for name, value in model.state_dict().items()}


def plain(value: Tensor) -> Tensor:
    """A sharded tensor without what torchao wraps its shard in to gather it as float8; same memory."""
    if isinstance(value, DTensor) and local(value) is not value.to_local():
        return DTensor.from_local(
            local(value),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return value


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the whole tensors, over all ranks."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def load(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Reads the named tensors in place; ``read_metadata`` tells which there are.

    Raises:
        ValueError: If a name is missing or has another shape; ``describe_differences`` says it better, before.
    """
    load_distributed(tensors, storage_reader=SafeReader(folder), process_group=group)


def read_metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> shape and dtype of the tensors that a folder holds."""
    entries = SafeReader(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def describe_differences(
    wanted: Mapping[str, Tensor], stored: Mapping[str, TensorStorageMetadata], limit: int = 8
) -> str:
    """What keeps ``stored`` from being read into ``wanted``, a line each; empty if nothing does."""
    lines = [f"{name} {list(wanted[name].shape)} is not in it" for name in sorted(wanted.keys() - stored.keys())]
    lines += [f"it also has {name} {list(stored[name].size)}" for name in sorted(stored.keys() - wanted.keys())]
    lines += [
        f"{name} is {list(wanted[name].shape)} here and {list(stored[name].size)} there"
        for name in sorted(wanted.keys() & stored.keys())
        if wanted[name].shape != stored[name].size
    ]
    if len(lines) > limit:
        lines = [*lines[:limit], f"and {len(lines) - limit} more"]
    return "\n".join(f"  {line}" for line in lines)


class SafeReader(FileSystemReader):
    """Reads the library's format without executing what a file says.

    Tensors are read with ``weights_only`` by the library itself. Its index is a pickle, which could call anything:
    here it may only name the classes that an index is made of.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            pickle.UnpicklingError: If it names anything else.
        """
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    NAMES = frozenset({
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch._C", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    })  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        is_class = module in self.MODULES and isinstance(
            getattr(super().find_class(module, name), "__mro__", None), tuple
        )
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_class or is_dtype or (module, name) in self.NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the index names {module}.{name}, which no index of tensors needs")
