"""Start small runs with their launcher in a fork of the tests, hold them in a phase, and read their results."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import patience
from tiny import text_file, tiny_config

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.data import DataLoader
from shardtrain.data.loader import MicroBatches
from shardtrain.launch import signals
from shardtrain.train import trainer as train
from shardtrain.train import validation

STEPS = 6
HELD = 3
"""Number of steps of the run, and the step in which it is held."""
TIMEOUT = 120
VALIDATION = {
    "enable": True,
    "freq": HELD,
    "steps": 3,
    "dataset": "text",
    "dataset_path": text_file(),
    "seq_len": 64,
}


def config(
    folder: Path, grace: int = 60, enable: bool = True, parallelism: dict | None = None, **training
):
    return tiny_config(
        job={"dump_folder": str(folder)},
        training={"steps": STEPS, "local_batch_size": 4, **training},
        parallelism=parallelism or {},
        checkpoint={"enable": enable, "interval": 2, "grace_seconds": grace},
        validation={**VALIDATION, "local_batch_size": 2},
    )


def wait_for(condition, seconds=TIMEOUT):
    patience.wait_for(condition, seconds)


def fork(target, *arguments):
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def end(process) -> int:
    process.join(patience.seconds(TIMEOUT))
    try:
        assert not process.is_alive(), "does not end"
    finally:
        process.kill()
    return process.exitcode


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def no_orphans(folder: Path) -> bool:
    return not any(alive(int(path.read_text())) for path in folder.glob("pid-*"))


def record(folder: Path) -> dict:
    return json.loads((folder / "exit.json").read_text())


def newest(folder: Path) -> int:
    checkpoint = signals.newest_checkpoint(folder / "checkpoint")
    return int(checkpoint.name.removeprefix("step-")) if checkpoint else 0


def losses(folder: Path) -> dict[int, tuple[float, str]]:
    """Return the loss and the hash of the data order of each step."""
    # the last line of a live run may be incomplete
    complete_lines = (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    records = [json.loads(line) for line in complete_lines.splitlines()]
    return {
        record["step"]: (record["loss"], record["order_hash"])
        for record in records
        if "loss" in record
    }


def hold(folder: Path, seconds: float = TIMEOUT) -> None:
    (folder / "ready").touch()
    end = time.monotonic() + patience.seconds(seconds)
    while not (folder / "go").exists() and time.monotonic() < end:
        time.sleep(0.01)


def before(owner, name, when, action):
    """Patch a method to call ``action`` before each call whose number satisfies ``when``."""
    original = getattr(owner, name)
    calls = []

    def patched(*arguments, **names):
        calls.append(1)
        if when(len(calls)):
            action()
        return original(*arguments, **names)

    setattr(owner, name, patched)


def patch(folder: Path, phase: str) -> None:
    """Patch this process, which is a single rank, to stop in a phase."""
    wait = lambda: hold(folder)  # noqa: E731
    in_step = lambda number: lambda calls: calls == number  # noqa: E731
    if phase in ("step", "warm-up"):
        before(train.optim, "set_learning_rate", in_step(HELD if phase == "step" else 1), wait)
    elif phase == "evaluation":
        generator = validation._batches

        def batches(*arguments):
            for number, batch in enumerate(generator(*arguments)):
                if number == 1:
                    hold(folder)
                yield batch

        validation._batches = batches
    elif phase == "save":
        before(Checkpoints, "save", in_step(1), wait)
    elif phase == "data":

        def stall_data() -> None:
            (folder / "ready").touch()
            time.sleep(10 * TIMEOUT)

        before(DataLoader, "__next__", in_step(HELD), stall_data)
    elif phase == "worker":
        pid = folder / "pid-worker"

        def stall() -> None:
            (folder / "ready").touch()
            pid.write_text(str(os.getpid()))
            time.sleep(10 * TIMEOUT)

        before(MicroBatches, "__getitem__", in_step(HELD), stall)
    elif phase == "slow save":
        before(Checkpoints, "save", lambda _: True, lambda: time.sleep(4))
        before(train.optim, "set_learning_rate", in_step(HELD), wait)
    elif phase == "slow second save":

        def stall_save() -> None:
            (folder / "ready").touch()
            time.sleep(TIMEOUT)

        before(Checkpoints, "save", in_step(2), stall_save)
    elif phase == "done":
        done = folder / f"done-{os.environ['RANK']}"
        before(Checkpoints, "close", in_step(1), lambda: (done.touch(), hold(folder)))
    elif phase == "signals itself":
        before(
            train.optim,
            "set_learning_rate",
            in_step(1),
            lambda: os.kill(os.getpid(), signal.SIGUSR1),
        )
    elif phase == "slow steps":
        before(train.optim, "set_learning_rate", lambda _: True, lambda: time.sleep(0.2))
    else:
        raise ValueError(f"unknown phase {phase!r}")
