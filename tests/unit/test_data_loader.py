import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spider_titan.curriculum import Curriculum, PhaseConfig
from spider_titan.data import loader, sources
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.documents import digest
from spider_titan.data.loader import TrainBatches, build_train_loader, build_validation_batches
from spider_titan.data.rows import Cursors
from spider_titan.data.sources import load_sources
from spider_titan.data.tokenizer import decode
from spider_titan.spec import Batch
from spider_titan.vocabulary import BOS_ID, EOS_ID, PAD_ID

SEQ_LEN, BATCH_SIZE, NUM_SHARDS = 64, 2, 8
PHASES = [PhaseConfig(until=0.5, weights={"code": 1}), PhaseConfig(weights={"code": 1, "multilingual": 3})]


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short documents of the two parts, so that an epoch is soon over."""
    rng = random.Random(0)
    for part in ("code", "multilingual"):
        documents = [f"{part} {number} ".encode() * rng.randint(1, 9) for number in range(60)]
        monkeypatch.setitem(sources._BUILTIN_PARTS, part, lambda documents=documents: documents)


def config(**arguments: object) -> DataConfig:
    parts = {part: SourceConfig(part=part) for part in ("code", "multilingual")}  # type: ignore[arg-type]
    return DataConfig(**{"sources": parts, "phases": PHASES, "held_out_fraction": 0.2, **arguments})  # type: ignore[arg-type]


def train_batches(count: int, *, seed: int = 1, rank: int = 0, world_size: int = 1, **arguments: object) -> list[Batch]:
    data = config(**arguments)
    bytes_per_step = NUM_SHARDS * SEQ_LEN
    batches = build_train_loader(
        data,
        load_sources(data),
        Curriculum(data.phases, byte_budget=20 * bytes_per_step, bytes_per_step=bytes_per_step),
        seq_len=SEQ_LEN,
        batch_size=BATCH_SIZE,
        num_rows=NUM_SHARDS,
        seed=seed,
        rank=rank,
        world_size=world_size,
    )
    return list(itertools.islice(batches, count))


def rows_by_shard(batches: list[Batch], *, rank: int = 0, world_size: int = 1) -> dict[int, list[list[int]]]:
    """Shard -> its rows of L + 1 ids, step by step."""
    inputs = torch.cat([batch.input_ids for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    rows = torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
    shards = range(rank, NUM_SHARDS, world_size)
    return {shard: rows[place :: len(shards)] for place, shard in enumerate(shards)}


def streams(batches: list[Batch]) -> list[list[int]]:
    """The ids that a shard has had of a source, in order: a list for each pair."""
    ids: dict[tuple[int, bool], list[int]] = {}
    for shard, rows in rows_by_shard(batches).items():
        for row in rows:
            stream = ids.setdefault((shard, ord("u") in row), row[:1])
            assert stream[-1] == row[0]
            stream += row[1:]
    return list(ids.values())


def whole_documents(streams: list[list[int]]) -> list[bytes]:
    """The documents that begin and end in the ids of a stream."""
    documents = []
    for ids in streams:
        start = None
        for position, number in enumerate(ids):
            if number == BOS_ID:
                start = position
            elif number == EOS_ID and start is not None:
                documents.append(decode(ids[start:position]))
    return documents


def equal(first: list[Batch], second: list[Batch]) -> bool:
    return all(
        torch.equal(a.input_ids, b.input_ids) and torch.equal(a.targets, b.targets)
        for a, b in zip(first, second, strict=True)
    )


def test_batches_are_full_rows_of_int64() -> None:
    for batch in train_batches(50):
        assert batch.input_ids.shape == batch.targets.shape == (BATCH_SIZE, SEQ_LEN)
        assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
        assert batch.num_targets == BATCH_SIZE * SEQ_LEN


def test_no_held_out_document_is_trained_on_and_no_training_document_is_missing() -> None:
    splits = load_sources(config())
    train = {split.train_document(i) for split in splits.values() for i in range(len(split.train))}
    seen = whole_documents(streams(train_batches(400)))
    assert set(seen) == train
    assert not any(digest(document) < 0.2 * 2**63 for document in seen)


@pytest.mark.parametrize("longest", [1, 40])
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("code", "multilingual"):
        documents = [f"{part} {number} ".encode() * (1 + number % longest) for number in range(60)]
        monkeypatch.setitem(sources._BUILTIN_PARTS, part, lambda documents=documents: documents)
    phases = [
        PhaseConfig(until=0.3, weights={"multilingual": 1}),
        PhaseConfig(until=0.6, weights={"code": 0.2, "multilingual": 0.8}),
        PhaseConfig(weights={"code": 2, "multilingual": 1}),
    ]
    steps, batches_per_step = 25, NUM_SHARDS // BATCH_SIZE
    alone = rows_by_shard(train_batches(steps * batches_per_step, phases=phases))
    assert [len(rows) for rows in alone.values()] == [steps] * NUM_SHARDS
    for world_size in (2, 4):
        ranks: dict[int, list[list[int]]] = {}
        for rank in range(world_size):
            batches = train_batches(
                steps * batches_per_step // world_size, phases=phases, rank=rank, world_size=world_size
            )
            ranks |= rows_by_shard(batches, rank=rank, world_size=world_size)
        assert ranks == alone


def test_the_same_seed_gives_the_same_batches_and_another_does_not() -> None:
    assert equal(train_batches(30), train_batches(30))
    assert not equal(train_batches(30), train_batches(30, seed=2))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [1, 3, 4])
def test_workers_change_nothing(num_workers: int) -> None:
    assert equal(train_batches(41, num_workers=num_workers), train_batches(41))


class RecordingReader:
    """Rows that say their step and place; keeps which were read."""

    def __init__(self) -> None:
        self.read_rows: list[tuple[int, int]] = []

    def read(self, step: int, places: Sequence[int]) -> NDArray[np.int64]:
        self.read_rows += [(step, place) for place in places]
        return np.array([[step, place] for place in places])

    def cursors(self, step: int, places: Sequence[int]) -> Cursors:
        return {}


@pytest.mark.parametrize(
    ("num_workers", "num_batches", "divides_by"), [(1, 3, 1), (2, 1, 1), (2, 4, 2), (4, 2, 2), (4, 6, 2), (3, 4, 1)]
)
def test_a_worker_reads_the_places_of_its_batches_alone(
    num_workers: int, num_batches: int, divides_by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, places = 12, range(1, 1 + 4 * num_batches, 2)
    made, place_counts = [], []
    for worker in range(num_workers):
        monkeypatch.setattr(
            loader, "get_worker_info", lambda worker=worker: SimpleNamespace(id=worker, num_workers=num_workers)
        )
        reader = RecordingReader()
        batches = TrainBatches(lambda reader=reader: reader, places, batch_size=2)
        made.append(list(itertools.islice(batches, steps * num_batches // num_workers)))
        read = {place: [step for step, other in reader.read_rows if other == place] for place in places}
        assert all(steps_of == list(range(len(steps_of))) for steps_of in read.values()), "no step may be left out"
        place_counts.append(sum(bool(steps_of) for steps_of in read.values()))
    assert place_counts == [len(places) // divides_by] * num_workers
    in_turn = [batch for turn in zip(*made, strict=True) for batch in turn]
    rows = [
        [int(step), int(place)] for batch in in_turn for step, place in zip(batch.input_ids, batch.targets, strict=True)
    ]
    assert rows == [[step, place] for step in range(steps) for place in places]


def test_the_loader_leaves_training_rng_alone() -> None:
    before = torch.get_rng_state()
    train_batches(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_source_without_weight_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    train_batches(1, phases=[PhaseConfig(weights={"code": 1})])
    assert "data.sources.multilingual is not read" in caplog.text


def validation_by_source(rank: int = 0, world_size: int = 1, **arguments: object) -> dict[str, list[Batch]]:
    settings = {"weights": {"code": 1, "multilingual": 3}, "num_bytes": 400, "seed": 1, "seq_len": SEQ_LEN, **arguments}
    data = settings.pop("config", None) or config()
    return build_validation_batches(
        data, load_sources(data), batch_size=BATCH_SIZE, rank=rank, world_size=world_size, **settings
    )


def validation(**arguments: object) -> list[Batch]:
    return [batch for batches in validation_by_source(**arguments).values() for batch in batches]


def targets(batches: list[Batch]) -> list[int]:
    ids = [number for batch in batches for number in batch.targets.flatten().tolist()]
    return [number for number in ids if number != PAD_ID]


def test_validation_is_a_fixed_slice_of_held_out_documents_in_shares() -> None:
    batches = validation()
    assert equal(batches, validation())
    splits = load_sources(config())
    for (name, part), num_bytes in zip(validation_by_source().items(), (100, 300), strict=True):
        documents = bytes(number if number < 256 else 0 for number in targets(part)).split(b"\0")
        documents = [document for document in documents if document]
        held_out = [splits[name].held_out_document(i) for i in range(len(splits[name].held_out))]
        assert all(any(whole.startswith(document) for whole in held_out) for document in documents)
        assert sum(map(len, documents)) == num_bytes


@pytest.mark.parametrize("seq_len", [1, 7, 64, 1000])
def test_validation_has_every_target_once(seq_len: int) -> None:
    batches = validation(seq_len=seq_len)
    assert targets(batches) == targets(validation())
    for batch in batches:
        assert batch.input_ids.shape == (BATCH_SIZE, seq_len)
        assert (batch.targets[batch.input_ids == PAD_ID] == PAD_ID).all()


def test_validation_takes_what_there_is() -> None:
    split = load_sources(config())["code"]
    everything = sorted(split.held_out_document(i) for i in range(len(split.held_out)))
    ids = [BOS_ID, *targets(validation(weights={"code": 1}, num_bytes=10**9))]
    assert sorted(whole_documents([ids])) == everything


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_validation_is_shared_among_ranks_that_have_equally_many(world_size: int) -> None:
    ranks = [validation_by_source(rank, world_size) for rank in range(world_size)]
    for name, whole in validation_by_source().items():
        in_turn = [batch for round_ in zip(*(rank[name] for rank in ranks), strict=True) for batch in round_]
        assert targets(in_turn) == targets(whole)


def test_validation_without_a_held_out_document() -> None:
    with pytest.raises(ValueError, match=r"held_out_fraction = 0\.0.*code: 60 .*multilingual: 60 "):
        validation(config=config(held_out_fraction=0.0))


def test_validation_goes_on_without_a_source_that_holds_nothing_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    only = next(text for text in (f"{n}".encode() for n in range(99)) if digest(text) > 0.2 * 2**63)
    (tmp_path / "one.txt").write_bytes(only)
    pair = {"code": SourceConfig(part="code"), "one": SourceConfig(kind="files", path=str(tmp_path / "one.txt"))}
    data = config(sources=pair, phases=[PhaseConfig(weights={"code": 1, "one": 1})])
    assert len(targets(validation(config=data, weights={"code": 1, "one": 1}, num_bytes=100))) > 50
    assert "data.sources.one has no held-out document" in caplog.text
    with pytest.raises(ValueError, match="one: 1 doc"):
        validation(config=data, weights={"one": 1})


def test_validation_slices_are_tiny_where_asked() -> None:
    ids = targets(validation(num_bytes=1))
    assert sum(number < 256 for number in ids) == 2
