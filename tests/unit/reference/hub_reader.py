"""A program that reads hub datasets as it is told, a JSON object a line: HF_ENDPOINT counts at the libraries' import.

It answers with the rows, cursors and log lines, or with the error.
"""

from __future__ import annotations

import json
import logging
import sys

from reading import read_leg

from spider_titan.curriculum import PhaseConfig
from spider_titan.data import hub
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.loader import build_validation_batches
from spider_titan.data.problems import SourceError
from spider_titan.data.rows import Cursor
from spider_titan.data.sources import load_sources

hub.FIRST_DELAY = 0.05


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def answer(source: dict, data: dict, steps: list[int], cursors: dict, world_size: int) -> dict:
    given = {name: {int(shard): Cursor(*cursor) for shard, cursor in of.items()} for name, of in cursors.items()}
    config = DataConfig({"web": SourceConfig(kind="hub", **source)}, [PhaseConfig(weights={"web": 1})], **data)
    sources = load_sources(config)
    held_out = []
    if config.held_out_fraction:
        batches = build_validation_batches(
            config, sources, {"web": 1}, seq_len=16, batch_size=2, num_bytes=10**6, seed=1
        )
        held_out = [batch.targets.tolist() for batch in batches["web"]]
    rows, after = read_leg(config, sources, range(*steps), given, world_size)
    return {"rows": rows, "cursors": after, "held_out": held_out, "describe": sources["web"].describe()}


def main() -> None:
    handler = Lines()
    logging.getLogger("spider_titan").addHandler(handler)
    for line in sys.stdin:
        handler.lines.clear()
        try:
            reply = answer(**json.loads(line))
        except SourceError as error:
            reply = {"error": str(error)}
        print(json.dumps({**reply, "log": handler.lines}), flush=True)


if __name__ == "__main__":
    main()
