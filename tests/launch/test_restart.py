"""Restarts: one per failure, from the last checkpoint, and none for failures that would repeat."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from launched import STEPS, config, end, fork, losses, no_orphans, record
from tiers import cases

from shardtrain.config import Loaded
from shardtrain.launch import environment, local
from shardtrain.launch.failure import Failure
from shardtrain.launch.goodput import events
from shardtrain.launch.goodput.account import account, attempts_of
from shardtrain.launch.restart import CRASH_LOOP, FRUITLESS, Restarts
from shardtrain.train import trainer

LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="forks of a process that has imported torch"
)


def kill_once(folder, step, rank):
    """Kill one rank with SIGKILL at its ``step``-th update, only in the first attempt."""
    original = trainer.optim.set_learning_rate
    calls = []

    def patched(*arguments):
        calls.append(1)
        if len(calls) == step and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    if int(os.environ["RANK"]) == rank:
        trainer.optim.set_learning_rate = patched


def _launch(run_config, max_restarts, fault):
    environment.set_process_defaults(os.environ, 2, 2, alone=True)

    def main(loaded):
        fault()
        return trainer.main(loaded)

    os._exit(local.launch(Loaded(run_config), 2, main=main, max_restarts=max_restarts))


@LINUX
@pytest.mark.parametrize("rank", cases([1], nightly=[0]))
def test_a_killed_rank_costs_one_restart_and_changes_no_loss(tmp_path, rank):
    (tmp_path / "undisturbed").mkdir()
    assert end(fork(_launch, config(tmp_path / "undisturbed"), 0, lambda: None)) == 0

    run_config = config(tmp_path)
    assert end(fork(_launch, run_config, 1, lambda: kill_once(tmp_path, 4, rank))) == 0
    assert record(tmp_path)["code"] == 0
    assert losses(tmp_path) == losses(tmp_path / "undisturbed")
    assert len(losses(tmp_path)) == STEPS
    assert no_orphans(tmp_path)


def kill_in_each_phase(folder):
    """Kill the first attempt in a step, the second while it loads, the third before its rendezvous."""

    def die_before(owner, name, rank):
        original = getattr(owner, name)

        def patched(*arguments, **names):
            if int(os.environ["RANK"]) == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **names)

        setattr(owner, name, patched)

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt == 0:
        kill_once(folder, 4, 0)
    elif attempt == 1:
        die_before(trainer, "resume", 1)
    elif attempt == 2:
        die_before(trainer.world, "join", 0)


@LINUX
@pytest.mark.nightly(
    "in a second start",
    by="tests/launch/test_restart.py::test_a_killed_rank_costs_one_restart_and_changes_no_loss",
)
def test_a_rank_killed_during_a_restart_costs_one_restart(tmp_path, capfd):
    assert end(fork(_launch, config(tmp_path), 3, lambda: kill_in_each_phase(tmp_path))) == 0

    lines = capfd.readouterr().err.splitlines()
    restarts = [line for line in lines if line.startswith("restart ")]
    assert restarts == ["restart 1 of 3", "restart 2 of 3", "restart 3 of 3"]
    assert list(losses(tmp_path)) == list(range(1, STEPS + 1))
    assert no_orphans(tmp_path)

    accounted = account(attempts_of(events.read(tmp_path)[0]))
    assert (accounted.attempts, accounted.saves) == (2, 3)
    assert accounted.seconds["restart"] > 0
    assert accounted.idle_seconds == 0


def always():
    def patched(*_):
        raise RuntimeError("step 1 fails on every machine")

    trainer.optim.set_learning_rate = patched


def always_killed():
    trainer.optim.set_learning_rate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@LINUX
def test_an_error_repeated_in_the_same_step_ends_the_restarts_and_names_the_data(tmp_path, capfd):
    assert end(fork(_launch, config(tmp_path), 100, always)) == CRASH_LOOP

    exit_record = record(tmp_path)
    message = exit_record["message"]
    assert exit_record["code"] == CRASH_LOOP
    assert exit_record["class"] == "CrashLoop"
    assert not exit_record["retryable"]
    beginning = "two attempts in a row ended with RuntimeError in step 1 (sequences 0 to 7 of the data) (there is no"
    assert message.startswith(beginning)
    assert message.endswith(f"; its data: shardtrain data show {tmp_path} --step 1")
    assert capfd.readouterr().err.count("restart 1 of 100") == 1


@LINUX
def test_a_run_whose_ranks_always_die_stops_restarting(tmp_path):
    assert end(fork(_launch, config(tmp_path), 100, always_killed)) == CRASH_LOOP
    assert record(tmp_path)["message"].startswith(
        "3 restarts in a row made no progress (there is no checkpoint)"
    )


def attempts(codes, steps, limit):
    """Return the number of restarts and the status of a run whose attempts end with these codes and newest steps."""
    now = iter([-1, *steps])
    restarts = Restarts(limit, lambda: next(now))
    for code in codes:
        status = restarts.after(code)
        if status is not None:
            return restarts.used, status
    raise AssertionError("requests a restart after the last attempt")


def test_restarts_end_at_the_limit_on_success_and_for_permanent_failures():
    assert attempts([6, 6, 6], [10, 20], limit=2) == (2, 6)
    assert attempts([6, 0], [10], limit=5) == (1, 0)
    for code in (2, 3, 4, 5, 7, 75, 76):
        assert attempts([code], [], limit=5) == (0, code)


def test_only_the_same_error_in_the_same_step_is_a_crash_loop():
    restarts = Restarts(9, iter(range(99)).__next__)

    def status_after(code, kind, place):
        return restarts.after(code, Failure(0, "h", kind, "m", "", 0.0, 1, place=place))

    # Another step, or another error
    assert status_after(1, "A", "step 3") is None
    assert status_after(1, "A", "step 4") is None
    assert status_after(1, "B", "step 4") is None

    # A lost rank is no evidence against the data, and neither is an error outside a step.
    assert status_after(6, "B", "step 4") is None
    assert status_after(1, "B", "") is None
    assert status_after(1, "B", "") is None

    assert status_after(1, "B", "step 4") is None
    assert status_after(1, "B", "step 4") == CRASH_LOOP


def test_progress_resets_the_count_of_fruitless_restarts():
    assert attempts([6] * 10, [-1] * 10, limit=9) == (FRUITLESS, CRASH_LOOP)
    assert attempts([6] * 10, [5, 5, 5, 10, 10, 10, 10], limit=99) == (6, CRASH_LOOP)
