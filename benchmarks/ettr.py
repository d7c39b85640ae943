"""Share of time that trains (ETTR) while something fails every minute.

    python benchmarks/ettr.py [--minutes 60] [--mean_seconds 60] [--seed 0] [--out benchmarks/results/ettr_cpu.json]

Four CPU ranks train the debug preset. Failures come at random times, ``mean_seconds`` apart on average (exponential):
SIGKILL of a rank, a stop signal to the launcher, a rank that is stopped for three seconds, a full disk, and a disk that
is mounted read-only. Checkpoints are on a small memory disk (tmpfs), so this needs root. The same command starts again
whenever it ends, as a scheduler would do.

At the end, the time is divided by the run's own ledger (``goodput.jsonl``), and an undisturbed run trains the same
steps: loss and gradient norm of every step must be equal, bit for bit, so no step was lost or applied twice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from processor import processor_facts
from restarts import ranks_of

from shardtrain.launch.goodput import events
from shardtrain.launch.goodput.account import Account, account, attempts_of

RANKS = 4
DISK_MIB = 256
SLOW_SECONDS = 3.0
DISK_FAULT_SECONDS = 4.0
KINDS = ("kill", "stop signal", "slow rank", "full disk", "read-only disk")
NEVER_RETRIED = (0, 1, 2, 3, 5)
"""Exit codes of a run that a scheduler does not start again (docs/launch.md)."""
STEPS_WITHOUT_END = 1_000_000
HOURS_BETWEEN_FAILURES = 3.0
"""Mean time between failures of the published figure (ByteRobust, arXiv 2509.16293: 97 % on 9,600 GPUs)."""


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a memory disk of ``DISK_MIB`` for checkpoints."""
    folder.mkdir()
    options = ["-o", f"size={DISK_MIB}m"]
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def start(run_folder: Path, checkpoints: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start the run, or continue it."""
    options = {
        "job.dump_folder": run_folder,
        "training.steps": steps,
        "training.device": "cpu",
        "training.seq_len": 128,
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": "false",
        "training.on_data_end": "repeat",
        "lr_scheduler.decay_ratio": 0,
        "checkpoint.enable": "true",
        "checkpoint.folder": checkpoints,
        "checkpoint.interval": 10,
        "checkpoint.keep_latest_k": 2,
        "checkpoint.async_mode": "async",
    }
    arguments = []
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    command = ["-P", "-m", "shardtrain", "train", "debug", "--nproc", str(RANKS), *arguments]
    # The process keeps its copy of the file descriptor.
    with run_folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command, "--max_restarts", "1000"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def fail(kind: str, launcher: int, disk: Path, dice: random.Random) -> bool:
    """Cause a failure. Return False if the ranks are not running yet, because then it has no effect."""
    ranks = ranks_of(launcher)
    if len(ranks) < RANKS:
        return False
    victim = ranks[dice.choice(sorted(ranks))]
    if kind == "kill":
        os.kill(victim, signal.SIGKILL)
    elif kind == "stop signal":
        os.kill(launcher, signal.SIGTERM)
    elif kind == "slow rank":
        os.kill(victim, signal.SIGSTOP)
        time.sleep(SLOW_SECONDS)
        os.kill(victim, signal.SIGCONT)
    elif kind == "full disk":
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(2**20))
        time.sleep(DISK_FAULT_SECONDS)
        filler.unlink(missing_ok=True)
    else:
        remount = ["mount", "-o"]
        # A disk with open files cannot become read-only, so try until a save is over.
        while subprocess.run([*remount, "remount,ro", str(disk)], capture_output=True).returncode:
            time.sleep(0.05)
        time.sleep(DISK_FAULT_SECONDS)
        subprocess.run([*remount, "remount,rw", str(disk)], check=True)
    return True


def disturb(
    run_folder: Path, disk: Path, seconds: float, mean_seconds: float, seed: int
) -> tuple[Counter[str], Counter[str]]:
    """Train with failures for a time. Return the numbers of failures by kind, and of ends by exit code."""
    dice = random.Random(seed)
    failures: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    end = time.monotonic() + seconds
    next_failure = time.monotonic() + dice.expovariate(1 / mean_seconds)
    process = start(run_folder, disk / "checkpoint", STEPS_WITHOUT_END)
    try:
        while time.monotonic() < end:
            time.sleep(0.1)
            if process.poll() is not None:
                if process.returncode in NEVER_RETRIED:
                    raise SystemExit(run_folder.with_suffix(".log").read_text()[-3000:])
                ends[str(process.returncode)] += 1
                process = start(run_folder, disk / "checkpoint", STEPS_WITHOUT_END)
            if time.monotonic() < next_failure:
                continue
            kind = dice.choice(KINDS)
            if fail(kind, process.pid, disk, dice):
                failures[kind] += 1
                next_failure = time.monotonic() + dice.expovariate(1 / mean_seconds)
    finally:
        # The launcher stops its ranks and saves.
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=120)
    return failures, ends


def records(run_folder: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm of each step. A step that was repeated must have the same ones."""
    by_step: dict[int, tuple[float, float]] = {}
    for line in (run_folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            by_step[record["step"]] = (record["loss"], record["grad_norm"])
    return by_step


def measure(minutes: float, mean_seconds: float, seed: int) -> dict[str, Any]:
    """Return the division of time, and the comparison with an undisturbed run."""
    with tempfile.TemporaryDirectory() as name, small_disk(Path(name) / "disk") as disk:
        disturbed = Path(name) / "disturbed"
        started_at = time.monotonic()
        failures, ends = disturb(disturbed, disk, 60 * minutes, mean_seconds, seed)
        wall_seconds = time.monotonic() - started_at
        ledger, _ = events.read(disturbed)
        division: Account = account(attempts_of(ledger))
        losses = records(disturbed)

        # The undisturbed run has its own checkpoints, so it starts from the first step.
        undisturbed = Path(name) / "undisturbed"
        start(undisturbed, undisturbed / "checkpoint", max(losses)).wait()
        expected = records(undisturbed)

    differing = [step for step in losses if losses[step] != expected.get(step)]
    seconds_of_failures = division.seconds["lost"] + division.recovery_seconds
    overhead = division.seconds["checkpoint"] + seconds_of_failures
    per_failure = seconds_of_failures / max(1, sum(failures.values()))
    total_seconds = division.running_seconds + division.idle_seconds
    stall_share = division.seconds["checkpoint"] / max(division.running_seconds, 1e-9)
    mean_time_between = 3600 * HOURS_BETWEEN_FAILURES
    return {
        "wall_seconds": round(wall_seconds, 1),
        "failures": dict(failures),
        "ends_by_exit_code": dict(ends),
        "steps": max(losses),
        "steps_that_differ": len(differing),
        "steps_missing": max(losses) - len(losses),
        "seconds": {name: round(value, 1) for name, value in division.seconds.items()},
        "idle_seconds": round(division.idle_seconds, 1),
        "trained_share": round(division.seconds["productive"] / total_seconds, 4),
        "ettr": round(1 - (overhead + division.idle_seconds) / wall_seconds, 4),
        "seconds_per_failure": round(per_failure, 2),
        "ettr_at_3_hours": round((1 - per_failure / mean_time_between) * (1 - stall_share), 4),
    }


def main() -> None:
    """Measure the ratio of effective training time. Print it as JSON, and write it to ``--out`` if set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--mean_seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    row = measure(options.minutes, options.mean_seconds, options.seed)
    result = {"processor": processor_facts(), "mean_seconds": options.mean_seconds, **row}
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
