"""Every cell of the table of signals and phases, tested with the full command on one process and on two ranks.

A command is a fork of this process, which avoids importing torch again. A hook holds it in a phase: it creates the file
``ready`` and waits for ``go``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import patience
import pytest
from launched import (
    HELD,
    alive,
    before,
    end,
    fork,
    hold,
    newest,
    no_orphans,
    patch,
    record,
    wait_for,
)
from ports import free_port
from tiers import cases
from tiny import text_file
from tiny_tokenizers import bpe_folder
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from shardtrain import cli, config
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.launch import failure, greeting, local, meeting, run_ends
from shardtrain.launch.run_ends import TABLE
from shardtrain.launch.stop_request import ONE_REQUEST_SECONDS
from shardtrain.tools.generate import generate_command
from shardtrain.train import preflight, trainer
from shardtrain.utils import python_child
from shardtrain.utils.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    OutOfMemoryError,
    ShardtrainError,
    StorageError,
)
from shardtrain.utils.stop_signals import FROM_OUTSIDE, REQUESTS

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="forks of a process that has imported torch"
)

RUN = f"""
[job]
dump_folder = "run"
[model]
flavor = "debugmodel"
hf_assets_path = "bytes"
[model.overrides]
num_layers = 1
dim = 32
ffn_dim = 32
vocab_size = 320
[training]
dataset = "text"
dataset_path = "{text_file()}"
steps = {HELD + 1}
seq_len = 32
local_batch_size = 2
device = "cpu"
[checkpoint]
enable = true
interval = {HELD}
[validation]
enable = true
freq = {HELD}
steps = 3
dataset = "text"
dataset_path = "{text_file()}"
seq_len = 32
local_batch_size = 1
"""
PHASES = list(TABLE["SIGTERM"])
ARGUMENTS, PREFLIGHT, STARTING, *_, AFTER = PHASES
READER = "reader of a tokenizer"
"""Part of ``STARTING`` in which rank 0 waits for the child process that opens the tokenizer first."""
TWICE = "SIGINT twice"
PAUSE = "SIGSTOP, then SIGCONT"
KILLED = ("SIGKILL", "SIGSYS")
HELD_IN = {
    "first step": "warm-up",
    "training": "step",
    "validation": "evaluation",
    "saving": "save",
}
"""Phases of the table that ``patch`` holds under another name."""


WAITING = """
import os, pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Program that waits for a file and then becomes another program. A shell would not keep blocked signals."""


def held_in(folder: Path, phase: str) -> None:
    """Hold this command, or its rank 0, in a phase of the table."""
    if phase == ARGUMENTS:
        before(config, "load", lambda calls: calls == 1, lambda: hold(folder))
    elif phase == PREFLIGHT:
        pid = folder / "pid-preflight"
        note = lambda: (pid.write_text(str(os.getpid())), hold(folder))  # noqa: E731
        before(preflight, "require", lambda calls: not pid.exists(), note)
    elif phase == "meeting":
        before(meeting.Meeting, "_meet", lambda calls: True, lambda: hold(folder))
    elif phase == "processes":
        before(
            SubprocessContext,
            "_start",
            lambda calls: True,
            lambda: os.kill(os.getpid(), signal.SIGTERM),
        )
    elif phase == "sample":
        before(generate_command, "main", lambda calls: True, lambda: hold(folder))
    elif phase == READER:
        original = python_child.command

        def slow_command(module: str, *arguments: str) -> list[str]:
            command = original(module, *arguments)
            if module != "shardtrain.data.sandbox_child" or "RANK" not in os.environ:
                return command
            (folder / "ready").touch()
            return [sys.executable, "-I", "-c", WAITING, str(folder / "go"), *command]

        python_child.command = slow_command
    else:
        main = trainer.main

        def held_main(loaded):
            rank = os.environ.get("RANK", "0")
            (folder / f"pid-{rank}").write_text(str(os.getpid()))
            if rank == "0" and phase in HELD_IN:
                patch(folder, HELD_IN[phase])
            elif rank == "0" and phase == STARTING:
                before(trainer.process_group, "join", lambda calls: True, lambda: hold(folder))
            elif rank == "0" and phase == AFTER:
                before(Checkpoints, "close", lambda calls: True, lambda: hold(folder))
            return main(loaded)

        trainer.main = held_main


def _command(folder: Path, phase: str, arguments: list[str]) -> None:
    os.chdir(folder)
    os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    for name in [
        name
        for name in os.environ
        if name in ("NGPU", "LOG_RANK") or name.startswith("SHARDTRAIN_STORE")
    ]:
        del os.environ[name]
    held_in(folder, phase)
    os._exit(cli.main(["train", "run.toml", *arguments]))


def start(folder: Path, phase: str, *arguments: str):
    """Start the command and wait until it is held."""
    (folder / "run.toml").write_text(RUN)
    process = fork(_command, folder, phase, list(arguments))
    wait_for((folder / "ready").exists)
    return process


def send(pid: int, name: str) -> None:
    """Send the signals that ``name`` stands for, such as two SIGINT in succession."""
    if name == TWICE:
        os.kill(pid, signal.SIGINT)
        time.sleep(3 * ONE_REQUEST_SECONDS)
    for number in {TWICE: ["SIGINT"], PAUSE: ["SIGSTOP", "SIGCONT"]}.get(name, [name]):
        try:
            os.kill(pid, signal.Signals[number])
        except ProcessLookupError:
            assert name == TWICE  # the first signal ended the process
        time.sleep(0.2)


CELLS = [(name, phase, ranks) for name in TABLE for phase in PHASES for ranks in (1, 2)]
FIRST = [
    ("SIGTERM", ARGUMENTS, 1), ("SIGALRM", PREFLIGHT, 1), ("SIGTERM", PREFLIGHT, 2), ("SIGQUIT", STARTING, 2),
    (TWICE, AFTER, 1), (TWICE, "training", 2), ("SIGKILL", "training", 1), (PAUSE, PREFLIGHT, 2), ("SIGXCPU", AFTER, 1),
    ("SIGXFSZ", "training", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "phase", "ranks"), cases(FIRST, nightly=[c for c in CELLS if c not in FIRST])
)
def test_each_cell_of_the_table(tmp_path, capfd, name, phase, ranks):
    process = start(tmp_path, phase, "--nproc", str(ranks))
    send(process.pid, name)
    (tmp_path / "go").touch()
    expected = TABLE[name][phase]
    status = end(process)

    assert (128 - status if status < 0 else status) == expected.code

    wait_for(lambda: no_orphans(tmp_path))
    run_folder = tmp_path / "run"
    assert (run_folder / "exit.json").exists() == expected.writes_exit_json

    err = (tmp_path / "err").read_text()
    if expected.writes_exit_json:
        assert record(run_folder)["code"] == expected.code
        assert record(run_folder)["retryable"] == (expected.code in failure.RETRYABLE)

    # Compare the line only up to the step number, which depends on the speed of the machine.
    if expected.line:
        reason = "a second SIGINT" if expected == run_ends.AT_ONCE else name.partition(" ")[0]
        line = expected.line.partition(" after step")[0].partition("{kept}")[0]
        start_of_line = line.format(reason=reason)
        assert err.count(f"stopped[{expected.code}]: {start_of_line}") == 1, err

    assert "Traceback" not in err

    if name in KILLED and phase not in (ARGUMENTS, PREFLIGHT):
        local.prepare(run_folder, note_killed=True)
        assert "was killed" in capfd.readouterr().err


def processes_of(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    pids = [pid]
    for parent in pids:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pids += map(int, children.read_text().split())
    return pids


OF_ALL = [
    (name, phase, ranks) for name in REQUESTS for phase in (*PHASES, READER) for ranks in (1, 2)
]
OF_ALL_FIRST = [
    ("SIGTERM", READER, 2), ("SIGINT", READER, 2), ("SIGHUP", PREFLIGHT, 2), ("SIGUSR2", "training", 2),
]  # fmt: skip


@pytest.mark.parametrize("last_first", cases([True], nightly=[False]))
@pytest.mark.parametrize(
    ("name", "phase", "ranks"),
    cases(OF_ALL_FIRST, nightly=[cell for cell in OF_ALL if cell not in OF_ALL_FIRST]),
)
def test_a_signal_to_all_processes_is_one_request(tmp_path, name, phase, ranks, last_first):
    """Slurm signals every process of a job at its time limit, a terminal all of its foreground processes."""
    arguments = ["--nproc", str(ranks)]
    if phase == READER:
        bpe_folder(tmp_path / "tokenizer")
        arguments.append("--model.tokenizer_path=tokenizer")
        arguments.append("--model.overrides.vocab_size=384")
        if ranks == 1:
            pytest.skip("one process opens the tokenizer in the preflight only")
    process = start(tmp_path, phase, *arguments)
    pids = processes_of(process.pid)
    # The main process receives the signal before its children, or after them.
    for pid in reversed(pids) if last_first else pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[name])
    time.sleep(0.2)
    (tmp_path / "go").touch()

    status = end(process)
    expected = TABLE[name][STARTING if phase == READER else phase]
    err = (tmp_path / "err").read_text()
    assert status == expected.code, err

    wait_for(lambda: not any(map(alive, pids)))
    run_folder = tmp_path / "run"
    assert (run_folder / "exit.json").exists() == expected.writes_exit_json
    if expected.writes_exit_json:
        assert record(run_folder)["code"] == expected.code
    assert err.count("stopped[") == bool(expected.line), err
    assert "error[" not in err, err
    assert "Traceback" not in err


@pytest.mark.parametrize("number", cases([signal.SIGTERM], nightly=FROM_OUTSIDE[1:]))
def test_a_request_to_the_preflight_process_stops_the_run(tmp_path, number):
    process = start(tmp_path, PREFLIGHT, "--nproc", "2")
    os.kill(int((tmp_path / "pid-preflight").read_text()), number)
    expected = TABLE[number.name][PREFLIGHT]

    assert end(process) == record(tmp_path / "run")["code"] == expected.code

    line = expected.line.format(reason=number.name)
    assert f"stopped[{expected.code}]: {line}\n" in (tmp_path / "err").read_text()


AT_IMPORT = """
import pathlib, sys, time

