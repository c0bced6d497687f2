"""Numbered documents over ranks, workers and files: an unbroken run, and one of three legs with two resumes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spider_titan.curriculum import Curriculum, PhaseConfig
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.documents import ListSource, Settings, SplitSource, TrainingSource
from spider_titan.data.loader import build_train_loader, merge_cursors
from spider_titan.data.problems import EndOfData, SourceError
from spider_titan.data.rows import Cursor, Cursors, epochs, shards
from spider_titan.data.sources import load_sources

from .reference.reading import NUM_SHARDS, SEQ_LEN, Rows, documents_of, read_leg

NUM_DOCUMENTS = 90
ENDS = (3, 8, 14)


def write_files(folder: Path, num_files: int, kind: str) -> list[str]:
    """Numbered documents in files of unequal length, the last of several files without any."""
    documents = [f"number {number}" for number in range(NUM_DOCUMENTS)]
    bounds = [0, *(NUM_DOCUMENTS * part * part // (num_files - 1) ** 2 for part in range(1, num_files)), NUM_DOCUMENTS]
    if num_files == 1:
        bounds = [0, NUM_DOCUMENTS]
    for index in range(num_files):
        part = documents[bounds[index] : bounds[index + 1]]
        if kind == "jsonl":
            (folder / f"{index}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        else:
            table = pa.table({"text": pa.array(part, pa.string())})
            pq.write_table(table, folder / f"{index}.parquet", row_group_size=8)
    return documents


def make_config(path: str = "", *, num_workers: int = 0, **arguments: object) -> DataConfig:
    source = SourceConfig(kind="files", path=path, **arguments)  # type: ignore[arg-type]
    phases = [PhaseConfig(weights={"mine": 1})]
    return DataConfig({"mine": source}, phases, held_out_fraction=0.0, num_workers=num_workers)


class Case:
    """A source of some files, and what an unbroken run on one rank without workers reads of it."""

    def __init__(self, folder: Path, num_files: int, kind: str) -> None:
        self.documents = write_files(folder, num_files, "jsonl" if kind == "jsonl" else "parquet")
        self.path, self.in_place = str(folder / "*.*"), kind == "in place"
        self.sources = load_sources(self.config(0))
        self.unbroken, _ = read_leg(self.config(0), self.sources, range(ENDS[-1]), {}, 1)

    def config(self, num_workers: int) -> DataConfig:
        return make_config(self.path, num_workers=num_workers, in_place=self.in_place)

    def in_legs(self, num_workers: int, world_sizes: tuple[int, ...]) -> Rows:
        rows: Rows = {shard: [] for shard in range(NUM_SHARDS)}
        cursors: Cursors = {}
        for start, end, world_size in zip((0, *ENDS), ENDS, world_sizes, strict=False):
            part, cursors = read_leg(self.config(num_workers), self.sources, range(start, end), cursors, world_size)
            for shard in rows:
                rows[shard] += part[shard]
        return rows


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))

        @functools.cache
        def make(num_files: int, kind: str) -> Case:
            return Case(tmp_path_factory.mktemp("files"), num_files, kind)

        yield make


@pytest.mark.parametrize("num_files", [1, 2, 5])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "in place"])
def test_every_document_goes_to_one_shard_in_an_epoch(case, num_files: int, kind: str) -> None:  # noqa: ANN001
    made = case(num_files, kind)
    source = made.sources["mine"]
    read = []
    for shard in range(NUM_SHARDS):
        for position, document in source.documents(shard, num_shards=NUM_SHARDS, seed=5):
            if source.epoch(position):
                break
            read.append(document.decode())
    assert sorted(read) == sorted(made.documents)


@pytest.mark.parametrize("num_files", [1, 2, 5])
def test_an_unbroken_run_reads_all_of_them(case, num_files: int) -> None:  # noqa: ANN001
    made = case(num_files, "jsonl")
    per_shard = NUM_DOCUMENTS // NUM_SHARDS
    first_epoch = [document for rows in made.unbroken.values() for document in documents_of(rows)[:per_shard]]
    assert sorted(first_epoch) == sorted(text.encode() for text in made.documents)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_files", [1, 2, 5])
@pytest.mark.parametrize("num_workers", [0, 1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_resumes_change_nothing(case, num_files: int, num_workers: int, world_size: int) -> None:  # noqa: ANN001
    made = case(num_files, "in place" if num_files == 2 else "jsonl")
    assert made.in_legs(num_workers, (world_size,) * 3) == made.unbroken


@pytest.mark.parametrize("kind", ["parquet", "in place"])
@pytest.mark.parametrize("world_sizes", [(1, 2, 3), (3, 1, 2), (6, 3, 1)])
def test_the_legs_may_have_any_number_of_ranks(case, kind: str, world_sizes: tuple[int, ...]) -> None:  # noqa: ANN001
    made = case(5, kind)
    assert made.in_legs(0, world_sizes) == made.unbroken


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("num_workers", "world_sizes"), [(0, (1, 2, 3)), (1, (2, 2, 2))])
@pytest.mark.parametrize("kind", ["jsonl", "in place"])
def test_documents_that_take_turns_are_resumed_too(
    case,  # noqa: ANN001
    kind: str,
    num_workers: int,
    world_sizes: tuple[int, ...],
) -> None:
    made = case(2, kind)
    config = make_config(made.path, num_workers=num_workers, in_place=made.in_place, interleave=3)
    sources = load_sources(config)
    unbroken, _ = read_leg(config, sources, range(ENDS[-1]), {}, 1)
    rows: Rows = {place: [] for place in range(NUM_SHARDS)}
    cursors: Cursors = {}
    for start, end, world_size in zip((0, *ENDS), ENDS, world_sizes, strict=False):
        part, newer = read_leg(config, sources, range(start, end), cursors, world_size)
        merge_cursors(cursors, newer)
        for place in rows:
            rows[place] += part[place]
    assert rows == unbroken
    assert unbroken != made.unbroken
    if kind == "jsonl":
        per_shard = NUM_DOCUMENTS // (NUM_SHARDS * 3)
        shards = [rows[place][turn::3] for place in rows for turn in range(3)]
        first_epoch = [document for shard in shards for document in documents_of(shard)[:per_shard]]
        assert sorted(first_epoch) == sorted(text.encode() for text in made.documents)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["jsonl", "in place"])
def test_a_source_that_may_not_repeat_ends(case, kind: str, num_workers: int) -> None:  # noqa: ANN001
    made = case(2, kind)
    config = make_config(made.path, num_workers=num_workers, in_place=made.in_place, repeat=False)
    sources = load_sources(config)
    for rank in range(2):
        loader = build_train_loader(
            config,
            sources,
            Curriculum(config.phases, byte_budget=10**6, bytes_per_step=NUM_SHARDS * SEQ_LEN),
            seq_len=SEQ_LEN,
            batch_size=1,
            num_rows=NUM_SHARDS,
            seed=5,
            rank=rank,
            world_size=2,
        )
        rows: Rows = {shard: [] for shard in range(rank, NUM_SHARDS, 2)}
        ended = None
        for number in range(1000):
            try:
                batch = next(loader)
            except EndOfData as end:
                ended = end
                break
            shard = rank + 2 * (number % 3)
            rows[shard].append([*batch.input_ids[0].tolist(), int(batch.targets[0, -1])])
        assert str(ended) == "mine"
        with pytest.raises(EndOfData):
            next(loader)
        for shard, read in rows.items():
            common = min(len(read), len(made.unbroken[shard]))
            assert common > 2 and read[:common] == made.unbroken[shard][:common]
            source = sources["mine"]
            mine = [document for _, document in until_the_end(source, shard)]
            assert documents_of(read) == mine[: len(documents_of(read))]
        # The shard that ended had less than a row left.
        short = min(sum(map(len, (d for _, d in until_the_end(sources["mine"], shard)))) for shard in rows)
        assert min(map(len, rows.values())) >= short // SEQ_LEN - 1


def until_the_end(source: TrainingSource, shard: int) -> Iterator[tuple[object, bytes]]:
    try:
        yield from source.documents(shard, num_shards=NUM_SHARDS, seed=5)
    except EndOfData:
        return


@pytest.mark.parametrize("kind", ["jsonl", "in place"])
def test_epochs_are_counted(case, kind: str) -> None:  # noqa: ANN001
    """By a rank of two, from its own shards alone: after a resume it has the cursors of the other's too, which stay."""
    made = case(5, kind)
    source, seen = made.sources["mine"], []
    mine = shards(source, NUM_SHARDS, 1, 2)
    assert [*mine] == [*range(1, NUM_SHARDS, 2)]
    cursors: Cursors = {"mine": {}}
    for start, end in ((0, 0), (0, 2), (2, 30), (30, 60)):
        _, newer = read_leg(made.config(0), made.sources, range(start, end), cursors, 1)
        stays = {shard: cursors["mine"].get(shard, cursor) for shard, cursor in newer["mine"].items()} if newer else {}
        cursors = {"mine": stays | {shard: newer["mine"][shard] for shard in mine}} if newer else cursors
        seen.append(epochs(source, cursors["mine"], mine))
    alone = {shard: cursors["mine"][shard] for shard in mine}
    assert seen[:2] == [0, 0] and seen == sorted(seen) and seen[-1] >= 3
    assert seen[-1] == epochs(source, alone, mine) > epochs(source, cursors["mine"], range(NUM_SHARDS))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_source_that_fails_is_named_in_one_line(tmp_path: Path, num_workers: int) -> None:
    write_files(tmp_path, 2, "parquet")
    config = make_config(str(tmp_path / "*.parquet"), num_workers=num_workers, in_place=True)
    sources = load_sources(config)
    (tmp_path / "0.parquet").unlink()
    (tmp_path / "1.parquet").unlink()
    with pytest.raises(SourceError, match=r"^data\.sources\.mine: its files cannot be read: .*parquet'$"):
        read_leg(config, sources, range(20), {}, 1)


