import argparse
import hashlib
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from spider_titan.curriculum import PhaseConfig
from spider_titan.data import corpus
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.documents import ListSource, Settings, SplitSource, digest
from spider_titan.data.sources import load_sources


def numbered(count: int) -> list[bytes]:
    return [f"document {number}".encode() for number in range(count)]


def test_digest_is_pinned() -> None:
    # A change here moves documents from the held-out side into the training of runs that are resumed.
    assert digest(b"spider") == int.from_bytes(hashlib.blake2b(b"spider", digest_size=8).digest(), "little") // 2
    assert digest(b"spider") == 8066320288172854007


def test_both_sides_together_are_the_source() -> None:
    documents = numbered(2000)
    split = SplitSource("x", ListSource(documents), Settings(0.1))
    train = [split.train_document(index) for index in range(len(split.train))]
    held_out = [split.held_out_document(index) for index in range(len(split.held_out))]
    assert sorted(train + held_out) == sorted(documents)
    assert not set(train) & set(held_out)
    assert 150 < len(held_out) < 250


def test_equal_documents_are_on_one_side_in_every_source_and_order() -> None:
    documents = numbered(300)
    first = SplitSource("x", ListSource(documents + documents), Settings(0.2))
    second = SplitSource("y", ListSource(documents[::-1]), Settings(0.2))
    held_out = [{split.held_out_document(i) for i in range(len(split.held_out))} for split in (first, second)]
    assert held_out[0] == held_out[1]
    assert len(first.held_out) == 2 * len(second.held_out) > 0


def test_a_larger_fraction_only_adds() -> None:
    source = ListSource(numbered(500))
    small, large, none = (SplitSource("x", source, Settings(fraction)) for fraction in (0.05, 0.3, 0.0))
    assert len(none.held_out) == 0
    assert set(small.held_out) < set(large.held_out)


def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"data\.sources\.mine has 0 documents"):
        SplitSource("mine", ListSource([]), Settings(0.1))
    with pytest.raises(ValueError, match=r"data\.sources\.mine has 3 documents.*held_out_fraction"):
        SplitSource("mine", ListSource(numbered(3)), Settings(0.9999999))


def test_describe_counts_what_is_there_and_what_is_cut(tmp_path: Path) -> None:
    documents = [b"x" * size for size in range(1, 101)]
    for number, document in enumerate(documents):
        (tmp_path / f"{number:03}.txt").write_bytes(document)
    config = DataConfig(
        sources={"mine": SourceConfig(kind="files", path=str(tmp_path / "*.txt")), "unused": SourceConfig(part="code")},
        phases=[PhaseConfig(weights={"mine": 1})],
        held_out_fraction=0.2,
        max_document_bytes=60,
    )
    summary = load_sources(config)["mine"].describe()
    train = [document for document in documents if digest(document) >= 0.2 * 2**63]
    held_out = [document for document in documents if digest(document) < 0.2 * 2**63]
    cut = [len(document) - 60 for document in train if len(document) > 60]
    assert summary == (
        f"mine: {len(train)} documents, {sum(map(len, train)):,} bytes; "
        f"held out {len(held_out)} documents, {sum(map(len, held_out)):,} bytes; "
        f"cut {len(cut)} documents by {sum(cut):,} bytes"
    )


@pytest.mark.parametrize("part", [corpus.english, corpus.code, corpus.multilingual])
def test_builtin_parts_are_the_same_on_every_reading(part: Callable) -> None:
    first = part()
    part.cache_clear()
    assert part() == first
    assert all(first)


def test_english_keeps_every_word_of_the_topics_once() -> None:
    documents = [document.decode() for document in corpus.english()]
    assert len(set(documents)) == len(documents)
    assert 300_000 < sum(map(len, documents)) < sum(map(len, topics.values()))
    assert np.quantile([len(document) for document in documents], 0.9) <= 4_000
    lines = {line for document in documents for line in document.splitlines()}
    missing = [line for topic in topics.values() for line in topic.splitlines() if line not in lines]
    # Sections that are in several topics are kept once: only the other underlines of their headings are missing.
    assert all(set(line) <= set("*=~^-\"'") for line in missing)


def test_code_is_whole_files_without_tests() -> None:
    documents = corpus.code()
    assert Path(argparse.__file__).read_bytes() in documents
    assert sum(map(len, documents)) > 5_000_000
    assert not any(b"class TestCase(unittest.TestCase)" in document for document in documents)


SCRIPTS = {
    "arabic": (0x0600, 0x06FF),
    "armenian": (0x0530, 0x058F),
    "chinese": (0x4E00, 0x9FFF),
    "czech": (0x0100, 0x017F),
    "french": (0x00C0, 0x00FF),
    "georgian": (0x10A0, 0x10FF),
    "greek": (0x0370, 0x03FF),
    "hebrew": (0x0590, 0x05FF),
    "hindi": (0x0900, 0x097F),
    "japanese": (0x3040, 0x30FF),
    "korean": (0xAC00, 0xD7A3),
    "russian": (0x0400, 0x04FF),
    "thai": (0x0E00, 0x0E7F),
}


@pytest.mark.parametrize("language", SCRIPTS)
def test_multilingual_has_texts_in_many_scripts(language: str) -> None:
    low, high = SCRIPTS[language]
    texts = [document.decode() for document in corpus.multilingual()]
    shares = [sum(low <= ord(character) <= high for character in text) / len(text) for text in texts]
    assert sum(share > 0.02 for share in shares) >= 3


def test_multilingual_texts_have_a_title_and_paragraphs() -> None:
    for document in corpus.multilingual():
        title, empty, first, *_ = document.decode().split("\n")
        assert title and not empty and len(first) > len(title)
        assert document.endswith(b"\n") and not document.endswith(b"\n\n")
