"""Groups, clipping, freezing and saved state against plain computation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spider_titan.optim import GroupedAdamW, LRSchedulerConfig, OptimizerConfig, check_groups, lr_factor
from spider_titan.spec import Batch, ParamGroup, StepContext, get_model_spec

from .reference.tiny import byte_transformer_config, lively_spider, next_ids, packed_rows, spider_config

SPIDER = get_model_spec("spider")


def optimizer_of(
    groups: list[ParamGroup],
    config: OptimizerConfig | None = None,
    schedule: LRSchedulerConfig | None = None,
    total_steps: int = 10,
) -> GroupedAdamW:
    """On one rank, whose shards are the whole."""
    return GroupedAdamW(
        groups, config or OptimizerConfig(), schedule or LRSchedulerConfig(), total_steps, sum_over_shards=torch.clone
    )


def three_groups() -> list[ParamGroup]:
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(3, 2)) for name in ("a", "b", "c", "d")}
    return [
        ParamGroup("plain", {"a": parameters["a"], "b": parameters["b"]}),
        ParamGroup("fast", {"c": parameters["c"]}, lr_factor=5.0, weight_decay=False),
        ParamGroup("bounded", {"d": parameters["d"]}, lr_factor=0.5, max_norm=0.5),
    ]


def set_gradients(groups: list[ParamGroup], seed: int, size: float = 1.0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    for group in groups:
        for parameter in group.parameters.values():
            parameter.grad = torch.randn_like(parameter) * size
    return {name: p.grad.clone() for group in groups for name, p in group.parameters.items()}


@pytest.mark.parametrize("implementation", ["foreach", "fused", "for-loop"])
def test_steps_equal_plain_adamw(implementation: str) -> None:
    config = OptimizerConfig(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3, implementation=implementation)
    schedule = LRSchedulerConfig(warmup_steps=2, min_lr_factor=0.1)
    groups = three_groups()
    optimizer = optimizer_of(groups, config, schedule, 6)
    expected = {name: p.detach().double().clone() for group in groups for name, p in group.parameters.items()}
    mean = {name: torch.zeros_like(value) for name, value in expected.items()}
    square = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(6):
        gradients = set_gradients(groups, seed=step)
        for group in groups:
            lr = 0.01 * lr_factor(schedule, step, 6) * group.lr_factor
            for name in group.parameters:
                gradient = gradients[name].double()
                mean[name] = 0.8 * mean[name] + 0.2 * gradient
                square[name] = 0.9 * square[name] + 0.1 * gradient**2
                expected[name] *= 1 - lr * (0.3 if group.weight_decay else 0.0)
                root = (square[name] / (1 - 0.9 ** (step + 1))).sqrt() + 1e-6
                expected[name] -= lr * mean[name] / (1 - 0.8 ** (step + 1)) / root
        optimizer.step(step)
        optimizer.zero_grad()
        for group in groups:
            for name, parameter in group.parameters.items():
                torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)
                assert parameter.grad is None


@pytest.mark.parametrize(("size", "max_norm"), [(10.0, 1.0), (0.01, 1.0), (1.0, 3.0), (10.0, 0.1)])
def test_clipping_scales_all_then_the_bounded_group(size: float, max_norm: float) -> None:
    """Bounds: nothing clips; the global one; the global one and then the group's; a group below its bound already."""
    groups = three_groups()
    optimizer = optimizer_of(groups)
    before = set_gradients(groups, seed=1, size=size)
    norms = optimizer.clip(max_norm)

    total = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in before.values()))
    assert float(norms["grad_norm"]) == pytest.approx(total, rel=1e-5)
    scale = min(1.0, max_norm / total)
    bounded = float(before["d"].norm()) * scale
    for group in groups:
        names = list(group.parameters)
        own = math.sqrt(sum(float(before[name].double().square().sum()) for name in names))
        assert float(norms[f"grad_norm/{group.name}"]) == pytest.approx(own, rel=1e-5)
        extra = min(1.0, 0.5 / bounded) if group.name == "bounded" else 1.0
        for name in names:
            torch.testing.assert_close(group.parameters[name].grad, before[name] * scale * extra, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("size", [10.0, 0.01])
def test_norms_are_over_the_shards_of_all_ranks(size: float) -> None:
    """Two ranks, each with half of every gradient's rows, clip as one that has all."""
    whole = three_groups()
    gradients = set_gradients(whole, seed=2, size=size)
    expected_norms = optimizer_of(whole).clip(1.0)

    def shard(group: ParamGroup, rows: slice) -> ParamGroup:
        parameters = {name: nn.Parameter(p.detach()[rows]) for name, p in group.parameters.items()}
        for name, parameter in parameters.items():
            parameter.grad = gradients[name][rows].clone()
        return dataclasses.replace(group, parameters=parameters)

    ranks = [[shard(group, rows) for group in three_groups()] for rows in (slice(0, 2), slice(2, 3))]
    squares = [
        torch.stack([sum(p.grad.square().sum() for p in group.parameters.values()) for group in groups])
        for groups in ranks
    ]
    for groups in ranks:
        optimizer = GroupedAdamW(
            groups, OptimizerConfig(), LRSchedulerConfig(), 10, lambda own: squares[0] + squares[1]
        )
        for name, norm in optimizer.clip(1.0).items():
            torch.testing.assert_close(norm, expected_norms[name])
    for index, group in enumerate(whole):
        for name, parameter in group.parameters.items():
            joined = torch.cat([groups[index].parameters[name].grad for groups in ranks])
            torch.testing.assert_close(joined, parameter.grad)


def test_a_group_without_gradients_has_norm_zero() -> None:
    groups = three_groups()
    optimizer = optimizer_of(groups)
    groups[0].parameters["a"].grad = torch.full((3, 2), 2.0)
    norms = optimizer.clip(1.0)
    assert float(norms["grad_norm"]) == pytest.approx(math.sqrt(24))
    assert float(norms["grad_norm/fast"]) == float(norms["grad_norm/bounded"]) == 0.0
    assert float(groups[0].parameters["a"].grad.norm()) == pytest.approx(1.0, rel=1e-4)


def test_a_group_that_starts_after_warmup_is_untouched_until_then() -> None:
    """Through the real loss: no gradient, no state, no share in the norm, no bit changed; then it trains."""
    model = lively_spider()
    groups = SPIDER.param_groups(model)
    optimizer = optimizer_of(groups, OptimizerConfig(lr=0.01), LRSchedulerConfig(warmup_steps=2))
    predictor = model.boundary_predictor
    initial = [parameter.detach().clone() for parameter in predictor.parameters()]
    batch = Batch(packed_rows(), next_ids(packed_rows()))
    for step in range(4):
        frozen = optimizer.frozen_groups(step)
        assert frozen == ({"boundary_predictor", "boundary_predictor_no_decay"} if step < 2 else set())
        SPIDER.loss(model, batch, StepContext(batch.num_targets, "topk", "fixed", 0.34, frozen)).total.backward()
        norms = optimizer.clip(1.0)
        optimizer.step(step)
        optimizer.zero_grad()
        unchanged = [torch.equal(*pair) for pair in zip(predictor.parameters(), initial, strict=True)]
        state = optimizer.state_tensors()
        has_state = [f"boundary_predictor.{name}.step" in state for name, _ in predictor.named_parameters()]
        share = float(norms["grad_norm/boundary_predictor"])
        if step < 2:
            assert all(unchanged) and not any(has_state) and share == 0.0
        else:
            assert not any(unchanged) and all(has_state) and share > 0.0
    counts = {name: int(value) for name, value in optimizer.state_tensors().items() if name.endswith(".step")}
    assert {count for name, count in counts.items() if name.startswith("boundary_predictor.")} == {2}
    assert {count for name, count in counts.items() if not name.startswith("boundary_predictor.")} == {4}


def train_predictor(optimizer: GroupedAdamW, model: nn.Module, steps: range) -> None:
    """Steps of the real loss; each step's gradient depends on the weights and on the step alone."""
    for step in steps:
        ids = packed_rows()
        batch = Batch(ids.roll(step, 0), next_ids(ids).roll(step, 0))
        frozen = optimizer.frozen_groups(step)
        SPIDER.loss(model, batch, StepContext(batch.num_targets, "topk", "fixed", 0.34, frozen)).total.backward()
        optimizer.clip(1.0)
        optimizer.step(step)
        optimizer.zero_grad()


def resumed(model: nn.Module, saved: dict[str, Tensor], **settings: Any) -> GroupedAdamW:
    """A new optimizer with the state that another one left."""
    optimizer = optimizer_of(SPIDER.param_groups(model), **settings)
    state = optimizer.allocate_state(saved)
    assert state.keys() == saved.keys()
    for name, value in state.items():
        assert value.shape == saved[name].shape and value.dtype == saved[name].dtype
        value.copy_(saved[name])
    return optimizer


@pytest.mark.parametrize("stopped", [1, 2, 3, 5])
def test_a_resumed_run_is_one_that_never_stopped(stopped: int) -> None:
    """Saved and restored inside the warm-up of 3 steps, at its end and after: every bit, and the frozen group too."""
    settings: dict[str, Any] = {"config": OptimizerConfig(lr=0.01), "schedule": LRSchedulerConfig(warmup_steps=3)}
    whole = lively_spider()
    initial = {name: value.clone() for name, value in whole.state_dict().items()}
    optimizer = optimizer_of(SPIDER.param_groups(whole), **settings)
    train_predictor(optimizer, whole, range(6))

    first = lively_spider()
    before = optimizer_of(SPIDER.param_groups(first), **settings)
    train_predictor(before, first, range(stopped))
    saved = {name: value.clone() for name, value in before.state_tensors().items()}
    is_frozen = [torch.equal(value, initial[name]) for name, value in predictor_weights(first).items()]
    assert all(is_frozen) if stopped <= 3 else not any(is_frozen)
    assert any(name.startswith("boundary_predictor.") for name in saved) == (stopped > 3)

    second = lively_spider()
    second.load_state_dict(first.state_dict())
    after = resumed(second, saved, **settings)
    train_predictor(after, second, range(stopped, 6))
    for name, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
    for name, value in optimizer.state_tensors().items():
        assert torch.equal(after.state_tensors()[name], value), name
    assert not any(torch.equal(value, initial[name]) for name, value in predictor_weights(whole).items())


def predictor_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_parameters() if name.startswith("boundary_predictor.")}


