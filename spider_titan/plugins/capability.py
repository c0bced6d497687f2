"""Which precision a device can compute in: one set of rules, apart from the questions to the device.

A mode that is named but cannot run falls back along nvfp4 -> mxfp8 -> fp8_dynamic -> bf16; ``auto`` walks the same way
from the top and ends at fp32 where bf16 has no instructions of its own.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spider_titan.plugins.precision import Mode, PrecisionConfig
from spider_titan.quiet import torchao_import

logger = logging.getLogger(__name__)

LADDER: tuple[Mode, ...] = ("nvfp4", "mxfp8", "fp8_dynamic", "bf16", "fp32")
"""Best first."""
MIN_CAPABILITY: dict[Mode, tuple[int, int]] = {"nvfp4": (10, 0), "mxfp8": (10, 0), "fp8_dynamic": (8, 9)}
"""CUDA compute capability of the first devices with such products."""
BF16_CAPABILITY = (8, 0)
FEATURES: dict[Mode, tuple[str, ...]] = {"nvfp4": ("triton",), "mxfp8": ("triton", "mxfp8 kernels")}
"""What the software must have beside the device."""


@dataclass(frozen=True)
class Hardware:
    """What the rules ask of a device and its software.

    Args:
        device_type: ``cuda`` or ``cpu``.
        name: As the vendor calls it.
        capability: CUDA compute capability; None on a CPU.
        features: Of ``FEATURES``, those that are there.
        bf16_products: Whether bf16 has instructions of its own.
        imagined: A dry run's, of which nothing is known.
    """

    device_type: str
    name: str
    capability: tuple[int, int] | None = None
    features: frozenset[str] = frozenset()
    bf16_products: bool = False
    imagined: bool = False


@dataclass(frozen=True)
class Choice:
    """The mode to compute in, and the better ones that cannot run, each with the reason."""

    mode: Mode
    obstacles: tuple[tuple[Mode, str], ...]


def obstacle(mode: Mode, hardware: Hardware, *, emulate: bool) -> str:
    """Why a mode cannot run; empty if it can."""
    if mode not in MIN_CAPABILITY or hardware.imagined:
        return ""
    if emulate:
        return "torchao cannot emulate it" if mode == "nvfp4" else ""
    needed = ".".join(map(str, MIN_CAPABILITY[mode]))
    if hardware.capability is None:
        return f"it needs a CUDA device of compute capability {needed} or more, and this run is on the CPU"
    if hardware.capability < MIN_CAPABILITY[mode]:
        found = ".".join(map(str, hardware.capability))
        return f"it needs compute capability {needed} or more, and {hardware.name} has {found}"
    missing = [feature for feature in FEATURES.get(mode, ()) if feature not in hardware.features]
    return f"torchao misses {' and '.join(missing)} for it" if missing else ""


def choose(config: PrecisionConfig, hardware: Hardware) -> Choice:
    """The mode that ``config`` comes to on ``hardware``.

    Raises:
        ValueError: If it names one that cannot run and is ``strict``.
    """
    if config.mode == "auto":
        return _choose_best(hardware)
    obstacles: list[tuple[Mode, str]] = []
    for mode in LADDER[LADDER.index(config.mode) :]:
        reason = obstacle(mode, hardware, emulate=config.emulate)
        if not reason:
            break
        obstacles.append((mode, reason))
    if obstacles and config.strict:
        raise ValueError(
            f'precision.mode = "{config.mode}" cannot run: {obstacles[0][1]}; set precision.strict = false to take '
            f'"{mode}" instead, or name a mode that can'
        )
    return Choice(mode, tuple(obstacles))


def _choose_best(hardware: Hardware) -> Choice:
    if hardware.imagined:
        unknown = "the devices of a dry run are not known"
        return Choice("bf16", tuple((mode, unknown) for mode in LADDER[: LADDER.index("bf16")]))
    obstacles: list[tuple[Mode, str]] = []
    for mode in LADDER:
        reason = obstacle(mode, hardware, emulate=False)
        if mode == "bf16" and not hardware.bf16_products:
            reason = f"{hardware.name} has no bf16 products"
        if not reason:
            break
        obstacles.append((mode, reason))
    return Choice(mode, tuple(obstacles))


def resolve(config: PrecisionConfig, mesh: DeviceMesh) -> PrecisionConfig:
    """``config`` with the mode that the devices of all ranks can run; says which and why.

    Raises:
        ValueError: On all ranks, if it names one that any device cannot run and is ``strict``.
    """
    if config.mode in ("fp32", "bf16"):
        return config
    weakest, choice = min(
        ((hardware, choose(config, hardware)) for hardware in _all_hardware(mesh)),
        key=lambda pair: -LADDER.index(pair[1].mode),
    )
    if dist.get_rank() == 0:
        _report(config, weakest, choice)
    return dataclasses.replace(config, mode=choice.mode)


def _report(config: PrecisionConfig, hardware: Hardware, choice: Choice) -> None:
    if config.mode == "auto":
        logger.info("precision: auto takes %s on %s", choice.mode, hardware.name)
        for mode, reason in choice.obstacles:
            logger.info("precision: not %s: %s", mode, reason)
    elif choice.obstacles:
        reasons = "; ".join(f"{mode}: {reason}" for mode, reason in choice.obstacles)
        logger.warning(
            'precision: mode = "%s" cannot run, so this run computes in %s. %s', config.mode, choice.mode, reasons
        )


def _all_hardware(mesh: DeviceMesh) -> list[Hardware]:
    """That of every rank: they must compute alike."""
    own = probe(mesh)
    if own.imagined or dist.get_world_size() == 1:
        return [own]
    found: list[Hardware] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def probe(mesh: DeviceMesh) -> Hardware:
    """Asks the device of a mesh, and the installed software."""
    if dist.get_backend(mesh.get_group(0)) == "fake":
        return Hardware(mesh.device_type, "imagined ranks", imagined=True)
    if mesh.device_type == "cuda":
        capability = torch.cuda.get_device_capability()
        return Hardware(
            "cuda",
            torch.cuda.get_device_name(),
            capability,
            features=_features() if capability >= MIN_CAPABILITY["mxfp8"] else frozenset(),
            bf16_products=capability >= BF16_CAPABILITY,
        )
    found = torch.cpu.get_capabilities()
    has_bf16 = any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return Hardware("cpu", f"the CPU ({found.get('cpu_name', found['architecture'])})", bf16_products=has_bf16)


def _features() -> frozenset[str]:
    with torchao_import():
        from torch.utils._triton import has_triton
        from torchao.prototype.mx_formats import kernels
    has_kernels = (
        kernels._triton_kernels_available
        and kernels._mxfp8_cuda_kernels_available
        # The operator is declared wherever the device would do; its kernel is in a library of torchao's own.
        and torch._C._dispatch_has_kernel_for_dispatch_key("torchao::mxfp8_quantize", "CUDA")
    )
    found = {"triton": has_triton(), "mxfp8 kernels": has_kernels}
    return frozenset(name for name, is_there in found.items() if is_there)
