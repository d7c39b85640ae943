"""No process survives a killed rank or launcher, measured with SHARDTRAIN_SUDDEN_ENDS kills of each (default 1)."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import patience
import pytest
from hangs import config, run
from launched import alive, end, no_orphans, record, wait_for

from shardtrain.utils import temporary

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="forks of a process that has imported torch"
)

ENDS = int(os.environ.get("SHARDTRAIN_SUDDEN_ENDS", "1"))
LIMIT_SECONDS = 10.0


def pid_of(folder: Path, rank: int) -> int:
    path = folder / f"pid-{rank}"
    wait_for(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def next_start_removes_others(places: Path) -> bool:
    """True if the folder of a new start is the only one."""
    with temporary.temporary_folder() as new_folder:
        return [path for path in places.iterdir() if path.name.startswith(temporary.PREFIX)] == [
            new_folder
        ]


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_all_processes_are_gone_within_ten_seconds_of_a_kill(tmp_path, victim, monkeypatch):
    seconds = []
    places = tmp_path / "temporary"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    for number in range(ENDS):
        folder = tmp_path / str(number)
        process = run(config(folder, steps=1000, on_data_end="repeat"))
        pids = [pid_of(folder, rank) for rank in range(2)]
        # Kill it during steps, saves and validation.
        wait_for(lambda folder=folder: (folder / "metrics.jsonl").exists())
        time.sleep(0.05 * number)
        started = time.monotonic()
        os.kill(pids[number % 2] if victim == "rank" else process.pid, signal.SIGKILL)
        wait_for(lambda pids=pids: not any(alive(pid) for pid in pids), LIMIT_SECONDS)
        status = end(process)
        seconds.append(time.monotonic() - started)

        assert no_orphans(folder)
        # A killed launcher leaves its temporary folder. The next start removes it.
        leftovers = [path for path in places.iterdir() if path.name.startswith(temporary.PREFIX)]
        assert len(leftovers) == (victim == "launcher")
        # Every fork of the launcher holds the lock, and on a busy machine the last may outlive the
        # ranks.
        wait_for(lambda: next_start_removes_others(places), LIMIT_SECONDS)
        if victim == "rank":
            assert (status, record(folder)["rank"], record(folder)["code"]) == (6, number % 2, 6)

    seconds.sort()
    p95 = seconds[int(0.95 * ENDS)]
    print(f"\n{ENDS} kills of a {victim}: all gone after p95 {p95:.1f} s, max {seconds[-1]:.1f} s")
    assert seconds[-1] <= patience.seconds(LIMIT_SECONDS)
