"""Facts that the documentation pages share with the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from spider_titan.config import JobConfig, ModelName
from spider_titan.config_schema import annotations_of
from spider_titan.metrics import TENSORBOARD_TAGS
from spider_titan.spec import get_model_spec

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

NO_KEYS = {"metrics.jsonl", "model.kernel_size", "training.stepz"}
"""A file, a key of the model on docs/own_model.md, and a mistake that docs/configuration.md shows."""


def table_rows(page: str, first_column: str) -> list[list[str]]:
    """The cells, without backticks, of the table whose head begins with ``first_column``."""
    lines = (REPOSITORY / page).read_text().split(f"\n| {first_column} |", 1)[1].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("`", "") for cell in line.strip("|").split("|")])
    return rows


def keys_of(config_class: type, prefix: str) -> set[str]:
    """``section.key`` of a dataclass, and of those of its lists and tables: ``data.phases.until``."""
    keys = set()
    for key, annotation in annotations_of(config_class).items():
        keys.add(f"{prefix}.{key}")
        for member in get_args(annotation):
            if hasattr(member, "__dataclass_fields__"):
                keys |= keys_of(member, f"{prefix}.{key}")
    return keys


def all_keys() -> set[str]:
    sections: dict[str, Any] = {name: cls for name, cls in get_type_hints(JobConfig).items() if name != "model"}
    keys = {key for name, section in sections.items() for key in keys_of(section, name)}
    own = [get_model_spec(name).config_class for name in ("spider", "byte_transformer")]
    return keys.union(*(keys_of(model, "model") for model in (ModelName, *own)))


def test_the_table_of_sections_is_that_of_the_code() -> None:
    sections = get_type_hints(JobConfig)
    expected = [(f"[{name}]", cls.__name__, cls.__module__.replace(".", "/") + ".py") for name, cls in sections.items()]
    rows = table_rows("docs/configuration.md", "section")
    assert [(section, dataclass, file) for section, _, dataclass, file in rows] == expected


def test_the_table_of_tags_is_that_of_the_code() -> None:
    tags = {key: tag for key, tag in table_rows("docs/run_directory.md", "key | tag")}
    assert tags.pop("anything else") == "model/KEY"
    assert tags == TENSORBOARD_TAGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_that_a_page_names_exist(page: Path) -> None:
    sections = "|".join(get_type_hints(JobConfig))
    named = re.findall(rf"(?:--|`)((?:{sections})\.[a-z_0-9.]*[a-z_0-9])", page.read_text())
    without_names = (re.sub(r"^(data\.sources)\.\w+|^(data\.phases)\.\d+", r"\1\2", key) for key in named)
    assert {key.replace(".no_", ".") for key in without_names} - all_keys() - NO_KEYS == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    files = re.findall(r"`((?:spider_titan|train_configs|docs|benchmarks|tests|scripts)/[\w./]+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [file for file in files if not (REPOSITORY / file).exists()]
    assert missing == []
