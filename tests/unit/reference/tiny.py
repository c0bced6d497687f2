"""Tiny models with weights far from their initial values, and rows for them to read.

Much of a fresh model is silent: projections, adapters, convolutions and halting weights start at zero. A test of what
reaches what needs every path to carry something, so here every parameter is random and of the size of 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spider_titan.models.byte_transformer.model import ByteTransformerConfig
from spider_titan.models.spider import SpiderConfig
from spider_titan.models.spider.model import Spider
from spider_titan.spec import get_model_spec
from spider_titan.vocabulary import BOS_ID, EOS_ID, PAD_ID

ATTENTION_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "attention_window": 16,
    "rope_original_length": 16,
    "rope_factor": 32.0,
}
SPIDER_SIZES: dict[str, Any] = {
    **ATTENTION_SIZES,
    "num_prelude_layers": 1,
    "num_recurrent_layers": 2,
    "num_coda_layers": 1,
    "num_loops": 3,
    "num_experts": 4,
    "expert_rank": 8,
    "engram_layers": (0, 1),
    "engram_orders": (2, 5),
    "engram_slots": 64,
    "engram_head_dim": 4,
    "lora_rank": 4,
}
SPIDER_TOML = """
[model]
name = "spider"
hidden_size = 32
num_heads = 2
num_prelude_layers = 1
num_coda_layers = 1
num_recurrent_layers = 2
engram_layers = [1]
num_experts = 4
intermediate_size = 32
expert_rank = 8
q_lora_rank = 16
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
engram_slots = 64
engram_head_dim = 4
"""
"""A Spider for whole runs, as the ``[model]`` of a file; what follows it goes on in that section."""
BYTE_TRANSFORMER_TOML = """
[model]
name = "byte_transformer"
hidden_size = 32
num_heads = 2
num_layers = 2
intermediate_size = 32
q_lora_rank = 16
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
"""
"""The baseline of the same sizes."""


def spider_config(**changes: Any) -> SpiderConfig:
    """A Spider of width 32 whose window is shorter than the rows of the tests."""
    return SpiderConfig(**{**SPIDER_SIZES, **changes})


def byte_transformer_config(**changes: Any) -> ByteTransformerConfig:
    """The baseline with the same attention."""
    return ByteTransformerConfig(**{**ATTENTION_SIZES, "num_layers": 2, **changes})


def lively_model(config: SpiderConfig | ByteTransformerConfig, seed: int = 0) -> nn.Module:
    """The config's model with all parameters random, in evaluation mode."""
    name = "spider" if isinstance(config, SpiderConfig) else "byte_transformer"
    model = get_model_spec(name).build(config, seed=seed)
    enliven(model, seed)
    return model.eval()


def lively_spider(seed: int = 0, **changes: Any) -> Spider:
    """``lively_model`` of ``spider_config``."""
    model = lively_model(spider_config(**changes), seed)
    assert isinstance(model, Spider)
    return model


@torch.no_grad()
def enliven(model: nn.Module, seed: int = 0) -> None:
    """Gives every parameter random values at which all paths matter; half of the boundary logits are positive."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.copy_(1.0 + 0.2 * noise)
        elif "embed" in name or parameter.ndim < 2:
            parameter.copy_(noise)
        else:
            # Linear weights are [out, in], expert cores [E, in, out], convolutions [D, 1, taps].
            fan_in = parameter.shape[-2] if "W_" in name else parameter.shape[-1]
            parameter.copy_(noise / math.sqrt(fan_in))
        if name == "boundary_predictor.output.weight":
            parameter.mul_(8.0)
    if isinstance(model, Spider):
        ids = packed_rows()
        logits = model(ids).raw_boundary_logits[ids < PAD_ID]
        model.boundary_predictor.output.bias.sub_(logits.median())


def document(length: int, seed: int, *, begins: bool = True, ends: bool = True) -> list[int]:
    """Ids of a document of ``length`` random letters, with its BOS and EOS unless it is cut."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(97, 123, (length,), generator=generator).tolist()
    return [BOS_ID] * begins + letters + [EOS_ID] * ends


def row(*documents: Sequence[int], length: int | None = None) -> list[int]:
    """Documents one after another, cut at ``length`` or filled with PAD to it."""
    ids = [id_ for ids in documents for id_ in ids]
    return ids if length is None else (ids + [PAD_ID] * length)[:length]


def packed_rows(length: int = 64) -> Tensor:
    """Four rows: packed with a PAD tail; one long document; begun within a document, tiny ones after; bytes only."""
    tiny = [document(size, 40 + size) for size in (0, 1, 2, 0, 3, 1, 5, 2, 4, 8, 1, 6)]
    return torch.tensor(
        [
            row(document(9, 1), document(21, 2), document(14, 3), length=length),
            row(document(100, 4), length=length),
            row(document(7, 5, begins=False), *tiny, document(30, 6), length=length),
            row(document(100, 7, begins=False), length=length),
        ]
    )


def next_ids(ids: Tensor) -> Tensor:
    """Targets of rows: the id that follows each, PAD at the end and after PAD."""
    last = torch.full_like(ids[:, :1], PAD_ID)
    return torch.cat((ids[:, 1:], last), dim=1).masked_fill(ids == PAD_ID, PAD_ID)
