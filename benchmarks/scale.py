"""What grows with the number of ranks, files or records, measured in one process with that many of them pretended.

    python benchmarks/scale.py [--out benchmarks/results/scale_cpu.json]

``slow_ranks``   seconds to judge one window of steps of N ranks (Stragglers.add)
``metrics``      seconds and MiB to continue a metrics.jsonl of N records, and to give TensorBoard its history
``shards``       seconds and files opened to open a prepared folder of N shards
``manifest``     bytes of the manifest of a model of 405B whose tensors are cut over N ranks, seconds to write it
                 and to read it (each piece is a line)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.checkpoint.manifest import Chunk, Manifest, StoredFile, StoredTensor, parse
from shardtrain.data import shard_index
from shardtrain.data.shard_writer import ShardWriter
from shardtrain.data.shards import ShardTokenBuffer
from shardtrain.metrics.sinks.jsonl import JsonlFile
from shardtrain.metrics.sinks.tensorboard import TensorBoardSink, thinned
from shardtrain.resilience.progress import Mark
from shardtrain.resilience.watchdog.heartbeat import Heartbeat
from shardtrain.resilience.watchdog.stragglers import Stragglers


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    found = action()
    return round(time.perf_counter() - begun, 3), found


def slow_ranks(count: int) -> dict[str, Any]:
    judge, signs = Stragglers(count), {rank: Heartbeat(0, "host") for rank in range(count)}
    for window in range(2):
        busy = {rank: 4000 * window + rank % 7 for rank in range(count)}
        marks = {rank: Mark(100 * window, "", 100.0 * window, 0, busy[rank], 5000 * window) for rank in range(count)}
        seconds, _ = timed(lambda: judge.add(marks, signs))  # noqa: B023 - called at once
    return {"seconds": seconds}


def metrics(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        fields = '"loss": 2.3, "grad_norm": 1.1, "lr": 0.001, "tokens_seen": 123456, "tps": 10000.0, "memory_gib": 9.5'
        with path.open("w") as file:
            file.writelines(f'{{"step": {step}, {fields}}}\n' for step in range(1, count + 1))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds, opened = timed(lambda: JsonlFile(path, count - 10))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        sink = TensorBoardSink(Path(folder, "tb"))

        def replay() -> None:
            for record in thinned(opened.history):
                sink.scalars(record["step"], {name: value for name, value in record.items() if name != "step"})
            sink.close()

        return {"seconds": seconds, "mib": round(grown, 1), "tensorboard_seconds": timed(replay)[0]}


def shards(count: int) -> dict[str, Any]:
    looked = []
    check = shard_index.check_file
    shard_index.check_file = lambda *a: (looked.append(1), check(*a))  # type: ignore[assignment, func-returns-value]
    with tempfile.TemporaryDirectory() as folder:
        writer = ShardWriter(Path(folder, "s"), 300, 4)
        writer.add_documents(np.array([4 * count]))
        writer.add_tokens(np.arange(4 * count, dtype=np.int32) % 300)
        writer.finish(tokenizer="0" * 64, tokenizer_name="bytes")
        seconds, _ = timed(lambda: ShardTokenBuffer(Path(folder, "s")))
    shard_index.check_file = check
    return {"seconds": seconds, "files_looked_at": len(looked)}


def manifest(count: int) -> dict[str, Any]:
    layers, dim, ffn = 126, 16384, 53248
    shapes = {"embedding": (128256, dim), "head": (128256, dim)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}": (dim, dim) for name in ("wq", "wo")}
        shapes |= {f"layers.{layer}.{name}": (1024, dim) for name in ("wk", "wv")}
        shapes |= {f"layers.{layer}.{name}": (ffn, dim) for name in ("w1", "w3")}
        shapes |= {f"layers.{layer}.w2": (dim, ffn)}
    tensors, sizes = {}, [0] * count
    for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        for name, (rows, columns) in shapes.items():
            step, chunks = -(-rows // count), []
            for rank in range(-(-rows // step)):
                own = min(step, rows - rank * step)
                chunks.append(Chunk((rank * step, 0), (own, columns), rank, sizes[rank]))
                sizes[rank] += 4 * own * columns
            tensors[f"{kind}.{name}"] = StoredTensor("float32", (rows, columns), tuple(chunks))
    files = tuple(
        StoredFile(f"rank-{rank:05d}.bin", size, hashlib.sha256().hexdigest()) for rank, size in enumerate(sizes)
    )
    whole = Manifest(1, count, "run", "benchmark", files, tensors, {"state": {"step": 1}})
    write_seconds, data = timed(whole.to_bytes)
    read_seconds, _ = timed(lambda: parse(data, Path("step-1")))
    return {"bytes": len(data), "write_seconds": write_seconds, "read_seconds": read_seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ranks = (8, 64, 512, 4096, 16384)
    asked: list[tuple[Callable[[int], dict[str, Any]], tuple[int, ...]]] = [
        (slow_ranks, ranks), (metrics, (10**4, 10**6, 10**7)), (shards, (100, 1000, 10_000)), (manifest, (8, 64, 512)),
    ]  # fmt: skip
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    found: dict[str, Any] = {
        "processor": f"{cpu[0].partition(':')[2].strip()}, {os.cpu_count()} threads" if cpu else ""
    }
    for measure, counts in asked:
        for count in counts:
            found.setdefault(measure.__name__, {})[str(count)] = told = measure(count)
            print(measure.__name__, count, told, flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
