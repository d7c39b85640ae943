"""Causal attention on a CPU: PyTorch's flash kernel and ``ops/cpu/blocked_attention.py``,
forward and backward.

    python benchmarks/attention.py [--rounds 5] [--out benchmarks/results/attention_cpu.json]

Uses one process and one thread. Times are CPU milliseconds, the best of interleaved rounds. ``gigaflops``
counts the products of causal attention (two forward, five backward); both kernels compute slightly more.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from processor import processor_facts
from torch import Tensor

from shardtrain.ops import flash_attention
from shardtrain.ops.cpu import blocked_attention
from shardtrain.utils.allocator import keep_freed_memory

SIZES = (  # rows, tokens, query heads, key-value heads, head dimension
    (8, 512, 8, 4, 32),
    (8, 512, 8, 8, 32),
    (8, 512, 4, 4, 64),
    (1, 2048, 8, 8, 64),
    (1, 2048, 8, 2, 128),
    (2, 4096, 4, 1, 64),
)


def flash(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> dict[str, Callable[[], object]]:
    """Return forward and backward of the flash kernel."""
    out, lse = flash_attention.attend(q, k, v, causal=True)
    return {
        "forward": lambda: flash_attention.attend(q, k, v, causal=True),
        "backward": lambda: flash_attention.attend_backward(
            gradient, q, k, v, out, lse, causal=True
        ),
    }


def blocks(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> dict[str, Callable[[], object]]:
    """Return forward and backward of blocked attention."""
    _, lse = blocked_attention.attend(q, k, v)
    return {
        "forward": lambda: blocked_attention.attend(q, k, v),
        "backward": lambda: blocked_attention.attend_backward(gradient, q, k, v, lse),
    }


def cpu_ms(function: Callable[[], object]) -> float:
    """Return CPU milliseconds of one call."""
    began = time.process_time()
    function()
    return 1e3 * (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    keep_freed_memory()  # every training run sets this allocator option at its start
    rows = []
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            for size in SIZES:
                B, T, N, K, H = size
                generator = torch.Generator().manual_seed(0)
                inputs = [
                    torch.randn(B, T, heads, H, generator=generator).to(dtype)
                    for heads in (N, K, K, N)
                ]
                kernels = {"flash": flash(*inputs), "blocks": blocks(*inputs)}
                best: dict[str, float] = {}
                # one extra round as a warm-up: it is slower, so the minimum ignores it
                for _ in range(options.rounds + 1):
                    for kernel, directions in kernels.items():
                        for direction, function in directions.items():
                            name = f"{kernel} {direction}"
                            best[name] = min(best.get(name, float("inf")), cpu_ms(function))
                gigaflop = 2 * B * N * T * T / 2 * H * 7 / 1e9
                seconds = {
                    kernel: (best[f"{kernel} forward"] + best[f"{kernel} backward"]) / 1e3
                    for kernel in kernels
                }
                row = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "size": size,
                    "cpu_ms": {name: round(value, 1) for name, value in best.items()},
                    "gigaflops": {
                        kernel: round(gigaflop / value) for kernel, value in seconds.items()
                    },
                    "times_as_fast": round(seconds["flash"] / seconds["blocks"], 2),
                    "processor": processor_facts(),
                    "torch": torch.__version__,
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