class Holder:
    def find_spec(self, name, path=None, target=None):
        folder = pathlib.Path({folder!r})
        if name == {name!r} and not (folder / "ready").exists():
            (folder / "ready").touch()
            while not (folder / "go").exists():
                time.sleep(0.01)

sys.meta_path.insert(0, Holder())
"""
IMPORTS = {
    "shardtrain.cli": ARGUMENTS,
    "shardtrain.launch.agent": ARGUMENTS,
    "shardtrain.train.preflight": PREFLIGHT,
    "shardtrain.train.trainer": STARTING,
}
"""Module that a new process imports -> phase of the table."""


@pytest.mark.parametrize(
    ("name", "module"),
    cases(
        [("SIGALRM", "shardtrain.cli"), ("SIGINT", "shardtrain.cli"), ("SIGQUIT", "shardtrain.train.preflight")],
        nightly=[(name, module) for name in REQUESTS for module in IMPORTS],
    ),
)  # fmt: skip
def test_a_signal_during_imports_ends_according_to_the_table(tmp_path, name, module):
    """Start a new interpreter, because forks of this process have already imported everything."""
    (tmp_path / "run.toml").write_text(RUN)
    customize = tmp_path / "customize"
    customize.mkdir()
    (customize / "sitecustomize.py").write_text(AT_IMPORT.format(folder=str(tmp_path), name=module))
    environment = {**os.environ, "PYTHONPATH": str(customize), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "shardtrain", "train", "run.toml", "--nproc=1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    wait_for((tmp_path / "ready").exists)
    process.send_signal(signal.Signals[name])
    (tmp_path / "go").touch()
    _, err = process.communicate(timeout=patience.seconds(60))
    expected = TABLE[name][IMPORTS[module]]

    assert process.returncode == expected.code
    assert err == f"stopped[{expected.code}]: {expected.line.format(reason=name)}\n"
    assert (tmp_path / "run/exit.json").exists() == expected.writes_exit_json


@pytest.mark.parametrize(
    ("name", "phase"),
    cases(
        [("SIGTERM", PREFLIGHT), ("SIGUSR1", "meeting")],
        nightly=[(name, "meeting") for name in (*REQUESTS, TWICE) if name != "SIGUSR1"],
    ),
)
def test_a_waiting_node_ends_according_to_the_table(tmp_path, name, phase):
    arguments = [
        "--nnodes",
        "2",
        "--node_rank",
        "0",
        "--rdzv_endpoint",
        f"127.0.0.1:{free_port()}",
        "--nproc",
        "1",
    ]
    arguments += ["--training.global_batch_size", "4"]
    # There is no other node, so telling the others takes two thirds of the grace period.
    process = start(tmp_path, phase, *arguments, "--checkpoint.grace_seconds", "1")
    send(process.pid, name)

    assert end(process) == record(tmp_path / "run")["code"] == TABLE[name][PREFLIGHT].code

    line = run_ends.BEFORE_FIRST_STEP.line.format(reason=name.partition(" ")[0])
    assert f"stopped[75]: {line}\n" in (tmp_path / "err").read_text()


@pytest.mark.nightly(
    "a node starts interpreters",
    by="tests/launch/test_run_ends.py::test_a_waiting_node_ends_according_to_the_table",
)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_node_with_starting_ranks_ends_according_to_the_table(tmp_path, name, monkeypatch):
    """The ranks are still importing PyTorch when they receive the signal."""
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=1")
    (tmp_path / "run.toml").write_text(RUN)
    arguments = [
        "--nnodes",
        "1:2",
        "--node_rank",
        "0",
        "--rdzv_endpoint",
        f"127.0.0.1:{free_port()}",
        "--nproc",
        "1",
    ]
    process = fork(_command, tmp_path, "none", [*arguments, "--training.global_batch_size", "4"])
    # Half a second after the agent has a child, its rank is importing PyTorch.
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: children.read_text())
    time.sleep(0.5)
    send(process.pid, name)

    assert end(process) == record(tmp_path / "run")["code"] == TABLE[name]["ranks starting"].code

    line = run_ends.BEFORE_FIRST_STEP.line.format(reason=name)
    assert (tmp_path / "err").read_text().count(f"stopped[75]: {line}\n") == 1


def test_a_node_that_is_starting_the_processes_of_ranks_ends_as_the_table_says(
    tmp_path, monkeypatch
):
    """PyTorch's agent has installed its signal handlers, but does not know the rank processes yet."""
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=1")
    (tmp_path / "run.toml").write_text(RUN)
    arguments = [
        "--nnodes",
        "1:2",
        "--node_rank",
        "0",
        "--rdzv_endpoint",
        f"127.0.0.1:{free_port()}",
        "--nproc",
        "1",
    ]
    process = fork(
        _command, tmp_path, "processes", [*arguments, "--training.global_batch_size", "4"]
    )

    assert end(process) == record(tmp_path / "run")["code"] == 75

    line = run_ends.BEFORE_FIRST_STEP.line.format(reason="SIGTERM")
    assert (tmp_path / "err").read_text().count(f"stopped[75]: {line}\n") == 1


