"""A run of two agents continues from the memory of its nodes after its ranks or a node were killed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import forked
import pytest

from shardtrain.utils import temporary

ROOT = Path(__file__).parents[2]
STEPS = 24
KILLS = 3

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="ranks end with their agent by Linux's help"
    ),
    pytest.mark.slow,
    pytest.mark.nightly(
        "four rounds of a rendezvous of two nodes",
        by="tests/checkpoint/test_snapshots.py::test_newest_complete_snapshot_is_restored",
    ),
]


def test_kill_costs_at_most_one_completed_step(tmp_path: Path) -> None:
    """``benchmarks/snapshot_kills.py`` does the same with 100 kills."""
    path = ROOT / "benchmarks/snapshot_kills.py"
    spec = importlib.util.spec_from_file_location("snapshot_kills", path)
    assert spec is not None and spec.loader is not None

    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark
    spec.loader.exec_module(benchmark)

    def start(command: list[str], names: dict[str, str]) -> Any:
        return forked.Popen(command, env=names, cwd=ROOT)

    before = {*temporary.SHARED_MEMORY.glob("shardtrain-snapshots-*")}
    kinds = benchmark.run(tmp_path / "killed", STEPS, KILLS, start)
    assert len(kinds) == KILLS
    assert max(benchmark.lost_steps(tmp_path / "killed"), default=0) <= 1

    benchmark.run(tmp_path / "undisturbed", STEPS, 0, start)
    killed = dict(benchmark.logged(tmp_path / "killed"))
    assert killed == dict(benchmark.logged(tmp_path / "undisturbed"))
    assert len(killed) == STEPS

    # Agents remove their snapshot folders when they end. The next start removes the folder of a
    # killed agent.
    remaining = {*temporary.SHARED_MEMORY.glob("shardtrain-snapshots-*")} - before
    with temporary.temporary_folder():
        assert not [folder for folder in remaining if folder.exists()]
