"""Batches for the trainer: endless ones for training, a fixed slice for validation.

B: rows of a micro-batch. L: positions of a row.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from spider_titan.curriculum import Curriculum
from spider_titan.data.config import DataConfig
from spider_titan.data.documents import TrainingSource
from spider_titan.data.packing import pack_all
from spider_titan.data.problems import EndOfData, SourceError
from spider_titan.data.rows import Cursors, RowReader, encode_document
from spider_titan.data.tokenizer import Ids, cut_at_character_boundary
from spider_titan.spec import Batch
from spider_titan.vocabulary import PAD_ID

logger = logging.getLogger(__name__)

# Raised by the library's own constructor, whatever it is given.
warnings.filterwarnings("ignore", message=r"'set_vital' is deprecated")


class TrainBatches(IterableDataset[Batch | Exception]):
    """Endless micro-batches of one rank: in each step the rows at its places.

    With W worker processes, worker w makes the batches w, w + W, w + 2W, ...; the loader asks them in turn, so the
    batches are those of a single process. To know where its rows begin, a worker reads all rows at the places of its
    batches, and at no others. So workers divide the reading where a step has a multiple of W batches; where it has one
    batch, each worker reads all of it, and what they divide is the making of tensors.

    A batch's ``position`` holds the cursors of the shards it was read from, so what a worker has read ahead does not
    matter.

    The end of a source, and one that fails, is an item in its place: raised in a worker process it would arrive as
    text. After it there are no batches.

    Args:
        open_reader: Makes a reader that stands before ``first_step``.
        places: Those of this rank among the rows of a step, in order.
        batch_size: B; divides the number of places.
        first_step: Step of the first batches.
    """

    def __init__(
        self, open_reader: Callable[[], RowReader], places: Sequence[int], batch_size: int, first_step: int = 0
    ) -> None:
        assert len(places) % batch_size == 0
        self._open_reader = open_reader
        self._first_step = first_step
        self._batches = [places[start : start + batch_size] for start in range(0, len(places), batch_size)]

    def __iter__(self) -> Iterator[Batch | Exception]:
        try:
            yield from self._batches_of_worker()
        except (EndOfData, SourceError) as error:
            problem = error
        # A worker that stopped would give its turns to the others.
        yield from itertools.repeat(problem)

    def _batches_of_worker(self) -> Iterator[Batch]:
        reader = self._open_reader()
        worker = get_worker_info()
        worker_id, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        # The batches of a step that this worker ever makes are those at worker_id, worker_id + stride, ...
        stride = math.gcd(num_workers, len(self._batches))
        for number in itertools.count(worker_id % stride, stride):
            steps_done, batch = divmod(number, len(self._batches))
            step, places = self._first_step + steps_done, self._batches[batch]
            rows = reader.read(step, places)
            if number % num_workers == worker_id:
                yield to_batch(rows, reader.cursors(step, places))


class TrainLoader(Iterator[Batch]):
    """The batches of ``TrainBatches`` in order, from worker processes or this one.

    Args:
        dataset: Makes the batches.
        num_workers: Processes; 0: this one.
        prefetch_batches: Batches that each process makes ahead.
        seed: Of the workers.
    """

    def __init__(self, dataset: TrainBatches, *, num_workers: int, prefetch_batches: int, seed: int) -> None:
        self.seconds_waited = 0.0
        """How long all calls of ``next`` took together."""
        self._items: Iterator[Batch | Exception] = iter(dataset)
        if num_workers:
            # The loader draws a seed for its workers; from a generator of its own, so that training's RNG stays.
            generator = torch.Generator().manual_seed(seed)
            workers = StatefulDataLoader(
                dataset,
                batch_size=None,
                num_workers=num_workers,
                prefetch_factor=prefetch_batches,
                generator=generator,
            )
            self._items = iter(workers)

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        """Returns the next batch.

        Raises:
            EndOfData: If a source that is not to repeat has no full row left for a shard of the batch. The other ranks
                are not told.
            SourceError: If a source cannot be read on.
        """
        begin = time.perf_counter()
        item = next(self._items)
        self.seconds_waited += time.perf_counter() - begin
        if isinstance(item, Exception):
            # Nothing else comes, so the workers are let go; the exception keeps this object alive for long.
            self._items = itertools.repeat(item)
            raise item
        return item


def build_train_loader(
    config: DataConfig,
    sources: Mapping[str, TrainingSource],
    curriculum: Curriculum,
    *,
    seq_len: int,
    batch_size: int,
    num_rows: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    first_step: int = 0,
    cursors: Cursors | None = None,
) -> TrainLoader:
    """Returns this rank's micro-batches [B, L], which have no end unless a source may not repeat; every row is full.

    Rank r has the places p with p % world_size == r. The rows of a step over all ranks do not depend on
    ``world_size``, and a phase begins with exactly the step at which ``curriculum`` says so.

    Args:
        config: The ``[data]`` section.
        sources: What ``load_sources(config)`` returned.
        curriculum: Step -> phase. Its phases are those of ``config``.
        seq_len: L.
        batch_size: B.
        num_rows: Rows of an optimizer step over all ranks, a multiple of B * world_size.
        seed: ``training.seed``.
        rank: This rank among the data-parallel ones.
        world_size: How many of them there are.
        first_step: Step to begin with.
        cursors: Where streams go on, of all shards; the merged ``position`` of the last batches of the step before.
    """
    for name in sorted(set(config.sources) - set(config.used_sources)):
        logger.warning("data.sources.%s is not read: no phase gives it a weight", name)
    open_reader = functools.partial(
        RowReader,
        sources,
        curriculum,
        seq_len=seq_len,
        num_rows=num_rows,
        seed=seed,
        cursors=cursors,
    )
    dataset = TrainBatches(open_reader, range(rank, num_rows, world_size), batch_size, first_step)
    return TrainLoader(dataset, num_workers=config.num_workers, prefetch_batches=config.prefetch_batches, seed=seed)


def build_validation_batches(
    config: DataConfig,
    sources: Mapping[str, TrainingSource],
    weights: Mapping[str, float],
    *,
    seq_len: int,
    batch_size: int,
    num_bytes: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
) -> dict[str, list[Batch]]:
    """Packs a fixed slice of each source's held-out documents; over all ranks every id but the first is a target once.

    Batch k of a source goes to rank k % world_size. All batches are [B, L] and every rank has equally many: what is
    missing are rows of PAD, which have no target. A source that holds nothing out has no entry.

    Args:
        config: The ``[data]`` section.
        sources: What ``load_sources(config)`` returned.
        weights: Source name -> share of the slice; normalised.
        seq_len: L.
        batch_size: B.
        num_bytes: Bytes of the slice over all ranks, at least one a source. A source that holds out fewer
            than its share gives all it has.
        seed: Chooses the slice.
        rank: This rank among the data-parallel ones.
        world_size: How many of them there are.

    Raises:
        ValueError: If no source of ``weights`` has a held-out document.
    """
    shares = {name: weight for name, weight in sorted(weights.items()) if weight > 0}
    batches = {}
    for name, weight in shares.items():
        share = max(1, round(num_bytes * weight / sum(shares.values())))
        if documents := _held_out_slice(sources[name], share, seed):
            rows = pack_all(np.concatenate(documents), seq_len)
            batches[name] = _share_out(rows, batch_size, rank, world_size)
        else:
            logger.warning("data.sources.%s has no held-out document: it takes no part in validation", name)
    if not batches:
        raise ValueError(
            f"no document is held out for validation with data.held_out_fraction = {config.held_out_fraction} "
            f"({'; '.join(sources[name].describe() for name in shares)}); raise the fraction, add documents, or set "
            f"validation.enable = false"
        )
    return batches


def _share_out(rows: Ids, batch_size: int, rank: int, world_size: int) -> list[Batch]:
    """This rank's batches of the rows [N, L + 1]."""
    rows_per_round = batch_size * world_size
    num_rounds = -(-len(rows) // rows_per_round)
    padded = np.full((num_rounds * rows_per_round, rows.shape[1]), PAD_ID, dtype=rows.dtype)
    padded[: len(rows)] = rows
    batches = padded.reshape(-1, batch_size, rows.shape[1])
    return [to_batch(batch) for batch in batches[rank::world_size]]


def _held_out_slice(source: TrainingSource, num_bytes: int, seed: int) -> list[Ids]:
    """Ids of held-out documents of ``source``, the last one cut so that they have ``num_bytes``."""
    found: list[Ids] = []
    for document in source.held_out_documents(seed):
        if source.settings.max_document_bytes:
            document = cut_at_character_boundary(document, source.settings.max_document_bytes)
        found.append(encode_document(cut_at_character_boundary(document, num_bytes), source.settings))
        num_bytes -= len(document)
        if num_bytes <= 0:
            break
    return found


def to_batch(rows: Ids, position: Cursors | None = None) -> Batch:
    """Splits rows [B, L + 1] into inputs and targets."""
    ids = torch.from_numpy(rows)
    return Batch(input_ids=ids[:, :-1].long(), targets=ids[:, 1:].long(), position=position)


def merge_cursors(into: Cursors, newer: Cursors) -> None:
    """Overwrites the cursors of the streams that ``newer`` has."""
    for source, cursors in newer.items():
        into.setdefault(source, {}).update(cursors)
