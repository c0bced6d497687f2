"""Weights & Biases, for those who have it: the numbers of metrics.jsonl, sent as they are logged.

The package reads its own settings from the environment: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE and so on.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spider_titan.run_directory import explain_disk_errors

DEFAULT_PROJECT = "spider_titan"


class WeightsAndBiases:
    """One run there for one run directory: a run that goes on adds to its curves.

    Args:
        folder: The run directory; its name is the run's.
        config_text: The effective configuration, shown with the run.

    Raises:
        ValueError: If the package is not installed.
        DiskError: If the run directory cannot be written.
    """

    def __init__(self, folder: Path, config_text: str) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ModuleNotFoundError as error:
            if error.name != "wandb":
                raise
            raise ValueError(
                "metrics.enable_wandb = true needs the package wandb, which is not installed; "
                "run pip install wandb, or set it to false"
            ) from error
        id_file = folder / "wandb_id"
        with explain_disk_errors(id_file):
            if not id_file.exists():
                id_file.write_text(wandb.util.generate_id(), encoding="utf-8")
            run_id = id_file.read_text(encoding="utf-8")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
            name=folder.name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config={"toml": config_text},
        )

    def add(self, step: int, values: Mapping[str, float | int | str | None]) -> None:
        """Sends the numbers of a step; texts and what is not known are left out."""
        numbers = {
            name: value for name, value in values.items() if isinstance(value, float | int) and math.isfinite(value)
        }
        self._run.log(numbers, step=step)

    def close(self) -> None:
        """Sends what is left; nothing may be added afterwards."""
        self._run.finish()
