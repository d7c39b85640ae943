"""Overhead of the trainer compared with a bare PyTorch loop on the same model, in tokens per CPU-second.

    python benchmarks/loop_overhead.py [--rounds 8] [--out benchmarks/results/loop_overhead.json]

Both loops run the same Llama (dim 256, 6 layers, 8 heads, 4 key-value heads, SwiGLU 768, vocabulary 2048),
8 sequences of 512 tokens, fused AdamW, clipping at 1.0, one thread, in interleaved rounds. The bare loop is
a typical one: cross-entropy on float32 logits, backward, clip_grad_norm_, step; in bfloat16 it uses
autocast. The other is ``train.step`` with its data stream, finite check, norm, schedule and metrics. CPU
time is used instead of wall time, because it depends less on other load.
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
from torch.nn import functional as F

from shardtrain import data, models
from shardtrain.config.schema import Comm, Config
from shardtrain.distributed import process_group
from shardtrain.metrics import Metrics
from shardtrain.train import trainer
from shardtrain.train.run import ReduceOverMesh, run_facts

SHAPE = {
    "vocab_size": 2048,
    "dim": 256,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
    "ffn_dim": 768,
    "rope_theta": 500000.0,
}
TOKENS = 8 * 512


def make_config(dtype: str, folder: str) -> Config:
    """Return the configuration of the benchmark for a compute dtype."""
    config = Config()
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, dump_folder=folder),
        model=dataclasses.replace(config.model, overrides=SHAPE),
        training=dataclasses.replace(
            config.training,
            local_batch_size=8,
            seq_len=512,
            steps=10_000,
            mixed_precision_param=dtype,
            device="cpu",
        ),
        activation_checkpoint=dataclasses.replace(config.activation_checkpoint, mode="none"),
        metrics=dataclasses.replace(config.metrics, log_freq=10),
    )


def bare_step(config: Config) -> Callable[[], None]:
    """Return a step of a plain loop on the plain model."""
    module = models.find("llama3")
    model = module.Model(models.shape_of(module, "debugmodel", SHAPE, "rmsnorm"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(
            parameter
        )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    stream = data.open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)
    low = config.training.mixed_precision_param == "bfloat16"

    def step() -> None:
        batch = next(stream)
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            logits = model(batch.tokens_BT, batch.positions_BT)
        F.cross_entropy(logits.float().flatten(0, 1), batch.targets_BT.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def trainer_step(config: Config, here: process_group.World) -> Callable[[], None]:
    """Return a step of the trainer, with its metrics."""
    run = trainer.build(config, here)
    metrics = Metrics(
        config, Path(config.job.dump_folder), run_facts(run, here), ReduceOverMesh(run.mesh)
    )

    def step() -> None:
        outcome = trainer.step(run)
        assert outcome, "the data have ended"
        trainer.update_metrics(run, metrics, outcome)

    return step


def measure(dtype: str, rounds: int) -> dict[str, object]:
    """Return median CPU seconds per step of both loops, measured alternately."""
    with tempfile.TemporaryDirectory() as folder, process_group.join(Comm(), "cpu") as here:
        config = make_config(dtype, folder)
        steps = {"bare": bare_step(config), "shardtrain": trainer_step(config, here)}
        for step in steps.values():  # warm-up: the first step allocates memory
            step()
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                start = time.process_time()
                step()
                step()
                seconds[name].append((time.process_time() - start) / 2)
    speed = {name: TOKENS / statistics.median(values) for name, values in seconds.items()}
    return {
        "dtype": dtype,
        "tokens_per_cpu_second": speed,
        "ratio": speed["shardtrain"] / speed["bare"],
        "cpu_seconds_per_step": seconds,
    }


def main() -> None:
    """Print the ratios and store the raw seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(dtype, options.rounds) for dtype in ("float32", "bfloat16")]
    for row in rows:
        speed = row["tokens_per_cpu_second"]
        print(
            f"{row['dtype']:9s} bare {speed['bare']:7.0f}  shardtrain {speed['shardtrain']:7.0f} tokens per CPU-second"
            f"  ratio {row['ratio']:.3f}"
        )
    if options.out:
        options.out.write_text(json.dumps({**measurement_facts(), "rows": rows}, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