SLOW_STEP = """
import pathlib, time

def factor(step, total_steps, warmup_steps, min_lr_factor):
    folder = pathlib.Path(__file__).parent
    ready = folder / "ready"
    # The preflight calls this, too, before there are metrics.
    if (folder / "run/metrics.jsonl").exists() and not ready.exists():
        ready.touch()
        time.sleep(4)
    return 1.0
"""


@pytest.mark.nightly(
    "a node starts interpreters",
    by="tests/launch/test_run_ends.py::test_a_node_that_is_starting_the_processes_of_ranks_ends_as_the_table_says",
)
@pytest.mark.parametrize(
    ("names", "code"),
    [(["SIGTERM"] * 4, 75), (["SIGINT", "SIGTERM", "SIGTERM"], 75), ([TWICE], 76)],
)
def test_a_node_waits_for_its_ranks_however_often_it_is_asked(tmp_path, names, code, monkeypatch):
    """Each signal interrupts the agent's main thread, which must continue to wait for its ranks."""
    monkeypatch.setenv("PET_RDZV_CONF", "last_call_timeout=1")
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "slow.py").write_text(SLOW_STEP)
    arguments = ["--nnodes", "1:2", "--node_rank", "0", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--nproc", "1",
             "--training.global_batch_size", "4", "--lr_scheduler.name", "slow.py", "--metrics.log_freq", "1",
             "--checkpoint.interval", "100", "--training.steps", "100"]  # fmt: skip
    process = fork(_command, tmp_path, "none", arguments)
    wait_for((tmp_path / "ready").exists)
    for name in names:
        send(process.pid, name)

    assert end(process) == record(tmp_path / "run")["code"] == code
    assert bool(newest(tmp_path / "run")) == (code == 75)


