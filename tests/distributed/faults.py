"""Losses that are not finite, on purpose."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from spider_titan.spec import LossTerms
from spider_titan.trainer import Trainer


def poison(trainer: Trainer, steps: Collection[int], kind: str = "loss", rank: int = 0) -> None:
    """Makes the loss of ``steps``, counted from 0, NaN on one rank; or with ``gradient``, only its gradient."""
    real = trainer.spec.loss

    def loss(*args: Any) -> LossTerms:
        terms = real(*args)
        if trainer.progress.step not in steps or trainer.world.rank != rank:
            return terms
        if kind == "loss":
            return LossTerms(terms.total * math.nan, {name: value * math.nan for name, value in terms.sums.items()})
        total = terms.total * 1.0
        total.register_hook(lambda gradient: gradient * math.inf)
        return LossTerms(total, terms.sums)

    trainer.spec = dataclasses.replace(trainer.spec, loss=loss)