def test_the_predictor_moves_at_its_factor_of_the_base_rate() -> None:
    """The first update of AdamW without decay is the learning rate in every entry."""
    model = SPIDER.build(spider_config(boundary_lr_factor=0.1))
    groups = SPIDER.param_groups(model)
    optimizer = optimizer_of(groups, OptimizerConfig(lr=0.01, weight_decay=0.0), LRSchedulerConfig(warmup_steps=1))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    assert optimizer.lr(1) == pytest.approx(0.01, rel=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1)
    for name, parameter in model.named_parameters():
        factor = 0.1 if name.startswith("boundary_predictor.") else 5.0 if name.endswith("embed.weight") else 1.0
        moved = (before[name].double() - parameter.detach().double()).mean()
        assert float(moved) == pytest.approx(optimizer.lr(1) * factor, rel=1e-4), name


def test_state_of_another_model_or_optimizer_is_refused() -> None:
    groups = three_groups()
    optimizer = optimizer_of(groups)
    keys = ("step", "exp_avg", "exp_avg_sq")
    with pytest.raises(ValueError, match="'other' belongs to no parameter of this model"):
        optimizer.allocate_state([f"other.{key}" for key in keys])
    with pytest.raises(ValueError, match=r"keeps step, exp_avg, exp_avg_sq for a, but the saved state has step; go on"):
        optimizer.allocate_state(["a.step"])
    # What was there before is dropped.
    set_gradients(groups, 0)
    optimizer.step(0)
    assert optimizer.allocate_state([f"b.{key}" for key in keys]).keys() == {f"b.{key}" for key in keys}
    assert optimizer.names() == {"a", "b", "c", "d"}


