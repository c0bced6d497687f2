"""The registry of model specs and what every built-in spec must offer."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spider_titan import spec as spec_module
from spider_titan.spec import Batch, ModelSpec, StepContext, get_model_spec, register_model_spec
from spider_titan.vocabulary import PAD_ID

from .reference.tiny import byte_transformer_config, next_ids, packed_rows, spider_config

CONFIGS = {"spider": spider_config(), "byte_transformer": byte_transformer_config()}

OWN_MODEL = """
import dataclasses

from spider_titan.spec import get_model_spec, register_model_spec

SPEC = dataclasses.replace(get_model_spec("byte_transformer"), name="my_model")
register_model_spec(SPEC)
"""


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry that forgets afterwards what a test registered."""
    monkeypatch.setattr(spec_module, "_REGISTRY", dict(spec_module._REGISTRY))
    yield


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no model spec named 'spidre'; known: byte_transformer, spider.*\[job\] import"
    ):
        get_model_spec("spidre")


def test_a_name_is_taken_once() -> None:
    spec = get_model_spec("spider")
    register_model_spec(spec)
    with pytest.raises(ValueError, match="'spider' is registered already"):
        register_model_spec(dataclasses.replace(spec))


def test_a_module_outside_the_package_registers_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What [job] import does."""
    (tmp_path / "my_model_of_a_test.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_model_of_a_test")
    try:
        assert get_model_spec("my_model").name == "my_model"
        assert get_model_spec("byte_transformer").name == "byte_transformer"
    finally:
        del sys.modules["my_model_of_a_test"]


def built(name: str) -> tuple[ModelSpec, torch.nn.Module]:
    spec = get_model_spec(name)
    return spec, spec.build(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_building_gives_a_model_with_storage_or_none(name: str) -> None:
    spec, model = built(name)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert model.training
    meta = spec.build(CONFIGS[name], device="meta")
    assert {parameter.device.type for parameter in meta.parameters()} == {"meta"}
    shapes = [(key, p.shape, p.dtype) for key, p in model.named_parameters()]
    assert shapes == [(key, p.shape, p.dtype) for key, p in meta.named_parameters()]
    assert {dtype for _, _, dtype in shapes} == {torch.float32}


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_are_modules_of_the_model_that_do_not_overlap(name: str) -> None:
    spec, model = built(name)
    names = [block.fqn for block in spec.blocks(model)]
    for fqn in names:
        model.get_submodule(fqn)
        assert not any(other.startswith(f"{fqn}.") for other in names)
    assert len(set(names)) == len(names)


def test_spiders_blocks() -> None:
    spec, model = built("spider")
    blocks = {block.fqn: block for block in spec.blocks(model)}
    assert list(blocks) == ["prelude.0", "boundary_predictor", "engram", "core", "coda.0"]
    assert blocks["core"].kind == "looped"
    assert blocks["boundary_predictor"].compute_dtype == "float32"
    assert not blocks["boundary_predictor"].float8
    assert blocks["prelude.0"].kind == "once" and blocks["prelude.0"].float8


def test_names_that_others_rely_on() -> None:
    spec = get_model_spec("spider")
    model = spec.build(spec.flavors["debug"])
    for fqn in (
        "boundary_predictor",
        "engram",
        "embed_tokens",
        "lm_head",
        "core.loop_embedding",
        "core.halt_predictor",
    ):
        model.get_submodule(fqn)
    assert {"W_gate", "W_transform"} <= {key.split(".")[-1] for key, _ in model.named_parameters()}
    ids = packed_rows()
    out = model(ids, boundary_mode="threshold")
    assert out.logits.shape == (*ids.shape, 272)
    assert out.boundaries.shape == ids.shape and out.boundaries.dtype == torch.bool


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_learn(name: str) -> None:
    """A few steps on one batch, through nothing but the spec."""
    spec, model = built(name)
    ids = packed_rows()
    batch = Batch(ids, next_ids(ids))
    context = StepContext(num_targets=batch.num_targets, max_boundary_rate=0.45)
    parameters = [p for group in spec.param_groups(model) for p in group.parameters.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(8):
        terms = spec.loss(model, batch, context)
        losses.append(spec.metrics(terms.sums)["lm_loss"])
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
        spec.after_step(model, terms.sums, context)
    assert losses[-1] < losses[0] - 0.5
    assert {"loss", "lm_loss", "bpb"} <= spec.metrics(terms.sums).keys()
    assert spec.flops_per_byte(CONFIGS[name], 64) > 0
    assert {"total", "active per byte"} <= spec.parameter_counts(model).keys()


def test_a_batch_counts_its_targets_and_moves() -> None:
    batch = Batch(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, PAD_ID]]))
    assert batch.num_targets == 2
    moved = batch.to(torch.device("meta"))
    assert moved.input_ids.is_meta and moved.targets.is_meta
