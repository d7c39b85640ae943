"""A long operation periodically prints a line, and a short one prints nothing."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import patience
import pytest

from shardtrain.utils import heartbeat as heartbeat_module
from shardtrain.utils.heartbeat import WaitingHeartbeat, heartbeat, not_silent


def test_long_operation_is_reported_and_short_one_is_silent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with heartbeat("short"):
        pass
    assert capsys.readouterr().err == ""

    with heartbeat("shardtrain export", seconds=0.01):
        patience.wait_for(lambda: "shardtrain export: " in capsys.readouterr().err, 10)
    capsys.readouterr()
    time.sleep(0.05)

    assert capsys.readouterr().err == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


@pytest.mark.parametrize("value", ["0", "soon", "nan", "1e300", ""])
def test_environment_variable_can_disable_the_heartbeat(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", value)
    with heartbeat("export"):
        threads = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    assert bool(threads) == (value != "0")


def test_environment_variable_sets_the_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0.01")
    output: list[str] = []

    def prints_twice() -> bool:
        output.append(capsys.readouterr().err)
        return "".join(output).count("export: ") >= 2

    with heartbeat("export"):
        patience.wait_for(prints_twice, 10)

    assert "".join(output).count("export: ") >= 2


def test_heartbeat_ends_with_its_block_and_hides_no_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="its own"), heartbeat("failing", seconds=0.01):
        patience.wait_for(lambda: re.search(r"^failing: \d", capsys.readouterr().err, re.M), 10)
        raise ValueError("its own")
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_lines_go_to_the_given_function(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with heartbeat("saving step 4", seconds=0.01, say=lines.append):
        patience.wait_for(lambda: bool(lines), 10)
    assert lines[0].startswith("saving step 4: ")
    assert capsys.readouterr().err == ""


def test_waiting_heartbeat_prints_without_a_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0.01")
    not_silent()
    waiting = WaitingHeartbeat("checking data")
    threads = threading.active_count()
    waiting.tell()

    assert capsys.readouterr().err == ""

    patience.wait_for(lambda: waiting.timeout == 0, 10)
    waiting.tell()
    assert threading.active_count() == threads
    assert waiting.seconds == 0.01
    assert capsys.readouterr().err.startswith("checking data: ")

    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0")
    assert WaitingHeartbeat("checking data").seconds is None


def test_consecutive_short_waits_count_as_one_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0.5")
    not_silent()
    num_lines = 0
    deadline = time.monotonic() + patience.seconds(20)
    while not num_lines and time.monotonic() < deadline:  # no single wait is long enough for a line
        with WaitingHeartbeat("comparing") as waiting:
            time.sleep(0.05)
            if waiting.timeout == 0:
                waiting.tell()
                num_lines += 1

    assert capsys.readouterr().err.startswith("comparing: ")

    with WaitingHeartbeat("comparing") as waiting:
        assert waiting.timeout > 0


def test_consecutive_short_operations_count_as_one_silence() -> None:
    lines: list[str] = []
    deadline = time.monotonic() + patience.seconds(20)
    # no single operation is long enough for a line
    while not lines and time.monotonic() < deadline:
        with heartbeat("importing", seconds=0.5, say=lines.append):
            time.sleep(0.05)

    assert lines
    assert lines[0].startswith("importing: ")


def test_inner_of_nested_heartbeats_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, actions = use_manual_clock(monkeypatch)
    lines: list[str] = []
    with heartbeat("outer", seconds=0.1, say=lines.append):
        with heartbeat("inner", seconds=0.1, say=lines.append):
            outer, inner = actions
            for _ in range(3):
                clock.now += 0.11
                # the outer operation waits longer, so a delayed inner thread still prints first
                assert outer() > 0.3
                assert inner() == pytest.approx(0.1)

            assert len(lines) == 3
            assert all(line.startswith("inner: ") for line in lines)
        clock.now += 0.11

        assert outer() == pytest.approx(0.1)

    assert len(lines) == 4
    assert lines[3].startswith("outer: ")


def use_manual_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[SimpleNamespace, list[Callable[[], float]]]:
    """Start no threads. Return a clock whose ``now`` the test moves, and the actions that threads would repeat."""
    clock = SimpleNamespace(now=1000.0)
    actions: list[Callable[[], float]] = []

    @contextmanager
    def repeat(action: Callable[[], float]) -> Iterator[None]:
        actions.append(action)
        yield

    monkeypatch.setattr(heartbeat_module, "repeat", repeat)
    monkeypatch.setattr(heartbeat_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(
        heartbeat_module, "_silence", heartbeat_module._Silence(clock.now, clock.now)
    )
    return clock, actions


def test_line_contains_the_progress() -> None:
    lines: list[str] = []
    with heartbeat(
        "measuring", seconds=0.01, say=lines.append, progress=lambda: "3 of 9 sequences"
    ):
        patience.wait_for(lambda: bool(lines), 10)
    assert re.match(r"measuring: 3 of 9 sequences, \d", lines[0])