def test_without_warmup_nothing_is_ever_frozen() -> None:
    optimizer = optimizer_of(SPIDER.param_groups(lively_spider()), OptimizerConfig(), LRSchedulerConfig(0))
    assert optimizer.frozen_groups(0) == frozenset()


CONFIGS = {"spider": spider_config(), "byte_transformer": byte_transformer_config()}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_a_model_is_in_one_group(name: str) -> None:
    spec = get_model_spec(name)
    model = spec.build(CONFIGS[name])
    groups = spec.param_groups(model)
    check_groups(model, groups)
    grouped = [key for group in groups for key in group.parameters]
    assert sorted(grouped) == sorted(key for key, _ in model.named_parameters())
    for group in groups:
        for key, parameter in group.parameters.items():
            assert parameter is model.get_parameter(key)


def test_spiders_groups() -> None:
    config = spider_config(engram_lr_factor=7.0, boundary_lr_factor=0.3, expert_max_norm=0.25)
    groups = {group.name: group for group in SPIDER.param_groups(SPIDER.build(config))}
    assert groups["engram_tables"].parameters.keys() == {f"engram.layers.{layer}.embed.weight" for layer in (0, 1)}
    assert (groups["engram_tables"].lr_factor, groups["engram_tables"].weight_decay) == (7.0, False)
    assert [name for name, group in groups.items() if group.lazy_rows] == ["engram_tables"]
    predictor, vectors = groups["boundary_predictor"], groups["boundary_predictor_no_decay"]
    assert predictor.parameters.keys() == {f"boundary_predictor.{name}.weight" for name in ("hidden", "output")}
    assert vectors.parameters.keys() == {
        f"boundary_predictor.{name}" for name in ("norm.weight", "hidden.bias", "output.bias")
    }
    assert (predictor.weight_decay, vectors.weight_decay) == (True, False)
    for group in (predictor, vectors):
        assert (group.lr_factor, group.starts_after_warmup) == (0.3, True)
    assert [name.split(".")[-1] for name in groups["expert_cores"].parameters] == ["W_gate", "W_transform"] * 2
    assert groups["expert_cores"].max_norm == 0.25
    assert not groups["backbone_no_decay"].weight_decay
    undecayed = groups["backbone_no_decay"].parameters
    assert {name for name in undecayed if name.endswith("norm.weight")} == {
        name
        for name, _ in SPIDER.build(config).named_parameters()
        if name.endswith("norm.weight") and not name.startswith("boundary_predictor")
    }
    assert {"null_slot", "core.injection.log_a", "core.loop_embedding.weight"} <= undecayed.keys()
    assert {"embed_tokens.weight", "lm_head.weight", "engram.layers.0.key_proj.weight"} <= groups[
        "backbone"
    ].parameters.keys()


