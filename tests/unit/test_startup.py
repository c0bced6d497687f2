"""The peak that a run's FLOPs are held against."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from spider_titan.distributed import World
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.startup import peak_flops

RANKS = 4


def peak(monkeypatch: pytest.MonkeyPatch, name: str, **precision: Any) -> float | None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    world = cast(World, SimpleNamespace(device=torch.device("cuda"), size=RANKS))
    return peak_flops(PrecisionConfig(**precision), world)


# Dense peaks of the vendor's data sheets, in TFLOPs: bf16, 8 bits, 4 bits.
@pytest.mark.parametrize(
    ("name", "mode", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "fp8_dynamic", 2 * 756),
        ("NVIDIA H200", "fp8_dynamic", 2 * 989),
        ("NVIDIA B200", "mxfp8", 4500),
        ("NVIDIA B200", "nvfp4", 9000),
    ],
)
def test_the_peak_is_that_of_the_fastest_products_of_a_mode(
    monkeypatch: pytest.MonkeyPatch, name: str, mode: str, teraflops: int
) -> None:
    assert peak(monkeypatch, name, mode=mode) == pytest.approx(teraflops * 1e12 * RANKS)


def test_emulated_products_are_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak(monkeypatch, "NVIDIA H200", mode="fp8_dynamic", emulate=True) == pytest.approx(989e12 * RANKS)


def test_fp32_is_not_held_against_the_peak_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak(monkeypatch, "NVIDIA H200", mode="fp32") is None


def test_the_peak_of_an_unknown_device_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak(monkeypatch, "NVIDIA T4", mode="bf16") is None
    assert (
        peak_flops(PrecisionConfig(mode="bf16"), cast(World, SimpleNamespace(device=torch.device("cpu"), size=RANKS)))
        is None
    )
