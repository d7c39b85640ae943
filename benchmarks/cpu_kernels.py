"""Tokens per CPU-second with the kernels chosen on this machine and with PyTorch's own,
in interleaved rounds.

    python benchmarks/cpu_kernels.py [--rounds 3] [--steps 6]

The model is that of benchmarks/LOG.md: 5.8 M parameters, 6 layers of width 256, 8 sequences of 512 tokens
per step. Each row is a separate process with one thread. Its first two steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

MODEL = {
    "vocab_size": 2048, "dim": 256, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "ffn_dim": 768,
}  # fmt: skip
TOKENS = 8 * 512

CHILD = """
import json, sys, time
import shardtrain
options, steps = json.loads(sys.argv[1]), int(sys.argv[2])
seconds = []
with shardtrain.Trainer("debug", options) as trainer:
    for _ in range(steps):
        began = time.process_time()
        trainer.step()
        seconds.append(time.process_time() - began)
print(json.dumps(seconds[2:]))
"""


def run(dtype: str, kernels: str, compiled: bool, steps: int) -> float:
    """Return tokens per CPU-second of the median step of one process."""
    with tempfile.TemporaryDirectory() as folder:
        options = {f"model.overrides.{name}": size for name, size in MODEL.items()} | {
            "model.name": "llama3", "model.flavor": "debugmodel", "job.dump_folder": folder, "training.seq_len": 512,
            "training.local_batch_size": 8, "training.steps": steps, "training.mixed_precision_param": dtype,
            "training.cpu_kernels": kernels, "activation_checkpoint.mode": "none", "compile.enable": compiled,
            "lr_scheduler.warmup_steps": 1, "checkpoint.enable": False,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps(options), str(steps)],
            stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    return TOKENS / statistics.median(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    for dtype in ("float32", "bfloat16"):
        # Tokens per CPU-second of both kinds of kernels, measured alternately.
        rows = []
        for _ in range(options.rounds):
            row = {}
            for kernels in ("pytorch", "auto"):
                row[kernels] = run(dtype, kernels, options.compile, options.steps)
            rows.append(row)
        for row in rows:
            speeds = {kernels: round(speed) for kernels, speed in row.items()}
            print(json.dumps({"dtype": dtype, "compile": options.compile, **speeds}))
        ratios = [row["auto"] / row["pytorch"] for row in rows]
        best = {kernels: max(row[kernels] for row in rows) for kernels in rows[0]}
        print(
            f"{dtype}: {best['pytorch']:.0f} -> {best['auto']:.0f} tokens per CPU-second, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
