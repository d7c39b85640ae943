"""Rules of the watchdog: when a run hangs, which rank is blamed, which is slow, and which differs from the others."""

from __future__ import annotations

import dataclasses
import gc
import json
import mmap
import os
import socket
import statistics
import sys
import threading

import patience
import pytest
import torch
import torch.distributed as dist
from hangs import config, run
from hypothesis import given
from hypothesis import strategies as st
from launched import end
from ranks import run_ranks
from tiny import shallow_config

from shardtrain.distributed import config_consistency, process_group
from shardtrain.distributed.cpu import shared_barrier, shared_memory
from shardtrain.resilience.watchdog import rank_heartbeat, stack
from shardtrain.resilience.watchdog.hang_detector import HangDetector, from_json, to_json
from shardtrain.resilience.watchdog.rank_heartbeat import Heartbeat
from shardtrain.resilience.watchdog.stragglers import (
    WINDOWS,
    Stragglers,
    common,
    find_odd,
    median_without,
)
from shardtrain.resilience.watchdog.watchdog import beat_seconds, monitors
from shardtrain.utils import activity
from shardtrain.utils.activity import Mark
from shardtrain.utils.errors import ConfigError, PeerError

LIMIT = 30.0
BEAT = 2.0
WAITING = {"collective": "all_reduce", "at": "train.py:9 in _read"}


def say(beat: int, **fields) -> Heartbeat:
    """Return a heartbeat of a rank in step 12."""
    fields = {"limit_seconds": LIMIT, "step": 12, "phase": "step", "entered": 40, **fields}
    return Heartbeat(beat, "node7", **fields)


def judge(signs_at, seconds: float = 100.0, size: int = 2, **limits):
    """Return the first verdict and its time. ``signs_at(beat)`` returns the heartbeats of ranks at a beat."""
    detector = HangDetector(size, BEAT, **{"cold_limit": 300.0, "warm_limit": 100.0, **limits})
    for beat in range(int(seconds / BEAT)):
        if verdict := detector.observe(100 + beat * BEAT, signs_at(beat)):
            return verdict, beat * BEAT
    return None


