"""Imports of libraries that warn of what does not concern the user."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torchao_import() -> Iterator[None]:
    """For importing torchao, which warns of kernels for other devices and of its own use of a deprecated function."""
    names = ("torchao", "torch.utils._pytree")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
