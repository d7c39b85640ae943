"""A run with a hanging rank ends soon, and the report names the correct rank and phase. These tests use real processes.

SHARDTRAIN_HANGS is the number of hangs at random ranks and places (default: 2). 200 hangs take about 25 minutes.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from hangs import LIMIT, PLACES, STEPS, config, run, run_foreign
from launched import alive, end, no_orphans, record, wait_for
from tiers import cases

from shardtrain.config.schema.watch_options import Profiling

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="forks of a process that has imported torch"
)

HANGS = int(os.environ.get("SHARDTRAIN_HANGS", "2"))


def log(folder: Path, rank: int) -> str:
    return (folder / f"logs/rank-{rank}.log").read_text()


def assert_named(folder: Path, rank: int, phase: str) -> None:
    report = record(folder)
    assert (report["code"], report["class"], report["rank"], report["phase"]) == (
        6,
        "Hang",
        rank,
        phase,
    ), report
    assert report["message"].startswith("has not arrived")
    lines = [line for line in (folder / "terminal").read_text().splitlines() if "error[" in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith(
        f"error[6]: rank {rank} (host {socket.gethostname()}) has not arrived"
    ), lines
    assert no_orphans(folder)


@pytest.mark.parametrize(
    ("place", "rank"), cases([("stop", 1), ("save", 0)], nightly=[("data", 0), ("validation", 1)])
)
def test_hanging_rank_is_named_with_its_phase(tmp_path, place, rank):
    assert end(run(config(tmp_path), place, (rank,))) == 6
    assert_named(tmp_path, rank, PLACES[place])

    other = 1 - rank
    assert "all_" in log(tmp_path, other)

    for living in range(2):
        if place != "stop" or living == other:
            assert "most recent call first" in log(tmp_path, living), (
                "a live rank did not write its stacks"
            )

    assert f"rank {other}: phase" in log(tmp_path, other), "the phases of all ranks are missing"


def test_stopped_data_worker_is_attributed_to_its_rank(tmp_path):
    assert end(run(config(tmp_path, workers=1), "worker", (1,))) == 6
    assert_named(tmp_path, 1, "data")
    assert f"data worker {(tmp_path / 'pid-worker').read_text()}: stopped" in log(tmp_path, 1)
    assert not alive(int((tmp_path / "pid-worker").read_text()))


def test_hanging_rank_reports_itself_if_the_store_does_not_answer(tmp_path):
    assert end(run(config(tmp_path), "data and store", (1,))) == 6
    assert_named(tmp_path, 1, "data")
    assert record(tmp_path)["message"].endswith("the store does not answer either")


def test_ranks_in_different_collectives_are_both_named_with_their_lines(tmp_path):
    assert end(run(config(tmp_path), "mismatch", (1,))) == 6

    report = record(tmp_path)
    assert (report["code"], report["phase"]) == (6, "step")
    assert "rank 0 in all_reduce (grad_clip.py:" in report["message"]
    assert "rank 1 in all_gather (collectives.py:" in report["message"]


def test_slow_validation_is_not_a_hang(tmp_path):
    assert end(run(config(tmp_path), "slow validation", (0, 1))) == 0
    assert record(tmp_path)["last_step"] == STEPS


def test_steps_longer_than_the_limit_are_not_a_hang(tmp_path):
    """The limit grows with the duration of steps, also during the second step, when only one duration is known."""
    assert end(run(config(tmp_path, steps=3), "long steps", (0, 1))) == 0
    assert record(tmp_path)["last_step"] == 3


def test_slow_write_of_a_trace_is_not_a_hang(tmp_path):
    run_config = dataclasses.replace(
        config(tmp_path), profiling=Profiling(enable_profiling=True, profile_freq=5)
    )

    assert end(run(run_config, "long trace", (0, 1))) == 0
    assert record(tmp_path)["last_step"] == STEPS


@pytest.mark.nightly(
    "real ranks",
    by="tests/resilience/test_watchdog.py::test_long_compilation_may_end_at_different_times",
)
@pytest.mark.parametrize(
    ("place", "culprits"), [("long first step", (0, 1)), ("long opening", (0,))]
)
def test_start_longer_than_its_limit_is_not_a_hang(tmp_path, place, culprits):
    run_config = config(tmp_path, comm={"init_timeout_seconds": 4 * LIMIT})
    assert end(run(run_config, place, culprits)) == 0
    assert record(tmp_path)["last_step"] == STEPS

    # The rank that only opens data slowly shows signs of life, so it causes no such warning.
    logged = [
        line
        for line in log(tmp_path, 0).splitlines()
        if "WARNING phase compile of step 1 has taken" in line
    ]

    assert len(logged) == (place == "long first step")


def test_with_a_foreign_launcher_rank_0_is_named_although_it_hosts_the_store(tmp_path):
    ranks = run_foreign(config(tmp_path), "stop", (0,))
    assert end(ranks[1]) == 6

    os.kill(ranks[0].pid, signal.SIGKILL)
    assert end(ranks[0]) == -signal.SIGKILL

    report = record(tmp_path)
    assert (report["code"], report["rank"], report["phase"]) == (6, 0, "step")
    assert "has not answered" in report["message"]
    assert "rank 1 waits in" in report["message"]
    assert "most recent call first" in log(tmp_path, 1)


def test_with_a_foreign_launcher_one_rank_reports_the_hang(tmp_path):
    ranks = run_foreign(config(tmp_path), "data", (1,))
    assert [end(rank) for rank in ranks] == [6, 6]
    report = record(tmp_path)
    assert (report["code"], report["rank"], report["phase"]) == (6, 1, "data")


def test_limit_of_0_disables_hang_detection(tmp_path):
    run_config = config(tmp_path, comm={"hang_timeout_seconds": 0, "train_timeout_seconds": 4})
    assert end(run(run_config, "data", (1,))) == 6
    assert record(tmp_path)["class"] == "PeerError"


def test_briefly_stopped_rank_continues(tmp_path):
    process = run(config(tmp_path), "stop", (1,))
    pid = tmp_path / "pid-1"
    wait_for(lambda: pid.exists() and is_stopped(int(pid.read_text())))
    time.sleep(LIMIT / 4)
    os.kill(int(pid.read_text()), signal.SIGCONT)

    assert end(process) == 0


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.nightly(
    "at random",
    by="tests/test_hangs.py::test_hanging_rank_is_named_with_its_phase",
)
def test_random_hangs_are_attributed_correctly(tmp_path):
    """Print the number of errors and the times (visible with pytest -s)."""
    dice = random.Random(HANGS)
    wrong = []
    seconds = []
    for number in range(HANGS):
        folder = tmp_path / str(number)
        count = 2 if number % 4 else 4
        rank = dice.randrange(count)
        place = dice.choice([place for place in PLACES if place != "worker"])
        axis = "data_parallel_shard_degree" if number % 2 else "data_parallel_replicate_degree"
        run_config = config(folder, parallelism={axis: count})
        process = run(run_config, place, (rank,), count)
        wait_for((folder / "hangs").exists)
        started = time.monotonic()
        assert end(process) == 6
        seconds.append(time.monotonic() - started)

        report = record(folder)
        is_named = (report.get("rank"), report.get("phase")) == (rank, PLACES[place])
        if not is_named or not no_orphans(folder):
            wrong.append((number, count, rank, place, report))

    # One report in a hundred may be wrong.
    seconds.sort()
    median = seconds[len(seconds) // 2]
    print(
        f"\n{HANGS} hangs with comm.hang_timeout_seconds={LIMIT}: {len(wrong)} wrong reports {wrong}"
    )
    print(
        f"from the hang to the end of all ranks: median {median:.1f} s, longest {seconds[-1]:.1f} s"
    )
    assert len(wrong) <= HANGS // 100, wrong
