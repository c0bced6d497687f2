import gzip
import json
import os
import socket
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider_titan.curriculum import PhaseConfig
from spider_titan.data import document_cache, problems
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.documents import digest
from spider_titan.data.files import open_files
from spider_titan.data.problems import BadRecords, SourceError
from spider_titan.data.sources import load_sources

TEXTS = [
    "two\r\nlines\r\n",
    "\ufeffBOM",
    "NUL \0 inside",
    "naïve λ 漢字 🙂",
    "2020-01-01",
    "lone \r return",
    "\u2028",
]


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An own cache, and no way out of the machine."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def refuse(*_: object) -> None:
        raise AssertionError("a local source went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def read(**arguments: object) -> list[bytes]:
    source = open_files("mine", SourceConfig(kind="files", **arguments), BadRecords("mine", "stop"))  # type: ignore[arg-type]
    documents = [source.document(index) for index in range(len(source))]
    assert source.sizes.tolist() == [len(document) for document in documents]
    assert source.digests.tolist() == [digest(document) for document in documents]
    return documents


def test_txt_is_one_document_a_file_byte_for_byte(tmp_path: Path) -> None:
    contents = [b"\xef\xbb\xbfBOM\r\nCRLF\r\n", b"NUL \0, not UTF-8 \xff\xc3(", b"no newline at the end"]
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


def test_a_column_of_text_that_is_not_utf_8_keeps_its_bytes(tmp_path: Path) -> None:
    offsets, content = pa.py_buffer(np.array([0, 3, 5], np.int32).tobytes()), pa.py_buffer(b"\xff\xfe\x00\xc3(")
    pq.write_table(pa.table({"text": pa.StringArray.from_buffers(2, offsets, content)}), tmp_path / "a.parquet")
    assert read(path=str(tmp_path / "a.parquet")) == [b"\xff\xfe\x00", b"\xc3("]


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


def write_parquet(path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"text": column}), path)


BAD = [
    ("a.jsonl", b'{"body": 1, "id": 2}\n', "missing field", r"a\.jsonl, line 2 has no field 'text'.*'body', 'id'"),
    ("a.jsonl", b'{"text": 3}\n', "wrong type", r"a\.jsonl, line 2 has no text but a int in the field 'text'"),
    ("a.jsonl", b'{"text": null}\n', "wrong type", r"a\.jsonl, line 2.*NoneType"),
    ("a.jsonl", b'{"text": ""}\n', "empty document", r"a\.jsonl, line 2 is empty"),
    ("a.jsonl", b'{"text": \n', "not JSON", r"a\.jsonl, line 2 is not JSON"),
    ("a.jsonl", b'{"text": "\xff"}\n', "not UTF-8", r"a\.jsonl, line 2 is not UTF-8"),
    ("a.jsonl", b'["x"]\n', "not an object", r"a\.jsonl, line 2 holds no object but a list"),
    ("a.jsonl", b"[" * 100_000 + b"\n", "not JSON", r"a\.jsonl, line 2 is not JSON"),
]


@pytest.mark.parametrize(("file", "line", "kind", "words"), BAD)
def test_bad_lines_are_skipped_or_stop(
    tmp_path: Path, file: str, line: bytes, kind: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / file).write_bytes(b'{"text": "first"}\n' + line + b'{"text": "last"}\n')
    config = SourceConfig(kind="files", path=str(tmp_path / file))
    with pytest.raises(SourceError, match=f"data.sources.mine: .*{words}.*on_bad_record"):
        open_files("mine", config, BadRecords("mine", "stop"))
    bad = BadRecords("mine", "skip")
    source = open_files("mine", config, bad)
    assert [source.document(index) for index in range(len(source))] == [b"first", b"last"]
    assert bad.counts == {kind: 1} and bad.summary() == f"1 {kind}"
    assert caplog.text.count(f"data.sources.mine: {kind}: ") == 1
    # The next run takes both the documents and the bad records from the cache.
    again = BadRecords("mine", "skip")
    open_files("mine", config, again)
    assert (again.counts, again.named) == (bad.counts, bad.named)
    with pytest.raises(SourceError, match=words):
        open_files("mine", config, BadRecords("mine", "stop"))