def test_the_reference_models_groups() -> None:
    """Every parameter in one group by the rules, told from its name and shape alone."""
    model = SPIDER.build(SPIDER.flavors["10b"], device="meta")
    groups = SPIDER.param_groups(model)
    check_groups(model, groups)
    found = {name: group for group in groups for name in group.parameters}
    for name, parameter in model.named_parameters():
        group, is_vector = found.pop(name), parameter.ndim == 1
        if "engram." in name and "embed" in name:
            assert (group.lr_factor, group.weight_decay, group.lazy_rows) == (5.0, False, True), name
        elif name.startswith("boundary_predictor."):
            assert (group.lr_factor, group.starts_after_warmup) == (0.1, True), name
            assert not (is_vector and group.weight_decay), name
        elif name.endswith(("W_gate", "W_transform")):
            assert (group.lr_factor, group.max_norm, group.weight_decay) == (1.0, 0.5, True), name
        else:
            assert (group.lr_factor, group.max_norm, group.starts_after_warmup) == (1.0, None, False), name
            assert not (is_vector and group.weight_decay), name
    assert not found


def test_a_parameter_in_no_group_is_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="'bias' is in no parameter group"):
        check_groups(model, [ParamGroup("backbone", {"weight": model.weight})])


@pytest.mark.parametrize("other", ["backbone", "second"])
def test_a_parameter_in_two_groups_is_named(other: str) -> None:
    model = nn.Linear(2, 2, bias=False)
    groups = [ParamGroup("backbone", {"weight": model.weight}), ParamGroup(other, {"weight": model.weight})]
    with pytest.raises(ValueError, match=f"'weight' is in the groups 'backbone' and '{other}'"):
        check_groups(model, groups)
