"""What a fixture of a module makes, made by the first of pytest-xdist's workers that needs it."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest


def made_once(places: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """``make()``, which is picklable, or what another worker has made under this name in the same run of pytest.

    Tests of a file are dealt to several workers, each of which would make what a module's fixture gives.
    """
    base = places.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = root / f"once-{name}.pickle"
    with (root / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # left when the file is closed, or its process ends
        if not made.exists():
            value = pickle.dumps(make())
            made.with_suffix(".part").write_bytes(value)
            made.with_suffix(".part").rename(made)
        return pickle.loads(made.read_bytes())
