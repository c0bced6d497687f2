import itertools
import random
from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch

from spider_titan.curriculum import Curriculum, PhaseConfig
from spider_titan.data import sources
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.loader import build_train_loader, build_validation_batches
from spider_titan.data.order import DocumentOrder
from spider_titan.data.sources import digest, load_sources
from spider_titan.data.tokenizer import decode
from spider_titan.spec import Batch
from spider_titan.vocabulary import BOS_ID, EOS_ID, PAD_ID

SEQ_LEN, BATCH_SIZE, ROWS_PER_STEP = 64, 3, 6
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
    bytes_per_step = ROWS_PER_STEP * SEQ_LEN * world_size
    loader = build_train_loader(
        data,
        Curriculum(data.phases, byte_budget=20 * bytes_per_step, bytes_per_step=bytes_per_step),
        seq_len=SEQ_LEN,
        batch_size=BATCH_SIZE,
        rows_per_step=ROWS_PER_STEP,
        rank=rank,
        world_size=world_size,
        seed=seed,
    )
    return list(itertools.islice(loader, count))


def streams(batches: list[Batch]) -> list[list[int]]:
    """The ids that each place of a step's rows has had, in order."""
    inputs = torch.cat([batch.input_ids for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    return [
        [int(inputs[place, 0]), *targets[place::ROWS_PER_STEP].flatten().tolist()] for place in range(ROWS_PER_STEP)
    ]


def whole_documents(places: list[list[int]]) -> list[bytes]:
    """The documents that begin and end in the ids of a place."""
    documents = []
    for ids in places:
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


def test_batches_are_full_rows_of_int64_that_follow_each_other() -> None:
    batches = train_batches(50)
    for batch in batches:
        assert batch.input_ids.shape == batch.targets.shape == (BATCH_SIZE, SEQ_LEN)
        assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
        assert batch.num_targets == BATCH_SIZE * SEQ_LEN
    inputs = torch.cat([batch.input_ids for batch in batches])
    for place, ids in enumerate(streams(batches)):
        assert inputs[place::ROWS_PER_STEP].flatten().tolist() == ids[:-1]


def test_no_held_out_document_is_trained_on_and_no_training_document_is_missing() -> None:
    splits = load_sources(config())
    train = {split.train_document(i) for split in splits.values() for i in range(len(split.train))}
    seen = whole_documents(streams(train_batches(400)))
    assert set(seen) == train
    assert not any(digest(document) < 0.2 * 2**63 for document in seen)


def test_a_rank_reads_the_documents_of_its_order() -> None:
    phases = [PhaseConfig(weights={"code": 1})]
    split = load_sources(config(phases=phases))["code"]
    for rank in range(3):
        seen = Counter(whole_documents(streams(train_batches(120, phases=phases, rank=rank, world_size=3))))
        order = DocumentOrder(len(split.train), seed=1, source="code", rank=rank, world_size=3)
        drawn = Counter(split.train_document(order.next()) for _ in range(seen.total() + ROWS_PER_STEP))
        assert not seen - drawn
        assert (drawn - seen).total() == ROWS_PER_STEP, "only the documents under way may be missing"


def test_the_same_seed_gives_the_same_batches_and_another_does_not() -> None:
    assert equal(train_batches(30), train_batches(30))
    assert not equal(train_batches(30), train_batches(30, seed=2))


def test_workers_change_nothing() -> None:
    expected = train_batches(41)
    assert equal(train_batches(41, num_workers=2), expected)


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
    return build_validation_batches(data, batch_size=BATCH_SIZE, rank=rank, world_size=world_size, **settings)


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
    with pytest.raises(ValueError, match=r"held_out_fraction = 0\.0.*code 60, multilingual 60"):
        validation(config=config(held_out_fraction=0.0))


def test_validation_goes_on_without_a_source_that_holds_nothing_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    only = next(text for text in (f"{n}".encode() for n in range(99)) if digest(text) > 0.2 * 2**63)
    (tmp_path / "one.txt").write_bytes(only)
    pair = {"code": SourceConfig(part="code"), "one": SourceConfig(kind="files", path=str(tmp_path / "one.txt"))}
    data = config(sources=pair, phases=[PhaseConfig(weights={"code": 1, "one": 1})])
    assert len(targets(validation(config=data, weights={"code": 1, "one": 1}, num_bytes=100))) > 50
    assert "data.sources.one has no held-out document" in caplog.text
    with pytest.raises(ValueError, match="one 1"):
        validation(config=data, weights={"one": 1})


def test_validation_slices_are_tiny_where_asked() -> None:
    ids = targets(validation(num_bytes=1))
    assert sum(number < 256 for number in ids) == 2
