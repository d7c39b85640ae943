"""``data prepare`` writes the same bytes as an uninterrupted run if it is killed and restarted."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import patience
import pytest

from shardtrain.data.prepared import shard_writer
from shardtrain.data.prepared.shard_index import UNFINISHED
from shardtrain.data.prepared.shards import ShardTokenBuffer
from shardtrain.tools.data import pool, prepare, work_units
from shardtrain.utils.errors import ConfigError, PeerError, ShardtrainError


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make work units small (2 KB), and write a progress record after each unit."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 2000)
    monkeypatch.setattr(work_units, "_FLUSH_TOKENS", 700)
    monkeypatch.setattr(prepare, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(pool, "_SAY_SECONDS", 0.0)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    draw = random.Random(0)
    rows = [
        {"prompt": "p" * draw.randint(0, 40), "completion": str(draw.random())} for _ in range(200)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "a.jsonl")
    options = [
        "--training.dataset",
        "jsonl",
        "--training.dataset_path",
        path,
        "--data.format",
        "prompt_completion",
    ]
    return ["--shard_tokens", "3000", *options]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


def in_child(arguments: list[str], before: Callable[[], object] = lambda: None) -> int:
    """Run ``data prepare`` in a forked process. Return its exit code, or minus the signal number."""

    def child() -> None:
        before()
        try:
            sys.exit(prepare.main(arguments))
        except ShardtrainError as error:
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(patience.seconds(60))
    assert process.exitcode is not None
    return process.exitcode


def kill_at(operation: int) -> Callable[[], None]:
    """Return a function that makes this process die right before its n-th change on disk."""

    def arm() -> None:
        remaining = [operation]
        parent_pid = os.getpid()

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if os.getpid() == parent_pid:
                    remaining[0] -= 1
                    if remaining[0] == 0:
                        os.kill(parent_pid, signal.SIGKILL)
                return function(*arguments, **options)

            return call

        for owner, name in (
            (Path, "replace"),
            (Path, "unlink"),
            (os, "fsync"),
            (shard_writer._GrowingFile, "write"),
            (shard_writer._GrowingFile, "close"),
        ):
            setattr(owner, name, counted(getattr(owner, name)))

    return arm


def test_twenty_kills_change_no_byte(tmp_path: Path, arguments: list[str]) -> None:
    """Kill each run a few disk changes later than the previous one, to reach every phase."""
    expected = tmp_path / "uninterrupted"
    folder = tmp_path / "killed"
    prepare.main(["--output", str(expected), "--processes", "1", *arguments])
    for kill in range(20):
        more = ["--output", str(folder), "--processes", str(kill % 3 + 1), *arguments]
        assert in_child(more, kill_at(1 + kill * 3 // 4)) == -signal.SIGKILL

    assert in_child(["--output", str(folder), "--processes", "2", *arguments]) == 0
    assert contents(folder) == contents(expected)


@pytest.mark.nightly(
    "random moments", by="tests/tools/data/test_prepare_kills.py::test_twenty_kills_change_no_byte"
)
def test_a_kill_at_any_moment_of_the_last_steps_changes_no_byte(
    tmp_path: Path, arguments: list[str]
) -> None:
    """Kill before every change on disk between the last unit and the index."""
    expected = tmp_path / "uninterrupted"
    folder = tmp_path / "killed"
    prepare.main(["--output", str(expected), "--processes", "1", *arguments])
    for operation in range(1, 200):
        print(operation)
        code = in_child(
            ["--output", str(folder), "--processes", "1", *arguments], kill_at(operation)
        )
        if code == 0:
            break

        assert code == -signal.SIGKILL
        if (folder / "index.json").exists():
            assert contents(folder) == contents(expected)

    assert contents(folder) == contents(expected)


def test_a_torn_unit_is_written_again(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss may leave a file without its content."""
    expected = tmp_path / "uninterrupted"
    folder = tmp_path / "torn"
    prepare.main(["--output", str(expected), "--processes", "1", *arguments])
    with monkeypatch.context() as patch:
        # Stop before the units are merged.
        patch.setattr(prepare._Work, "_merge", lambda self: None)
        patch.setattr(prepare._Work, "finish", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepare.main(["--output", str(folder), "--processes", "1", *arguments])
    parts = sorted((folder / UNFINISHED).glob("unit-*.tokens"))

    assert len(parts) > 3

    os.truncate(parts[0], 10)
    parts[1].write_bytes(b"\x00" * parts[1].stat().st_size)
    parts[2].unlink()
    parts[3].with_suffix(".json").write_text("{")
    assert prepare.main(["--output", str(folder), "--processes", "1", *arguments]) == 0
    assert contents(folder) == contents(expected)


def test_a_process_that_dies_is_named_and_costs_nothing(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = work_units.write_unit
    folder = tmp_path / "o"

    def dies(
        target: Path, source: Any, encoder: Any, policy: Any, unit: Any, say: Any
    ) -> dict[str, Any]:
        if unit.number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(target, source, encoder, policy, unit, say)

    monkeypatch.setattr(work_units, "write_unit", dies)

    with pytest.raises(
        PeerError,
        match=r"process \d+ died at unit 2 with signal 9 \(SIGKILL\); the machine may be out",
    ):
        prepare.main(["--output", str(folder), "--processes", "1", *arguments])

    monkeypatch.setattr(work_units, "write_unit", write)
    assert prepare.main(["--output", str(folder), "--processes", "1", *arguments]) == 0


def test_an_error_of_the_program_shows_where(
    tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_units, "write_unit", lambda *_: 1 / 0)
    with pytest.raises(ShardtrainError, match="ZeroDivisionError") as caught:
        prepare.main(["--output", str(tmp_path / "o"), "--processes", "2", *arguments])
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("limit_bytes", [600, 4000])
def test_a_full_disk_is_a_storage_error_from_which_it_continues(
    tmp_path: Path, arguments: list[str], limit_bytes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """At 600 bytes, the files of worker processes exceed the limit. At 4,000 bytes, only the shards do."""
    expected = tmp_path / "uninterrupted"
    folder = tmp_path / "full"
    prepare.main(["--output", str(expected), "--processes", "1", *arguments])
    more = ["--output", str(folder), "--processes", "2", *arguments]
    full = in_child(
        more, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    )

    assert full == 8
    assert "the command continues where it stopped when it is repeated" in capfd.readouterr().err
    assert in_child(more) == 0
    assert contents(folder) == contents(expected)


def test_ctrl_c_stops_it_cleanly(
    tmp_path: Path, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "o"

    def interrupt() -> None:
        # background jobs of a shell ignore SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)
        append = work_units.append_unit

        def once(*arguments: Any) -> None:
            append(*arguments)
            os.kill(os.getpid(), signal.SIGINT)

        work_units.append_unit = once

    assert in_child(["--output", str(folder), "--processes", "2", *arguments], interrupt) == 130

    captured = capfd.readouterr()
    assert captured.err.strip().splitlines()[-1] == "stopped; the same command continues from here"
    assert in_child(["--output", str(folder), "--processes", "2", *arguments]) == 0
    assert ShardTokenBuffer(folder).num_documents == 200


def test_two_commands_do_not_write_one_folder(tmp_path: Path, arguments: list[str]) -> None:
    folder = tmp_path / "o"
    (folder / UNFINISHED).mkdir(parents=True)
    with prepare._locked(folder):
        # A lock does not block the process that holds it, so run the second command in a child process.
        assert (
            in_child(["--output", str(folder), "--processes", "1", *arguments])
            == ConfigError.exit_code
        )

    assert in_child(["--output", str(folder), "--processes", "1", *arguments]) == 0


def test_processes_end_with_the_one_that_started_them(tmp_path: Path, arguments: list[str]) -> None:
    """A killed parent cannot notify its child processes, so they must detect its end."""
    pids = tmp_path / "pids"
    pids.mkdir()
    write = work_units.write_unit

    def arm() -> None:
        def noted(*arguments: Any) -> dict[str, Any]:
            (pids / str(os.getpid())).touch()
            return write(*arguments)

        work_units.write_unit = noted
        kill_at(25)()

    try:
        assert (
            in_child(["--output", str(tmp_path / "o"), "--processes", "2", *arguments], arm)
            == -signal.SIGKILL
        )
    finally:
        work_units.write_unit = write
    started = [int(path.name) for path in pids.iterdir()]
    assert started

    # Wait up to ten seconds.
    for _ in range(200):
        alive = [pid for pid in started if is_alive(pid)]
        if not alive:
            return
        signal.sigtimedwait([], 0.05)
    raise AssertionError(f"processes {alive} are still alive")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
