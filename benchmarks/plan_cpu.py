"""Accuracy of ``shardtrain plan --device cpu`` on this machine, calibrated with one of the measured runs.

    python benchmarks/plan_cpu.py [--rounds 2] [--out benchmarks/results/plan_cpu.json]
    python benchmarks/plan_cpu.py --score benchmarks/results/plan_cpu.json

Trains two Llamas (5.8 M and 52 M parameters, float32, sequences of 512 tokens) for a few steps in one
process and on six meshes of two ranks, in turns, with one thread and one core per rank. Stores the wall and
CPU seconds of each step on each rank. With other load, only CPU seconds are comparable, because waiting
ranks sleep. Plans predict wall seconds, so waits of pipeline ranks are subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "5.8M": {
        "model.overrides": {
            "dim": 256,
            "num_layers": 6,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 32,
        },
        "ffn_dim": 768,
        "training.local_batch_size": 4,
    },
    "52M": {
        "model.overrides": {
            "dim": 512,
            "num_layers": 16,
            "num_heads": 8,
            "num_kv_heads": 4,
            "head_dim": 64,
        },
        "ffn_dim": 1536,
        "training.local_batch_size": 2,
    },
}
MESHES: dict[str, dict[str, Any]] = {
    "one process": {},
    "FSDP 2": {"parallelism.data_parallel_shard_degree": 2},
    "DDP 2": {
        "parallelism.data_parallel_replicate_degree": 2,
        "parallelism.data_parallel_shard_degree": 1,
    },
    "TP 2": {"parallelism.tensor_parallel_degree": 2},
    "PP 2": {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_microbatch_size": 1,
    },
    "CP 2": {"parallelism.context_parallel_degree": 2},
    "CP 2 ring": {
        "parallelism.context_parallel_degree": 2,
        "parallelism.context_parallel_rotate_method": "alltoall",
    },
}
CALIBRATED_WITH = "FSDP 2"
LEFT_OUT = 2
"""Uncounted first steps, which allocate memory."""


def options(model: str, mesh: str) -> dict[str, Any]:
    """Return options of a run that override the debug preset. Every mesh has the same sequences per step."""
    sizes = MODELS[model]
    rows = sizes["training.local_batch_size"]
    return {
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.overrides": {
            **sizes["model.overrides"],
            "ffn_dim": sizes["ffn_dim"],
            "vocab_size": 2048,
        },
        "model.hf_assets_path": "bytes",
        "training.seq_len": 512,
        "training.local_batch_size": rows // 2 if mesh in ("FSDP 2", "DDP 2") else rows,
        "training.device": "cpu",
        "metrics.enable_tensorboard": False,
        "metrics.sample_prompt": "",
        "metrics.sample_freq": 0,
        "checkpoint.enable": False,
        **MESHES[mesh],
    }


def rank(model: str, mesh: str, steps: int, folder: str) -> None:
    """Train as one rank of a run. Print the wall and CPU seconds of each step."""
    import shardtrain

    os.sched_setaffinity(0, {int(os.environ["RANK"]) % (os.cpu_count() or 1)})
    loaded = shardtrain.load_config("debug", {**options(model, mesh), "job.dump_folder": folder})
    seconds_of_steps = []
    with shardtrain.Trainer(loaded) as trainer:
        for _ in range(steps):
            wall = time.perf_counter()
            cpu = time.process_time()
            trainer.step()
            wall_seconds = time.perf_counter() - wall
            cpu_seconds = time.process_time() - cpu
            seconds_of_steps.append([wall_seconds, cpu_seconds])
    print(json.dumps(seconds_of_steps))


def measure(model: str, mesh: str, steps: int) -> dict[str, Any]:
    """Start the ranks of one run and parse their output."""
    size = 1 if mesh == "one process" else 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for place in range(size):
            environment = {
                **os.environ, "RANK": str(place), "LOCAL_RANK": str(place), "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            }  # fmt: skip
            command = [sys.executable, __file__, "--rank", model, mesh, str(steps), folder]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate(timeout=1800)[0] for process in processes]
    codes = [process.returncode for process in processes]
    if any(codes):
        raise SystemExit(f"{model} on {mesh} ended with {codes}")
    return {
        "model": model,
        "mesh": mesh,
        "load": load,
        "ranks": [json.loads(output.splitlines()[-1]) for output in outputs],
    }


def seconds_of(row: dict[str, Any]) -> tuple[float, float]:
    """Return the wall and CPU seconds of a step.

    Wall seconds are the minimum over steps. CPU seconds are the median over steps, averaged over ranks.
    """
    steps_of_ranks = [rank[LEFT_OUT:] for rank in row["ranks"]]
    # A step takes as long as its slowest rank.
    wall_seconds = []
    for step_of_ranks in zip(*steps_of_ranks, strict=True):
        wall_seconds.append(max(wall for wall, _ in step_of_ranks))
    cpu_seconds = []
    for steps in steps_of_ranks:
        cpu_seconds.append(statistics.median(cpu for _, cpu in steps))
    return min(wall_seconds), statistics.mean(cpu_seconds)


def score(rows: list[dict[str, Any]]) -> list[tuple[str, str, float, float, float, float]]:
    """Return model, mesh, measured and planned CPU seconds, and measured and planned wall seconds of a step.

    The device is calibrated with one mesh of the first model, separately for CPU and wall seconds.
    """
    import shardtrain
    from shardtrain.tools.plan import hardware, planning

    device = hardware.find("cpu")
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        measured.setdefault((row["model"], row["mesh"]), []).append(seconds_of(row))
    planned = {}
    for model, mesh in measured:
        config = shardtrain.load_config("debug", options(model, mesh)).config
        if mesh == "one process":
            # Plan for one thread: by default, a plan lets a single process use all cores.
            time = planning.make(config, 1, device.with_nodes_of(1)).time
        else:
            time = planning.make(config, 2, device).time
        waits = time.costs.get("pipeline bubble and sends", 0.0)
        planned[model, mesh] = time.seconds - waits, time.seconds
    least = {
        key: tuple(min(one) for one in zip(*pairs, strict=True)) for key, pairs in measured.items()
    }
    base = next(key for key in least if key[1] == CALIBRATED_WITH)
    of_wall = least[base][0] / planned[base][1]
    of_cpu = least[base][1] / planned[base][0]
    print(
        f"calibrated with {base[0]} on {base[1]}: x {of_cpu:.2f} in CPU seconds, x {of_wall:.2f} in wall seconds"
    )
    return [
        (*key, cpu, planned[key][0] * of_cpu, wall, planned[key][1] * of_wall)
        for key, (wall, cpu) in least.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """Print planned and measured times."""
    print(
        f"{'model':7}{'mesh':14}{'CPU s':>9}{'planned':>9}{'error':>8}{'wall s':>10}{'planned':>9}{'error':>8}"
    )
    for model, mesh, cpu, of_cpu, wall, of_wall in score(rows):
        print(
            f"{model:7}{mesh:14}{cpu:9.3f}{of_cpu:9.3f}{of_cpu / cpu - 1:+8.0%}"
            f"{wall:10.3f}{of_wall:9.3f}{of_wall / wall - 1:+8.0%}"
        )


def main() -> None:
    """Measure and store the raw seconds, or score stored ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", default=",".join(MESHES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--score", type=Path)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        model, mesh, steps, folder = options.rank
        rank(model, mesh, int(steps), folder)
        return
    if options.score:
        show(json.loads(options.score.read_text())["rows"])
        return
    import torch

    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    rows = []
    for _ in range(options.rounds):
        for model in options.models.split(","):
            for mesh in options.meshes.split(","):
                rows.append(measure(model, mesh, options.steps))
                print(model, mesh, *(f"{value:.3f}" for value in seconds_of(rows[-1])), flush=True)
                if options.out:
                    options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    if any(row["mesh"] == CALIBRATED_WITH for row in rows):
        show(rows)


if __name__ == "__main__":
    main()
