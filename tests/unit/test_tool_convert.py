"""Checkpoints as one file and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spider_titan.checkpoint import folders
from spider_titan.tools import convert
from spider_titan.tools.convert import Content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete checkpoint."""
    tensors = {
        "model.w": torch.randn(5, 7),
        "model.b16": torch.randn(3).bfloat16(),
        "model.count": torch.tensor(2**53 + 1),
        "optimizer.w.step": torch.tensor(3.0),
    }
    state = {"step": 30, "ranks": [{"random": {}, "cursors": {"english": {"0": [4, 5]}}}]}
    target = tmp_path / "a" / "step-30"
    convert.write_folder(Content(tensors, {"state.json": json.dumps(state), "config.toml": "[job]\n"}), target)
    return target


def equal(first: Content, second: Content) -> bool:
    same = first.tensors.keys() == second.tensors.keys() and first.texts == second.texts
    return same and all(
        value.dtype == second.tensors[name].dtype and torch.equal(value, second.tensors[name])
        for name, value in first.tensors.items()
    )


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_there_and_back(folder: Path, tmp_path: Path, suffix: str) -> None:
    file, back = tmp_path / f"one{suffix}", tmp_path / "b" / "step-30"
    convert.convert(folder, file)
    convert.convert(file, back)
    assert equal(convert.read_folder(folder), convert.read_folder(back))
    folders.verify(back, folders.read_marker(back))
    assert folders.steps_in(tmp_path / "b") == [30]


def test_mistakes_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give a folder step-N, or a file that ends in \.pt or \.safetensors"):
        convert.convert(folder, tmp_path / "one.bin")
    with pytest.raises(ValueError, match="does not exist"):
        convert.convert(tmp_path / "step-3", tmp_path / "one.pt")
    convert.convert(folder, tmp_path / "one.pt")
    with pytest.raises(ValueError, match="exists already"):
        convert.convert(folder, tmp_path / "one.pt")
    with pytest.raises(ValueError, match="must be called step-30"):
        convert.convert(tmp_path / "one.pt", tmp_path / "b" / "step-31")
    (folder / "complete.json").unlink()
    with pytest.raises(ValueError, match=r"complete\.json is missing"):
        convert.convert(folder, tmp_path / "two.pt")
