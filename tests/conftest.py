"""Set-up for all tests: one thread per process, so that ranks do not fight for cores, and long tests first."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

LONGEST_FIRST = ("test_grid.py", "test_docs.py", "test_expert.py", "test_same_numbers.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start what takes longest first, so that no core is idle at the end."""
    ranks = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(LONGEST_FIRST)))
