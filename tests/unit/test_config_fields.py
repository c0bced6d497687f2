"""Every key of the configuration does something: those of the models by what a step computes, all others by who reads
them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

import spider_titan
from spider_titan.config import JobConfig
from spider_titan.spec import Batch, StepContext, get_model_spec

from .reference.tiny import byte_transformer_config, enliven, next_ids, packed_rows, spider_config

PACKAGE = Path(spider_titan.__file__).parent

SMALLEST = spider_config(num_loops=2, num_recurrent_layers=1, engram_layers=(0,))
TINY = {"spider": SMALLEST, "byte_transformer": byte_transformer_config()}

OTHER_VALUES: dict[str, Any] = {
    "num_heads": 4,
    "num_experts": 5,
    "experts_per_token": 1,
    "engram_layers": (),
    "engram_orders": (2, 4),
    "engram_slots": 128,
    "rope_original_length": 32,
    "norm_eps": 0.1,
    "act_epsilon": 0.4,
    "attention_window": 5,
    "num_loops": 3,
    "backprop_loops": 1,
    "max_sampled_loops": 3,
    "boundary_bias_decay": 0.5,
    "bytes_per_segment": 4.0,
}
"""Where the rule of ``other_value`` gives none that is allowed, or none that a tiny model notices."""

NEEDS = {
    "max_sampled_loops": {"sample_loops": "poisson"},
    # Far above the rate of a lively model, which then lies below the hinge's band.
    "boundary_hinge_width": {"boundary_adaptive_loss": "hinge", "bytes_per_segment": 1.2},
}
"""Keys that mean something beside another setting only."""


def other_value(name: str, value: Any, annotation: Any) -> Any:
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return next(choice for choice in get_args(annotation) if choice != value)
    if isinstance(value, float):
        return value * 0.5 or 0.5
    return value + 8 if value % 8 == 0 else value * 2


def fingerprint(name: str, config: Any) -> str:
    """Of all that a config decides: initial weights, groups, cost, drawn loops, and two steps with their gradients."""
    spec, found = get_model_spec(name), hashlib.sha256()
    model = spec.build(config, seed=1)

    def add(*values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                value = value.detach().double().contiguous().numpy().tobytes()
            found.update(value if isinstance(value, bytes) else repr(value).encode())

    add(*model.state_dict().values(), spec.flops_per_byte(config, 64))
    groups = [replace(group, parameters={}) for group in spec.param_groups(model)]
    add(groups, spec.draw_loops and [spec.draw_loops(config, 0, step) for step in range(30)])
    enliven(model)
    model.train()
    ids = packed_rows()[::2]
    batch = Batch(ids, next_ids(ids))
    for mode, phase in (("topk", "fixed"), ("threshold", "adaptive")):
        context = StepContext(batch.num_targets, mode, phase)  # type: ignore[arg-type]
        model.zero_grad()
        terms = spec.loss(model, batch, context)
        terms.total.backward()
        spec.after_step(model, terms.sums, context)
        add(terms.total, *terms.sums.values(), *(p.grad for p in model.parameters()), *model.buffers())
    return found.hexdigest()


@cache
def fingerprint_of_base(name: str, field: str) -> str:
    return fingerprint(name, replace(TINY[name], **NEEDS.get(field, {})))


CASES = [(name, field.name) for name, config in TINY.items() for field in fields(config)]


@pytest.mark.parametrize(("name", "field"), CASES, ids=lambda value: value)
def test_a_models_key_changes_what_it_computes(name: str, field: str) -> None:
    base = replace(TINY[name], **NEEDS.get(field, {}))
    value = other_value(field, getattr(base, field), get_type_hints(type(base))[field])
    shared = fingerprint_of_base(name, field if field in NEEDS else "")
    assert fingerprint(name, replace(base, **{field: value})) != shared


def test_the_fingerprint_is_of_the_config_alone() -> None:
    assert fingerprint("spider", TINY["spider"]) == fingerprint("spider", TINY["spider"])


def sections(config_class: type, path: str) -> Iterator[tuple[str, type]]:
    """The dataclass of a section, and those of its lists and tables."""
    yield path, config_class
    for name, annotation in get_type_hints(config_class).items():
        for member in get_args(annotation):
            if is_dataclass(member):
                yield from sections(member, f"{path}.{name}")


KEYS = [
    (f"{path}.{field.name}", config_class, field.name)
    for section, section_class in get_type_hints(JobConfig).items()
    if section != "model"
    for path, config_class in sections(section_class, section)
    for field in fields(config_class)
]


@cache
def files() -> dict[Path, ast.Module]:
    """All of the package, without the checks of configs: they read a key to refuse it."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                node.body = [item for item in node.body if getattr(item, "name", "") != "__post_init__"]
    return trees


def readers(config_class: type, section: str, name: str) -> list[str]:
    """Files that read ``.name`` where they know the dataclass, or as ``.section.name`` where they do not."""
    found = []
    for path, tree in files().items():
        nodes = list(ast.walk(tree))
        knows = any(
            (isinstance(node, ast.Name) and node.id == config_class.__name__)
            or (isinstance(node, ast.alias) and node.name == config_class.__name__)
            or (isinstance(node, ast.ClassDef) and node.name == config_class.__name__)
            for node in nodes
        )
        for node in nodes:
            if not (isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)):
                continue
            if knows or (isinstance(node.value, ast.Attribute | ast.Name) and section in ast.unparse(node.value)):
                found.append(path.name)
    return found


@pytest.mark.parametrize(("key", "config_class", "name"), KEYS, ids=[key for key, _, _ in KEYS])
def test_a_key_is_read(key: str, config_class: type, name: str) -> None:
    assert readers(config_class, key.split(".")[0], name), f"nothing reads {key}"


def test_a_key_that_nobody_reads_would_be_found() -> None:
    assert not readers(JobConfig, "job", "no_such_key")
    assert len(KEYS) > 60
