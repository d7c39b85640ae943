"""``watch`` shows the growing files of a run in any terminal, and restores the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import patience
import pytest
from tiers import cases

from shardtrain import cli
from shardtrain.launch.goodput import events
from shardtrain.launch.goodput.events import AttemptProgress, Start
from shardtrain.tools.runs.watch import following
from shardtrain.tools.runs.watch.following import FollowedRun
from shardtrain.tools.runs.watch.screen import Terminal, frame


def lines(first: int, last: int, **more: Any) -> str:
    records = []
    for step in range(first, last + 1):
        record = {"step": step, "loss": 10 / step, "tokens_per_second": 100.0, "step_seconds": 0.5}
        records.append(json.dumps({**record, **more}) + "\n")
    return "".join(records)


def add(folder: Path, text: str, name: str = "metrics.jsonl") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def steps(run: FollowedRun) -> list[int]:
    return run.curves["loss"][0] if run.curves else []


def test_appended_lines_are_read_once_and_torn_lines_when_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FollowedRun(tmp_path)
    run.look()
    assert (run.state, steps(run)) == ("not there yet", [])

    add(tmp_path, lines(1, 3) + '{"step": 4, "lo')
    run.look()
    assert (run.state, steps(run), run.last["step"]) == ("under way", [1, 2, 3], 3)

    taken: list[bytes] = []
    take = FollowedRun._take
    monkeypatch.setattr(
        FollowedRun, "_take", lambda self, line: (taken.append(line), take(self, line))
    )
    add(tmp_path, 'ss": 2.5}\n')
    run.look()
    run.look()

    assert steps(run) == [1, 2, 3, 4]
    assert len(taken) == 1
    assert run.curves["loss"][1][-1] == 2.5


def test_rewound_and_restarted_runs_are_followed(tmp_path: Path) -> None:
    run = FollowedRun(tmp_path)
    add(tmp_path, lines(1, 9))
    run.look()
    # a resumed run removes the lines after its checkpoint
    (tmp_path / "metrics.jsonl").write_text(lines(1, 4))
    run.look()

    assert steps(run) == [1, 2, 3, 4]

    # The run rewinds without a restart: it logs steps 3 and 4 again.
    add(tmp_path, lines(3, 6))
    run.look()
    assert steps(run) == [1, 2, 3, 4, 5, 6]

    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics-before.jsonl")
    run.look()
    assert steps(run) == []
    assert run.last == {}

    add(tmp_path, lines(1, 50))  # the file is replaced by a longer one with the same name
    run.look()
    assert steps(run) == list(range(1, 51))


def test_a_long_file_is_sampled_and_its_curve_spans_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_WHOLE_BYTES", 1 << 14)
    monkeypatch.setattr(following, "_SAMPLE_BYTES", 1 << 10)
    monkeypatch.setattr(following, "POINTS", 200)
    add(tmp_path, lines(1, 20_000))
    run = FollowedRun(tmp_path)
    run.look()
    sampled_steps = steps(run)

    assert sampled_steps == sorted(set(sampled_steps))
    assert sampled_steps[0] < 200
    assert run.last["step"] == 20_000
    assert len(sampled_steps) <= 200
    assert len([step for step in sampled_steps if step < 10_000]) > 20


@pytest.mark.parametrize(
    "text", ["", "\n", "[1]\n", "{" * 5000 + "\n", '{"step": "x"}\n', "\x00" * 100, "x" * 10**6]
)
def test_any_file_content_yields_a_frame(text: str, tmp_path: Path) -> None:
    for name in (
        "metrics.jsonl",
        "validation.jsonl",
        "logs/rank-0.log",
        "exit.json",
        "config.resolved.toml",
    ):
        add(tmp_path, text, name)
    run = FollowedRun(tmp_path)
    run.look()

    assert frame([run], 0, Terminal(80, 24))


def full(folder: Path) -> FollowedRun:
    bins = {
        f"goodput_{name}_seconds": 10.0 for name in ("productive", "data", "checkpoint", "lost")
    }
    add(folder, lines(1, 300, grad_norm=1.5, memory_gib=61.3, spikes=2, stragglers=1, **bins))
    add(folder, "[training]\nsteps = 1000\n", "config.resolved.toml")
    add(folder, '{"step": 200, "loss": 3.25}\n', "validation.jsonl")
    add(folder, "2026-01-01 00:00:00 WARNING rank 3 is slow \x1b]0;owned\x07\n", "logs/rank-0.log")
    run = FollowedRun(folder)
    run.look()
    return run


@pytest.mark.parametrize(("columns", "height"), [(20, 6), (60, 24), (80, 24), (200, 60)])
@pytest.mark.parametrize("unicode", [True, False])
def test_a_frame_fits_its_terminal_and_escapes_file_content(
    columns: int, height: int, unicode: bool, tmp_path: Path
) -> None:
    followed = [full(tmp_path / f"run \x1b[2J {number}") for number in range(3)]
    rows = frame(followed, 1, Terminal(columns, height, unicode))
    assert len(rows) <= height
    assert max(map(len, rows)) <= columns

    text = "\n".join(rows)
    assert "\x1b" not in text
    assert "\x07" not in text

    if not unicode:
        text.encode("ascii")


def test_a_frame_shows_all_facts(tmp_path: Path) -> None:
    text = "\n".join(frame([full(tmp_path / "run")], 0, Terminal(80, 24)))
    for part in (
        "run  under way  step 300 of 1,000", "30%", "5m50s left", "loss", "grad norm", "tokens/s, all devices",
        "memory GiB", "validation                3.25  step 200", "goodput                 25.0 % PPPP", "LLLL",
        "productive 25.0 %, checkpoint 25.0 %",
        "spikes 2, stragglers 1", "rank 3 is slow",
    ):  # fmt: skip
        assert part in text, part
    assert "\x1b[32m" in frame([full(tmp_path / "other")], 0, Terminal(80, 24, color=True))[0]


@pytest.mark.parametrize(("exit_code", "goodput"), [(None, "93.0 %"), (0, "91.1 %"), (1, "91.1 %")])
def test_every_command_shows_the_same_goodput(
    exit_code: int | None, goodput: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An ended run shows the goodput of goodput.jsonl, a running one that of its last logged step.

    The last logged step does not include the final save and the shutdown.
    """
    run = tmp_path / "run"
    add(run, lines(1, 3, goodput=0.93, goodput_productive_seconds=93.0, goodput_start_seconds=7.0))
    start = Start("a", "job", 1e9, 1e9, 0, 2, 0)
    seconds = {"step": 93.0, "start": 7.0}
    if exit_code is not None:
        seconds["checkpoint"] = 2.0868
    progress = AttemptProgress("a", 1e9, 3, 1, seconds, exit_code is not None, 3)
    for event in (start, progress):
        events.append(run / events.FILE, event)
    if exit_code is not None:
        add(run, json.dumps({"code": exit_code, "message": ""}), "exit.json")

    for command in (["watch", str(run), "--once"], ["goodput", str(run)]):
        assert cli.main(command) == 0
        output = capsys.readouterr().out
        assert re.findall(r"^goodput +(\d.*? %)", output, re.MULTILINE) == [goodput]

    page = tmp_path / "page.html"
    assert cli.main(["report", str(run), "-o", str(page)]) == 0
    assert f"<td>{goodput}</td>" in page.read_text()


