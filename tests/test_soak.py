"""A long run does not accumulate memory, files or threads."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

STEPS = int(os.environ.get("SHARDTRAIN_SOAK_STEPS", "4000"))
"""Number of steps. docs/scale.md has the result of 100,000."""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.nightly("thousands of steps, which take more than a minute")
def test_long_run_does_not_accumulate_resources(tmp_path):
    path = Path(__file__).parents[1] / "benchmarks/soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    growth = soak.grown(soak.soak(STEPS, 1, tmp_path / "run"))

    # an asynchronous save may be in progress
    assert growth["files"] <= 1, growth
    assert growth["threads"] <= 1, growth
    # a leak of 1 KiB per step is 90 MiB in 100,000 steps; checkpoints change the heap by a few MiB
    assert growth["mib"] <= 40 + growth["steps"] / 1024, growth
