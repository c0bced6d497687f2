"""Which mode a device comes to: the rules on devices that are not there, and what is asked of the one that is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spider_titan.distributed import CommConfig, ParallelismConfig, World, imagine_world, join_world
from spider_titan.plugins import PluginContext, apply_plugins, capability
from spider_titan.plugins.capability import Hardware, choose, obstacle, resolve
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import get_model_spec

ALL_FEATURES = frozenset({"triton", "mxfp8 kernels"})


def cuda(name: str, *version: int, features: frozenset[str] = ALL_FEATURES) -> Hardware:
    major, minor = version
    return Hardware("cuda", name, (major, minor), features, bf16_products=major >= 8)


PLAIN_CPU = Hardware("cpu", "the CPU")
BF16_CPU = Hardware("cpu", "the CPU", bf16_products=True)
V100, A100, L40, H100, B200 = (
    cuda("V100", 7, 0),
    cuda("A100", 8, 0),
    cuda("L40", 8, 9),
    cuda("H100", 9, 0),
    cuda("B200", 10, 0),
)
NO_TRITON = cuda("B200", 10, 0, features=frozenset({"mxfp8 kernels"}))
NO_KERNELS = cuda("B200", 10, 0, features=frozenset({"triton"}))

EXPECTED = {
    # device: (auto, then what nvfp4, mxfp8, fp8_dynamic and bf16 come to)
    "plain CPU": (PLAIN_CPU, "fp32", "bf16", "bf16", "bf16", "bf16"),
    "CPU with bf16": (BF16_CPU, "bf16", "bf16", "bf16", "bf16", "bf16"),
    "7.0": (V100, "fp32", "bf16", "bf16", "bf16", "bf16"),
    "8.0": (A100, "bf16", "bf16", "bf16", "bf16", "bf16"),
    "8.9": (L40, "fp8_dynamic", "fp8_dynamic", "fp8_dynamic", "fp8_dynamic", "bf16"),
    "9.0": (H100, "fp8_dynamic", "fp8_dynamic", "fp8_dynamic", "fp8_dynamic", "bf16"),
    "10.0": (B200, "nvfp4", "nvfp4", "mxfp8", "fp8_dynamic", "bf16"),
    "10.0 without triton": (NO_TRITON, "fp8_dynamic", "fp8_dynamic", "fp8_dynamic", "fp8_dynamic", "bf16"),
    "10.0 without kernels": (NO_KERNELS, "nvfp4", "nvfp4", "fp8_dynamic", "fp8_dynamic", "bf16"),
}
NAMED = ("nvfp4", "mxfp8", "fp8_dynamic", "bf16")


@pytest.fixture
def world() -> Iterator[World]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world


@pytest.mark.parametrize("device", EXPECTED)
def test_auto_takes_the_best_and_names_why_not_the_better_ones(device: str) -> None:
    hardware, best, *_ = EXPECTED[device]
    choice = choose(PrecisionConfig(mode="auto"), hardware)
    assert choice.mode == best
    ladder = ("nvfp4", "mxfp8", "fp8_dynamic", "bf16", "fp32")
    assert [mode for mode, _ in choice.obstacles] == list(ladder[: ladder.index(best)])
    assert all(reason for _, reason in choice.obstacles)


@pytest.mark.parametrize("device", EXPECTED)
@pytest.mark.parametrize("mode", NAMED)
def test_a_named_mode_falls_back_or_stops(device: str, mode: Any) -> None:
    hardware, _, *results = EXPECTED[device]
    expected = results[NAMED.index(mode)]
    choice = choose(PrecisionConfig(mode=mode), hardware)
    assert choice.mode == expected
    assert [skipped for skipped, _ in choice.obstacles] == list(NAMED[NAMED.index(mode) : NAMED.index(expected)])
    strict = PrecisionConfig(mode=mode, strict=True)
    if expected == mode:
        assert choose(strict, hardware).mode == mode
    else:
        with pytest.raises(ValueError, match=f'"{mode}" cannot run: .*strict = false to take "{expected}" instead'):
            choose(strict, hardware)


def test_fp32_is_fp32_everywhere() -> None:
    for hardware, *_ in EXPECTED.values():
        assert choose(PrecisionConfig(mode="fp32", strict=True), hardware).mode == "fp32"


@pytest.mark.parametrize("hardware", [PLAIN_CPU, A100, B200])
def test_emulation_needs_no_device_and_does_not_do_nvfp4(hardware: Hardware) -> None:
    for mode in ("mxfp8", "fp8_dynamic"):
        assert choose(PrecisionConfig(mode=mode, emulate=True, strict=True), hardware).mode == mode  # type: ignore[arg-type]
    choice = choose(PrecisionConfig(mode="nvfp4", emulate=True), hardware)
    assert (choice.mode, choice.obstacles) == ("mxfp8", (("nvfp4", "torchao cannot emulate it"),))


@pytest.mark.parametrize(
    ("mode", "hardware", "reason"),
    [
        ("nvfp4", PLAIN_CPU, "it needs a CUDA device of compute capability 10.0 or more, and this run is on the CPU"),
        ("mxfp8", H100, "it needs compute capability 10.0 or more, and H100 has 9.0"),
        ("fp8_dynamic", A100, "it needs compute capability 8.9 or more, and A100 has 8.0"),
        ("nvfp4", NO_TRITON, "torchao misses triton for it"),
        ("mxfp8", cuda("B200", 10, 0, features=frozenset()), "torchao misses triton and mxfp8 kernels for it"),
        ("fp8_dynamic", L40, ""),
    ],
)
def test_reasons(mode: Any, hardware: Hardware, reason: str) -> None:
    assert obstacle(mode, hardware, emulate=False) == reason


def test_a_dry_run_takes_a_named_mode_at_its_word() -> None:
    with imagine_world(ParallelismConfig(), 8) as world:
        for mode in NAMED:
            assert resolve(PrecisionConfig(mode=mode, strict=True), world.mesh).mode == mode  # type: ignore[arg-type]
        assert resolve(PrecisionConfig(mode="auto"), world.mesh).mode == "bf16"


def test_nvfp4_is_refused_here(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r'"nvfp4" cannot run: .* 10\.0 or more, and this run is on the CPU'):
        resolve(PrecisionConfig(mode="nvfp4", strict=True), world.mesh)
    assert resolve(PrecisionConfig(mode="nvfp4"), world.mesh).mode == "bf16"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage().startswith(
        'precision: mode = "nvfp4" cannot run, so this run computes in bf16. nvfp4: '
    )
    assert all(f"{mode}: it needs" in warning.getMessage() for mode in ("nvfp4", "mxfp8", "fp8_dynamic"))


def test_auto_says_what_it_takes_and_why_not_the_better_ones(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("spider_titan"), "propagate", True)
    monkeypatch.setattr(capability, "probe", lambda mesh: A100)
    with caplog.at_level(logging.INFO, logger="spider_titan"):
        resolve(PrecisionConfig(mode="auto"), world.mesh)
    assert caplog.messages == [
        "precision: auto takes bf16 on A100",
        "precision: not nvfp4: it needs compute capability 10.0 or more, and A100 has 8.0",
        "precision: not mxfp8: it needs compute capability 10.0 or more, and A100 has 8.0",
        "precision: not fp8_dynamic: it needs compute capability 8.9 or more, and A100 has 8.0",
    ]


def test_the_context_of_a_run_has_the_mode_that_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = get_model_spec("byte_transformer")
    for device in (B200, L40, A100, PLAIN_CPU):
        monkeypatch.setattr(capability, "probe", lambda mesh, device=device: device)
        precision = resolve(PrecisionConfig(mode="auto"), world.mesh)
        assert precision.mode == choose(PrecisionConfig(mode="auto"), device).mode
        model = apply_plugins(
            spec.build(spec.flavors["debug"], device="meta"), spec, PluginContext(world.mesh, precision=precision)
        )
        kinds = {type(module).__name__ for module in model.modules()}
        assert ("BlockScaledLinear" in kinds) == (device is B200)
        assert ("Float8Linear" in kinds) == (device is L40)


def test_what_is_asked_of_this_machine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, expected in (
        ({}, False),
        ({"avx512_bf16": True}, True),
        ({"bf16": True}, True),
        ({"avx2": True}, False),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: {"architecture": "x", **flags})
        found = capability.probe(world.mesh)
        assert (found.device_type, found.capability, found.bf16_products) == ("cpu", None, expected)


@pytest.mark.parametrize("version", [(8, 0), (8, 9), (9, 0)])
def test_what_is_asked_of_a_cuda_device(
    world: World, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    class CudaMesh:
        device_type = "cuda"

        def get_group(self, dim: int) -> Any:
            return world.mesh.get_group(dim)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some device")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: version)
    found = capability.probe(CudaMesh())  # type: ignore[arg-type]
    assert found == Hardware("cuda", "some device", version, frozenset(), bf16_products=True)


@pytest.mark.parametrize("setting", ["strict", "emulate"])
def test_auto_goes_with_neither_strict_nor_emulate(setting: str) -> None:
    with pytest.raises(ValueError, match=f'{setting} = true does not go with mode = "auto"'):
        PrecisionConfig(mode="auto", **{setting: True})  # type: ignore[arg-type]
