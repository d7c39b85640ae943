"""Cost of comparing replicas relative to a step: CPU seconds of both, on two ranks with the same model.

    torchrun --nproc_per_node 2 benchmarks/replica_check.py [--rounds 6] [--out results/replica_check_cpu.json]

Uses the model of ``loop_overhead.py`` (6 layers of width 256, AdamW) in float32, replicated on two ranks
with gloo. A comparison reads every weight and both moments once. The cost of a step grows with its tokens,
that of a comparison does not. CPU time is used instead of wall time, because it depends less on other load.
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

from shardtrain.checkpoint import holders, replica_comparison
from shardtrain.config.schema import Comm, Config
from shardtrain.distributed import process_group
from shardtrain.train import trainer


def replicated(config: Config, rows: int) -> Config:
    """Return the configuration for two replicas with ``rows`` sequences of 512 tokens each."""
    return dataclasses.replace(
        config,
        training=dataclasses.replace(
            config.training, local_batch_size=rows, global_batch_size=2 * rows
        ),
        parallelism=dataclasses.replace(
            config.parallelism, data_parallel_replicate_degree=2, data_parallel_shard_degree=1
        ),
    )


def measure(rows: int, rounds: int) -> dict[str, object]:
    """Return median CPU seconds of a step and of a comparison."""
    with tempfile.TemporaryDirectory() as folder, process_group.join(Comm(), "cpu") as here:
        run = trainer.build(replicated(make_config("float32", folder), rows), here)
        seconds: dict[str, list[float]] = {"step": [], "comparison": []}
        # The first step allocates memory and creates the optimizer state, so it is not measured.
        trainer.step(run)
        # Not measured: a run finds the holders of each tensor only once, before its first comparison.
        tensors = {**run.model_state_dict(), **run.optimizer_state_dict()}
        tensor_holders = holders.find_holders(tensors)
        for _ in range(rounds):
            step_start = time.process_time()
            trainer.step(run)
            step_end = time.process_time()
            tensors = {**run.model_state_dict(), **run.optimizer_state_dict()}
            comparison_start = time.process_time()
            different = replica_comparison.find_odd(tensors, tensor_holders, run.state.to_dict())
            comparison_end = time.process_time()
            assert not different, different
            seconds["step"].append(step_end - step_start)
            seconds["comparison"].append(comparison_end - comparison_start)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    step = statistics.median(seconds["step"])
    comparison = statistics.median(seconds["comparison"])
    return {
        "tokens": rows * 512,
        "bytes": size,
        "step": step,
        "comparison": comparison,
        "share": comparison / step,
    }


def main() -> None:
    """Print the shares on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(rows, options.rounds) for rows in options.rows]
    if dist.is_initialized():
        dist.destroy_process_group()
    if os.environ.get("RANK", "0") != "0":
        return
    for measured in results:
        step = f"{measured['tokens']:6d} tokens a rank: step {measured['step']:.3f} s"
        comparison = (
            f"comparison of {measured['bytes'] / 1e6:.0f} MB {measured['comparison'] * 1e3:.1f} ms"
        )
        print(f"{step}, {comparison}, {100 * measured['share']:.2f} % of a step")
    if options.out:
        options.out.write_text(
            json.dumps({**measurement_facts(), "rows": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