@pytest.mark.parametrize(
    "name", cases(["SIGINT"], nightly=sorted({*REQUESTS} - {"SIGINT", "SIGHUP"}))
)
def test_a_signal_after_the_end_stops_the_sample_but_keeps_the_status(tmp_path, name):
    process = start(tmp_path, "sample", "--nproc", "1", "--metrics.sample_prompt", "a")
    send(process.pid, name)
    (tmp_path / "go").touch()

    assert end(process) == record(tmp_path / "run")["code"] == 0
    assert "the sample was stopped by a signal" in (tmp_path / "err").read_text()


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize(("number", "cause"), [
    (signal.SIGKILL, "was killed by signal 9 (the kernel sends it when memory runs out)"),
    (signal.SIGSTOP, "was stopped (by SIGSTOP, or a read from the terminal in the background)"),
])  # fmt: skip
def test_a_check_that_is_killed_or_stopped_is_named_and_tried_again(
    tmp_path, number, cause, restarts
):
    """The hook blocks only the first preflight check, so the second one passes."""
    arguments = [
        "--nproc",
        "2",
        "--max_restarts",
        str(restarts),
        "--comm.hang_timeout_seconds",
        "2",
    ]
    process = start(tmp_path, PREFLIGHT, *arguments)
    os.kill(int((tmp_path / "pid-preflight").read_text()), number)
    status = end(process)
    lines = (tmp_path / "err").read_text().splitlines()
    name_of_check = "the process that checks data, tokenizer and model before ranks start"

    assert [line for line in lines if line.startswith(f"error[6]: {name_of_check} {cause}")], lines
    assert status == record(tmp_path / "run")["code"] == (0 if restarts else 6)
    assert ("restart 1 of 1" in lines) == bool(restarts)

    if not restarts:
        assert record(tmp_path / "run")["retryable"]
        assert not record(tmp_path / "run")["message"].endswith("log")

    assert no_orphans(tmp_path)


