"""Reads the rows of some steps as several ranks do, and what documents are in them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from spider_titan.curriculum import Curriculum
from spider_titan.data.config import DataConfig
from spider_titan.data.documents import TrainingSource
from spider_titan.data.loader import build_train_loader, merge_cursors
from spider_titan.data.rows import Cursor, Cursors
from spider_titan.data.tokenizer import decode
from spider_titan.vocabulary import BOS_ID, EOS_ID

SEQ_LEN, NUM_SHARDS = 16, 6

Rows = dict[int, list[list[int]]]
"""Place -> its rows of L + 1 ids."""


def read_leg(
    config: DataConfig,
    sources: Mapping[str, TrainingSource],
    steps: range,
    cursors: Cursors,
    world_size: int,
    seq_len: int = SEQ_LEN,
) -> tuple[Rows, Cursors]:
    """The rows at every place in these steps, read by ``world_size`` ranks, and the cursors of all ranks after them."""
    rows: Rows = {}
    merged: Cursors = {}
    for rank in range(world_size):
        loader = build_train_loader(
            config,
            sources,
            Curriculum(config.phases, byte_budget=10**6, bytes_per_step=NUM_SHARDS * seq_len),
            seq_len=seq_len,
            batch_size=1,
            num_rows=NUM_SHARDS,
            seed=5,
            rank=rank,
            world_size=world_size,
            first_step=steps.start,
            cursors=cursors,
        )
        for _ in steps:
            for place in range(rank, NUM_SHARDS, world_size):
                batch = next(loader)
                rows.setdefault(place, []).append([*batch.input_ids[0].tolist(), int(batch.targets[0, -1])])
                merge_cursors(merged, batch.position)
    # As a checkpoint keeps them.
    kept = json.loads(json.dumps(merged))
    return rows, {source: {int(shard): Cursor(*cursor) for shard, cursor in of.items()} for source, of in kept.items()}


def documents_of(rows: list[list[int]]) -> list[bytes]:
    """The whole documents in the rows of a shard, in order."""
    ids = [*rows[0][:1], *(number for row in rows for number in row[1:])]
    documents, start = [], None
    for place, number in enumerate(ids):
        if number == BOS_ID:
            start = place
        elif number == EOS_ID and start is not None:
            documents.append(decode(ids[start:place]))
    return documents