def test_progressing_run_never_counts_as_hanging():
    assert (
        judge(lambda beat: {0: say(beat, entered=beat // 10), 1: say(beat, **WAITING)}, 1000)
        is None
    )
    assert (
        judge(lambda beat: {0: say(beat, ticks=beat // 10), 1: say(beat, **WAITING)}, 1000) is None
    )


def test_rank_without_heartbeats_is_blamed_first():
    signs = lambda beat: {0: say(beat), 1: say(min(beat, 2), phase="data"), 2: say(beat, **WAITING)}  # noqa: E731
    verdict, seconds = judge(signs, size=3)
    assert (verdict.rank, verdict.phase, verdict.num_silent) == (1, "data", 1)
    assert verdict.message == (
        "has not arrived and sends no heartbeat: last seen in phase data of step 12, 30 s ago"
    )
    assert LIMIT <= seconds <= LIMIT + 2 * BEAT


@pytest.mark.parametrize("size", [64, 16_384])
def test_a_verdict_has_a_bounded_size_whatever_the_ranks_do(size):
    """Every node receives the verdict. Each rank is in a different place, and every second rank is silent."""

    def signs(beat):
        places = {rank: f"train.py:{rank} in step" for rank in range(size)}
        signs_of_ranks = {}
        for rank in range(size):
            last_beat = beat if rank % 2 else min(beat, 2)
            signs_of_ranks[rank] = say(last_beat, at=places[rank])
        return signs_of_ranks

    verdict, _ = judge(signs, size=size)

    assert verdict.num_silent == size // 2
    assert "nor have ranks 2,4,6" in verdict.message
    assert len(to_json(verdict)) < 4000
    assert from_json(to_json(verdict)) == verdict


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_live_rank_outside_a_collective_is_blamed(culprit):
    def signs(beat):
        return {rank: say(beat, **({} if rank == culprit else WAITING)) for rank in range(3)}

    verdict, _ = judge(signs, size=3)

    assert verdict.rank == culprit
    others = {0: "1-2", 1: "0,2", 2: "0-1"}[culprit]
    position = "phase step of step 12, waits in all_reduce (train.py:9 in _read)"
    assert f"ranks {others}: {position}" in verdict.table


def test_rank_that_never_sends_a_heartbeat_is_blamed():
    verdict, seconds = judge(lambda beat: {0: say(beat, **WAITING)})
    assert (verdict.rank, verdict.num_silent) == (1, 1)
    assert seconds <= LIMIT + 2 * BEAT
    assert judge(lambda beat: {0: say(beat, is_cold=True)}) is None, (
        "no rank waits, so the limit is longer"
    )


def test_ranks_furthest_behind_are_blamed():
    def signs(beat):
        return {
            0: say(beat),
            1: say(beat, entered=38),
            2: say(beat, entered=38),
            3: say(beat),
        }

    verdict, _ = judge(signs, size=4)

    assert verdict.rank == 1
    assert verdict.message.endswith("; nor have ranks 2")


def test_ranks_in_different_collectives_are_all_named():
    def signs(beat):
        other = {"collective": "all_gather", "at": "mine.py:3 in f"}
        return {rank: say(beat, **(other if rank == 1 else WAITING)) for rank in range(4)}

    verdict, _ = judge(signs, size=4)

    assert verdict.rank == 1
    assert (
        "ranks 0,2-3 in all_reduce (train.py:9 in _read), rank 1 in all_gather (mine.py:3 in f)"
        in verdict.message
    )


def test_network_is_suspected_if_all_wait_in_one_collective():
    verdict, _ = judge(lambda beat: {0: say(beat, **WAITING), 1: say(beat, **WAITING)})
    assert "no rank is behind; check the network" in verdict.message


def test_rank_that_exits_early_is_blamed():
    verdict, _ = judge(lambda beat: {0: say(beat, **WAITING), 1: say(0, has_left=True)})
    assert verdict.rank == 1
    assert verdict.message == "has left in phase step of step 12, but other ranks wait for it"
    assert (
        judge(
            lambda beat: {
                0: say(0, has_left=True, phase="end"),
                1: say(0, has_left=True, phase="end"),
            }
        )
        is None
    )


def test_before_the_end_of_the_first_step_only_a_wait_is_a_hang():
    cold = {"is_cold": True, "limit_seconds": 300.0, "phase": "compile"}
    assert judge(lambda beat: {0: say(beat, **cold), 1: say(beat, **cold)}, 2000) is None
    verdict, seconds = judge(
        lambda beat: {0: say(beat, **cold), 1: say(beat, **cold, **WAITING)}, 2000
    )
    assert verdict.rank == 0
    assert seconds < 300, "PyTorch's timeout comes first, and would name the wrong rank"


def test_long_compilation_may_end_at_different_times():
    cold = {"is_cold": True, "limit_seconds": 300.0, "phase": "compile"}

    def signs(done: int, last_done: int):
        """Return a function that returns the heartbeats of three compiling ranks at a beat.

        Rank 0 compiles until all ranks proceed at ``last_done``. Rank 1 waits from ``done`` on, and rank 2 from
        three beats before ``last_done``.
        """

        def compile_until(beat: int, end: int):
            waiting = WAITING if beat >= end else {}
            return say(beat, **cold, **waiting)

        def signs_at(beat: int):
            if beat >= last_done:
                return {rank: say(beat, entered=41) for rank in range(3)}
            return {
                0: compile_until(beat, 10_000),
                1: compile_until(beat, done),
                2: compile_until(beat, last_done - 3),
            }

        return signs_at

    # the slowest rank may need 200 s more after 1,000 s of compilation
    assert judge(signs(500, 600), 1200, size=3) is None

    verdict, seconds = judge(signs(500, 700), 3000, size=3)
    assert verdict.rank == 0
    assert verdict.message.startswith("has not arrived")
    assert 1250 < seconds < 1300, "the timeout of the collective comes first"


def test_consecutive_collectives_count_as_progress():
    """On a slow network, a rank may gather layers for longer than the limit of one collective."""
    assert (
        judge(lambda beat: {rank: say(beat, ticks=beat, **WAITING) for rank in range(2)}, 1000)
        is None
    )
    assert (
        judge(lambda beat: {0: say(beat, **WAITING), 1: say(beat, ticks=beat, **WAITING)}, 1000)
        is None
    )

    verdict, seconds = judge(
        lambda beat: {rank: say(beat, ticks=min(beat, 99), **WAITING) for rank in range(2)}, 1000
    )
    assert "no rank is behind" in verdict.message
    assert seconds >= 99 * BEAT + LIMIT


def test_collectives_of_all_groups_and_of_shared_memory_are_counted():
    for before, gathered, added, met in run_ranks(2, begin_collectives):
        assert before < gathered < added <= met
        assert met == added + bool(shared_barrier.own_process().number)


def begin_collectives(rank: int) -> list[int]:
    group = dist.new_group([0, 1])
    counts = [process_group.collectives_begun()]
    dist.all_reduce(torch.ones(1), group=group)
    counts.append(process_group.collectives_begun())
    dist.all_reduce(torch.ones(1))
    counts.append(process_group.collectives_begun())
    process = shared_barrier.own_process()
    if process.number:
        shared_barrier.Barrier(mmap.mmap(-1, mmap.PAGESIZE), [process], 0, lambda: 1.0).wait()
    counts.append(process_group.collectives_begun())
    return counts


def test_hang_is_reported_before_the_collective_times_out():
    slow = {"limit_seconds": 500.0}
    verdict, seconds = judge(
        lambda beat: {0: say(beat, **slow), 1: say(beat, **slow, **WAITING)}, 600
    )
    assert verdict.rank == 0
    assert seconds < 100


def test_longest_limit_of_any_rank_applies_and_0_disables():
    _, seconds = judge(
        lambda beat: {0: say(beat, limit_seconds=60.0), 1: say(beat, **WAITING)}, 600
    )
    assert 60 <= seconds <= 64
    assert (
        judge(lambda beat: {0: say(beat, limit_seconds=0.0), 1: say(beat, **WAITING)}, 2000) is None
    )


def test_suspended_watchdog_blames_nobody():
    detector = HangDetector(2, BEAT, 300.0, 100.0)
    for now in (100.0, 102.0, 2000.0, 2002.0, 2020.0):
        assert detector.observe(now, {0: say(int(now)), 1: say(5, **WAITING)}) is None


def test_verdicts_and_heartbeats_round_trip_through_json_and_other_text_is_ignored():
    verdict, _ = judge(lambda beat: {0: say(beat, **WAITING), 1: say(beat)})
    assert from_json(to_json(verdict)) == verdict
    for text in (
        "",
        "null",
        "[]",
        '"x"',
        '{"beat": true}',
        '{"beat": 1, "host": 3}',
        '{"beat":1,"host":"a","x":1}',
    ):
        assert rank_heartbeat.read(text) is None
    assert rank_heartbeat.read(rank_heartbeat.write(say(3))) == say(3)


def test_number_of_monitors_does_not_grow_with_the_number_of_ranks():
    assert monitors(1) == {0}
    assert monitors(2) == {0, 1}
    assert monitors(4096) == {0, 1, 2048, 4095}
    assert beat_seconds(30) == beat_seconds(0) == 2.0
    assert beat_seconds(1) == 0.1


def mark(begun: int, facts: str = "step", work: int = 25, samples: int = 50) -> Mark:
    return Mark(begun, facts, begun * 0.1, 0, begun * work, begun * samples)


def test_rank_counts_as_slow_after_five_consecutive_windows():
    stragglers = Stragglers(4)
    slow_ranks = []
    signs = {rank: say(0) for rank in range(4)}
    for window in range(WINDOWS + 2):
        marks = {rank: mark(window, work=48 if rank == 2 else 25) for rank in range(4)}
        slow_ranks.append([straggler.rank for straggler in stragglers.add(marks, signs) or []])

    assert slow_ranks == [[]] * WINDOWS + [[2], [2]]


def test_ranks_of_other_pipeline_stages_are_not_peers():
    stragglers = Stragglers(4, num_stages=2)
    for window in range(3 * WINDOWS):
        marks = {rank: mark(window, work=48 if rank < 2 else 20) for rank in range(4)}
        assert not stragglers.add(marks, {rank: say(0) for rank in range(4)})


def test_window_with_few_samples_is_extended():
    stragglers = Stragglers(2)
    signs = {0: say(0), 1: say(0)}
    results = []
    for window in range(8):
        marks = {0: mark(window, samples=8, work=4), 1: mark(window, samples=8, work=7)}
        results.append(stragglers.add(marks, signs))

    assert [result is None for result in results] == [
        True,
        True,
        True,
        False,
        True,
        True,
        False,
        True,
    ]


def test_latest_common_marks_are_compared():
    signs = {
        0: say(1, marks={1: mark(7), 16: mark(4)}),
        1: say(1, marks={1: mark(8), 16: mark(4, "lost")}),
    }
    assert common(signs, 2, after=4) is None
    assert common(signs, 3, after=0) is None
    assert find_odd({0: mark(4), 1: mark(4)}, signs) is None

    odd = find_odd(common(signs, 2, after=0), signs)
    assert odd.rank == 1
    assert odd.message.endswith("rank 0: step; rank 1: lost")


def test_marks_count_steps_of_this_process():
    counts = activity.restart(mark_steps=2)
    for step in range(11, 50):
        activity.begin_step(step, {"step": step})
    assert (counts.step, counts.begun) == (49, 39)
    assert {grain: (mark.begun, mark.facts) for grain, mark in counts.marks.items()} == {
        1: (38, "step 48"),
        16: (32, "step 42"),
    }


def waits(rank: int, shares_memory: bool) -> str:
    """Return the position of rank 0 in its stack while it waits for rank 1 in a collective."""
    positions: list[stack.StackPosition] = []
    exchange = shared_memory.Exchange.between(dist.group.WORLD) if shares_memory else None
    if rank == 0:
        go = threading.Event()

        def look():
            while not positions or not positions[-1].collective:
                positions.append(stack.main_thread())
            go.set()
            dist.distributed_c10d._get_default_store().set("go", "1")

        threading.Thread(target=look, daemon=True).start()
    else:
        dist.distributed_c10d._get_default_store().get("go")
    if exchange is None:
        dist.all_reduce(torch.ones(1))
    else:
        exchange.all_gather(torch.ones(1))
    return f"{positions[-1].collective} {positions[-1].at}" if positions else ""


def test_wait_in_a_collective_is_detected_in_the_stack():
    assert "all_reduce test_watchdog.py:" in run_ranks(2, waits, False)[0]


@pytest.mark.skipif(not shared_barrier.own_process().number, reason="no futexes of Linux on x86-64")
def test_wait_in_shared_memory_is_detected_in_the_stack():
    assert run_ranks(2, waits, True)[0].startswith("shared_barrier shared_barrier.py:")


def test_inspecting_the_stack_keeps_no_object_alive():
    collected = []

    def look():
        gc.collect()
        gc.disable()
        try:
            for _ in range(50):
                stack.main_thread()
            collected.append(gc.collect())
        finally:
            gc.enable()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert collected[0] < 10, "a reference cycle through a frame keeps tensors alive"


def test_work_inside_pytorch_frames_is_not_a_wait():
    seen = []

    class Looks(torch.nn.Module):
        def forward(self, x):
            seen.append(stack.locate(sys._getframe()))
            return x

    torch.nn.Sequential(Looks())(torch.ones(1))

    assert not seen[0].collective
    assert seen[0].at.startswith("test_watchdog.py:")
    assert not seen[0].compiling
    assert not seen[0].debugging


# the value of an option, so it must be equal on all ranks
ARRIVAL_SECONDS = round(patience.seconds(2))


def agree(rank: int, changes: dict[int, dict], environment: dict[int, dict] | None = None) -> str:
    """Return the error of one rank when ranks compare their options, or an empty string.

    ``changes`` are options of some ranks, and ``environment`` are other facts, such as versions.
    """
    store = dist.distributed_c10d._get_default_store()
    config = shallow_config(**changes.get(rank, {}))
    comm = dataclasses.replace(config.comm, init_timeout_seconds=ARRIVAL_SECONDS)
    facts = config_consistency.facts_of
    config_consistency.facts_of = lambda *arguments: {
        **facts(*arguments),
        **(environment or {}).get(rank, {}),
    }
    try:
        config_consistency.check(dataclasses.replace(config, comm=comm), store, rank, 3)
    except (ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_with_equal_options_continue():
    assert run_ranks(3, agree, {1: {"job": {"dump_folder": "elsewhere"}}}) == [""] * 3


@pytest.mark.parametrize(
    ("rates", "named", "other"),
    [([1, 1, 5], 2, 0), ([1, 5, 1], 1, 0), ([5, 1, 1], 0, 1), ([1, 2, 3], 1, 0)],
)
def test_rank_whose_options_differ_from_most_others_is_named(rates, named, other):
    options = {rank: {"optimizer": {"lr": float(rate)}} for rank, rate in enumerate(rates)}
    errors = run_ranks(3, agree, options)
    differing = f"{rates[other]}.0 on rank {other} and {rates[named]}.0 on rank {named}"
    assert set(errors) == {
        f"ConfigError: rank {named} on {socket.gethostname()}: ranks differ in options: optimizer.lr={differing}; "
        "give every rank the same file and command line"
    }


def test_ranks_with_different_versions_stop_and_all_versions_are_named():
    errors = run_ranks(3, agree, {}, {1: {"torch": "1.0"}, 2: {"torch": "1.0"}})
    assert len(set(errors)) == 1
    start = f"ConfigError: rank 0 on {socket.gethostname()}: ranks differ in torch: "
    assert errors[0].startswith(f"{start}1.0 on rank 1, 2, 2.")


def test_missing_rank_is_named():
    class Store(dict):
        def get(self, key):
            return self[key].encode()

        def set(self, key, value):
            self[key] = value

        def check(self, keys):
            return all(key in self for key in keys)

    comm = dataclasses.replace(shallow_config().comm, init_timeout_seconds=1)
    config = dataclasses.replace(shallow_config(), comm=comm)
    facts = config_consistency.facts_of(config, 4)
    store = Store({"facts-1": json.dumps([facts, {}])})

    with pytest.raises(
        PeerError, match="rank 2, 3 has not arrived within comm.init_timeout_seconds=1"
    ):
        config_consistency._compare(store, config, facts, 4)


CLEAN_RUNS = int(os.environ.get("SHARDTRAIN_CLEAN_RUNS", "1"))


def only_steps(folder):
    """Return a configuration with 24 short steps, without saves and validation, and windows of 2 steps."""
    defaults = shallow_config()
    steps = config(folder, comm={"straggler_window_steps": 2}, steps=24, seq_len=16)
    return dataclasses.replace(
        steps, validation=defaults.validation, checkpoint=defaults.checkpoint
    )


def slow_lines(folder) -> list[str]:
    return [
        line
        for line in (folder / "logs/rank-0.log").read_text().splitlines()
        if " is slow: " in line
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="forks of a process that has imported torch")
def test_slow_rank_is_named_in_log_and_metrics(tmp_path):
    assert end(run(only_steps(tmp_path), "slow", (1,))) == 0
    lines = slow_lines(tmp_path)
    assert len(lines) == 1, lines
    assert "WARNING rank 1 on " in lines[0], lines
    assert "mostly in phase step" in lines[0], lines
    assert '"stragglers": 1.0' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="forks of a process that has imported torch")
@pytest.mark.nightly(
    "tests the absence of a report",
    by="tests/resilience/test_watchdog.py::test_slow_rank_is_named_in_log_and_metrics",
)
def test_equal_ranks_are_not_reported_as_slow(tmp_path):
    for number in range(CLEAN_RUNS):
        assert end(run(only_steps(tmp_path / str(number)))) == 0
        assert slow_lines(tmp_path / str(number)) == []


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=12), st.data())
def test_expected_work_is_the_median_of_all_other_ranks(
    works: list[float], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(works) - 1))
    others = works[:place] + works[place + 1 :]
    assert median_without(sorted(works), works[place]) == statistics.median(others)
