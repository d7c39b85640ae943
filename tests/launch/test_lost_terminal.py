"""Unwritable output: a run survives the loss of its terminal, and write errors of commands are reported."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import patience
import pytest
from tiers import cases
from tiny import text_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/full")


def command(folder: Path, ranks: int = 1) -> list[str]:
    return [
        sys.executable, "-m", "shardtrain", "train", f"--job.dump_folder={folder}", "--training.dataset=text",
        f"--training.dataset_path={text_file()}", "--training.seq_len=32", "--training.local_batch_size=1",
        "--training.steps=3", "--training.device=cpu", "--model.overrides.num_layers=1",
        "--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1", "--nproc", str(ranks),
    ]  # fmt: skip


def closed(*numbers: int) -> Callable[[], None]:
    """Return a function that closes standard streams, like ``2>&-`` in a shell. Python then sets them to None."""

    def close() -> None:
        for number in numbers:
            os.close(number)
            name = ("stdin", "stdout", "stderr")[number]
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)

    return close


@contextlib.contextmanager
def stream(kind: str) -> Iterator[int]:
    """Yield a file descriptor on which writes fail: a full disk, or a pipe without a reader."""
    if kind == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    cases(
        [("pipe", 1), ("closed", 1)], nightly=[("pipe", 2), ("closed", 2), ("full", 1), ("full", 2)]
    ),
)
def test_a_run_without_its_terminal_completes(kind: str, ranks: int, tmp_path: Path) -> None:
    limit = patience.seconds(120)
    if kind == "closed":
        result = forked.run(command(tmp_path, ranks), preexec_fn=closed(0, 1, 2), timeout=limit)
    else:
        with stream(kind) as end:
            result = forked.run(command(tmp_path, ranks), stdout=end, stderr=end, timeout=limit)

    assert result.returncode == 0
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == 0

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [1, 2, 3]
    assert "step:  3" in (tmp_path / "logs/rank-0.log").read_text()


@pytest.mark.parametrize("kind", ["pipe", "full"])
def test_output_that_cannot_be_written_is_reported_unless_its_reader_has_left(kind: str) -> None:
    with stream(kind) as end:
        result = forked.run(
            [sys.executable, "-m", "shardtrain", "config", "show"],
            stdout=end, stderr=subprocess.PIPE, text=True, timeout=patience.seconds(60),
        )  # fmt: skip
    if kind == "pipe":
        assert (result.returncode, result.stderr) == (0, "")
    else:
        assert (result.returncode, result.stderr) == (
            8,
            "error[8]: cannot write to stdout: No space left on device (errno 28); free space\n",
        )


@pytest.mark.parametrize("verb", ["config show", "--version"])
def test_output_of_a_command_without_a_stdout_is_reported(verb: str) -> None:
    result = forked.run(
        [sys.executable, "-m", "shardtrain", *verb.split()],
        stderr=subprocess.PIPE, text=True, timeout=patience.seconds(60), preexec_fn=closed(1),
    )  # fmt: skip

    assert (result.returncode, result.stderr) == (
        8,
        "error[8]: stdout is closed, so the output is lost; redirect it to a file or /dev/null\n",
    )


def in_a_deleted_folder(tmp_path: Path) -> Callable[[], None]:
    def enter() -> None:
        (tmp_path / "deleted").mkdir()
        os.chdir(tmp_path / "deleted")
        (tmp_path / "deleted").rmdir()

    return enter


def without_a_temporary_folder(tmp_path: Path) -> Callable[[], None]:
    def hide() -> None:
        import tempfile

        tempfile._candidate_tempdir_list = lambda: [str(tmp_path / "none")]  # type: ignore[attr-defined]

    return hide


def with_few_files(tmp_path: Path) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))


def on_a_strange_network(tmp_path: Path) -> Callable[[], None]:
    return lambda: os.environ.__setitem__("GLOO_SOCKET_IFNAME", "no\nsuch0")


def with_a_file_for_the_compiler(tmp_path: Path) -> Callable[[], None]:
    return lambda: os.environ.__setitem__("TORCHINDUCTOR_CACHE_DIR", "/dev/null/cache")


REFUSED = {
    "the working folder": (
        in_a_deleted_folder,
        2,
        "the working folder of this process was deleted",
    ),
    "temporary files": (
        without_a_temporary_folder,
        8,
        "no folder for temporary files can be written; set TMPDIR",
    ),
    "open files": (with_few_files, 7, "ulimit -n=12 must be at least 96 for 2 ranks on this host"),
    "the interface": (
        on_a_strange_network,
        2,
        'GLOO_SOCKET_IFNAME="no?such0" is not a network interface',
    ),
    "the compiler's cache": (
        with_a_file_for_the_compiler,
        2,
        'TORCHINDUCTOR_CACHE_DIR="/dev/null/cache" is not a folder that can be written',
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_system_failures_are_one_line(kind: str, tmp_path: Path) -> None:
    make, code, message = REFUSED[kind]
    result = forked.run(
        command(Path("run"), 2), cwd=tmp_path, preexec_fn=make(tmp_path), stderr=subprocess.PIPE, text=True,
        timeout=patience.seconds(120),
    )  # fmt: skip
    lines = [line for line in result.stderr.splitlines() if not line.startswith("shardtrain ")]

    assert result.returncode == code and len(lines) == 1, result.stderr
    assert lines[0].startswith(f"error[{code}]: ")
    assert message in lines[0]


def test_a_verb_that_starts_no_ranks_refuses_an_unusable_compiler_cache_in_one_line(
    tmp_path: Path,
) -> None:
    names = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": "/dev/null/cache",
        "SHARDTRAIN_HEARTBEAT_SECONDS": "0",
    }
    command = [sys.executable, "-m", "shardtrain", "plan", "debug"]
    result = subprocess.run(
        command,
        env=names,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
    )

    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(
        'error[2]: TORCHINDUCTOR_CACHE_DIR="/dev/null/cache" is not a folder'
    )
    assert result.stderr.count("\n") == 1
