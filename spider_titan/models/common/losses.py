"""The language-model loss, as sums that stay meaningful when added over micro-batches and ranks.

Letters: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from spider_titan.vocabulary import NUM_BYTES, PAD_ID


def language_model_sums(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Cross entropy in fp32.

    Args:
        logits: [B, L, V].
        targets: int64 [B, L]; PAD is ignored.

    Returns:
        ``lm_nats`` over all valid targets (with gradient) and ``byte_nats`` over those that are bytes, in nats;
        ``num_targets`` and ``num_byte_targets``. Sums for reports are in float64.
    """
    valid = targets != PAD_ID
    is_byte = targets < NUM_BYTES
    nats = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=PAD_ID, reduction="none"
    ).view_as(targets)
    return {
        "lm_nats": nats.sum(),
        "byte_nats": (nats.detach().double() * is_byte).sum(),
        "num_targets": valid.sum().double(),
        "num_byte_targets": is_byte.sum().double(),
    }


def language_model_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """``lm_loss`` in nats a target and ``bpb`` in bits a byte, from summed ``language_model_sums``."""
    targets = max(float(totals["num_targets"]), 1.0)
    byte_targets = max(float(totals["num_byte_targets"]), 1.0)
    return {
        "lm_loss": float(totals["lm_nats"]) / targets,
        "bpb": float(totals["byte_nats"]) / byte_targets / math.log(2),
    }


def as_sums(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached and in float64, fit for ``LossTerms.sums``; what is float64 stays the same memory."""
    return {name: value.detach().to(torch.float64) for name, value in sums.items()}
