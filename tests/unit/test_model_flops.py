"""FLOP formulas against counted FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from spider_titan.models.byte_transformer.model import ByteTransformerConfig
from spider_titan.models.spider import SpiderConfig
from spider_titan.models.spider.flops import flops_per_byte, flops_per_slot
from spider_titan.models.spider.moe import dispatch
from spider_titan.spec import get_model_spec

from .reference.tiny import byte_transformer_config, spider_config


def attention_flops(q: list[int], k: list[int], v: list[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    batch, heads, queries, dim = q
    return 2 * batch * heads * queries * k[2] * (dim + v[3])


def grouped_flops(x: list[int], weight: list[int], *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * x[0] * weight[1] * weight[2]


def attention_backward_flops(
    grad: list[int], q: list[int], k: list[int], v: list[int], *args: Any, **kwargs: Any
) -> int:
    """Without the scores, which the kernel computes once more."""
    return 2 * attention_flops(q, k, v)


# The counter knows none; without these it would count 0 for them.
KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    torch.ops.aten._grouped_mm: grouped_flops,
}


def counted(model: nn.Module, ids: torch.Tensor, **options: Any) -> int:
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        model(ids, **options)
    names = {str(name) for name in counter.get_flop_counts()["Global"]}
    assert "aten._scaled_dot_product_flash_attention_for_cpu" in names
    return counter.get_total_flops()


# Values as wide as keys: the CPU kernel pads narrower ones, which would be counted.
WIDE_VALUES = {"v_head_dim": 12, "attention_window": 256}


@pytest.mark.parametrize("length", [7, 64, 200])
def test_byte_transformer(length: int) -> None:
    config = byte_transformer_config(**WIDE_VALUES)
    spec = get_model_spec("byte_transformer")
    flops = counted(spec.build(config), torch.full((2, length), 97))
    assert flops == round(spec.flops_per_byte(config, length) * 2 * length)


@pytest.mark.parametrize("changes", [{}, {"experts_per_token": 3}, {"num_loops": 1, "engram_layers": ()}], ids=str)
@pytest.mark.parametrize(("length", "rate"), [(7, 1.0), (64, 0.45), (200, 0.34)])
def test_spider(length: int, rate: float, changes: dict[str, Any]) -> None:
    config = spider_config(**WIDE_VALUES, **changes)
    model = get_model_spec("spider").build(config)
    ids = torch.full((2, length), 97)
    flops = counted(model, ids, max_boundary_rate=rate)
    slots = model(ids, max_boundary_rate=rate).filled.shape[1]
    expected = flops_per_byte(config, length, slots_per_byte=slots / length) * 2 * length
    assert flops - padding_of_groups(config, 2 * slots) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("loops", "backprop_loops"), [(3, 0), (3, 2), (5, 2), (1, 2)])
def test_a_backward_is_two_forwards_of_the_loops_it_goes_through(loops: int, backprop_loops: int) -> None:
    spec, config = get_model_spec("spider"), spider_config(backprop_loops=backprop_loops)
    through = min(loops, backprop_loops or loops)
    expected = flops_per_byte(spider_config(num_loops=loops), 64) + 2 * flops_per_byte(
        spider_config(num_loops=through), 64
    )
    assert spec.training_flops(config, 64, loops) == pytest.approx(expected)
    assert spec.training_flops(config, 64) == spec.training_flops(config, 64, 3)


@pytest.mark.parametrize("backprop_loops", [0, 1, 2])
def test_counted_flops_of_a_training_step(backprop_loops: int) -> None:
    length, slots = 64, 32
    spec = get_model_spec("spider")
    config = spider_config(
        **WIDE_VALUES, experts_per_token=4, bytes_per_segment=length / slots, backprop_loops=backprop_loops
    )
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        out = spec.build(config)(torch.full((2, length), 97), max_boundary_rate=(slots - 1) / length)
        out.logits.float().sum().backward()
    assert out.filled.shape[1] == slots
    through = backprop_loops or config.num_loops
    padding = padding_of_groups(config, 2 * slots) * (config.num_loops + 2 * through) / config.num_loops
    expected = spec.training_flops(config, length) * 2 * length
    assert counter.get_total_flops() - padding == pytest.approx(expected, rel=1e-12)


def test_a_byte_transformer_trains_at_three_forwards() -> None:
    spec, config = get_model_spec("byte_transformer"), byte_transformer_config()
    assert spec.training_flops(config, 64) == 3 * spec.flops_per_byte(config, 64)


def padding_of_groups(config: SpiderConfig, num_tokens: int) -> int:
    """Rows that fill the experts' groups up: work that the formula leaves out, as it depends on the kernel."""
    assignments = num_tokens * config.experts_per_token
    rows = dispatch(torch.zeros(assignments, dtype=torch.int64), config.num_experts)[2]
    per_row = 2 * config.expert_rank * (config.hidden_size + config.intermediate_size)
    return (rows - assignments) * per_row * config.num_loops * config.num_recurrent_layers


@pytest.mark.parametrize("flavor", ["debug", "100m", "10b"])
def test_slots_default_to_the_target_rate(flavor: str) -> None:
    spec = get_model_spec("spider")
    config = spec.flavors[flavor]
    assert spec.flops_per_byte(config, 4096) == flops_per_byte(config, 4096, slots_per_byte=1 / 3.3)


def test_attention_counts_no_more_than_the_window() -> None:
    """Beyond the window a longer row costs the same a byte; below it, more."""
    transformer = get_model_spec("byte_transformer")
    config = ByteTransformerConfig(attention_window=256)
    costs = [transformer.flops_per_byte(config, length) for length in (128, 256, 512, 4096)]
    assert costs[0] < costs[1] == costs[2] == costs[3]
    assert flops_per_slot(spider_config(), context=10) < flops_per_slot(spider_config(), context=11)


def test_work_grows_with_loops_and_chosen_experts_only() -> None:
    base = flops_per_byte(spider_config(), 64)
    assert flops_per_byte(spider_config(num_experts=8), 64) - base == pytest.approx(3 * 2 * 2 * 32 * 4 / 3.3)
    assert flops_per_byte(spider_config(num_loops=6), 64) > base
    assert flops_per_byte(spider_config(engram_slots=4096), 64) == base