@pytest.mark.parametrize(
    ("file", "content", "kind", "words"),
    [
        ("a.parquet", b"not parquet", "unreadable file", r"a\.parquet cannot be read as parquet"),
        ("a.parquet", pa.array([1, 2]), "wrong type", r"a\.parquet.* has neither text nor bytes but int64"),
        ("a.parquet", pa.array(["x", None]), "missing field", r"a\.parquet, record 1 has null"),
        ("a.parquet", pa.array(["x", ""]), "empty document", r"a\.parquet, record 1 is empty"),
        ("a.txt", b"", "empty document", r"a\.txt is empty"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}\n' * 999)[:-9],
            "unreadable file",
            r"a\.jsonl\.gz cannot be read",
        ),
        ("a.jsonl.gz", b"not gzip", "unreadable file", r"a\.jsonl\.gz cannot be read"),
        (
            "a.txt.zst",
            pa.compress(os.urandom(9999), "zstd", asbytes=True)[:-99],
            "unreadable file",
            r"a\.txt\.zst cannot",
        ),
    ],
)
def test_bad_files_are_skipped_or_stop(
    tmp_path: Path, file: str, content: bytes | pa.Array, kind: str, words: str
) -> None:
    if isinstance(content, bytes):
        (tmp_path / file).write_bytes(content)
    else:
        write_parquet(tmp_path / file, content)
    (tmp_path / "good.txt").write_bytes(b"good")
    config = SourceConfig(kind="files", path=str(tmp_path / "*.*"))
    with pytest.raises(SourceError, match=f"data.sources.mine: .*{words}"):
        open_files("mine", config, BadRecords("mine", "stop"))
    bad = BadRecords("mine", "skip")
    source = open_files("mine", config, bad)
    assert source.document(len(source) - 1) == b"good"
    assert bad.counts == {kind: 1}


def test_what_is_before_the_break_of_a_file_is_read(tmp_path: Path) -> None:
    lines = [json.dumps({"text": os.urandom(20).hex()}) for _ in range(2000)]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode())[:-3000])
    bad = BadRecords("mine", "skip")
    source = open_files("mine", SourceConfig(kind="files", path=str(tmp_path / "*.gz")), bad)
    expected = [json.loads(line)["text"].encode() for line in lines]
    assert 1000 < len(source) < 2000
    assert [source.document(index) for index in range(len(source))] == expected[: len(source)]
    assert bad.counts == {"unreadable file": 1}


def test_many_bad_records_are_counted_and_few_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + "broken\n" * 1000)
    bad = BadRecords("mine", "skip")
    open_files("mine", SourceConfig(kind="files", path=str(tmp_path / "a.jsonl")), bad)
    assert bad.counts == {"not JSON": 1000} and len(bad.named) == problems.NAMED
    assert len(caplog.records) < 2 * problems.NAMED


def test_a_source_with_nothing_good_says_why(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.array(["x"]))
    mine = SourceConfig(kind="files", path=str(tmp_path / "a.parquet"), text_field="body")
    with pytest.raises(ValueError, match=r"mine has 0 documents.*1 missing field.*no field 'body'; there are"):
        load_sources(DataConfig(sources={"mine": mine}, phases=[PhaseConfig(weights={"mine": 1})]))


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_compressed_lines_are_unpacked(tmp_path: Path, suffix: str) -> None:
    content = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
    # Two members one after the other are one file.
    (tmp_path / f"a.{suffix}.gz").write_bytes(gzip.compress(content[:50]) + gzip.compress(content[50:]))
    (tmp_path / f"b.{suffix}.zst").write_bytes(pa.compress(content, "zstd", asbytes=True))
    assert read(path=str(tmp_path / "*")) == [text.encode() for text in TEXTS] * 2


def test_bytes_are_a_document_a_file_whatever_the_suffix(tmp_path: Path) -> None:
    packed = gzip.compress(b"packed")
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\xff")
    (tmp_path / "b.txt.gz").write_bytes(packed)
    assert read(path=str(tmp_path / "*"), format="bytes") == [b"\x89PNG\r\n\x1a\n\0\xff", packed]
    assert read(path=str(tmp_path / "*.gz")) == [b"packed"]


def test_a_field_of_a_struct(tmp_path: Path) -> None:
    images = pa.array([{"bytes": b"\xff\xd8\xff", "path": "a.jpg"}, {"bytes": None, "path": "b.jpg"}, None])
    pq.write_table(pa.table({"image": images}), tmp_path / "a.parquet")
    bad = BadRecords("mine", "skip")
    config = SourceConfig(kind="files", path=str(tmp_path / "a.parquet"), text_field="image.bytes")
    source = open_files("mine", config, bad)
    assert [source.document(index) for index in range(len(source))] == [b"\xff\xd8\xff"]
    assert bad.counts == {"missing field": 2}


def test_documents_of_any_length_are_written_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_cache, "_BATCH_BYTES", 1000)
    monkeypatch.setattr(document_cache, "_BATCH_DOCUMENTS", 7)
    documents = ["x" * (size * size) for size in range(1, 60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    assert read(path=str(tmp_path / "a.jsonl")) == [text.encode() for text in documents]


def test_an_unknown_suffix_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"data.sources.mine: .*a\.csv is none of .*format"):
        read(path=str(tmp_path / "a.csv"))


def test_a_glob_that_matches_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"data\.sources\.mine\.path: no file matches .*\*\.jsonl"):
        read(path=[str(tmp_path / "a.txt"), str(tmp_path / "*.jsonl")])
    with pytest.raises(ValueError, match="it is a folder"):
        read(path=str(tmp_path))
