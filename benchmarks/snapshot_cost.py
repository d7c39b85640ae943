"""Cost of a snapshot after every step, relative to a step, on two ranks that stand for two nodes.

    torchrun --nproc_per_node 2 benchmarks/snapshot_cost.py [--rounds 6] [--out results/snapshot_cost_cpu.json]

Uses the model of ``loop_overhead.py`` (6 layers of width 256, AdamW) in float32, sharded over two ranks with
gloo, and one compute thread. "held" is the CPU time of the training thread: planning, and the copy to shared
memory. "total" also includes the background thread, which hashes the copy, sends it and receives the other
rank's. On ranks with a spare core, only "held" delays a step. The cost of a step grows with its tokens, that
of a snapshot does not. CPU time is used instead of wall time, because it depends less on other load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from loop_overhead import make_config
from processor import measurement_facts

from shardtrain.checkpoint import snapshot_folder
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.snapshots import Snapshots
from shardtrain.config.schema import Comm, Config
from shardtrain.distributed import process_group
from shardtrain.ops.dtensor import local_tensor
from shardtrain.train import trainer
from shardtrain.train.resume import take_snapshot


def sharded(config: Config, rows: int) -> Config:
    """Return the configuration for two shards with ``rows`` sequences of 512 tokens each."""
    return dataclasses.replace(
        config,
        training=dataclasses.replace(
            config.training, local_batch_size=rows, global_batch_size=2 * rows
        ),
        checkpoint=dataclasses.replace(config.checkpoint, enable=True, snapshot_interval=1),
    )


def measure(rows: int, rounds: int) -> dict[str, float]:
    """Return the median CPU seconds of a step, and of a snapshot: "held" and "total"."""
    with tempfile.TemporaryDirectory() as folder, process_group.join(Comm(), "cpu") as here:
        config = sharded(make_config("float32", folder), rows)
        run = trainer.build(config, here)
        checkpoints = Checkpoints(config)
        # Separate folders in host memory make the two ranks behave like two nodes.
        with snapshot_folder.created(config, max_restarts=1) as variables:
            os.environ.update(variables)
            checkpoints.snapshots = Snapshots(config, lambda create: create())
            seconds: dict[str, list[float]] = {"step": [], "held": [], "total": []}
            # Two warm-up rounds: snapshots alternate between two buffers, and the first use of each allocates memory.
            for number in range(rounds + 2):
                step_start = time.process_time()
                trainer.step(run)
                step_end = time.process_time()
                # thread_time for "held": background threads do not delay a step if a core is free.
                thread_start = time.thread_time()
                take_snapshot(run, checkpoints)
                thread_end = time.thread_time()
                checkpoints.snapshots.wait()
                snapshot_end = time.process_time()
                if number >= 2:
                    seconds["step"].append(step_end - step_start)
                    seconds["held"].append(thread_end - thread_start)
                    seconds["total"].append(snapshot_end - step_end)
            assert checkpoints.snapshots.is_due(1), "snapshots were turned off"
            dist.barrier()
        tensors = {**run.model_state_dict(), **run.optimizer_state_dict()}.values()
        num_bytes = sum(local_tensor(tensor).nbytes for tensor in tensors)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"tokens": rows * 512, "bytes": num_bytes, **medians}


def main() -> None:
    """Print the shares on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(rows, options.rounds) for rows in options.rows]
    if os.environ.get("RANK", "0") != "0":
        return
    for row in results:
        shares = [100 * row[name] / row["step"] for name in ("held", "total")]
        print(
            f"{row['tokens']:6d} tokens a rank: step {row['step']:.3f} s, snapshot of {row['bytes'] / 1e6:.0f} MB: "
            f"held {row['held'] * 1e3:.1f} ms ({shares[0]:.2f} %), "
            f"total {row['total'] * 1e3:.1f} ms ({shares[1]:.2f} %)"
        )
    if options.out:
        options.out.write_text(
            json.dumps({**measurement_facts(), "rows": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
