"""Initial weights: a function of the seed and the name alone, on every device and however sharded. And the flavors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from spider_titan.models.common.init import clean_fqn, constant, init_parameters, normal
from spider_titan.models.spider import SpiderConfig
from spider_titan.spec import get_model_spec

from .reference.tiny import byte_transformer_config, packed_rows, spider_config

SPIDER = get_model_spec("spider")
CONFIGS = {"spider": spider_config(), "byte_transformer": byte_transformer_config()}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one.keys() & other.keys() if not torch.equal(one[name], other[name])}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_seed_decides(name: str) -> None:
    spec = get_model_spec(name)
    first, again, other = (state(spec.build(CONFIGS[name], seed=seed)) for seed in (0, 0, 1))
    assert not differing(first, again)
    random = {
        key for key, value in first.items() if value.is_floating_point() and value.numel() > 1 and value.std() > 0
    }
    assert differing(first, other) == random


def test_global_rng_is_neither_read_nor_moved() -> None:
    torch.manual_seed(0)
    first = state(SPIDER.build(CONFIGS["spider"]))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert not differing(first, state(SPIDER.build(CONFIGS["spider"])))
    assert torch.equal(before, torch.get_rng_state())


def test_a_parameter_more_changes_no_other() -> None:
    one = state(SPIDER.build(spider_config(engram_layers=(1,))))
    two = state(SPIDER.build(spider_config(engram_layers=(0, 1))))
    assert one.keys() < two.keys()
    assert not differing(one, two)


def test_no_two_parameters_are_alike() -> None:
    weights = [p for p in SPIDER.build(CONFIGS["spider"]).parameters() if p.ndim == 2 and p.std() > 0]
    corners = {round(float(weight[0, 0].detach()), 9) for weight in weights}
    assert len(corners) == len(weights) > 20


@pytest.mark.parametrize("name", CONFIGS)
def test_every_value_is_set_after_materialising(name: str) -> None:
    """Buffers too: memory that meta construction leaves is garbage."""
    spec = get_model_spec(name)
    model = spec.build(CONFIGS[name], device="meta")
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(113)
    spec.init_weights(model, 7)
    assert not differing(state(model), state(spec.build(CONFIGS[name], seed=7)))


@pytest.fixture
def become_rank() -> Iterator[Any]:
    """Makes this process one rank of a world whose collectives do nothing."""

    def become(rank: int, world_size: int) -> DeviceMesh:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        return init_device_mesh("cpu", (world_size,))

    yield become
    dist.destroy_process_group()


# One rank a world size: torch caches shard sizes by mesh, and in a real process a mesh's rank never changes.
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (2, 3), (1, 5), (60, 64)])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_shard_is_a_slice_of_the_same_weights(name: str, rank: int, world_size: int, become_rank: Any) -> None:
    spec = get_model_spec(name)
    whole = state(spec.build(CONFIGS[name], seed=3))
    mesh = become_rank(rank, world_size)
    model = spec.build(CONFIGS[name], device="meta")
    for block in spec.blocks(model):
        fully_shard(model.get_submodule(block.fqn), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    spec.init_weights(model, 3)
    for key, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        parts = whole[key].chunk(world_size)
        expected = parts[rank] if rank < len(parts) else whole[key][:0]
        assert torch.equal(parameter.to_local(), expected), key
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, whole[key]), key


def stds(config: SpiderConfig) -> dict[str, float]:
    return {name: float(p.detach().std()) for name, p in SPIDER.build(config).named_parameters() if p.numel() > 1}


def test_sizes_of_initial_weights() -> None:
    config = spider_config(hidden_size=96, num_loops=4)
    found = stds(config)
    output = 0.02 / math.sqrt(2 * (1 + 4 * 2 + 1))
    for name in ("prelude.0.attention.o_proj", "prelude.0.mlp.down_proj", "core.layers.1.moe.down_proj"):
        assert found[f"{name}.weight"] == pytest.approx(output, rel=0.1)
    for name in ("embed_tokens", "lm_head", "core.layers.0.attention.q_up", "boundary_predictor.hidden"):
        assert found[f"{name}.weight"] == pytest.approx(0.02, rel=0.1)
    for name in ("core.layers.0.moe.W_gate", "core.layers.0.moe.W_transform"):
        assert found[name] == pytest.approx(0.02, rel=0.1)
    assert found["engram.layers.1.embed.weight"] <= 0.011


def test_what_starts_at_zero_and_at_one() -> None:
    model = SPIDER.build(CONFIGS["spider"])
    for name in ("out_proj.weight", "core.adapter.up_proj.weight", "core.engram_gates.0.conv.weight"):
        assert not model.get_parameter(name).any()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()


def test_a_fresh_model_is_prelude_and_coda() -> None:
    """Whatever the core holds, nothing of it reaches the logits yet."""
    model, ids = SPIDER.build(CONFIGS["spider"]), packed_rows()
    before = model(ids).logits
    with torch.no_grad():
        for parameter in [*model.core.parameters(), *model.engram.parameters(), model.null_slot]:
            parameter.add_(1.0)
    assert torch.equal(model(ids).logits, before)


def test_a_fresh_predictor_has_the_target_rate_and_all_loops_weigh_the_same() -> None:
    config = spider_config(num_loops=4)
    out = SPIDER.build(config)(packed_rows())
    free = out.selection.free
    assert float(out.selection.probs[free].detach().mean()) == pytest.approx(1 / 3.3, abs=0.01)
    # (1 + 2 + 3 + 4) / 4 loops
    torch.testing.assert_close(out.ponder, torch.full_like(out.ponder, 2.5))


def test_an_unmatched_parameter_is_named() -> None:
    with pytest.raises(ValueError, match="'bias'"):
        init_parameters(nn.Linear(2, 2), [("weight", normal(1.0))], 0)


def test_the_first_rule_that_matches_wins() -> None:
    layer = nn.Linear(2, 2)
    init_parameters(layer, [("bias", constant(3.0)), ("*", constant(5.0))], 0)
    assert (layer.bias == 3).all() and (layer.weight == 5).all()


def test_wrappers_do_not_change_names() -> None:
    assert clean_fqn("core._orig_mod.layers.0._checkpoint_wrapped_module.moe.W_gate") == "core.layers.0.moe.W_gate"


def test_the_table_of_flavors() -> None:
    columns = {
        "debug": (128, 4, 2, 8, 2, 256, 16, (64, 32, 32, 16, 32), 2, 4096, 16, 256, 8, 512, 4096),
        "100m": (768, 12, 4, 32, 2, 1536, 64, (384, 192, 64, 32, 64), 4, 32768, 32, 4096, 8, 8192, 65536),
        "10b": (2048, 16, 6, 32, 2, 6144, 256, (768, 512, 128, 64, 128), 4, 131072, 64, 8192, 8, 32768, 262144),
    }
    assert SPIDER.flavors.keys() == columns.keys()
    for name, c in SPIDER.flavors.items():
        latent = (c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
        assert (c.num_prelude_layers, c.num_recurrent_layers, c.num_coda_layers) == (2, 6, 2)
        assert (c.engram_layers, c.engram_orders) == ((1, 4), (3, 5, 8))
        assert columns[name] == (
            *(c.hidden_size, c.num_heads, c.num_loops, c.num_experts, c.experts_per_token),
            *(c.intermediate_size, c.expert_rank, latent, c.engram_heads, c.engram_slots, c.engram_head_dim),
            *(c.attention_window, c.rope_factor, c.rope_original_length, c.context_length),
        )


def attention_count(c: SpiderConfig) -> int:
    qk = c.qk_nope_head_dim + c.qk_rope_head_dim
    queries = c.hidden_size * c.q_lora_rank + c.q_lora_rank + c.q_lora_rank * c.num_heads * qk
    keys = c.hidden_size * (c.kv_lora_rank + c.qk_rope_head_dim) + c.kv_lora_rank
    values = c.kv_lora_rank * c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
    return queries + keys + values + c.num_heads * c.v_head_dim * c.hidden_size


def count(c: SpiderConfig, table_rows: int) -> int:
    """Parameters by MODEL's equations."""
    d, m, e, r = c.hidden_size, c.intermediate_size, c.num_experts, c.expert_rank
    dense = 4 * (2 * d + attention_count(c) + 3 * d * m)
    recurrent = 6 * (2 * d + attention_count(c) + e * d + 2 * d * m + e * r * (d + m))
    loops = 2 * d * c.lora_rank + c.num_loops * (d + c.lora_rank)
    injection = 1 + 2 * d
    halting = d + 1
    gates = 2 * (2 * d + 4 * d)
    memory_dim = 3 * c.engram_heads * c.engram_head_dim
    engram = table_rows * c.engram_head_dim + 2 * (2 * memory_dim * d + d)
    predictor = d + (d * d + d) + (d + 1)
    ends = 2 * 272 * d + d
    null_norms_and_out = d + 2 * d + d * d
    core = recurrent + loops + injection + halting + gates + d
    return dense + core + engram + predictor + ends + null_norms_and_out