def test_watch_and_report_label_the_speed_equally(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(
        tmp_path,
        lines(1, 3, tps=977.6).replace('"tokens_per_second": 100.0', '"tokens_per_second": 1955.2'),
    )
    assert cli.main(["watch", str(tmp_path), "--once"]) == 0
    assert re.search(r"^tokens/s, all devices +1,?955", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0

    page = (tmp_path / "page.html").read_text()
    assert "<th>Tokens/s, all devices</th>" in page
    assert "<td>1955</td>" in page.replace(",", "")


def test_once_prints_every_run_below_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full(tmp_path / "a")
    full(tmp_path / "b")
    assert cli.main(["watch", str(tmp_path), "--once"]) == 0

    out = capsys.readouterr().out
    assert "a  under way" in out
    assert "b  under way" in out
    assert cli.main(["watch", str(tmp_path / "none")]) == 0, (
        "without a terminal, it must print only once"
    )
    assert "not there yet" in capsys.readouterr().out
    assert cli.main(["watch", str(tmp_path / "a/metrics.jsonl")]) == 2
    assert cli.main(["watch", "--interval_seconds", "0"]) == 2


def heard(terminal: int, wanted: str, so_far: str = "") -> str:
    """Return the terminal output up to a text."""
    end = time.monotonic() + patience.seconds(30)
    while wanted not in so_far:
        assert time.monotonic() < end, so_far[-2000:]
        if select.select([terminal], [], [], 0.2)[0]:
            so_far += os.read(terminal, 65536).decode()
    return so_far


# "stopped" is nightly: it passes alone, but is flaky together with all other tests.
@pytest.mark.parametrize("how", cases(["q", "SIGTERM", "SIGINT"], nightly=["stopped"]))
def test_the_terminal_is_restored(how: str, tmp_path: Path) -> None:
    full(tmp_path / "a")
    full(tmp_path / "b")
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    child = subprocess.Popen(
        [sys.executable, "-m", "shardtrain", "watch", str(tmp_path), "--interval_seconds", "0.2"],
        stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
        # Ctrl-C must work even if the parent of pytest ignores SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        # Like a shell, start a process group in this session. SIGTSTP has no effect in a separate session.
        process_group=0,
    )  # fmt: skip
    try:
        heard(master, "> 1 a")
        assert termios.tcgetattr(slave)[3] & termios.ICANON == 0
        os.write(master, b"2")
        heard(master, "> 2 b")
        add(tmp_path / "b", lines(301, 333))
        heard(master, "333")
        if how == "stopped":
            os.kill(child.pid, signal.SIGTSTP)
            output = heard(master, "\x1b[?1049l")
            end = time.monotonic() + patience.seconds(10)
            while "State:\tT" not in (status := Path(f"/proc/{child.pid}/status").read_text()):
                assert time.monotonic() < end, status
                time.sleep(0.02)
            assert termios.tcgetattr(slave)[3] == before[3]
            os.kill(child.pid, signal.SIGCONT)
            heard(master, "\x1b[?1049h", output.rpartition("\x1b[?1049l")[2])
        if how in ("q", "stopped"):
            os.write(master, b"q")
        else:
            os.kill(child.pid, getattr(signal, how))
        heard(master, "\x1b[?25h\x1b[?1049l")
        assert child.wait(patience.seconds(20)) == (128 + signal.SIGTERM if how == "SIGTERM" else 0)
        assert termios.tcgetattr(slave) == before
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.wait()
        os.close(master)
        os.close(slave)
