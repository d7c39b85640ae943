"""A long run stays as it is: what it holds after many steps is what it held after few."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

STEPS = int(os.environ.get("SHARDTRAIN_SOAK_STEPS", "4000"))
"""100,000 are the figure of docs/scale.md."""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.nightly("thousands of steps, which take a minute and more")
def test_a_long_run_holds_no_more_at_its_end(tmp_path):
    path = Path(__file__).parents[1] / "benchmarks/soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    grown = soak.grown(soak.soak(STEPS, 1, tmp_path / "run"))
    assert grown["files"] <= 1 and grown["threads"] <= 1, grown  # one of them may be a save under way
    # 1 KiB a step would be 90 MiB in 100,000; the heap itself moves by some MiB as checkpoints come and go
    assert grown["mib"] <= 40 + grown["steps"] / 1024, grown
