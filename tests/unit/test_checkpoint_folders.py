"""Folders of checkpoints: complete or not, damaged, kept, replaced."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spider_titan.checkpoint import folders
from spider_titan.checkpoint.folders import DamagedError


def make(root: Path, step: int, content: bytes = b"weights") -> Path:
    """A complete checkpoint of two files."""
    staging = folders.staging_folder(root, step)
    staging.mkdir(parents=True)
    (staging / "__0_0.distcp").write_bytes(content * 100)
    (staging / "state.json").write_text("{}")
    records = {path.name: folders.record_of(path) for path in staging.iterdir()}
    folders.write_marker(staging, step, 1, records)
    folders.publish(staging, folders.step_folder(root, step))
    return folders.step_folder(root, step)


def damage_of(folder: Path) -> str:
    try:
        folders.verify(folder, folders.read_marker(folder))
    except DamagedError as error:
        return str(error)
    return ""


def flip(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[123] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: os.truncate(folder / "__0_0.distcp", 10), "has 10 bytes instead of 700"),
    "flipped": (flip, "its checksum differs"),
    "no marker": (lambda folder: (folder / "complete.json").unlink(), "complete.json is missing"),
    "half a marker": (lambda folder: os.truncate(folder / "complete.json", 20), "complete.json cannot be read"),
    "a list": (lambda folder: (folder / "complete.json").write_text("[]"), "complete.json cannot be read"),
    "missing file": (lambda folder: (folder / "state.json").unlink(), "state.json: No such file"),
    "emptied": (lambda folder: [path.unlink() for path in folder.iterdir()], "complete.json is missing"),
    "future": (
        lambda folder: (folder / "complete.json").write_text(
            (folder / "complete.json").read_text().replace('"format": 2', '"format": 9')
        ),
        "format 9, and this version reads format 2",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path, 500)
    assert damage_of(folder) == ""
    damage, reason = DAMAGES[name]
    damage(folder)
    assert reason in damage_of(folder)


def test_files_are_shared_out_to_be_verified(tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    flip(folder)
    marker = folders.read_marker(folder)
    found = []
    for part in range(3):
        try:
            folders.verify(folder, marker, part, 3)
        except DamagedError:
            found.append(part)
    assert len(found) == 1


def test_steps_are_ordered_as_numbers_and_foreign_entries_are_ignored(tmp_path: Path) -> None:
    for name in ("step-500", "step-1000", "step-9", "step-007", "step-x", "superseded-step-3", ".step-4.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-2000").write_text("a file")
    assert folders.steps_in(tmp_path) == [1000, 500, 9]
    assert folders.steps_in(tmp_path / "nowhere") == []


def test_retention_keeps_the_newest_complete_and_those_listed(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400, 500, 600):
        make(tmp_path, step)
    (tmp_path / "step-500" / "complete.json").unlink()
    (tmp_path / "step-999").mkdir()
    folders.write_json(tmp_path / "kept.json", {"best": {"step": 100, "value": 1.5}})
    folders.retain(tmp_path, 2, just_written=600)
    # What is damaged or foreign is neither counted nor deleted.
    assert folders.steps_in(tmp_path) == [999, 600, 500, 400, 100]
    assert all(damage_of(folders.step_folder(tmp_path, step)) == "" for step in (600, 400, 100))
    folders.retain(tmp_path, 0, just_written=600)
    assert folders.steps_in(tmp_path) == [999, 600, 500, 400, 100]


def test_the_one_just_written_is_never_deleted(tmp_path: Path) -> None:
    """A run that went back to an earlier step writes one that is not the newest."""
    for step in (100, 200, 300):
        make(tmp_path, step)
    folders.retain(tmp_path, 1, just_written=100)
    assert folders.steps_in(tmp_path) == [300, 100]


def test_publishing_again_replaces(tmp_path: Path) -> None:
    make(tmp_path, 5, b"old")
    folder = make(tmp_path, 5, b"newer")
    assert (folder / "__0_0.distcp").read_bytes() == b"newer" * 100
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


def test_left_overs_of_saves_are_removed(tmp_path: Path) -> None:
    make(tmp_path, 5)
    (tmp_path / ".step-10.partial").mkdir()
    (tmp_path / ".step-10.partial" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / ".step-5.replaced").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    folders.remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-5"]


def test_newer_ones_are_set_aside_not_deleted(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        make(tmp_path, step)
    folders.set_aside_newer(tmp_path, 5)
    make(tmp_path, 10)
    folders.set_aside_newer(tmp_path, 5)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-5", "superseded-step-10", "superseded-step-10.1", "superseded-step-15"]


def test_json_is_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.json"
    folders.write_json(path, {"best": {"step": 1}})

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(json, "dump", fail)
    with pytest.raises(OSError, match="disk full"):
        folders.write_json(path, {"best": {"step": 2}})
    assert folders.read_kept(tmp_path) == {"best": {"step": 1}}


def test_a_kept_file_that_is_rubbish_is_named(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("{")
    with pytest.raises(ValueError, match=r"kept\.json cannot be read"):
        folders.read_kept(tmp_path)
