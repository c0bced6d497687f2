"""What a run says before its first step: what it is, what the model is made of, what a step costs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from spider_titan.console import count
from spider_titan.curriculum import Curriculum
from spider_titan.data.documents import TrainingSource
from spider_titan.distributed import World
from spider_titan.optim import GroupedAdamW
from spider_titan.plugins.precision import PrecisionConfig

if TYPE_CHECKING:
    from spider_titan.config import JobConfig

logger = logging.getLogger(__name__)

PEAK_BF16_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bf16 peak a device, by a part of its name (vendor data sheets); the first match counts."""
PEAK_FACTOR: dict[str, int] = {"fp8_dynamic": 2, "mxfp8": 2, "nvfp4": 4}
"""Peak of the fastest products of a mode over that of bf16, on the devices that have them (the same data sheets)."""


def log_run(
    config: JobConfig, sources: Mapping[str, TrainingSource], world: World, curriculum: Curriculum, total_steps: int
) -> None:
    """Logs the machine, the data and the length of the run."""
    logger.info(
        "Spider-Titan: model %s, flavor %s, on %d x %s, torch %s, threads a rank: %d",
        config.model.name,
        config.model.flavor,
        world.size,
        _device_name(world.device),
        torch.__version__,
        torch.get_num_threads(),
    )
    logger.info("run directory %s", config.job.dump_folder)
    for source in sources.values():
        logger.info("data: %s", source.describe())
    logger.info(
        "run: %s steps of %s rows x %s bytes = %s bytes a step, %s bytes in all, %s",
        f"{total_steps:,}",
        config.training.rows_per_step(world.size),
        config.training.seq_len,
        f"{curriculum.bytes_per_step:,}",
        f"{total_steps * curriculum.bytes_per_step:,}",
        count(len(curriculum.phases), "phase"),
    )
    if world.is_reporter and config.lr_scheduler.warmup_steps >= total_steps:
        logger.warning(
            "lr_scheduler.warmup_steps = %d: the run of %d steps ends within the warm-up, before the groups that start "
            "after it",
            config.lr_scheduler.warmup_steps,
            total_steps,
        )


def log_model(config: JobConfig, model: nn.Module, optimizer: GroupedAdamW, bytes_per_step: int) -> None:
    """Logs parameters by part and by group, what updates them, and the cost of a byte."""
    spec = config.model_spec
    for part, number in spec.parameter_counts(model).items():
        logger.info("parameters: %-18s %15s", part, f"{number:,}")
    for group in optimizer.groups:
        logger.info(
            "group: %-27s %4d tensors %15s parameters  lr x%g%s%s%s%s",
            group.name,
            len(group.parameters),
            f"{sum(parameter.numel() for parameter in group.parameters.values()):,}",
            group.lr_factor,
            "  decays" if group.weight_decay else "  no decay",
            "  rows move when hit" if group.lazy_rows else "",
            "  starts after warm-up" if group.starts_after_warmup else "",
            f"  own clip {group.max_norm:g}" if group.max_norm is not None else "",
        )
    logger.info("optimizer: %s", optimizer.summary())
    forward = spec.flops_per_byte(config.model_config, config.training.seq_len)
    training = spec.training_flops(config.model_config, config.training.seq_len)
    logger.info(
        "cost: %s FLOPs a byte forward, %s to train; %.2f TFLOPs a step",
        f"{forward:,.0f}",
        f"{training:,.0f}",
        training * bytes_per_step / 1e12,
    )


def describe_phase(curriculum: Curriculum, index: int) -> str:
    """``2/3, until 50%: adaptive boundaries (threshold, at most 0.45); english 80%, code 20%``."""
    phase = curriculum.phases[index]
    total = sum(phase.weights.values())
    shares = ", ".join(f"{name} {weight / total:.0%}" for name, weight in phase.weights.items() if weight)
    return (
        f"{index + 1}/{len(curriculum.phases)}, until {phase.until:.0%}: {phase.boundary} boundaries "
        f"({phase.boundary_mode}, at most {phase.boundary_capacity:g} a byte); {shares}"
    )


def peak_flops(precision: PrecisionConfig, world: World) -> float | None:
    """FLOPs a second that all devices together cannot exceed in a precision; None where that is not known, as in fp32.

    Args:
        precision: With the mode that the devices compute in.
        world: The ranks.
    """
    if world.device.type != "cuda":
        return None
    if precision.mode == "fp32":
        logger.info("mfu: the peaks that are known are of bf16 and below, so the share of them is not shown in fp32")
        return None
    name = torch.cuda.get_device_name(world.device)
    peak = next((flops for part, flops in PEAK_BF16_FLOPS.items() if part in name), None)
    if peak is None:
        logger.info("mfu: the peak of '%s' is not known, so the share of it is not shown", name)
        return None
    factor = 1 if precision.emulate else PEAK_FACTOR.get(precision.mode, 1)
    return peak * factor * world.size


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
