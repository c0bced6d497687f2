"""Folders of checkpoints: which are complete, which are kept, and how one becomes visible.

    checkpoint/step-500/             a complete checkpoint
        complete.json                written last: format, step, ranks, and every other file's size and checksum
        state.json                   the trainer's numbers: step, data position, random states
        config.toml                  the effective configuration of the run
        .metadata, __0_0.distcp ...  tensors, by torch.distributed.checkpoint
    checkpoint/.step-1000.partial/   one that is being written, or was when the run ended
    checkpoint/kept.json             steps kept for another reason than being new: best, final, epoch ends

A folder is written aside and renamed when it is complete, so one named step-N is either whole or has been damaged
since; the checksums tell.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MARKER = "complete.json"
KEPT = "kept.json"
FORMAT = 2
_STEP = re.compile(r"step-(0|[1-9]\d*)")
_CHUNK = 1 << 22


class DamagedError(ValueError):
    """A folder that is not a complete checkpoint; the message says why."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and checksum of a file."""

    size: int
    blake2b: str


@dataclass(frozen=True)
class Marker:
    """What ``complete.json`` holds.

    Args:
        format: Version of the layout.
        step: Optimizer steps done.
        world_size: Ranks that wrote it.
        files: Name -> record of every other file.
    """

    format: int
    step: int
    world_size: int
    files: dict[str, FileRecord]


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies once it is complete."""
    return root / f"step-{step}"


def staging_folder(root: Path, step: int) -> Path:
    """Where it is written."""
    return root / f".step-{step}.partial"


def steps_in(root: Path) -> list[int]:
    """Steps that have a folder, newest first; whatever else lies there is not looked at."""
    if not root.is_dir():
        return []
    names = (match for entry in root.iterdir() if entry.is_dir() and (match := _STEP.fullmatch(entry.name)))
    return sorted((int(match.group(1)) for match in names), reverse=True)


def record_of(path: Path) -> FileRecord:
    """Reads a file for its size and checksum."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest())


def write_marker(folder: Path, step: int, world_size: int, files: Mapping[str, FileRecord]) -> None:
    """Makes a written folder complete; everything it lists must be on disk."""
    write_json(folder / MARKER, asdict(Marker(FORMAT, step, world_size, dict(sorted(files.items())))))


def read_marker(folder: Path) -> Marker:
    """Reads the marker, without looking at the files.

    Raises:
        DamagedError: If there is none, or one that this version cannot read.
    """
    try:
        values = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = {str(name): FileRecord(**record) for name, record in values.pop("files").items()}
        marker = Marker(files=files, **values)
    except FileNotFoundError:
        raise DamagedError(f"{MARKER} is missing, so it was not written to its end") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{MARKER} cannot be read ({error})") from error
    if marker.format != FORMAT:
        raise DamagedError(f"it has format {marker.format}, and this version reads format {FORMAT}")
    return marker


def verify(folder: Path, marker: Marker, part: int = 0, parts: int = 1) -> None:
    """Compares every ``parts``-th file with the marker, from number ``part`` on.

    Raises:
        DamagedError: Names the first file that is missing or not as it was written.
    """
    for name, record in itertools.islice(sorted(marker.files.items()), part, None, parts):
        path = folder / name
        try:
            size = path.stat().st_size
            if size != record.size:
                raise DamagedError(f"{name} has {size:,} bytes instead of {record.size:,}")
            if record_of(path) != record:
                raise DamagedError(f"{name} is not what was written: its checksum differs")
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror or error}") from error


def publish(staging: Path, folder: Path) -> None:
    """Makes a complete staging folder visible; one of the same step, from a run that went back, is replaced."""
    if folder.exists():
        retired = folder.with_name(f".{folder.name}.replaced")
        shutil.rmtree(retired, ignore_errors=True)
        folder.rename(retired)
        staging.rename(folder)
        shutil.rmtree(retired)
    else:
        staging.rename(folder)
    sync_folder(folder.parent)


def set_aside_newer(root: Path, step: int) -> None:
    """Renames checkpoints beyond ``step``, so that they are not taken for the newest of the run that goes on there."""
    for newer in steps_in(root):
        if newer > step:
            names = (root / f"superseded-step-{newer}{suffix}" for suffix in ("", *(f".{n}" for n in range(1, 1000))))
            target = next(name for name in names if not name.exists())
            step_folder(root, newer).rename(target)
            logger.info("checkpoint: step-%d is newer than the step asked for; it is kept as %s", newer, target)


def remove_partial(root: Path, keep: Iterable[Path] = ()) -> None:
    """Deletes what saves that never ended have left."""
    kept = set(keep)
    for pattern in (".step-*.partial", ".step-*.replaced"):
        for folder in root.glob(pattern):
            if folder not in kept:
                shutil.rmtree(folder)


def retain(root: Path, keep_latest_k: int, just_written: int) -> None:
    """Deletes old checkpoints: all but the newest ``keep_latest_k``, those in ``kept.json`` and the one just written.

    Only complete ones count as new, so a damaged folder never takes the place of a whole one; nor is it deleted.
    """
    if keep_latest_k == 0:
        return
    complete = [step for step in steps_in(root) if (step_folder(root, step) / MARKER).is_file()]
    kept = {*complete[:keep_latest_k], just_written, *kept_steps(read_kept(root))}
    for step in complete:
        if step not in kept:
            # Renamed first: a folder that is half deleted must not look like a checkpoint.
            doomed = staging_folder(root, step)
            step_folder(root, step).rename(doomed)
            shutil.rmtree(doomed)


def read_kept(root: Path) -> dict[str, Any]:
    """``{"best": {"step": 500, "bpb": 1.9}, "final": {"step": 1000}, "epoch-1": {"step": 700}}``, or nothing yet."""
    path = root / KEPT
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}); repair it, or delete it and lose only what it lists"
        ) from error


def kept_steps(kept: Mapping[str, Any]) -> set[int]:
    """The steps that ``kept.json`` names."""
    return {int(entry["step"]) for entry in kept.values()}


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that ``path`` is the old or the new text, whatever happens."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Brings a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
