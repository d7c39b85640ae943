"""Save intervals: only rank 0's clock counts, and the automatic interval minimizes lost time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from ranks import run_ranks
from tiny import shallow_config, train_whole

from shardtrain.checkpoint import retention, save
from shardtrain.checkpoint.interval import (
    LONGEST_SECONDS,
    SHORTEST_SECONDS,
    Interval,
    best_seconds,
    useful_share,
)
from shardtrain.config.schema import Checkpoint
from shardtrain.tools import checkpoint_command
from shardtrain.utils.errors import ConfigError


class Clock:
    """Clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_seconds_count_from_the_end_of_the_previous_save() -> None:
    clock = Clock()
    interval = Interval(Checkpoint(interval_type="seconds", interval=30), clock)
    assert not interval.is_time()

    clock.now += 29.9
    assert not interval.is_time()

    clock.now += 0.1
    assert interval.is_time()

    interval.restart()
    assert not interval.is_time()

    # An interval in steps ignores the clock.
    fast_clock = itertools.count(0, 1000).__next__
    assert not Interval(Checkpoint(interval_type="steps", interval=1), fast_clock).is_time()


def run(rank: int, root: Path, kind: str, ticks: Iterator[float]) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "Interval", partial(Interval, clock=lambda: next(ticks)))
        training = {"steps": 12, "local_batch_size": 4}
        checkpoint = {"enable": True, "interval_type": kind, "interval": 4, "keep_latest_k": 0}
        config = shallow_config(
            job={"dump_folder": str(root)}, training=training, checkpoint=checkpoint
        )
        ended = train_whole(rank, config)
    assert ended.error is None, ended.error
    return retention.steps(root / "checkpoint")


def saved_steps(rank: int, root: Path) -> list[int]:
    # The fake clock advances at each reading: by 1 s on rank 0, and by 10,000 s on rank 1.
    return run(rank, root, "seconds", itertools.count(0.0, 1.0 if rank == 0 else 1e4))


def test_ranks_with_different_clocks_save_at_the_same_steps(tmp_path: Path) -> None:
    # Rank 0 reads its clock at the start, once per step and once per save. So a save is due every 4 steps.
    assert run_ranks(2, saved_steps, tmp_path) == [[4, 8, 12]] * 2


def test_automatic_interval_follows_the_measured_stall() -> None:
    interval = Interval(Checkpoint(interval_type="automatic", mean_time_to_failure_hours=7.9))
    for _ in range(3):
        interval.note(1.0)

    assert interval.seconds == pytest.approx(238.5, abs=0.1)

    # The interval follows the square root of the median time of a save.
    interval.note(100.0)
    assert interval.seconds == pytest.approx(238.5, abs=0.1), (
        "one slow save of four changes nothing"
    )

    # Once most of the last saves take four times as long, the interval is twice as long.
    for _ in range(9):
        interval.note(4.0)
    assert interval.seconds == pytest.approx(2 * 238.5, abs=0.1)


@pytest.mark.parametrize(
    ("stall", "hours"), [(1e-9, 1e-6), (0.0, 24.0), (3600.0, 0.01), (3600.0, 1e6), (1e-3, 1e9)]
)
def test_automatic_interval_stays_within_limits(stall: float, hours: float) -> None:
    interval = Interval(Checkpoint(interval_type="automatic", mean_time_to_failure_hours=hours))
    interval.note(stall)
    assert max(SHORTEST_SECONDS, 10 * stall) <= interval.seconds <= max(LONGEST_SECONDS, 10 * stall)


def test_automatic_interval_is_longer_than_the_duration_of_a_save() -> None:
    interval = Interval(Checkpoint(interval_type="automatic"))
    interval.note(0.01)
    interval.note_write(400.0)
    assert interval.seconds == 600.0


def test_interval_is_logged_when_it_changes_by_a_fifth(caplog: pytest.LogCaptureFixture) -> None:
    interval = Interval(Checkpoint(interval_type="automatic"))
    with caplog.at_level("INFO", logger="shardtrain"):
        for stall in (1.0, 1.1, 1.2, 1.2, 1.2):
            interval.note(stall)
        assert caplog.text.count("saving every") == 1
        for _ in range(9):
            interval.note(2.0)

    assert caplog.text.count("saving every") == 2


def test_advised_interval_maximizes_the_useful_share() -> None:
    for stall, mttf, restart in (
        (1.0, 28440.0, 240.0),
        (60.0, 28440.0, 900.0),
        (0.2, 6480.0, 60.0),
    ):
        best = best_seconds(stall, mttf)
        shares = {}
        for factor in (0.25, 0.5, 0.9, 1, 1.1, 2, 4):
            shares[factor] = useful_share(factor * best, stall, mttf, restart)
        # Young's formula is a first-order approximation, so a neighbour may be slightly better.
        assert max(shares, key=lambda factor: shares[factor]) in (0.9, 1, 1.1)
        assert max(shares.values()) - shares[1] < 1e-4


def test_command_prints_the_interval_and_the_useful_share(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["interval", "--stall", "1", "--restart", "4min", "--mttf", "7.9h"]
    assert checkpoint_command.main(arguments) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "save every 3m58s (sqrt(2 * stall * mttf) = 238 s)"
    assert lines[2] == "every      3m58s: 98.3 % of the time is training"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--stall must be a time above 0"),
        (["--stall", "1"], "--mttf must be a time above 0"),
        (["--stall", "0", "--mttf", "1h"], "--stall=0.0 must be a time above 0"),
        (["--stall", "-1", "--mttf", "1h"], 'stall="-1" is not a time'),
        (["--stall", "1", "--mttf"], 'mttf="" is not a time'),
        (["--stall", "1", "--mttf", "nan"], 'mttf="nan" is not a time'),
        (["--mtbf", "1"], "--mtbf"),
    ],
)
def test_command_rejects_invalid_times(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checkpoint_command.main(["interval", *arguments])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
