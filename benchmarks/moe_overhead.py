"""Overhead of experts compared with a dense model with equal active parameters, in tokens per CPU-second.

    python benchmarks/moe_overhead.py [--rounds 6] [--kernels fastest] [--micro-batches 4]
        [--out benchmarks/results/moe_overhead.json]

All models have dim 256, 6 layers, 8 heads, 4 key-value heads, vocabulary 2048 and take 8 sequences of 512
tokens per step of ``train.step`` on one process and one thread, in interleaved rounds. In each model, a
token uses 768 feed-forward features: of one dense SwiGLU, of 2 of 8 experts (Mixtral), or of 8 of 64
experts (Qwen3). CPU time is used instead of wall time, because it depends less on other load. ``--kernels
fastest`` computes like ``train``, with the fastest kernels of this machine and reused memory; the default
is PyTorch's own kernels. ``--micro-batches`` (default 1) of 8 sequences make up a step: the experts have
eight times the weights to update, which dominates small steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from processor import measurement_facts

from shardtrain.config.schema import Comm, Config
from shardtrain.distributed import process_group
from shardtrain.train import trainer
from shardtrain.train.build import use_fastest_kernels

COMMON = {
    "vocab_size": 2048,
    "dim": 256,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
}
MODELS = {
    "dense": ("llama3", "debugmodel", {**COMMON, "ffn_dim": 768}),
    "2 of 8": (
        "mixtral",
        "debugmodel",
        {**COMMON, "moe_ffn_dim": 384, "num_experts": 8, "top_k": 2},
    ),
    "dense, qk-norm": ("qwen3", "debugmodel", {**COMMON, "ffn_dim": 768, "tied_embeddings": False}),
    "8 of 64": (
        "qwen3_moe",
        "debugmodel_moe",
        {**COMMON, "moe_ffn_dim": 96, "num_experts": 64, "top_k": 8},
    ),
}
BASE = {"2 of 8": "dense", "8 of 64": "dense, qk-norm"}
TOKENS = 8 * 512


def make_config(model: str, dtype: str, folder: str, micro_batches: int) -> Config:
    """Return the configuration of one model and compute dtype."""
    name, flavor, overrides = MODELS[model]
    config = Config()
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, dump_folder=folder),
        model=dataclasses.replace(config.model, name=name, flavor=flavor, overrides=overrides),
        training=dataclasses.replace(
            config.training,
            local_batch_size=8,
            global_batch_size=8 * micro_batches,
            seq_len=512,
            steps=10_000,
            mixed_precision_param=dtype,
            device="cpu",
        ),
        # The default compiles only dense models, which would bias the comparison.
        compile=dataclasses.replace(config.compile, enable=False),
        activation_checkpoint=dataclasses.replace(config.activation_checkpoint, mode="none"),
    )


def trainer_step(config: Config, here: process_group.World) -> Callable[[], None]:
    """Return a step of the trainer."""
    run = trainer.build(config, here)
    return lambda: trainer.step(run) and None


def measure(dtype: str, rounds: int, kernels: str, micro_batches: int) -> dict[str, object]:
    """Return median CPU seconds per step of all models, measured alternately."""
    with tempfile.TemporaryDirectory() as folder, process_group.join(Comm(), "cpu") as here:
        if kernels == "fastest":
            use_fastest_kernels(
                make_config("dense", dtype, folder, micro_batches), torch.device("cpu")
            )
        steps = {
            name: trainer_step(make_config(name, dtype, folder, micro_batches), here)
            for name in MODELS
        }
        for step in steps.values():  # warm-up: the first step allocates memory
            step()
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                start = time.process_time()
                step()
                seconds[name].append(time.process_time() - start)
    speed = {
        name: TOKENS * micro_batches / statistics.median(values) for name, values in seconds.items()
    }
    ratios = {name: speed[name] / speed[base] for name, base in BASE.items()}
    return {
        "dtype": dtype,
        "tokens_per_cpu_second": speed,
        "ratio": ratios,
        "cpu_seconds_per_step": seconds,
    }


def main() -> None:
    """Print the ratios and store the raw seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kernels", choices=("pytorch", "fastest"), default="pytorch")
    parser.add_argument("--micro-batches", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(dtype, options.rounds, options.kernels, options.micro_batches)
        for dtype in ("float32", "bfloat16")
    ]
    for row in rows:
        for name, base in BASE.items():
            speed = row["tokens_per_cpu_second"]
            print(
                f"{row['dtype']:9s} {base} {speed[base]:6.0f}  {name} {speed[name]:6.0f} tokens per CPU-second"
                f"  ratio {row['ratio'][name]:.3f}"
            )
    if options.out:
        options.out.write_text(json.dumps({**measurement_facts(), "rows": rows}, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
