"""Batches for the trainer: endless ones for training, a fixed slice for validation.

B: rows of a micro-batch. L: positions of a row.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from spider_titan.curriculum import Curriculum
from spider_titan.data.config import DataConfig
from spider_titan.data.mixture import Mixture
from spider_titan.data.order import permutation
from spider_titan.data.packing import RowPacker, pack_all
from spider_titan.data.sources import SplitSource, load_sources
from spider_titan.data.tokenizer import Ids, cut_at_character_boundary, encode
from spider_titan.spec import Batch
from spider_titan.vocabulary import PAD_ID

logger = logging.getLogger(__name__)

# Raised by the library's own constructor, whatever it is given.
warnings.filterwarnings("ignore", message=r"'set_vital' is deprecated")


class RowStream(Iterator[Ids]):
    """The endless rows [L + 1] of one rank, drawn from the mixture of the step that each row belongs to.

    A step's rows come from as many packers, each with documents of its own: a document that is longer than a row goes
    on in the same place of the next step, and a step sees as many documents as it has rows. Documents that are under
    way when the phase changes are finished first. The state is the number of rows, the mixture's counts and positions,
    and what waits in the packers.

    Args:
        mixture: Where documents come from.
        curriculum: Step -> phase.
        seq_len: L.
        rows_per_step: Rows that this rank consumes in an optimizer step.
    """

    def __init__(self, mixture: Mixture, curriculum: Curriculum, *, seq_len: int, rows_per_step: int) -> None:
        self.mixture = mixture
        self.packers = [RowPacker(seq_len) for _ in range(rows_per_step)]
        self.under_way = [""] * rows_per_step
        """The source of each packer's last document, which is the only one that still waits."""
        self.num_rows = 0
        self._curriculum = curriculum

    def __next__(self) -> Ids:
        step, place = divmod(self.num_rows, len(self.packers))
        waiting: Counter[str] = Counter()
        for source, packer in zip(self.under_way, self.packers, strict=True):
            waiting[source] += packer.num_waiting
        self.mixture.enter_phase(self._curriculum.index_at(step), waiting)
        packer = self.packers[place]
        while not packer.is_ready:
            self.under_way[place], ids = self.mixture.next_document()
            packer.add(ids)
        self.num_rows += 1
        return packer.take()