@pytest.mark.parametrize(("flavor", "total"), [("debug", 2_576_019), ("100m", 103_020_099), ("10b", 1_037_275_267)])
def test_flavors_build_without_storage_and_have_the_parameters_they_should(flavor: str, total: int) -> None:
    config = SPIDER.flavors[flavor]
    model = SPIDER.build(config, device="meta")
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    table_rows = sum(table.embed.num_embeddings for table in model.engram.layers.values())
    tables = 2 * 3 * config.engram_heads
    assert tables * config.engram_slots < table_rows < tables * config.engram_slots * 1.2
    counts = SPIDER.parameter_counts(model)
    assert counts["total"] == sum(p.numel() for p in model.parameters()) == count(config, table_rows) == total


def test_counts_by_part_add_up_and_active_ones_leave_out_what_a_byte_does_not_use() -> None:
    config = spider_config()
    counts = dict(SPIDER.parameter_counts(SPIDER.build(config)))
    total, active = counts.pop("total"), counts.pop("active per byte")
    assert sum(counts.values()) == total
    model = SPIDER.build(config)
    rows = sum(table.embed.num_embeddings for table in model.engram.layers.values())
    unused_experts = 2 * 2 * config.expert_rank * (config.hidden_size + config.intermediate_size)
    unused_rows = (rows - 2 * 2 * 2) * config.engram_head_dim
    assert total - active == unused_experts + unused_rows + 271 * config.hidden_size


def test_counts_of_the_byte_transformer() -> None:
    spec = get_model_spec("byte_transformer")
    model = spec.build(CONFIGS["byte_transformer"])
    counts = dict(spec.parameter_counts(model))
    total, active = counts.pop("total"), counts.pop("active per byte")
    assert sum(counts.values()) == total == sum(p.numel() for p in model.parameters())
    assert total - active == 271 * 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim = 5"),
        ({"experts_per_token": 5}, "experts_per_token = 5"),
        ({"engram_layers": (0, 2)}, "layer 2"),
        ({"engram_orders": ()}, "engram_orders"),
        ({"bytes_per_segment": 1.0}, "bytes_per_segment"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spider_config(**changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_longer_than_the_context_are_refused(name: str) -> None:
    model = get_model_spec(name).build(CONFIGS[name])
    model(torch.full((1, 512), 97))
    with pytest.raises(ValueError, match=r"513 bytes.*context of 512"):
        model(torch.full((1, 513), 97))
