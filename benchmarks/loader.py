"""Throughput of the loader with prepared shards, and the time to seek to any position.

    python benchmarks/loader.py [--tokens 1_000_000_000] [--text-mb 2000] [--out benchmarks/results/loader_cpu.json]

Writes shards of random tokens (uint16, documents of about 500 tokens), opens them as training does, and
reads batches of 8 sequences of 2,048 tokens with all work of the trainer's loader: shuffle, packing,
targets, positions and the order hash. Throughput is in tokens per CPU-second of this process, because it
depends less on other load. Pages are in the cache after writing. Seeking is timed from the call to the
first batch, and opening from the folder to the first batch. Then a JSONL file of ``--text-mb`` is streamed
with the byte-level tokenizer: tokens per CPU-second including tokenization,
and the growth of resident memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from processor import processor_facts

from shardtrain.config.schema import Config, Data
from shardtrain.data import DataLoader, open_dataloader
from shardtrain.data.prepared.shard_writer import ShardWriter, default_shard_tokens
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer

SEQ_LEN = 2048
ROWS = 8
VOCAB = 258
PACKINGS = {
    "concat": Data(),
    "concat, documents masked": Data(document_mask="on"),
    "first_fit": Data(packing="first_fit"),
}


def write_shards(folder: Path, num_tokens: int) -> None:
    """Write documents of random ids, in blocks of 16 million tokens."""
    random = np.random.default_rng(0)
    writer = ShardWriter(folder, VOCAB, default_shard_tokens(VOCAB))
    while writer.num_tokens < num_tokens:
        lengths = random.integers(100, 900, 32_000)
        writer.add_documents(lengths)
        writer.add_tokens(random.integers(0, VOCAB, int(lengths.sum()), dtype=np.uint16))
    writer.finish(tokenizer=open_tokenizer("bytes").fingerprint, tokenizer_name="bytes")


def open_at(folder: Path, data: Data) -> DataLoader:
    """Open the training stream of the shards."""
    config = Config(data=data)
    model = dataclasses.replace(config.model, hf_assets_path="bytes")
    training = dataclasses.replace(
        config.training,
        dataset="tokens",
        dataset_path=str(folder),
        seq_len=SEQ_LEN,
        local_batch_size=ROWS,
    )
    config = dataclasses.replace(
        config, model=model, training=dataclasses.replace(training, on_data_end="repeat")
    )
    return open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)


def measure(folder: Path, data: Data, seconds: float) -> dict[str, float]:
    """Measure opening, seeking and reading."""
    started = time.perf_counter()
    stream = open_at(folder, data)
    next(stream)
    opened = time.perf_counter() - started
    seeks = []
    for share in (0.1, 0.5, 0.9, 2.3):
        started = time.perf_counter()
        stream.seek(int((stream.num_samples or 0) * share))
        next(stream)
        seeks.append(time.perf_counter() - started)
    batches = 0
    cpu = time.process_time()
    while time.process_time() - cpu < seconds:
        next(stream)
        batches += 1
    cpu = time.process_time() - cpu
    return {
        "open_seconds": opened,
        "longest_seek_seconds": max(seeks),
        "tokens_per_cpu_second": batches * ROWS * SEQ_LEN / cpu,
    }


def measure_text(folder: Path, megabytes: int, seconds: float) -> dict[str, float]:
    """Measure opening and streaming a JSONL file."""
    line = json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 60}) + "\n"
    with (folder / "text.jsonl").open("w") as file:
        for _ in range(megabytes * 10**6 // (1000 * len(line))):
            file.write(line * 1000)
    before = resident_mib()
    started = time.perf_counter()
    config = Config(data=Data(mode="stream"))
    stream = open_jsonl(config, folder / "text.jsonl")
    next(stream)
    opened = time.perf_counter() - started
    batches = 0
    cpu = time.process_time()
    while time.process_time() - cpu < seconds:
        next(stream)
        batches += 1
    cpu = time.process_time() - cpu
    return {
        "open_seconds": opened,
        "tokens_per_cpu_second": batches * ROWS * SEQ_LEN / cpu,
        "resident_mib_before": before,
        "resident_mib_after": resident_mib(),
    }


def open_jsonl(config: Config, path: Path) -> DataLoader:
    """Open the training stream of a JSONL file."""
    model = dataclasses.replace(config.model, hf_assets_path="bytes")
    training = dataclasses.replace(
        config.training,
        dataset="jsonl",
        dataset_path=str(path),
        seq_len=SEQ_LEN,
        local_batch_size=ROWS,
    )
    config = dataclasses.replace(config, model=model, training=training)
    return open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)


def resident_mib() -> float:
    """Return the resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=lambda text: int(text.replace("_", "")), default=1_000_000_000
    )
    parser.add_argument("--text-mb", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), arguments.tokens)
        results = {
            name: measure(Path(folder), data, arguments.seconds) for name, data in PACKINGS.items()
        }
    with tempfile.TemporaryDirectory() as folder:
        results["jsonl as a stream"] = measure_text(
            Path(folder), arguments.text_mb, arguments.seconds
        )
    for name, values in results.items():
        print(f"{name:26}", "  ".join(f"{key} {value:,.3f}" for key, value in values.items()))
    if arguments.out:
        facts = {
            "tokens": arguments.tokens,
            "text_mb": arguments.text_mb,
            "machine": processor_facts(),
        }
        facts |= {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        }
        arguments.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
