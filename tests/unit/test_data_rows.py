import copy
import random
from dataclasses import replace

import pytest

from spider_titan.curriculum import Curriculum, PhaseConfig
from spider_titan.data.documents import ListSource, Settings, SplitSource
from spider_titan.data.loader import merge_cursors
from spider_titan.data.order import permutation
from spider_titan.data.rows import Cursor, Cursors, RowReader
from spider_titan.vocabulary import BOS_ID, EOS_ID

# Each source writes with a byte of its own, so that a row tells where its ids come from.
MARKS = {"a": b"a", "b": b"b", "c": b"c"}
SEQ_LEN, NUM_ROWS, STEPS, SEED = 16, 6, 100, 3
PHASES = [
    PhaseConfig(until=0.3, weights={"a": 1}),
    PhaseConfig(until=0.6, weights={"a": 7, "b": 3}),
    PhaseConfig(until=1.0, weights={"a": 0.2, "b": 0.0, "c": 0.5}),
]


def make_sources(longest: int, limit: int = 0, interleave: int = 1) -> dict[str, SplitSource]:
    """Of these, only the first is interleaved by more than 2."""
    rng = random.Random(longest)
    settings = Settings(0.05, max_document_bytes=limit)
    return {
        name: SplitSource(
            name,
            ListSource([mark * rng.randint(0, longest) for _ in range(50)]),
            replace(settings, interleave=interleave if name == "a" else min(interleave, 2)),
        )
        for name, mark in MARKS.items()
    }


def make_reader(sources: dict[str, SplitSource], seed: int = SEED, cursors: Cursors | None = None) -> RowReader:
    return RowReader(
        sources,
        Curriculum(PHASES, byte_budget=STEPS * NUM_ROWS * SEQ_LEN, bytes_per_step=NUM_ROWS * SEQ_LEN),
        seq_len=SEQ_LEN,
        num_rows=NUM_ROWS,
        seed=seed,
        cursors=cursors,
    )


def source_of(row: list[int]) -> str:
    names = [name for name, mark in MARKS.items() if mark[0] in row]
    assert len(names) == 1, "a row is of one source"
    return names[0]


def expected_stream(source: SplitSource, shard: int, num_shards: int, num_ids: int, limit: int) -> list[int]:
    """The documents of a shard back to back, from the concatenated epochs of the source, with plain lists."""
    order, stream = [], []
    epoch = 0
    while len(stream) < num_ids:
        order += permutation(len(source.train), f"{SEED}/{epoch}/{source.name}").tolist()
        epoch += 1
        stream = []
        for number in order[shard::num_shards]:
            document = source.train_document(number)
            stream += [BOS_ID, *(document[:limit] if limit else document), EOS_ID]
    return stream[:num_ids]


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize(("longest", "limit"), [(20, 0), (400, 0), (400, 50), (2000, 0)])
def test_every_id_of_a_stream_is_a_target_once(longest: int, limit: int, interleave: int) -> None:
    """Shard v has the place v % R of every ``interleave``-th step, and its documents follow each other there."""
    sources = make_sources(longest, limit, interleave)
    reader = make_reader(sources)
    streams: dict[tuple[int, str], list[int]] = {}
    for step in range(STEPS):
        for place, row in enumerate(reader.read(step, range(NUM_ROWS)).tolist()):
            assert len(row) == SEQ_LEN + 1
            name = source_of(row)
            shard = place + NUM_ROWS * (step % sources[name].settings.interleave)
            stream = streams.setdefault((shard, name), row[:1])
            assert stream[-1] == row[0]
            stream += row[1:]
    num_shards = {name: NUM_ROWS * source.settings.interleave for name, source in sources.items()}
    assert streams.keys() == {(shard, name) for name, number in num_shards.items() for shard in range(number)}
    for (shard, name), stream in streams.items():
        assert stream == expected_stream(sources[name], shard, num_shards[name], len(stream), limit)


def test_phases_switch_at_their_step_and_have_their_shares() -> None:
    reader = make_reader(make_sources(400))
    rows = [source_of(row) for step in range(STEPS) for row in reader.read(step, range(NUM_ROWS)).tolist()]
    shares = [{"a": 1}, {"a": 0.7, "b": 0.3}, {"a": 2 / 7, "c": 5 / 7}]
    for steps, expected in zip([range(30), range(30, 60), range(60, 100)], shares, strict=True):
        part = rows[steps.start * NUM_ROWS : steps.stop * NUM_ROWS]
        assert set(part) == set(expected)
        for name, share in expected.items():
            assert abs(part.count(name) - share * len(part)) <= 1


def test_places_are_read_alone_as_among_others() -> None:
    sources = make_sources(400, interleave=3)
    together = make_reader(sources)
    alone = [make_reader(sources) for _ in range(NUM_ROWS)]
    for step in range(STEPS):
        expected = together.read(step, range(NUM_ROWS)).tolist()
        assert [alone[place].read(step, [place])[0].tolist() for place in range(NUM_ROWS)] == expected


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize(("longest", "limit"), [(5, 0), (400, 0), (400, 50), (2000, 0)])
def test_cursors_are_the_whole_state(longest: int, limit: int, interleave: int) -> None:
    """Two resumes, the second with other owners of the places, against a reader that is never stopped."""
    sources = make_sources(longest, limit, interleave)
    through, all_cursors = make_reader(sources), Cursors()
    expected = []
    for step in range(STEPS):
        expected.append(through.read(step, range(NUM_ROWS)).tolist())
        merge_cursors(all_cursors, through.cursors(step, range(NUM_ROWS)))
    cursors: Cursors = {}
    for start, end, owners in ((0, 7, 1), (7, 45, 2), (45, STEPS, 3)):
        given = copy.deepcopy(cursors)
        readers = [make_reader(sources, cursors=given) for _ in range(owners)]
        for step in range(start, end):
            for owner, reader in enumerate(readers):
                places = range(owner, NUM_ROWS, owners)
                assert reader.read(step, places).tolist() == expected[step][owner::owners]
                merge_cursors(cursors, reader.cursors(step, places))
    assert cursors == all_cursors


def test_a_resume_reads_nothing_of_what_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = make_sources(400)
    reader = make_reader(sources)
    for step in range(STEPS - 1):
        reader.read(step, range(NUM_ROWS))
    resumed = make_reader(sources, cursors=reader.cursors(STEPS - 2, range(NUM_ROWS)))
    read: list[int] = []
    document = ListSource.document
    monkeypatch.setattr(ListSource, "document", lambda self, index: read.append(index) or document(self, index))
    resumed.read(STEPS - 1, range(NUM_ROWS))
    assert len(read) <= 2 * NUM_ROWS


def test_a_source_that_has_changed_is_refused() -> None:
    cursors: Cursors = {"a": {shard: Cursor(shard, 500) for shard in range(NUM_ROWS)}}
    with pytest.raises(ValueError, match=r"data\.sources\.a: the documents are not those"):
        make_reader(make_sources(400), cursors=cursors).read(0, range(NUM_ROWS))


def test_another_seed_reads_in_another_order() -> None:
    sources = make_sources(400)
    first, second = (make_reader(sources, seed=seed).read(0, range(NUM_ROWS)).tolist() for seed in (1, 2))
    assert first != second
