"""What the tests of several ranks share."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder starts ranks."""
    for item in items:
        if "distributed" in item.path.parts:
            item.add_marker(pytest.mark.distributed)
