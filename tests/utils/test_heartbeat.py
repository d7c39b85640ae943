"""A long command says now and then that it works; a short one says nothing."""

from __future__ import annotations

import re
import threading
import time

import patience
import pytest

from shardtrain.utils.heartbeat import WaitingHeartbeat, heartbeat, not_silent


def test_what_takes_long_is_reported_and_what_does_not_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with heartbeat("short"):
        pass
    assert capsys.readouterr().err == ""
    with heartbeat("shardtrain export", seconds=0.01):
        patience.wait_for(lambda: "shardtrain export: " in capsys.readouterr().err, 10)
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "" and not [one for one in threading.enumerate() if one.name == "heartbeat"]


@pytest.mark.parametrize(
    ("value", "printed"), [("0", ""), ("soon", "'soon' is not a number of seconds; using 5"), ("", "")]
)
def test_the_environment_says_how_often(
    value: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", value)
    with heartbeat("export"):
        threads = [one for one in threading.enumerate() if one.name == "heartbeat"]
    assert bool(threads) == (value != "0") and printed in capsys.readouterr().err


def test_the_environment_says_how_often_in_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0.01")
    with heartbeat("export"):
        patience.wait_for(lambda: "export: " in capsys.readouterr().err, 10)


def test_it_ends_with_what_it_is_about_and_hides_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="its own"), heartbeat("failing", seconds=0.01):
        patience.wait_for(lambda: re.search(r"^failing: \d", capsys.readouterr().err, re.M), 10)
        raise ValueError("its own")
    assert not [one for one in threading.enumerate() if one.name == "heartbeat"]


def test_lines_go_where_they_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with heartbeat("saving step 4", seconds=0.01, say=said.append):
        patience.wait_for(lambda: bool(said), 10)
    assert said[0].startswith("saving step 4: ") and capsys.readouterr().err == ""


def test_a_process_that_may_fork_prints_without_a_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0.01")
    not_silent()
    waiting, threads = WaitingHeartbeat("checking data"), threading.active_count()
    waiting.tell()
    assert capsys.readouterr().err == ""
    patience.wait_for(lambda: waiting.timeout == 0, 10)
    waiting.tell()
    assert threading.active_count() == threads and waiting.seconds == 0.01
    assert capsys.readouterr().err.startswith("checking data: ")
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0")
    assert WaitingHeartbeat("checking data").seconds is None


def test_waits_that_follow_on_each_other_make_one_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0.5")
    not_silent()
    said = 0
    deadline = time.monotonic() + patience.seconds(20)
    while not said and time.monotonic() < deadline:  # none of them is long enough for a line of its own
        with WaitingHeartbeat("comparing") as waiting:
            time.sleep(0.05)
            if waiting.timeout == 0:
                waiting.tell()
                said += 1
    assert capsys.readouterr().err.startswith("comparing: ")
    with WaitingHeartbeat("comparing") as waiting:
        assert waiting.timeout > 0


def test_short_works_that_follow_on_each_other_make_one_silence() -> None:
    said: list[str] = []
    deadline = time.monotonic() + patience.seconds(20)
    while not said and time.monotonic() < deadline:  # none of them is long enough for a line of its own
        with heartbeat("importing", seconds=0.5, say=said.append):
            time.sleep(0.05)
    assert said and said[0].startswith("importing: ")


def test_of_works_within_each_other_the_inner_one_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardtrain.utils.heartbeat._PATIENCE_SECONDS", patience.seconds(10))
    said: list[str] = []
    with heartbeat("outer", seconds=0.1, say=lambda _: said.append("outer")):
        with heartbeat("inner", seconds=0.1, say=lambda _: said.append("inner")):
            before = len(said)
            patience.wait_for(lambda: said.count("inner") >= 3, 10)
            within = said[before:]
        patience.wait_for(lambda: said[-1] == "outer", 30)
    # The outer thread may have decided to speak just before the inner work began
    assert within.count("outer") <= 1


def test_a_line_says_how_far_the_work_is() -> None:
    said: list[str] = []
    with heartbeat("measuring", seconds=0.01, say=said.append, far=lambda: "3 of 9 sequences"):
        patience.wait_for(lambda: bool(said), 10)
    assert re.match(r"measuring: 3 of 9 sequences, \d", said[0])
