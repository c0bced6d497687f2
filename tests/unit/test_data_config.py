import pytest

from spider_titan.curriculum import PhaseConfig
from spider_titan.data.config import DataConfig, SourceConfig


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "part"),
        ({"part": "code", "path": "x.txt"}, "path"),
        ({"part": "code", "text_field": "body"}, "text_field"),
        ({"kind": "files"}, "path is empty"),
        ({"kind": "files", "path": []}, "path is empty"),
        ({"kind": "files", "path": ["a", ""]}, "path is empty"),
        ({"kind": "files", "path": "a", "part": "code"}, "part"),
        ({"kind": "files", "path": "a", "text_field": ""}, "text_field"),
        ({"kind": "files", "path": "a", "format": "txt", "text_field": "body"}, "text_field"),
        ({"kind": "files", "path": "a", "format": "bytes", "text_field": "body"}, "text_field"),
        ({"kind": "files", "path": "a", "dataset": "b/c"}, 'dataset is for kind = "hub", not "files"'),
        ({"kind": "hub"}, "dataset"),
        ({"kind": "hub", "dataset": "b/c", "split": ""}, "split"),
        ({"kind": "hub", "dataset": "b/c", "name": []}, "name"),
        ({"kind": "hub", "dataset": "b/c", "in_place": True}, "in_place"),
        ({"kind": "hub", "dataset": "b/c", "options": {"a": "b"}}, "options"),
        ({"part": "code", "options": {"a": "b"}}, 'options is for kind = "own"'),
        ({"part": "code", "markers": "image"}, 'markers is for kind = "files" or "hub" or "own"'),
        ({"part": "code", "in_place": True}, "in_place"),
        ({"part": "code", "max_document_bytes": -1}, "max_document_bytes"),
        ({"kind": "own"}, "opener"),
    ],
)
def test_source_errors_name_the_key(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SourceConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_document_bytes": -1}, "max_document_bytes"),
        ({"held_out_fraction": 1.0}, "held_out_fraction"),
        ({"held_out_fraction": -0.1}, "held_out_fraction"),
        ({"num_workers": -1}, "num_workers"),
        ({"prefetch_batches": 0}, "prefetch_batches"),
        ({"hub_retry_seconds": -1.0}, "hub_retry_seconds"),
        ({"phases": []}, "phases"),
        ({"phases": [PhaseConfig(weights={"french": 1})]}, r"phases\[0\].weights.*'french'.*english"),
        ({"phases": [PhaseConfig(weights={"english": 0})]}, r"phases\[0\].weights"),
        ({"phases": [PhaseConfig()]}, r"phases\[0\].weights"),
    ],
)
def test_data_errors_name_the_key(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataConfig(**arguments)


def test_local_files_take_the_place_of_a_hub_dataset() -> None:
    assert SourceConfig(kind="hub", dataset="a/b", name="c", path="x/*.parquet", in_place=True).is_local
    assert not SourceConfig(kind="hub", dataset="a/b").is_local


def test_only_weighted_sources_are_used() -> None:
    sources = {name: SourceConfig(part="english") for name in ("a", "b", "c")}
    phases = [PhaseConfig(until=0.5, weights={"b": 1, "c": 0}), PhaseConfig(weights={"a": 1, "b": 2})]
    assert DataConfig(sources=sources, phases=phases).used_sources == ["a", "b"]
