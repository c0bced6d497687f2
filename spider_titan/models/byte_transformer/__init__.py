"""The dense byte transformer's spec: the baseline, and the shortest example of a model of one's own."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from spider_titan.models.byte_transformer.model import ByteTransformer, ByteTransformerConfig
from spider_titan.models.common.flops import dense_block_flops
from spider_titan.models.common.init import clean_fqn, constant, init_parameters, normal
from spider_titan.models.common.losses import as_sums, language_model_metrics, language_model_sums
from spider_titan.spec import Batch, Block, LossTerms, ModelSpec, ParamGroup, StepContext, register_model_spec
from spider_titan.vocabulary import VOCAB_SIZE

FLAVORS = {
    "debug": ByteTransformerConfig(),
    # As many of Spider's blocks of that flavor as cost what it costs.
    "10b": ByteTransformerConfig(
        hidden_size=2048,
        num_heads=16,
        num_layers=12,
        intermediate_size=6144,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        attention_window=8192,
        rope_original_length=32768,
    ),
}


def init_weights(model: ByteTransformer, seed: int) -> None:
    """Norms 1, output projections scaled by depth, everything else normal."""
    config = model.config
    output = normal(config.init_std / math.sqrt(2 * config.num_layers))
    rules = (
        ("*norm.weight", constant(1.0)),
        ("*.o_proj.weight", output),
        ("*.down_proj.weight", output),
        ("*", normal(config.init_std)),
    )
    init_parameters(model, rules, seed)


def blocks(model: ByteTransformer) -> list[Block]:
    """Every layer is a unit."""
    return [Block(f"layers.{index}") for index in range(model.config.num_layers)]


def param_groups(model: ByteTransformer) -> list[ParamGroup]:
    """Matrices decay, norms do not."""
    decay, no_decay = ParamGroup("backbone", {}), ParamGroup("backbone_no_decay", {}, weight_decay=False)
    for name, parameter in model.named_parameters():
        (decay if parameter.ndim > 1 else no_decay).parameters[clean_fqn(name)] = parameter
    return [decay, no_decay]


def loss(model: ByteTransformer, batch: Batch, context: StepContext) -> LossTerms:
    """Cross entropy."""
    sums = language_model_sums(model(batch.input_ids), batch.targets)
    return LossTerms(total=sums["lm_nats"] / context.num_targets, sums=as_sums(sums))


def metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """``loss`` is the language-model loss."""
    values = language_model_metrics(totals)
    return {"loss": values["lm_loss"], **values}


def flops_per_byte(config: ByteTransformerConfig, seq_len: int) -> float:
    """Forward FLOPs a byte."""
    block = dense_block_flops(config.attention, config.intermediate_size, context=min(config.attention_window, seq_len))
    return config.num_layers * block + 2 * config.hidden_size * VOCAB_SIZE


def parameter_counts(model: ByteTransformer) -> dict[str, int]:
    """Parameters by part, in all, and those a byte's forward uses."""
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = clean_fqn(name).split(".")[0]
        parts[part] = parts.get(part, 0) + parameter.numel()
    total = sum(parts.values())
    unused_rows = (VOCAB_SIZE - 1) * model.config.hidden_size
    return {**parts, "total": total, "active per byte": total - unused_rows}


def after_step(model: ByteTransformer, totals: Mapping[str, Tensor], context: StepContext) -> None:
    """The model has nothing that moves by rule."""


SPEC = ModelSpec(
    name="byte_transformer",
    config_class=ByteTransformerConfig,
    flavors=FLAVORS,
    construct=ByteTransformer,
    init_weights=init_weights,
    blocks=blocks,
    param_groups=param_groups,
    loss=loss,
    metrics=metrics,
    flops_per_byte=flops_per_byte,
    parameter_counts=parameter_counts,
    after_step=after_step,
)
register_model_spec(SPEC)
