"""Laws of the heartbeat's rules: when a run hangs, who is to blame, who is slow, and who is not like the others."""

from __future__ import annotations

import dataclasses
import gc
import json
import mmap
import os
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
from shardtrain.resilience.watchdog.stragglers import WINDOWS, Stragglers, common, find_odd, median_without
from shardtrain.resilience.watchdog.watchdog import beat_seconds, monitors
from shardtrain.utils import activity
from shardtrain.utils.activity import Mark
from shardtrain.utils.errors import ConfigError, PeerError

LIMIT, BEAT = 30.0, 2.0
WAITING = {"collective": "all_reduce", "at": "train.py:9 in _read"}


def say(beat: int, **fields) -> Heartbeat:
    """A sign of a rank in step 12."""
    fields = {"limit_seconds": LIMIT, "step": 12, "phase": "step", "entered": 40, **fields}
    return Heartbeat(beat, "node7", **fields)


def judge(signs_at, seconds: float = 100.0, size: int = 2, **limits):
    """The first verdict, and when; ``signs_at(beat)`` is what ranks say, every two seconds."""
    one = HangDetector(size, BEAT, **{"cold_limit": 300.0, "warm_limit": 100.0, **limits})
    for beat in range(int(seconds / BEAT)):
        if verdict := one.observe(100 + beat * BEAT, signs_at(beat)):
            return verdict, beat * BEAT
    return None


