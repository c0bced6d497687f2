"""Spider's model spec: what the trainer and the plugins know of it."""

from __future__ import annotations

import math
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from spider_titan.models.common.init import clean_fqn, constant, init_parameters, logit, normal
from spider_titan.models.spider.boundary import BoundaryPredictor
from spider_titan.models.spider.config import FLAVORS, SpiderConfig
from spider_titan.models.spider.engram import EngramTable
from spider_titan.models.spider.flops import flops_per_byte, training_flops_per_byte
from spider_titan.models.spider.loops import draw_loops, max_loops
from spider_titan.models.spider.losses import PREDICTOR_GROUP, spider_after_step, spider_loss, spider_metrics
from spider_titan.models.spider.model import Spider
from spider_titan.spec import Block, ModelSpec, ParamGroup, register_model_spec
from spider_titan.vocabulary import VOCAB_SIZE

__all__ = ["SPEC", "Spider", "SpiderConfig"]


@torch.no_grad()
def init_weights(model: Spider, seed: int) -> None:
    """Fills parameters and buffers; see MODEL in docs for the rules."""
    config = model.config
    base = normal(config.init_std)
    output = normal(config.init_std / math.sqrt(2 * config.applied_depth))
    rules = (
        ("*norm.weight", constant(1.0)),
        ("out_proj.weight", constant(0.0)),
        ("core.adapter.up_proj.weight", constant(0.0)),
        ("core.adapter.scale.weight", constant(1.0)),
        ("core.adapter.down_proj.weight", base),
        ("core.injection.log_*", constant(0.0)),
        ("core.injection.Bv", constant(1.0)),
        # Equal weights for all loops at first: the last gets what the others leave.
        ("core.halt_predictor.bias", constant(logit(1.0 / config.num_loops) if config.num_loops > 1 else 0.0)),
        ("core.halt_predictor.weight", constant(0.0)),
        ("core.engram_gates.*.conv.weight", constant(0.0)),
        ("boundary_predictor.output.bias", constant(logit(config.boundary_rate))),
        ("*.bias", constant(0.0)),
        ("*.o_proj.weight", output),
        ("*.down_proj.weight", output),
        ("engram.*.embed.weight", normal(config.init_std / 2)),
        ("*", base),
    )
    init_parameters(model, rules, seed)
    for module in model.modules():
        if isinstance(module, BoundaryPredictor | EngramTable):
            module.init_buffers()
    for router in model.core.routers():
        router.balance_bias.zero_()


def blocks(model: Spider) -> list[Block]:
    """Prelude and coda blocks run once; the core is one unit that loops inside; two units keep out of float8.

    So do halting, which computes in fp32, and the adapter, whose two thin products float8 would only slow down.
    """
    config = model.config
    core_parts = (
        *(f"core.layers.{index}" for index in range(config.num_recurrent_layers)),
        *(f"core.engram_gates.{layer}" for layer in config.engram_layers),
    )
    return [
        *(Block(f"prelude.{index}") for index in range(config.num_prelude_layers)),
        Block("boundary_predictor", compute_dtype="float32", float8=False),
        Block("engram", float8=False),
        Block("core", kind="looped", parts=core_parts, high_precision=("core.halt_predictor", "core.adapter.*")),
        *(Block(f"coda.{index}") for index in range(config.num_coda_layers)),
    ]


PREDICTOR_VECTOR_GROUP = f"{PREDICTOR_GROUP}_no_decay"


def group_of(name: str, parameter: nn.Parameter) -> str:
    """The parameter group of a parameter, by its name; norms, biases and vectors do not decay."""
    if "engram" in name and "embed" in name and "proj" not in name:
        return "engram_tables"
    if name.startswith("boundary_predictor."):
        return PREDICTOR_GROUP if parameter.ndim > 1 else PREDICTOR_VECTOR_GROUP
    if name.endswith(("W_gate", "W_transform")):
        return "expert_cores"
    vectors = ("core.loop_embedding.*", "core.adapter.scale.*", "core.halt_predictor.*", "*.conv.weight")
    if parameter.ndim < 2 or any(fnmatchcase(name, pattern) for pattern in vectors):
        return "backbone_no_decay"
    return "backbone"


def param_groups(model: Spider) -> list[ParamGroup]:
    """Every parameter in exactly one group; see ``group_of``."""
    config = model.config
    predictor = ParamGroup(PREDICTOR_GROUP, {}, lr_factor=config.boundary_lr_factor, starts_after_warmup=True)
    groups = [
        ParamGroup("backbone", {}),
        ParamGroup("backbone_no_decay", {}, weight_decay=False),
        ParamGroup("engram_tables", {}, lr_factor=config.engram_lr_factor, weight_decay=False, lazy_rows=True),
        predictor,
        replace(predictor, name=PREDICTOR_VECTOR_GROUP, parameters={}, weight_decay=False),
        ParamGroup("expert_cores", {}, max_norm=config.expert_max_norm),
    ]
    by_name = {group.name: group for group in groups}
    for wrapped_name, parameter in model.named_parameters():
        name = clean_fqn(wrapped_name)
        by_name[group_of(name, parameter)].parameters[name] = parameter
    return [group for group in groups if group.parameters]


def part_of(name: str) -> str:
    """The part of the model that a parameter is counted in, for reports."""
    first = name.split(".")[0]
    if name.endswith(("W_gate", "W_transform")):
        return "core, expert cores"
    if first == "engram":
        return "engram tables" if "embed" in name else "engram projections"
    if first in ("embed_tokens", "norm", "lm_head"):
        return "embedding and head"
    if first in ("null_slot", "pool_norm", "unpool_norm", "out_proj"):
        return "pool and unpool"
    return {"boundary_predictor": "boundary predictor", "core": "core, shared"}.get(first, first)


def parameter_counts(model: Spider) -> dict[str, int]:
    """Parameters by part, in all, and those that one byte's forward uses: its embedding, experts and table rows."""
    config = model.config
    parts: dict[str, int] = {}
    for wrapped_name, parameter in model.named_parameters():
        part = part_of(clean_fqn(wrapped_name))
        parts[part] = parts.get(part, 0) + parameter.numel()
    total = sum(parts.values())
    idle_experts = parts["core, expert cores"] * (config.num_experts - config.experts_per_token) // config.num_experts
    table_rows = len(config.engram_layers) * len(config.engram_orders) * config.engram_heads
    idle_rows = parts.get("engram tables", 0) - table_rows * config.engram_head_dim
    idle_embeddings = (VOCAB_SIZE - 1) * config.hidden_size
    return {**parts, "total": total, "active per byte": total - idle_experts - idle_rows - idle_embeddings}


SPEC = ModelSpec(
    name="spider",
    config_class=SpiderConfig,
    flavors=FLAVORS,
    construct=Spider,
    init_weights=init_weights,
    blocks=blocks,
    param_groups=param_groups,
    loss=spider_loss,
    metrics=spider_metrics,
    flops_per_byte=flops_per_byte,
    parameter_counts=parameter_counts,
    after_step=spider_after_step,
    draw_loops=draw_loops,
    max_loops=max_loops,
    training_flops_per_byte=training_flops_per_byte,
)
register_model_spec(SPEC)