# error of the preflight -> exit status
REFUSALS: dict[str, tuple[Exception, int]] = {
    "configuration": (ConfigError("training.steps=0 must be at least 1"), 2),
    "data": (DataError("row 7 has no text"), 3),
    "checkpoint": (CheckpointError("step-2 is incomplete"), 5),
    "memory": (OutOfMemoryError("no room"), 7),
    "storage": (StorageError("the disk is full"), 8),
    "disk": (OSError(errno.ENOSPC, "No space left on device"), 8),
    "others": (ShardtrainError("a check failed"), 1),
}
WAYS = {
    "one process": ["--nproc", "1"],
    "two ranks": ["--nproc", "2"],
    "a node": [
        "--nnodes",
        "2",
        "--node_rank",
        "0",
        "--rdzv_endpoint",
        "127.0.0.1:1",
        "--nproc",
        "1",
    ],
    "a rank of torchrun": [],
}


def _refused(folder: Path, name: str, way: str) -> None:
    def judge(*_: object) -> None:
        raise REFUSALS[name][0]

    preflight.judge = judge
    # There is no other node that could receive the refusal.
    greeting.REFUSAL_SECONDS = 0.5
    if way == "a rank of torchrun":
        os.environ.update(
            RANK="0",
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="2",
            TORCHELASTIC_RUN_ID="run",
        )
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    _command(folder, "none", WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_of_the_preflight_is_in_exit_json(tmp_path, name, way):
    """An invalid configuration creates no run folder, except under torchrun, whose status is always 1."""
    (tmp_path / "run.toml").write_text(RUN)
    code = REFUSALS[name][1]
    assert end(fork(_refused, tmp_path, name, way)) == code

    err = (tmp_path / "err").read_text()
    assert err.count(f"error[{code}]: ") == 1 and "Traceback" not in err, err

    if name == "configuration" and way != "a rank of torchrun":
        assert not (tmp_path / "run").exists()
        return
    written = record(tmp_path / "run")
    assert written["code"] == code
    assert written["rank"] is None
    assert written["retryable"] == (code in failure.RETRYABLE)
    assert written["message"] in err


def table() -> str:
    """Return the table as Markdown."""
    rows = [f"| Signal | {' | '.join(PHASES)} |", "|---" * (len(PHASES) + 1) + "|"]
    names = {
        "SIGTERM": REQUESTS,
        TWICE: [TWICE],
        "SIGKILL": ["SIGKILL"],
        PAUSE: [PAUSE],
        "SIGPIPE": run_ends.IGNORED,
    }
    for name, alike in names.items():
        cells = [
            f"{cell.code}" if cell.writes_exit_json else f"{cell.code}, no file"
            for cell in TABLE[name].values()
        ]
        rows.append(f"| {', '.join(alike)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def test_the_documentation_matches_the_table_and_the_messages():
    text = (Path(__file__).parents[2] / "docs/launch.md").read_text()
    assert table() in text, table()

    values = {
        "step": 41,
        "folder": "outputs/checkpoint/step-41",
        "kept": "; the last checkpoint is ",
    }
    for name in TABLE:
        reason = "a second SIGINT" if name == TWICE else "SIGTERM"
        for cell in TABLE[name].values():
            if cell.line and not (name == TWICE and cell != run_ends.AT_ONCE):
                assert (
                    f"\nstopped[{cell.code}]: {cell.line.format(reason=reason, **values)}" in text
                )
