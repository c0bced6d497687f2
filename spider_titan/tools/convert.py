"""A checkpoint as one file, and back.

    python -m spider_titan.tools.convert outputs/run/checkpoint/step-500 step-500.safetensors
    python -m spider_titan.tools.convert outputs/run/checkpoint/step-500 step-500.pt
    python -m spider_titan.tools.convert step-500.pt outputs/other/checkpoint/step-500

The file has all tensors, under the names that the checkpoint gives them, the trainer's numbers and the configuration.
So a run can go on from what is converted back. Nothing is executed on the way: no file is read as a free pickle.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from spider_titan.checkpoint import folders, tensors
from spider_titan.checkpoint.manager import CONFIG, STATE
from spider_titan.console import setup_console

logger = logging.getLogger("spider_titan.convert")


@dataclass
class Content:
    """All that a checkpoint holds.

    Args:
        tensors: Name -> tensor.
        texts: File name -> text, of the trainer's numbers and the configuration.
    """

    tensors: dict[str, Tensor]
    texts: dict[str, str]


def read_folder(folder: Path) -> Content:
    """Reads a complete checkpoint, whatever number of ranks wrote it.

    Raises:
        DamagedError: If it is not complete.
    """
    folders.verify(folder, folders.read_marker(folder))
    found = tensors.read_metadata(folder)
    values = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()}
    load(values, storage_reader=tensors.SafeReader(folder), no_dist=True)
    return Content(values, {name: (folder / name).read_text(encoding="utf-8") for name in (STATE, CONFIG)})


def write_folder(content: Content, folder: Path) -> None:
    """Writes a complete checkpoint, as one rank would have.

    Raises:
        ValueError: If the folder exists, or is not called step-N with the N of the content.
    """
    step = json.loads(content.texts[STATE])["step"]
    if folder.name != f"step-{step}":
        raise ValueError(f"{folder} must be called step-{step}, as the content is of that step")
    if folder.exists():
        raise ValueError(f"{folder} exists already; remove it, or name another run's checkpoint folder")
    staging = folders.staging_folder(folder.parent, step)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    save(content.tensors, storage_writer=FileSystemWriter(staging), no_dist=True)
    for name, text in content.texts.items():
        (staging / name).write_text(text, encoding="utf-8")
    records = {path.name: folders.record_of(path) for path in staging.iterdir()}
    folders.write_marker(staging, step, 1, records)
    folders.publish(staging, folder)


def read_torch(path: Path) -> Content:
    """Reads what ``write_torch`` wrote, without executing anything."""
    return Content(**torch.load(path, weights_only=True))


def write_torch(content: Content, path: Path) -> None:
    """Writes one file with ``torch.save``."""
    torch.save({"tensors": content.tensors, "texts": content.texts}, path)


def read_safetensors(path: Path) -> Content:
    """Reads what ``write_safetensors`` wrote."""
    with safe_open(path, framework="pt") as file:
        texts = dict(file.metadata())
        return Content({name: file.get_tensor(name) for name in file.keys()}, texts)  # noqa: SIM118


def write_safetensors(content: Content, path: Path) -> None:
    """Writes one safetensors file; the texts are its metadata."""
    save_file({name: value.contiguous() for name, value in content.tensors.items()}, path, metadata=content.texts)


READERS: Mapping[str, Callable[[Path], Content]] = {
    "": read_folder,
    ".pt": read_torch,
    ".safetensors": read_safetensors,
}
WRITERS: Mapping[str, Callable[[Content, Path], None]] = {
    "": write_folder,
    ".pt": write_torch,
    ".safetensors": write_safetensors,
}


def convert(source: Annotated[Path, tyro.conf.Positional], target: Annotated[Path, tyro.conf.Positional]) -> None:
    """Converts a checkpoint: a folder step-N, or a file that ends in .pt or .safetensors.

    Args:
        source: What to read.
        target: What to write; must not exist.

    Raises:
        ValueError: If either cannot be used; says why.
    """
    for path in (source, target):
        if path.suffix not in READERS:
            raise ValueError(f"{path}: give a folder step-N, or a file that ends in .pt or .safetensors")
    if not source.exists():
        raise ValueError(f"{source} does not exist")
    if target.exists():
        raise ValueError(f"{target} exists already; remove it, or name another")
    content = READERS[source.suffix](source)
    WRITERS[target.suffix](content, target)
    logger.info("%s -> %s: %d tensors, %s bytes", source, target, len(content.tensors), f"{size(content):,}")


def size(content: Content) -> int:
    """Bytes of all tensors."""
    return tensors.nbytes(content.tensors.values())


if __name__ == "__main__":
    setup_console()
    try:
        tyro.cli(convert)
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        sys.exit(2)