def test_too_few_documents_for_the_shards_are_reported(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    config = make_config(str(tmp_path / "a.parquet"), in_place=True)
    with pytest.raises(SourceError, match=r"data\.sources\.mine has too few documents for 6 shards"):
        read_leg(config, load_sources(config), range(2), {}, 1)


@pytest.mark.parametrize(
    ("kind", "position"), [("jsonl", [0, 0, 0, 0]), ("in place", 3), ("in place", [0, 9, 0, 0]), ("in place", [0])]
)
def test_a_position_of_other_documents_is_refused(case, kind: str, position: object) -> None:  # noqa: ANN001
    made = case(2, kind)
    cursors: Cursors = {"mine": {shard: Cursor(position, 0) for shard in range(NUM_SHARDS)}}  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=r"data\.sources\.mine: the documents are not those that the checkpoint"):
        read_leg(made.config(0), made.sources, range(1), cursors, 1)


class Sparse:
    """A source of a million documents that exist when they are read, and says which were."""

    def __init__(self, size: int) -> None:
        source = ListSource([b"x"])
        self.sizes = source.sizes.repeat(size)
        self.digests = source.digests.repeat(size)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def document(self, index: int) -> bytes:
        self.read.append(index)
        return f"number {index}".encode()


@pytest.mark.parametrize("position", [10, 200_000])
def test_a_resume_far_on_reads_no_more_than_one_near_the_beginning(position: int) -> None:
    documents = Sparse(300_000)
    sources = {"mine": SplitSource("mine", documents, Settings(0.0))}
    cursors: Cursors = {"mine": {shard: Cursor(position // 6 * 6 + shard, 3) for shard in range(NUM_SHARDS)}}
    read_leg(make_config("x"), sources, range(1), cursors, 1)
    assert len(documents.read) <= 3 * NUM_SHARDS
