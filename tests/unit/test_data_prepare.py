import json
import logging
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider_titan.tools import prepare

TEXTS = [f"text {number}\r\n" for number in range(500)]


@pytest.fixture(autouse=True)
def console() -> object:
    """The tool sets the console up; the other tests want their logger back."""
    logger = logging.getLogger("spider_titan")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def write_source(folder: Path) -> Path:
    corpus = folder / "corpus"
    corpus.mkdir()
    for part in range(5):
        lines = [json.dumps({"text": text}) for text in TEXTS[part * 100 : part * 100 + 100]]
        (corpus / f"{part}.jsonl").write_text("\n".join([*lines, "broken", '{"text": ""}']) + "\n")
    config = folder / "run.toml"
    config.write_text(
        f"""
        [training]
        steps = 1
        [data.sources.mine]
        kind = "files"
        path = "{corpus}/*.jsonl"
        [data.sources.python]
        part = "code"
        [[data.phases]]
        weights = {{ mine = 1 }}
        """
    )
    return config


def run(folder: Path, *arguments: str, source: str = "mine", part_bytes: int = 5_000) -> int:
    given = ["--source", source, "--out", str(folder / "out"), "--config", str(folder / "run.toml")]
    return prepare.main([*given, "--part-bytes", str(part_bytes), *arguments])


def copied(folder: Path) -> list[str]:
    files = sorted((folder / "out").glob("*.parquet"))
    return [document.decode() for path in files for document in pq.read_table(path)["text"].to_pylist()]


def test_copies_every_document_as_it_is(tmp_path: Path) -> None:
    write_source(tmp_path)
    assert run(tmp_path) == 0
    assert copied(tmp_path) == TEXTS
    assert len(list((tmp_path / "out").glob("*.parquet"))) == 2
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(tmp_path)
    write = prepare._write

    def stop_in_the_second(path: Path, records: object, bad: object) -> int:
        if path.name.startswith("000001"):
            path.with_suffix(".tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        return write(path, records, bad)

    monkeypatch.setattr(prepare, "_write", stop_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    first = tmp_path / "out" / "000000.parquet"
    stamp = first.stat().st_mtime_ns
    monkeypatch.setattr(prepare, "_write", write)
    assert run(tmp_path) == 0
    assert copied(tmp_path) == TEXTS
    assert first.stat().st_mtime_ns == stamp


def test_row_groups_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_source(tmp_path)
    monkeypatch.setattr(prepare, "_GROUP_BYTES", 300)
    assert run(tmp_path, part_bytes=10**9) == 0
    (path,) = (tmp_path / "out").glob("*.parquet")
    metadata = pq.ParquetFile(path).metadata
    assert metadata.num_rows == 500 and metadata.num_row_groups > 10


def test_another_source_does_not_go_into_the_same_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_source(tmp_path)
    assert run(tmp_path) == 0
    (tmp_path / "corpus" / "5.jsonl").write_text('{"text": "x"}\n')
    assert run(tmp_path) == 2
    assert "holds a copy of other files" in "".join(capfd.readouterr())
    assert copied(tmp_path) == TEXTS


@pytest.mark.parametrize(
    ("arguments", "words"), [({"source": "other"}, "has mine, python"), ({"source": "python"}, "is not copied")]
)
def test_mistakes_are_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: dict[str, str], words: str
) -> None:
    write_source(tmp_path)
    assert run(tmp_path, **arguments) == 2
    assert words in "".join(capfd.readouterr())


def test_bytes_are_grouped_by_size(tmp_path: Path) -> None:
    write_source(tmp_path)
    images = [os.urandom(1000) for _ in range(20)]
    for number, image in enumerate(images):
        (tmp_path / "corpus" / f"{number:02}.png").write_bytes(image)
    config = (
        (tmp_path / "run.toml")
        .read_text()
        .replace("*.jsonl", "*.png")
        .replace('kind = "files"', 'kind = "files"\nformat = "bytes"')
    )
    (tmp_path / "run.toml").write_text(config)
    assert run(tmp_path) == 0
    files = sorted((tmp_path / "out").glob("*.parquet"))
    tables = [pq.read_table(path) for path in files]
    assert len(files) == 4 and pa.concat_tables(tables)["text"].to_pylist() == images
