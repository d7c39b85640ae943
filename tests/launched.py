"""A small run under a launcher of its own, forked from the tests: what to run it with, and what it left."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import patience
from tiny import text_file, tiny_config

from shardtrain.resilience import signals

STEPS, HELD = 6, 3
"""Steps of the run, and the one in which it is held."""
TIMEOUT = 120
VALIDATION = {"enable": True, "freq": HELD, "steps": 3, "dataset": "text", "dataset_path": text_file(), "seq_len": 64}


def config(folder: Path, grace: int = 60, enable: bool = True, parallelism: dict | None = None, **training):
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
    found = signals.newest_checkpoint(folder / "checkpoint")
    return int(found.name[5:]) if found else 0


def losses(folder: Path) -> dict[int, tuple[float, str]]:
    whole = (
        (folder / "metrics.jsonl").read_text().rpartition("\n")[0]
    )  # of a run that continues, the last may be half there
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["step"]: (line["loss"], line["order_hash"]) for line in lines if "loss" in line}
