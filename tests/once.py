"""Share the value of a module's fixture between pytest-xdist workers: the first one that needs it computes it."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest


def made_once(places: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """Return ``make()``, or the value that another worker of the same pytest run has stored under this name.

    The tests of a file run in several workers, each of which would otherwise compute the value. It must be picklable.
    """
    base = places.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    stored = root / f"once-{name}.pickle"
    with (root / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed or the process ends
        if not stored.exists():
            value = pickle.dumps(make())
            stored.with_suffix(".part").write_bytes(value)
            stored.with_suffix(".part").rename(stored)
        return pickle.loads(stored.read_bytes())
