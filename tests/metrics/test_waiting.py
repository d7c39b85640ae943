"""A slow step is reported: on the console after some seconds of silence, and on a terminal in the live line."""

from __future__ import annotations

import io
import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import patience
import pytest
import torch

from shardtrain.metrics import Metrics
from shardtrain.metrics.waiting import Waiting
from shardtrain.utils import log


class Clock:
    """A clock that only changes when a test sets it."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def console_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """Function that returns the console lines. Its first call starts the recording, because pytest replaces stderr."""
    stream = io.StringIO()

    def lines() -> list[str]:
        if sys.stderr is not stream:
            monkeypatch.setattr(sys, "stderr", stream)
            log.setup(0, 1, tmp_path, "log.txt")
        return [line.split(" INFO ")[1] for line in stream.getvalue().splitlines()]

    yield lines
    log.reset()


def test_silence_never_exceeds_the_interval(
    console_lines: Callable[[], list[str]], clock: Clock, tmp_path: Path
) -> None:
    assert console_lines() == []
    phase = "compile"
    waiting = Waiting(5000, 40, lambda: phase, seconds=5, clock=clock)
    times = [0.0]
    for step, now, seconds in [
        (40, "compile", 30.0),
        (41, "step", 3.0),
        (42, "data", 12.0),
        (43, "validation", 12.0),
    ]:
        phase = now
        if step > 40:
            waiting.step(step)
        end = clock.seconds + seconds
        while clock.seconds < end:
            wait = waiting.tell()
            assert 0 < wait <= 1
            if len(console_lines()) >= len(times):
                times.append(clock.seconds)
            clock.seconds += wait
    waiting.close()

    assert max(after - before for before, after in itertools.pairwise(times)) <= 5
    assert clock.seconds - times[-1] <= 5
    assert console_lines()[0] == "first step (41/5000): 5s"
    assert console_lines()[4].endswith(": 25s")
    assert "step 43/5000, waiting for data: 7s" in console_lines()
    assert "validation after step 43: 5s" in console_lines()
    assert (tmp_path / "log.txt").read_text() == ""  # progress lines are only for the console
    assert "_LastLine" not in [type(handler).__name__ for handler in log.logger.handlers]


@pytest.mark.parametrize(
    ("compiles", "line"),
    [(True, "first step (1/10), compiling: 5s"), (False, "first step (1/10): 5s")],
)
def test_line_of_the_first_step_mentions_compilation(
    clock: Clock, compiles: bool, line: str
) -> None:
    waiting = Waiting(10, 0, lambda: "compile", seconds=5, clock=clock, compiles=compiles)
    waiting.close()
    assert waiting.text("compile", 5.0) == line


def test_frequent_logging_suppresses_progress_lines(
    console_lines: Callable[[], list[str]], clock: Clock
) -> None:
    assert console_lines() == []
    waiting = Waiting(5000, 0, lambda: "step", seconds=5, clock=clock)
    for step in range(1, 20):
        clock.seconds += 4
        waiting.tell()
        waiting.step(step)
        log.logger.info(f"step: {step}")
    waiting.close()

    assert console_lines() == [f"step: {step}" for step in range(1, 20)]


def test_progress_lines_of_short_steps_have_no_time(
    console_lines: Callable[[], list[str]], clock: Clock
) -> None:
    assert console_lines() == []
    waiting = Waiting(5000, 0, lambda: "step", seconds=5, clock=clock)
    for step in range(1, 31):
        clock.seconds += 0.5
        waiting.step(step)
        waiting.tell()
    waiting.close()

    assert console_lines() == ["step 11/5000", "step 21/5000", "step 31/5000"]


@pytest.mark.parametrize("columns", [60, 80])
def test_live_line_counts_the_seconds_of_a_slow_step(
    tmp_path: Path, kit, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    log.setup(0, 1, tmp_path, "log.txt")
    try:
        with Metrics(kit.config(), tmp_path, kit.facts(total_steps=5000), kit.OneRank()) as metrics:
            assert metrics._progress is not None
            metrics.update(1, torch.tensor(1.5), 1, 1, 1.0, 1.0, 0.0)
            metrics._progress.wait("step 2/5000: 20s")
            metrics.update(2, torch.tensor(1.5), 1, 1, 1.0, 1.0, 0.0)
    finally:
        log.reset()

    # Without escape sequences, each redraw is a row.
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue().replace("\x1b[2K", "\n"))
    rows = [line.rstrip() for line in re.split(r"[\r\n]+", drawn)]

    assert any("step 2/5000: 20s  loss 1.5000" in row for row in rows)
    assert all(len(row) <= columns for row in rows if "step 2/5000" in row)


def test_run_prints_progress_lines(
    tmp_path: Path, kit, console_lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert console_lines() == []
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0.05")  # default: 5 seconds
    with Metrics(
        kit.config(), tmp_path, kit.facts(total_steps=50), kit.OneRank(), phase=lambda: "checkpoint"
    ):
        patience.wait_for(lambda: "saving step 0" in console_lines(), 10)

    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]
