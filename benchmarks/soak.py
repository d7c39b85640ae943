"""Stability of a long run: memory, open files, threads and step rate at its end compared with its beginning.

    python benchmarks/soak.py [--steps 100000] [--nproc 1] [--folder outputs/soak]

Trains a model of two narrow layers with checkpoints, TensorBoard and validation, and samples all of its
processes about a hundred times. Prints one JSON line per sample (step, private MiB, open files, threads and
CPU seconds, summed over processes), and at the end the growth since a tenth of the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def descendants(pid: int) -> list[int]:
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):
            pids += [
                int(child)
                for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            ]
    return pids


def sample(pid: int) -> dict[str, float]:
    total = {"mib": 0.0, "files": 0, "threads": 0, "cpu_seconds": 0.0}
    for one in descendants(pid):
        with contextlib.suppress(OSError, ValueError):
            private = [
                line
                for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
                if "Private" in line
            ]
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total["mib"] += sum(int(line.split()[1]) for line in private) / 1024
            total["files"] += len(os.listdir(f"/proc/{one}/fd"))
            total["threads"] += int(fields[17])
            total["cpu_seconds"] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return {name: round(value, 1) for name, value in total.items()}


def last_step(metrics: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError), metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 4096))
        return int(json.loads(file.read().splitlines()[-1])["step"])
    return 0


def soak(steps: int, nproc: int, folder: Path) -> list[dict[str, Any]]:
    options = {
        "job.dump_folder": folder, "training.steps": steps, "training.seq_len": 32, "training.local_batch_size": 1,
        "training.global_batch_size": nproc, "training.mixed_precision_param": "float32", "metrics.log_freq": 10,
        "model.overrides.dim": 16, "model.overrides.num_layers": 2, "model.overrides.num_heads": 2,
        "model.overrides.num_kv_heads": 2, "model.overrides.head_dim": 8, "model.overrides.ffn_dim": 32,
        "checkpoint.enable": "true", "checkpoint.interval": max(1, steps // 100), "checkpoint.keep_latest_k": 3,
        "validation.enable": "true", "validation.dataset": "python_stdlib",
        "validation.freq": max(1, steps // 100), "validation.steps": 2,
        "metrics.enable_tensorboard": "true",
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [
        sys.executable,
        "-m",
        "shardtrain",
        "train",
        "debug",
        "--nproc",
        str(nproc),
        *arguments,
    ]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
    )
    samples: list[dict[str, Any]] = []
    try:
        while process.poll() is None:
            step = last_step(folder / "metrics.jsonl")
            if step >= len(samples) * steps / 100 and step:
                samples.append({"step": step, **sample(process.pid)})
                print(json.dumps(samples[-1]), flush=True)
            time.sleep(0.2)
    finally:
        process.terminate()
    if process.wait() != 0:
        raise SystemExit(f"the run has ended with {process.returncode}")
    return samples


def grown(samples: list[dict[str, Any]]) -> dict[str, float]:
    """Return the growth of each resource: mean of the last ten samples minus mean of samples 10 to 19."""
    early = samples[10:20]
    late = samples[-10:]

    def mean(part: list[dict[str, Any]], name: str) -> float:
        return float(sum(sample[name] for sample in part) / max(1, len(part)))

    def pace(part: list[dict[str, Any]]) -> float:
        cpu_seconds = part[-1]["cpu_seconds"] - part[0]["cpu_seconds"]
        return float(cpu_seconds / (part[-1]["step"] - part[0]["step"]))

    def growth(name: str) -> float:
        return round(mean(late, name) - mean(early, name), 2)

    return {
        "steps": late[-1]["step"] - early[0]["step"],
        "mib": growth("mib"),
        "files": growth("files"),
        "threads": growth("threads"),
        "cpu_seconds_per_step_ratio": round(pace(late) / pace(early), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("outputs/soak"))
    options = parser.parse_args()
    print(json.dumps(grown(soak(options.steps, options.nproc, options.folder))))


if __name__ == "__main__":
    main()
