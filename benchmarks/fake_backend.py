"""Time and memory of ``comm.mode="fake_backend"`` for large models on thousands of ranks, on one CPU core.

    python benchmarks/fake_backend.py

Each row is one process, including the import of PyTorch (2 to 3 s).

Result (torch 2.13.0+cpu, Python 3.11, one shared core of a server CPU, OMP_NUM_THREADS=1):

config        ranks  rank  seconds  peak MiB  mesh
llama3_8b         8     0      5.4       320  dp_shard 8
llama3_70b      256     0      7.9       330  dp_shard 32 x tp 8
llama3_405b     512     0      8.1       348  dp_shard 64 x tp 8
llama3_405b     512     0      4.4       325  pp 8 x dp_shard 8 x tp 8
llama3_405b     512   511      4.5       325  pp 8 x dp_shard 8 x tp 8
llama3_405b    4096     0      4.9       363  pp 8 x dp_replicate 2 x dp_shard 8 x cp 4 x tp 8
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ANYWHERE = [
    "--comm.mode",
    "fake_backend",
    "--model.hf_assets_path",
    "bytes",
    "--training.dataset_path",
    str(ROOT),
]
PIPELINE = ["--parallelism.pipeline_parallel_degree", "8", "--training.local_batch_size", "16"]
CONTEXT = [
    "--parallelism.context_parallel_degree",
    "4",
    "--parallelism.data_parallel_replicate_degree",
    "2",
]
CASES = (
    ("llama3_8b", 8, 0, []),
    ("llama3_70b", 256, 0, []),
    ("llama3_405b", 512, 0, []),
    ("llama3_405b", 512, 0, PIPELINE),
    ("llama3_405b", 512, 511, PIPELINE),
    ("llama3_405b", 4096, 0, [*PIPELINE, *CONTEXT]),
)


def main() -> None:
    print(f"{'config':<13}{'ranks':>6}{'rank':>6}{'seconds':>9}{'peak MiB':>10}  mesh")
    for name, size, rank, arguments in CASES:
        command = [
            sys.executable,
            "-m",
            "shardtrain",
            "train",
            str(ROOT / f"configs/{name}.toml"),
            *ANYWHERE,
            *arguments,
        ]
        environment = {**os.environ, "RANK": str(rank), "NGPU": str(size), "OMP_NUM_THREADS": "1"}
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            sys.exit(f"{name} on {size} ranks failed")
        mesh = next(
            line.partition(" on ")[2] for line in text.splitlines() if line.startswith("model ")
        )
        print(
            f"{name:<13}{size:>6}{rank:>6}{seconds:>9.1f}{usage.ru_maxrss / 1024:>10.0f}  {mesh}",
            flush=True,
        )


if __name__ == "__main__":
    main()