def test_a_run_that_moves_never_hangs():
    assert judge(lambda beat: {0: say(beat, entered=beat // 10), 1: say(beat, **WAITING)}, 1000) is None
    assert judge(lambda beat: {0: say(beat, ticks=beat // 10), 1: say(beat, **WAITING)}, 1000) is None


def test_a_rank_without_a_sign_of_life_is_to_blame_before_all_others():
    signs = lambda beat: {0: say(beat), 1: say(min(beat, 2), phase="data"), 2: say(beat, **WAITING)}  # noqa: E731
    verdict, seconds = judge(signs, size=3)
    assert (verdict.rank, verdict.phase, verdict.silent) == (1, "data", (1,))
    assert verdict.message == (
        "has not arrived and gives no sign of life: last seen in phase data of step 12, 30 s ago"
    )
    assert LIMIT <= seconds <= LIMIT + 2 * BEAT


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_of_living_ranks_the_one_in_no_collective_is_to_blame(culprit):
    def signs(beat):
        return {rank: say(beat, **({} if rank == culprit else WAITING)) for rank in range(3)}

    verdict, _ = judge(signs, size=3)
    others = ",".join(str(rank) for rank in range(3) if rank != culprit).replace("0,1", "0-1").replace("1,2", "1-2")
    assert verdict.rank == culprit
    assert f"ranks {others}: phase step of step 12, waits in all_reduce (train.py:9 in _read)" in verdict.table


def test_a_rank_that_never_speaks_is_to_blame():
    verdict, seconds = judge(lambda beat: {0: say(beat, **WAITING)})
    assert (verdict.rank, verdict.silent) == (1, (1,)) and seconds <= LIMIT + 2 * BEAT
    assert judge(lambda beat: {0: say(beat, is_cold=True)}) is None, "and where nobody waits there is time"


def test_of_several_in_no_collective_those_furthest_behind_are_to_blame():
    signs = lambda beat: {0: say(beat), 1: say(beat, entered=38), 2: say(beat, entered=38), 3: say(beat)}  # noqa: E731
    verdict, _ = judge(signs, size=4)
    assert verdict.rank == 1 and verdict.message.endswith("; nor have ranks 2")


def test_ranks_in_different_collectives_are_all_named():
    def signs(beat):
        other = {"collective": "all_gather", "at": "mine.py:3 in f"}
        return {rank: say(beat, **(other if rank == 1 else WAITING)) for rank in range(4)}

    verdict, _ = judge(signs, size=4)
    assert verdict.rank == 1
    assert "ranks 0,2-3 in all_reduce (train.py:9 in _read), rank 1 in all_gather (mine.py:3 in f)" in verdict.message


def test_where_all_wait_in_one_collective_the_network_is_suspected():
    verdict, _ = judge(lambda beat: {0: say(beat, **WAITING), 1: say(beat, **WAITING)})
    assert "none is behind; look at the network" in verdict.message


def test_a_rank_that_has_left_before_the_end_is_to_blame():
    verdict, _ = judge(lambda beat: {0: say(beat, **WAITING), 1: say(0, has_left=True)})
    assert verdict.rank == 1 and verdict.message == "has left in phase step of step 12, and others wait for it"
    assert judge(lambda beat: {0: say(0, has_left=True, phase="end"), 1: say(0, has_left=True, phase="end")}) is None


def test_before_the_first_step_is_done_only_a_wait_for_others_is_a_hang():
    cold = {"is_cold": True, "limit_seconds": 300.0, "phase": "compile"}
    assert judge(lambda beat: {0: say(beat, **cold), 1: say(beat, **cold)}, 2000) is None
    verdict, seconds = judge(lambda beat: {0: say(beat, **cold), 1: say(beat, **cold, **WAITING)}, 2000)
    assert verdict.rank == 0
    assert seconds < 300, "earlier than PyTorch's own error, which would name the wrong rank"


def test_ranks_that_have_compiled_for_long_may_be_done_at_different_times():
    cold = {"is_cold": True, "limit_seconds": 300.0, "phase": "compile"}

    def signs(done: int, last_done: int):
        arrives = lambda beat, at: say(beat, **cold, **(WAITING if beat >= at else {}))  # noqa: E731
        return lambda beat: {
            0: say(beat, entered=41) if beat >= last_done else arrives(beat, 10_000),
            1: say(beat, entered=41) if beat >= last_done else arrives(beat, done),
            2: say(beat, entered=41) if beat >= last_done else arrives(beat, last_done - 3),
        }

    assert judge(signs(500, 600), 1200, size=3) is None, "1,000 s of compilation, and 200 s for the slowest"
    verdict, seconds = judge(signs(500, 700), 3000, size=3)
    assert verdict.rank == 0 and verdict.message.startswith("has not arrived")
    assert 1250 < seconds < 1300, "before the error of the collective that waits longest"


def test_ranks_that_are_always_seen_in_a_collective_move_if_it_is_a_new_one():
    """As with layers that are gathered by a slow network, for longer than one collective may take."""
    assert judge(lambda beat: {rank: say(beat, ticks=beat, **WAITING) for rank in range(2)}, 1000) is None
    assert judge(lambda beat: {0: say(beat, **WAITING), 1: say(beat, ticks=beat, **WAITING)}, 1000) is None
    verdict, seconds = judge(lambda beat: {rank: say(beat, ticks=min(beat, 99), **WAITING) for rank in range(2)}, 1000)
    assert "none is behind" in verdict.message and seconds >= 99 * BEAT + LIMIT


def test_collectives_of_all_groups_are_counted_and_those_by_shared_memory():
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
    own = shared_barrier.own_process()
    if own.number:
        shared_barrier.Barrier(mmap.mmap(-1, mmap.PAGESIZE), [own], 0, lambda: 1.0).wait()
    counts.append(process_group.collectives_begun())
    return counts


def test_a_hang_is_declared_before_a_collective_ends_with_an_error():
    slow = {"limit_seconds": 500.0}
    verdict, seconds = judge(lambda beat: {0: say(beat, **slow), 1: say(beat, **slow, **WAITING)}, 600)
    assert verdict.rank == 0 and seconds < 100


def test_the_longest_limit_of_any_rank_counts_and_0_is_none():
    _, seconds = judge(lambda beat: {0: say(beat, limit_seconds=60.0), 1: say(beat, **WAITING)}, 600)
    assert 60 <= seconds <= 64
    assert judge(lambda beat: {0: say(beat, limit_seconds=0.0), 1: say(beat, **WAITING)}, 2000) is None


def test_a_watcher_that_was_asleep_itself_blames_nobody():
    one = HangDetector(2, BEAT, 300.0, 100.0)
    for now in (100.0, 102.0, 2000.0, 2002.0, 2020.0):
        assert one.observe(now, {0: say(int(now)), 1: say(5, **WAITING)}) is None


def test_a_verdict_and_a_sign_survive_their_journey_and_nothing_else_is_taken_for_one():
    verdict, _ = judge(lambda beat: {0: say(beat, **WAITING), 1: say(beat)})
    assert from_json(to_json(verdict)) == verdict
    for text in ("", "null", "[]", '"x"', '{"beat": true}', '{"beat": 1, "host": 3}', '{"beat":1,"host":"a","x":1}'):
        assert rank_heartbeat.read(text) is None
    assert rank_heartbeat.read(rank_heartbeat.write(say(3))) == say(3)


def test_a_few_ranks_watch_whatever_the_size_of_the_world():
    assert monitors(1) == {0} and monitors(2) == {0, 1} and monitors(4096) == {0, 1, 2048, 4095}
    assert beat_seconds(30) == beat_seconds(0) == 2.0 and beat_seconds(1) == 0.1


def mark(begun: int, facts: str = "step", work: int = 25, samples: int = 50) -> Mark:
    return Mark(begun, facts, begun * 0.1, 0, begun * work, begun * samples)


def test_a_rank_is_slow_after_five_windows_in_a_row_and_no_sooner():
    one, named = Stragglers(4), []
    for window in range(WINDOWS + 2):
        marks = {rank: mark(window, work=48 if rank == 2 else 25) for rank in range(4)}
        named.append([s.rank for s in one.add(marks, {rank: say(0) for rank in range(4)}) or []])
    assert named == [[]] * WINDOWS + [[2], [2]]


def test_ranks_of_other_stages_of_a_pipeline_are_not_peers():
    one = Stragglers(4, num_stages=2)
    for window in range(3 * WINDOWS):
        marks = {rank: mark(window, work=48 if rank < 2 else 20) for rank in range(4)}
        assert not one.add(marks, {rank: say(0) for rank in range(4)})


def test_a_window_with_few_samples_waits_for_the_next():
    one, signs = Stragglers(2), {0: say(0), 1: say(0)}
    found = [one.add({0: mark(w, samples=8, work=4), 1: mark(w, samples=8, work=7)}, signs) for w in range(8)]
    assert [slow is None for slow in found] == [True, True, True, False, True, True, False, True]


def test_marks_are_compared_where_all_ranks_have_made_the_same():
    signs = {0: say(1, marks={1: mark(7), 16: mark(4)}), 1: say(1, marks={1: mark(8), 16: mark(4, "lost")})}
    assert common(signs, 2, after=4) is None and common(signs, 3, after=0) is None
    assert find_odd({0: mark(4), 1: mark(4)}, signs) is None
    odd = find_odd(common(signs, 2, after=0), signs)
    assert odd.rank == 1 and odd.message.endswith("rank 0: step; rank 1: lost")


def test_marks_are_made_of_the_steps_begun_by_this_process():
    counts = activity.restart(mark_steps=2)
    for step in range(11, 50):
        activity.begin_step(step, {"step": step})
    assert (counts.step, counts.begun) == (49, 39)
    assert {grain: (mark.begun, mark.facts) for grain, mark in counts.marks.items()} == {
        1: (38, "step 48"),
        16: (32, "step 42"),
    }


def waits(rank: int, shares_memory: bool) -> str:
    """Where rank 0 is while it waits for rank 1 in a collective."""
    found: list[stack.StackPosition] = []
    exchange = shared_memory.Exchange.between(dist.group.WORLD) if shares_memory else None
    if rank == 0:
        go = threading.Event()

        def look():
            while not found or not found[-1].collective:
                found.append(stack.main_thread())
            go.set()
            dist.distributed_c10d._get_default_store().set("go", "1")

        threading.Thread(target=look, daemon=True).start()
    else:
        dist.distributed_c10d._get_default_store().get("go")
    if exchange is None:
        dist.all_reduce(torch.ones(1))
    else:
        exchange.give(torch.ones(1))
    return found[-1].collective + " " + found[-1].at if found else ""


def test_a_wait_in_a_collective_is_seen_in_the_stack():
    assert "all_reduce test_watchdog.py:" in run_ranks(2, waits, False)[0]


@pytest.mark.skipif(not shared_barrier.own_process().number, reason="no futexes of Linux on x86-64")
def test_a_wait_for_a_rank_that_shares_memory_is_seen_in_the_stack():
    assert run_ranks(2, waits, True)[0].startswith("shared_barrier shared_barrier.py:")


def test_looking_at_the_stack_keeps_nothing_alive():
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
    assert collected[0] < 10, "a cycle through a frame holds the tensors of a step"


def test_work_is_not_a_wait_though_pytorchs_own_frames_are_around_it():
    seen = []

    class Looks(torch.nn.Module):
        def forward(self, x):
            seen.append(stack.locate(sys._getframe()))
            return x

    torch.nn.Sequential(Looks())(torch.ones(1))
    assert not seen[0].collective and seen[0].at.startswith("test_watchdog.py:")
    assert not seen[0].compiling and not seen[0].debugging


COMES_SECONDS = round(patience.seconds(2))  # an option, so the same on each rank


def agree(rank: int, changes: dict[int, dict], environment: dict[int, dict] | None = None) -> str:
    """What the comparison of ranks says to one rank; rank r has other options, or other facts."""
    store = dist.distributed_c10d._get_default_store()
    one = shallow_config(**changes.get(rank, {}))
    one = dataclasses.replace(one, comm=dataclasses.replace(one.comm, init_timeout_seconds=COMES_SECONDS))
    facts = config_consistency.facts_of
    config_consistency.facts_of = lambda *arguments: {**facts(*arguments), **(environment or {}).get(rank, {})}
    try:
        config_consistency.check(one, store, rank, 3)
    except (ConfigError, PeerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_are_alike_continue():
    assert run_ranks(3, agree, {1: {"job": {"dump_folder": "elsewhere"}}}) == [""] * 3


def test_ranks_with_other_options_stop_and_the_option_is_named():
    said = run_ranks(3, agree, {2: {"optimizer": {"lr": 0.5}}})
    assert set(said) == {
        "ConfigError: ranks differ in options: optimizer.lr=0.01 on rank 0 and 0.5 on rank 2; give every rank the same "
        "file and command line"
    }


def test_ranks_with_other_versions_stop_and_both_sides_are_named():
    said = run_ranks(3, agree, {}, {1: {"torch": "1.0"}, 2: {"torch": "1.0"}})
    assert len(set(said)) == 1 and said[0].startswith("ConfigError: ranks differ in torch: ")
    # Rank 0 stops comparing at the first difference, so the message names the rank that reported first.
    assert "1.0 on rank 1" in said[0] or "1.0 on rank 2" in said[0]


def test_a_rank_that_does_not_come_is_named():
    class Store(dict):
        def get(self, key):
            return self[key].encode()

        def set(self, key, value):
            self[key] = value

        def check(self, keys):
            return all(key in self for key in keys)

    one = dataclasses.replace(shallow_config(), comm=dataclasses.replace(shallow_config().comm, init_timeout_seconds=1))
    store = Store({"facts-1": json.dumps([config_consistency.facts_of(one, 4), {}])})
    with pytest.raises(PeerError, match="rank 2, 3 has not arrived within comm.init_timeout_seconds=1"):
        config_consistency._compare(store, one, config_consistency.facts_of(one, 4), 4)


CLEAN_RUNS = int(os.environ.get("SHARDTRAIN_CLEAN_RUNS", "1"))


def steps_alone(folder):
    """Two dozen short steps without saves and validation, compared every two."""
    one, plain = config(folder, comm={"straggler_window_steps": 2}, steps=24, seq_len=16), shallow_config()
    return dataclasses.replace(one, validation=plain.validation, checkpoint=plain.checkpoint)


def slow_lines(folder) -> list[str]:
    return [line for line in (folder / "logs/rank-0.log").read_text().splitlines() if " is slow: " in line]


@pytest.mark.skipif(sys.platform != "linux", reason="forks of a process that has imported torch")
def test_a_rank_that_takes_longer_is_named_in_log_and_metrics(tmp_path):
    assert end(run(steps_alone(tmp_path), "slow", (1,))) == 0
    lines = slow_lines(tmp_path)
    assert len(lines) == 1 and "WARNING rank 1 on " in lines[0] and "most of it in phase step" in lines[0], lines
    assert '"stragglers": 1.0' in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="forks of a process that has imported torch")
@pytest.mark.nightly(
    "nobody is slow",
    by="tests/resilience/test_watchdog.py::test_a_rank_that_takes_longer_is_named_in_log_and_metrics",
)
def test_equal_ranks_are_not_called_slow(tmp_path):
    for number in range(CLEAN_RUNS):
        assert end(run(steps_alone(tmp_path / str(number)))) == 0
        assert slow_lines(tmp_path / str(number)) == []


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=12), st.data())
def test_the_usual_work_of_the_peers_is_the_median_of_all_others(works: list[float], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(works) - 1))
    others = works[:place] + works[place + 1 :]
    assert median_without(sorted(works), works[place]) == statistics.median(others)