class TrainBatches(IterableDataset[Batch]):
    """Endless micro-batches of one rank.

    With W worker processes, worker w makes the batches w, w + W, w + 2W, ...; the loader asks them in turn, so the
    batches are those of a single process. To know where its rows are, a worker walks the documents of all batches:
    workers take reading off the trainer's process, but do not divide it among them.

    Args:
        sources: What the phases read.
        config: The ``[data]`` section.
        curriculum: Step -> phase.
        seq_len: L.
        batch_size: B.
        rows_per_step: Rows that this rank consumes in an optimizer step.
        rank: This rank among the data-parallel ones.
        world_size: How many of them there are.
        seed: ``training.seed``.
    """

    def __init__(
        self,
        sources: Mapping[str, SplitSource],
        config: DataConfig,
        curriculum: Curriculum,
        *,
        seq_len: int,
        batch_size: int,
        rows_per_step: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self._sources = sources
        self._max_document_bytes = config.max_document_bytes
        self._curriculum = curriculum
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._rows_per_step = rows_per_step
        self._rank = rank
        self._world_size = world_size
        self._seed = seed

    def __iter__(self) -> Iterator[Batch]:
        mixture = Mixture(
            self._sources,
            self._curriculum.phases,
            seed=self._seed,
            rank=self._rank,
            world_size=self._world_size,
            max_document_bytes=self._max_document_bytes,
        )
        rows = RowStream(mixture, self._curriculum, seq_len=self._seq_len, rows_per_step=self._rows_per_step)
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in itertools.count():
            batch = list(itertools.islice(rows, self._batch_size))
            if number % step == first:
                yield to_batch(np.stack(batch))


def build_train_loader(
    config: DataConfig,
    curriculum: Curriculum,
    *,
    seq_len: int,
    batch_size: int,
    rows_per_step: int,
    rank: int,
    world_size: int,
    seed: int,
) -> Iterable[Batch]:
    """Returns an endless iterable of micro-batches [B, L]; every row is full.

    Args:
        config: The ``[data]`` section.
        curriculum: Step -> phase. Its phases are those of ``config``.
        seq_len: L.
        batch_size: B.
        rows_per_step: Rows that this rank consumes in an optimizer step: a phase begins with exactly the step at which
            ``curriculum`` says so.
        rank: This rank among the data-parallel ones.
        world_size: How many of them there are.
        seed: ``training.seed``.

    Raises:
        ValueError: If a source cannot be read or has nothing to train on.
    """
    for name in sorted(set(config.sources) - set(config.used_sources)):
        logger.warning("data.sources.%s is not read: no phase gives it a weight", name)
    dataset = TrainBatches(
        load_sources(config),
        config,
        curriculum,
        seq_len=seq_len,
        batch_size=batch_size,
        rows_per_step=rows_per_step,
        rank=rank,
        world_size=world_size,
        seed=seed,
    )
    # The loader draws a seed for its workers; from a generator of its own, so that training's RNG does not move.
    generator = torch.Generator().manual_seed(seed)
    return StatefulDataLoader(dataset, batch_size=None, num_workers=config.num_workers, generator=generator)


def build_validation_batches(
    config: DataConfig,
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
        weights: Source name -> share of the slice; normalised.
        seq_len: L.
        batch_size: B.
        num_bytes: Bytes of the slice over all ranks, at least one a source. A source that holds out fewer
            than its share gives all it has.
        seed: Chooses the slice.
        rank: This rank among the data-parallel ones.
        world_size: How many of them there are.

    Raises:
        ValueError: If no source of ``weights`` has a held-out document, or a source cannot be read.
    """
    sources = load_sources(config)
    names = sorted(name for name, weight in weights.items() if weight > 0)
    total = sum(weights[name] for name in names)
    if not any(len(sources[name].held_out) for name in names):
        counts = ", ".join(f"{name} {len(sources[name].source)}" for name in names)
        raise ValueError(
            f"no document is held out for validation with data.held_out_fraction = {config.held_out_fraction} "
            f"(documents: {counts}); raise the fraction, add documents, or set validation.enable = false"
        )
    batches = {}
    for name in names:
        share = max(1, round(num_bytes * weights[name] / total))
        if documents := _held_out_slice(sources[name], share, config.max_document_bytes, seed):
            rows = pack_all(np.concatenate([encode(document) for document in documents]), seq_len)
            batches[name] = _share_out(rows, batch_size, rank, world_size)
    return batches


def _share_out(rows: Ids, batch_size: int, rank: int, world_size: int) -> list[Batch]:
    """This rank's batches of the rows [N, L + 1]."""
    rows_per_round = batch_size * world_size
    num_rounds = -(-len(rows) // rows_per_round)
    padded = np.full((num_rounds * rows_per_round, rows.shape[1]), PAD_ID, dtype=rows.dtype)
    padded[: len(rows)] = rows
    batches = padded.reshape(-1, batch_size, rows.shape[1])
    return [to_batch(batch) for batch in batches[rank::world_size]]


def _held_out_slice(source: SplitSource, num_bytes: int, max_document_bytes: int, seed: int) -> list[bytes]:
    """Held-out documents of ``source``, the last one cut so that they have ``num_bytes``."""
    if not len(source.held_out):
        logger.warning("data.sources.%s has no held-out document: it takes no part in validation", source.name)
    documents: list[bytes] = []
    for index in permutation(len(source.held_out), seed=seed, epoch=0, source=source.name):
        document = source.held_out_document(int(index))
        if max_document_bytes:
            document = cut_at_character_boundary(document, max_document_bytes)
        if len(document) >= num_bytes:
            return [*documents, cut_at_character_boundary(document, num_bytes)]
        documents.append(document)
        num_bytes -= len(document)
    return documents


def to_batch(rows: Ids) -> Batch:
    """Splits rows [B, L + 1] into inputs and targets."""
    ids = torch.from_numpy(rows.astype(np.int64))
    return Batch(input_ids=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())
