import json
import logging
import os
import socket
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider_titan.data.config import SourceConfig
from spider_titan.data.files import open_files
from spider_titan.data.sources import digest

TEXTS = [
    "two\r\nlines\r\n",
    "\ufeffBOM",
    "NUL \0 inside",
    "",
    "naïve λ 漢字 🙂",
    "2020-01-01",
    "lone \r return",
    "\u2028",
]


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An own cache, and no way out of the machine."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def refuse(*_: object) -> None:
        raise AssertionError("a local source went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def read(**arguments: object) -> list[bytes]:
    source = open_files("mine", SourceConfig(kind="files", **arguments))  # type: ignore[arg-type]
    documents = [source.document(index) for index in range(len(source))]
    assert source.sizes.tolist() == [len(document) for document in documents]
    assert source.digests.tolist() == [digest(document) for document in documents]
    return documents


def test_txt_is_one_document_a_file_byte_for_byte(tmp_path: Path) -> None:
    contents = [b"\xef\xbb\xbfBOM\r\nCRLF\r\n", b"NUL \0, not UTF-8 \xff\xc3(", b"", b"no newline at the end"]
    for index, content in enumerate(contents):
        (tmp_path / "deep" / str(index)).mkdir(parents=True)
        (tmp_path / "deep" / str(index) / "part.txt").write_bytes(content)
    assert read(path=str(tmp_path / "**" / "*.txt")) == contents


def test_jsonl_keeps_the_text(tmp_path: Path) -> None:
    lines = [json.dumps({"n": index, "text": text}, ensure_ascii=index % 2 == 0) for index, text in enumerate(TEXTS)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode() + b"\n")
    assert read(path=str(path)) == [text.encode() for text in TEXTS]


def test_jsonl_of_dates_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "2020-01-01"}\n{"text": "2021-12-31T00:00:00Z"}\n')
    assert read(path=str(path)) == [b"2020-01-01", b"2021-12-31T00:00:00Z"]


def test_jsonl_keeps_half_a_surrogate_pair(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x\\ud83d"}\n')
    assert read(path=str(path)) == [b"x\xed\xa0\xbd"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_parquet_keeps_text_and_bytes(tmp_path: Path, kind: pa.DataType) -> None:
    contents = [text.encode() for text in TEXTS] + ([] if "string" in str(kind) else [b"\xff\x00\xc3("])
    table = pa.table({"n": range(len(contents)), "body": pa.array(contents, pa.binary()).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert read(path=str(tmp_path / "*.parquet"), text_field="body") == contents


def test_files_are_sorted_and_formats_may_be_mixed(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n')
    (tmp_path / "[c].data").write_bytes(b"third")
    paths = [str(tmp_path / "b.txt"), str(tmp_path / "*.jsonl"), str(tmp_path / "?.txt")]
    assert read(path=paths) == [b"first", b"second"]
    assert read(path=str(tmp_path / "[c].data"), format="txt") == [b"third"]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"before")
    assert read(path=str(path)) == [b"before"]
    path.write_bytes(b"after!")
    os.utime(path, ns=(1, 1))
    assert read(path=str(path)) == [b"after!"]


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"once")
    assert read(path=str(path)) == [b"once"]
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("read twice"))
    assert read(path=str(path)) == [b"once"]


def test_no_progress_bar_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"x")
    before = datasets.are_progress_bars_disabled()
    read(path=str(tmp_path / "a.txt"))
    assert capfd.readouterr().err == ""
    assert datasets.are_progress_bars_disabled() == before


def write_parquet(path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"text": column}), path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"body": 1, "id": 2}\n', r"a\.jsonl, line 2 has no field 'text'.*'body', 'id'"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl, line 1.*'text'.*int"),
        ("a.jsonl", b'{"text": null}\n', r"a\.jsonl, line 1.*NoneType"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1 is not JSON in UTF-8"),
        ("a.jsonl", b'["x"]\n', r"a\.jsonl, line 1 holds no object but a list"),
        ("a.jsonl", b"[" * 100_000 + b"\n", r"a\.jsonl, line 1 is not JSON"),
        ("a.parquet", b"not parquet", r"a\.parquet cannot be read as parquet"),
        ("a.parquet", pa.array([1, 2]), r"a\.parquet: the field 'text' holds neither text nor bytes but int64"),
        ("a.parquet", pa.array(["x", None]), r"a\.parquet, record 1: .* null"),
        ("a.csv", b"x", r"a\.csv is none of .*format"),
    ],
)
def test_errors_name_the_place(tmp_path: Path, file: str, content: bytes | pa.Array, words: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / file).write_bytes(content)
    else:
        write_parquet(tmp_path / file, content)
    logging.disable(logging.CRITICAL)
    try:
        with pytest.raises(ValueError, match=f"(?s)data.sources.mine.*{words}"):
            read(path=str(tmp_path / file))
    finally:
        logging.disable(logging.NOTSET)


def test_a_missing_parquet_field_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.array(["x"]))
    with pytest.raises(ValueError, match=r"a\.parquet has no field 'body'; there are: 'text'"):
        read(path=str(tmp_path / "a.parquet"), text_field="body")


def test_a_glob_that_matches_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"data\.sources\.mine\.path: no file matches .*\*\.jsonl"):
        read(path=[str(tmp_path / "a.txt"), str(tmp_path / "*.jsonl")])
    with pytest.raises(ValueError, match="it is a folder"):
        read(path=str(tmp_path))
