"""Costs that grow with the number of ranks, files or records, measured on one machine with simulated ones.

    python benchmarks/scale.py [--out benchmarks/results/scale_cpu.json]

``slow_ranks``   CPU seconds to evaluate one window of steps of N ranks (Stragglers.add)
``metrics``      CPU seconds and MiB to continue a metrics.jsonl of N records, and to replay it to TensorBoard
``shards``       CPU seconds and opened files for opening a prepared folder of N shards
``many_files``   seconds, CPU seconds and MiB to open a folder of N streamed JSONL files on two real ranks, of which
                 rank 0 lists them for both; the time to find which files are already hashed; and the bytes of the data
                 state in a checkpoint. The files are in /dev/shm, where 10^6 of them take 5 GiB
``whole_documents``  CPU seconds and MiB to open N unsplit documents (packing "first_fit" and "padded")
``prepared_documents``  the same for prepared documents with a fit table, and CPU seconds per row
``commit``       seconds of rank 0 after N ranks have written their files: sizes, manifest, rename; of a completeness
                 check; and of reading the marker of each rank, for a background save
``saving``       for a 405B model and an MoE of 10^12 parameters with optimizer, on meshes of 8 to 65,536 ranks, some
                 with uneven splits: CPU seconds and MiB of the save plan on each rank, bytes that one rank of each
                 pipeline stage sends, bytes of the manifest, and CPU seconds to write and read it
``resuming``     for such a checkpoint on the mesh that saved it and on another one: reads the manifest and all pieces
                 that the first, a middle and the last rank need, with rows narrowed to 8 numbers to exclude the time of
                 the data itself. CPU seconds and MiB of a rank, pieces, files, and bytes read per needed byte
``own_parts``    CPU seconds of a rank to compute its shards of the N DTensors of such a model and its optimizer, for a
                 save and for a load; not included in the two above
``real_save``    two real ranks save, check and read a model of N MiB with optimizer: MiB in addition to the tensors
``host_reduce``  an all-reduce of four numbers over N real ranks, with a delay of 2 ms before each message:
                 milliseconds, sequential messages, and those of gloo's ring
``host_step``    the same delay in a step of the debug preset: milliseconds of host work and sequential messages
``peer_rows``    N ranks that need the same rows of 8,192 tokens: CPU seconds of a rank per row if each reads it from
                 prepared shards, if the first one reads and broadcasts it (gloo, one machine), and if each tokenizes it
                 from text (byte-level BPE of 32,768 tokens, trained on such text)
``retained``     seconds and manifests read by the retention of a save with N older checkpoints, all kept permanently
``imports``      files that a process opens to import a module, and the number of modules, of PyTorch and of the trainer
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from prepare import make_text, train_tokenizer
from processor import processor_facts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtrain.checkpoint import async_save, holders, retention, save_plan, tensor_reader
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.grids import Axis, Grid
from shardtrain.checkpoint.holders import Table
from shardtrain.checkpoint.manifest import Manifest, StoredTensor, TensorFile, parse
from shardtrain.checkpoint.storage import LocalStorage
from shardtrain.config import load
from shardtrain.config.schema import Checkpoint, Config, Job
from shardtrain.data import open_dataloader
from shardtrain.data.file_hashes import Contents
from shardtrain.data.packing.fit_table import FitTableWriter, open_table, table_name
from shardtrain.data.packing.fitted import BLOCK_DOCUMENTS, fit_block, num_blocks, pack
from shardtrain.data.packing.packed_rows import PackedSequences, Packing
from shardtrain.data.prepared import shard_index
from shardtrain.data.prepared.shard_writer import ShardWriter
from shardtrain.data.prepared.shards import ShardTokenBuffer
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.facts.dtypes import ITEM_BYTES
from shardtrain.metrics.sinks.metrics_jsonl import JsonlFile
from shardtrain.metrics.sinks.tensorboard import TensorBoardSink, thinned
from shardtrain.ops import host_collectives
from shardtrain.resilience.watchdog.rank_heartbeat import Heartbeat
from shardtrain.resilience.watchdog.stragglers import Stragglers
from shardtrain.train.open_together import together
from shardtrain.utils.activity import Mark

IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = action()
    return round(time.perf_counter() - begun, 3), result


def cpu_timed(action: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    result = action()
    return round(time.process_time() - begun, 3), result


def slow_ranks(count: int) -> dict[str, Any]:
    judge = Stragglers(count)
    signs = {rank: Heartbeat(0, "host") for rank in range(count)}
    for window in range(2):
        busy = {rank: 4000 * window + rank % 7 for rank in range(count)}
        marks = {
            rank: Mark(100 * window, "", 100.0 * window, 0, busy[rank], 5000 * window)
            for rank in range(count)
        }
        seconds, _ = cpu_timed(lambda: judge.add(marks, signs))  # noqa: B023 - called at once
    return {"cpu_seconds": seconds}


def metrics(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        fields = '"loss": 2.3, "grad_norm": 1.1, "lr": 0.001, "tokens_seen": 123456, "tps": 10000.0, "memory_gib": 9.5'
        with path.open("w") as file:
            file.writelines(f'{{"step": {step}, {fields}}}\n' for step in range(1, count + 1))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds, opened = cpu_timed(lambda: JsonlFile(path, count - 10))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        sink = TensorBoardSink(Path(folder, "tb"))

        def replay() -> None:
            for record in thinned(opened.history):
                sink.scalars(
                    record["step"],
                    {name: value for name, value in record.items() if name != "step"},
                )
            sink.close()

        return {
            "cpu_seconds": seconds,
            "mib": round(grown, 1),
            "tensorboard_cpu_seconds": cpu_timed(replay)[0],
        }


def shards(count: int) -> dict[str, Any]:
    looked = []
    check = shard_index.check_file
    shard_index.check_file = lambda *a: (looked.append(1), check(*a))  # type: ignore[assignment, func-returns-value]
    with tempfile.TemporaryDirectory() as folder:
        writer = ShardWriter(Path(folder, "s"), 300, 4)
        writer.add_documents(np.array([4 * count]))
        writer.add_tokens(np.arange(4 * count, dtype=np.int32) % 300)
        writer.finish(tokenizer="0" * 64, tokenizer_name="bytes")
        seconds, _ = cpu_timed(lambda: ShardTokenBuffer(Path(folder, "s")))
    shard_index.check_file = check
    return {"cpu_seconds": seconds, "files_looked_at": len(looked)}


def many_files(count: int) -> dict[str, Any]:
    """Open ``count`` files on two real ranks. Rank 0 lists the files for both. Also measure the checkpoint state."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for number in range(count):
            path = Path(folder, "data", f"{number // 1000:06d}", f"{number:08d}.jsonl")
            if number % 1000 == 0:
                path.parent.mkdir(parents=True)
            path.write_bytes(b'{"text": "a document of several words"}\n')
        options = ["--training.dataset=jsonl", f"--training.dataset_path={folder}/data"]
        config = load("debug", [*options, "--data.mode=stream"]).config
        pipes = []
        processes = []
        for rank in range(2):
            receiver, sender = multiprocessing.Pipe(False)
            arguments = (config, rank, f"{folder}/store", sender)
            fork = multiprocessing.get_context("fork")
            process = fork.Process(target=open_many_files, args=arguments)
            process.start()
            processes.append(process)
            pipes.append(receiver)
        first, other = (pipe.recv() for pipe in pipes)
        for process in processes:
            process.join()
    return {"first": first, "other": other}


def open_many_files(config: Config, rank: int, store: str, sender: Any) -> None:
    """Measure one rank, and send the result: seconds, CPU seconds and MiB to open its data and to read a batch."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = time.process_time()

    def opened() -> Any:
        with together(config):
            return open_dataloader(config, batch_rank=rank, num_batch_ranks=2, accumulation=1)

    seconds, loader = timed(opened)
    cpu = time.process_time() - cpu
    next(loader)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    result = {"seconds": seconds, "cpu_seconds": round(cpu, 2), "mib": round(grown, 1)}
    if rank == 0:
        hashed = {name: "0" * 64 for name in loader.sampled_files}
        facts = {
            "data_files": loader.sampled_files,
            "data_contents": hashed,
            "data_cursors": loader.cursors().tolist(),
        }
        result["state_bytes"] = len(json.dumps(facts))
        result["contents_seconds"], _ = timed(lambda: Contents(loader.files_to_hash).look())
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        result["contents_mib"] = round(grown, 1)
    sender.send(result)
    dist.barrier()
    dist.destroy_process_group()


class Lengths:
    """Fake token buffer: it has document lengths, but no tokens."""

    has_mask = False

    def __init__(self, count: int) -> None:
        lengths = np.random.default_rng(1).integers(2, 2000, count)
        self._starts = np.cumsum(lengths) - lengths
        self.num_documents = count
        self.num_tokens = int(lengths.sum())

    def document_starts(self) -> Any:
        return self._starts


def whole_documents(count: int) -> dict[str, Any]:
    line = Lengths(count)
    found = {}
    for kind in ("first_fit", "padded"):
        tracemalloc.start()
        rows = pack(line, Packing(2048, kind))  # type: ignore[arg-type]
        mib = tracemalloc.get_traced_memory()[0] / 2**20
        tracemalloc.stop()
        seconds, rows = cpu_timed(lambda: pack(line, Packing(2048, kind)))  # type: ignore[arg-type]  # noqa: B023
        found |= {
            "rows": rows.num_rows,
            f"{kind}_cpu_seconds": seconds,
            f"{kind}_mib": round(mib, 1),
        }
    return found


class PeriodicLengths:
    """Fake token buffer that repeats the lengths of one block, so its memory does not grow with documents."""

    has_mask = False
    num_tokens = 2**62

    def __init__(self, count: int) -> None:
        lengths = np.random.default_rng(1).integers(2, 2000, BLOCK_DOCUMENTS)
        self._starts = np.cumsum(lengths) - lengths
        self._period = int(lengths.sum())
        self.num_documents = count

    def document_starts(self) -> Any:
        return self

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, which: Any) -> Any:
        numbers = (
            np.arange(which.start, which.stop) if isinstance(which, slice) else np.int64(which)
        )
        return self._starts[numbers % BLOCK_DOCUMENTS] + numbers // BLOCK_DOCUMENTS * self._period

    def tokens(self, start: int, stop: int) -> Any:
        return np.zeros(stop - start, np.int64)


def prepared_documents(count: int) -> dict[str, Any]:
    line = PeriodicLengths(count)
    packing = Packing(2048, "first_fit")
    fit = fit_block(line, 0, packing)  # type: ignore[arg-type]
    counts = {name: getattr(fit, name) for name in ("num_rows", "num_targets", "cut", "dropped")}
    blocks = num_blocks(line)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        writer = FitTableWriter(Path(folder), packing, "", BLOCK_DOCUMENTS, blocks)
        writer.add((counts, fit.to_bytes()) for _ in range(blocks))
        writer.finish()
        size = (Path(folder) / table_name(packing)).stat().st_size
        facts: Any = {
            "fingerprint": "",
            "num_documents": count,
            "block_documents": BLOCK_DOCUMENTS,
            "option": "o",
        }
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds, table = cpu_timed(lambda: open_table(Path(folder), packing, **facts))
        rows, out = pack(line, packing, table), PackedSequences(1, packing)  # type: ignore[arg-type]
        asked = np.random.default_rng(2).integers(0, (blocks - 1) * fit.num_rows, 1000).tolist()
        row_seconds, _ = cpu_timed(lambda: [rows.write(row, out, 0) for row in asked])
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "cpu_seconds": seconds, "mib": round(grown, 1), "cpu_seconds_of_a_row": row_seconds / 1000, "file_bytes": size
    }  # fmt: skip


def llama3_405b() -> dict[str, tuple[int, ...]]:
    layers = 126
    dim = 16384
    ffn = 53248
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (128256, dim)}
    for layer in range(layers):
        own: dict[str, tuple[int, ...]] = {
            "wq": (dim, dim),
            "wk": (1024, dim),
            "wv": (1024, dim),
            "wo": (dim, dim),
        }
        own |= {
            "w1": (ffn, dim),
            "w2": (dim, ffn),
            "w3": (ffn, dim),
            "attn_norm": (dim,),
            "ffn_norm": (dim,),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return {**shapes, "norm.weight": (dim,), "head.weight": (128256, dim)}


def experts_1t() -> dict[str, tuple[int, ...]]:
    """Return the parameter shapes of an MoE like Kimi-K2: 384 experts, about 10^12 parameters."""
    dim = 7168
    ffn = 2048
    latent = 512
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (163840, dim)}
    for layer in range(61):
        own: dict[str, tuple[int, ...]] = {
            "wq_a": (1536, dim),
            "wq_b": (64 * 192, 1536),
            "wkv_a": (latent + 64, dim),
        }
        own |= {"wo": (dim, 64 * 128)}
        own |= {
            "wkv_b": (64 * 256, latent),
            "attn_norm": (dim,),
            "ffn_norm": (dim,),
            "router": (384, dim),
        }
        own |= {
            "experts.w1": (384, ffn, dim),
            "experts.w2": (384, dim, ffn),
            "experts.w3": (384, ffn, dim),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return {**shapes, "norm.weight": (dim,), "head.weight": (163840, dim)}


def tables(
    shapes: dict[str, tuple[int, ...]], mesh: dict[str, int]
) -> tuple[list[Table], list[int]]:
    """Return the shard tables that ranks exchange in a save, and the table number of each rank.

    FSDP splits the shards of TP or EP further. Pipeline stages have different layers.
    """
    tp = mesh.get("tp", 1)
    ep = mesh.get("ep", 1)
    shard = mesh.get("fsdp", 1)
    stages = mesh.get("pp", 1)
    replicas = mesh.get("replicas", 1)
    per_stage = replicas * shard * tp
    layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers."))
    said: list[Table] = [{} for _ in range(stages)]
    for name, shape in shapes.items():
        layer = (
            int(name.split(".")[1])
            if name.startswith("layers.")
            else 0
            if name.startswith("embed")
            else layers - 1
        )
        if ".experts." in name and ep > 1:
            rule = [[ep, 1, 0], [shard * tp // ep, ep, 1]]
        else:
            rule = [[shard, tp, 0]]
            if tp > 1 and len(shape) > 1:
                along = 1 if name.rpartition(".weight")[0].endswith(("wo", "w2")) else 0
                rule = [[tp, 1, along], *rule]
        table = said[layer * stages // layers]
        rule = [split for split in rule if split[0] > 1]
        table[f"model.{name}"] = ["float32", [*shape], rule]  # type: ignore[index]
        for moment in ("exp_avg", "exp_avg_sq"):
            table[f"optimizer.{name}.{moment}"] = ["float32", [*shape], rule]  # type: ignore[index]
        table[f"optimizer.{name}.step"] = ["float32", [], []]  # type: ignore[index]
    return said, [rank // per_stage for rank in range(stages * per_stage)]


MESHES: dict[str, tuple[Callable[[], dict[str, tuple[int, ...]]], dict[str, int]]] = {
    "405B fsdp 8": (llama3_405b, {"fsdp": 8}),
    "405B fsdp 8 tp 8": (llama3_405b, {"fsdp": 8, "tp": 8}),
    "405B fsdp 64 tp 8": (llama3_405b, {"fsdp": 64, "tp": 8}),
    "405B pp 16 fsdp 32 tp 8": (llama3_405b, {"pp": 16, "fsdp": 32, "tp": 8}),
    "405B pp 16 fsdp 128 tp 8": (llama3_405b, {"pp": 16, "fsdp": 128, "tp": 8}),
    "405B fsdp 2048 tp 8": (llama3_405b, {"fsdp": 2048, "tp": 8}),
    "405B hsdp 16 x 128 tp 8": (llama3_405b, {"replicas": 16, "fsdp": 128, "tp": 8}),
    "1T fsdp 512 ep 64": (experts_1t, {"fsdp": 512, "ep": 64}),
    "1T pp 16 fsdp 1024 ep 64": (experts_1t, {"pp": 16, "fsdp": 1024, "ep": 64}),
    "1T fsdp 16384 ep 64": (experts_1t, {"fsdp": 16384, "ep": 64}),
    "405B fsdp 8191": (llama3_405b, {"fsdp": 8191}),
    "405B pp 13 fsdp 157 tp 8": (llama3_405b, {"pp": 13, "fsdp": 157, "tp": 8}),
    "405B pp 7 hsdp 3 x 97 tp 8": (llama3_405b, {"pp": 7, "replicas": 3, "fsdp": 97, "tp": 8}),
    "1T fsdp 16128 ep 96": (experts_1t, {"fsdp": 16128, "ep": 96}),
    "1T hsdp 5 x 384 ep 128": (experts_1t, {"replicas": 5, "fsdp": 384, "ep": 128}),
    "405B fsdp 8192 tp 8": (llama3_405b, {"fsdp": 8192, "tp": 8}),
    "405B fsdp 65536": (llama3_405b, {"fsdp": 65536}),
    "405B fsdp 16381": (llama3_405b, {"fsdp": 16381}),
}


def saving(mesh: str) -> dict[str, Any]:
    """Measure the planning of a save, as each rank does it, and the writing and reading of its manifest."""
    model, degrees = MESHES[mesh]
    said, table_of_rank = tables(model(), degrees)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = time.process_time()
    held = holders.held_by_all(said, table_of_rank)
    stored, load = save_plan.share_out(held, len(table_of_rank))
    plan = save_plan.SavePlan(stored, load, held)
    plan.names_of(0)
    planned = time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    digest = hashlib.sha256().hexdigest()
    files = tuple(
        TensorFile(f"rank-{rank:05d}.bin", size, digest) for rank, size in enumerate(load) if size
    )
    whole = Manifest(1, len(load), "run", "benchmark", files, stored, {"state": {"step": 1}})
    write_seconds, data = cpu_timed(whole.to_bytes)
    read_seconds, _ = cpu_timed(lambda: parse(data, Path("step-1")))
    return {
        "ranks": len(load), "tensors": len(stored), "plan_cpu_seconds": round(planned, 2), "plan_mib": round(grown, 1),
        "said_bytes": [len(zlib.compress(json.dumps(holders.fold(table)).encode())) for table in said],
        "manifest_bytes": len(data), "write_cpu_seconds": write_seconds, "read_cpu_seconds": read_seconds,
    }  # fmt: skip


RESUMES = {
    "405B fsdp 8, the same": ("405B fsdp 8", "405B fsdp 8"),
    "405B fsdp 64 tp 8, the same": ("405B fsdp 64 tp 8", "405B fsdp 64 tp 8"),
    "405B fsdp 64 tp 8 on pp 16 fsdp 32 tp 8": ("405B fsdp 64 tp 8", "405B pp 16 fsdp 32 tp 8"),
    "405B pp 16 fsdp 128 tp 8, the same": ("405B pp 16 fsdp 128 tp 8", "405B pp 16 fsdp 128 tp 8"),
    "405B fsdp 2048 tp 8, the same": ("405B fsdp 2048 tp 8", "405B fsdp 2048 tp 8"),
    "405B fsdp 2048 tp 8 on fsdp 64 tp 8": ("405B fsdp 2048 tp 8", "405B fsdp 64 tp 8"),
    "405B pp 16 fsdp 128 tp 8 on fsdp 2048 tp 8": (
        "405B pp 16 fsdp 128 tp 8",
        "405B fsdp 2048 tp 8",
    ),
    "1T fsdp 16384 ep 64, the same": ("1T fsdp 16384 ep 64", "1T fsdp 16384 ep 64"),
    "1T fsdp 16384 ep 64 on fsdp 512 ep 64": ("1T fsdp 16384 ep 64", "1T fsdp 512 ep 64"),
    "405B fsdp 8191 on fsdp 64 tp 8": ("405B fsdp 8191", "405B fsdp 64 tp 8"),
    "405B fsdp 16381 on fsdp 8": ("405B fsdp 16381", "405B fsdp 8"),
    "405B pp 13 fsdp 157 tp 8 on fsdp 8191": ("405B pp 13 fsdp 157 tp 8", "405B fsdp 8191"),
    "1T fsdp 16128 ep 96 on fsdp 512 ep 64": ("1T fsdp 16128 ep 96", "1T fsdp 512 ep 64"),
}


def stored_by(mesh: str, columns: int | None = None) -> Manifest:
    """Return the manifest of a save on a mesh. Rows have only ``columns`` elements, if set."""
    model, degrees = MESHES[mesh]
    held = holders.held_by_all(*tables(narrowed(model(), columns), degrees))
    ranks = math.prod(degrees[axis] for axis in ("pp", "replicas", "fsdp", "tp") if axis in degrees)
    stored, load = save_plan.share_out(held, ranks)
    digest = hashlib.sha256().hexdigest()
    files = tuple(
        TensorFile(f"rank-{rank:05d}.bin", size, digest) for rank, size in enumerate(load) if size
    )
    return Manifest(1, len(load), "run", "benchmark", files, stored, {"state": {"step": 1}})


def narrowed(shapes: dict[str, tuple[int, ...]], columns: int | None) -> dict[str, tuple[int, ...]]:
    if columns is None:
        return shapes
    return {
        name: (*shape[:-1], columns) if len(shape) > 1 else shape for name, shape in shapes.items()
    }


def resuming(name: str) -> dict[str, Any]:
    """Measure how long a resuming rank takes to compute which bytes of which file it needs, and to read them."""
    (saved, wanted), columns = RESUMES[name], 8
    data = stored_by(saved).to_bytes()
    narrow = stored_by(saved, columns)
    model, degrees = MESHES[wanted]
    said, table_of_rank = tables(model(), degrees)
    narrow_said = tables(narrowed(model(), columns), degrees)[0]
    ranks = len(table_of_rank)
    worst = dict.fromkeys(("cpu_seconds", "mib", "pieces", "files", "read_for_needed"), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for file in narrow.files:
            with open(Path(folder, file.name), "wb") as handle:
                handle.truncate(file.bytes)
        for rank in (0, ranks // 2, ranks - 1):
            found = needed(parse(data, Path("step-1")), said[table_of_rank[rank]], rank)
            told = in_fresh_process(
                lambda rank: read_by(data, narrow, narrow_said[table_of_rank[rank]], folder, rank),
                rank,
            )
            told |= {
                "pieces": found[0],
                "files": len(found[1]),
                "read_for_needed": round(found[2] / found[3], 2),
            }
            worst = {key: max(worst[key], told[key]) for key in worst}
    return {"ranks": ranks, **worst}


def boxes(table: Table, rank: int) -> dict[str, Any]:
    found = {}
    for key, (_, shape, rule) in table.items():
        offsets, sizes = holders.boxes_of(shape, rule, np.array([rank]))
        found[key] = (tuple(offsets[0].tolist()), tuple(sizes[0].tolist()))
    return found


def needed(manifest: Manifest, table: Table, rank: int) -> tuple[int, set[int], int, int]:
    """Return pieces, files, bytes read and bytes needed of one rank, computed like in ``tensor_reader.read``."""
    pieces = 0
    files = set[int]()
    read_bytes = 0
    needed_bytes = 0
    for key, own in boxes(table, rank).items():
        stored = manifest.tensors[key]
        for chunk, shared in stored.overlapping(own):
            pieces += 1
            files.add(chunk.file)
            # tensor_reader reads full rows, even if a rank needs only some columns.
            rows = shared[1][0] if stored.shape else 1
            read_bytes += ITEM_BYTES[stored.dtype] * rows * math.prod(chunk.sizes[1:])
            needed_bytes += ITEM_BYTES[stored.dtype] * math.prod(shared[1])
    return pieces, files, read_bytes, needed_bytes


def read_by(data: bytes, narrow: Manifest, table: Table, folder: str, rank: int) -> dict[str, Any]:
    own = boxes(table, rank)
    filled = {key: torch.zeros(sizes) for key, (_, sizes) in own.items()}
    box_of = {id(tensor): own[key] for key, tensor in filled.items()}
    tensor_reader.box_of = lambda tensor: box_of[id(tensor)]  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = time.process_time()
    parse(data, Path("step-1"))
    tensor_reader.read(filled, narrow, Path(folder))
    seconds = time.process_time() - cpu
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {"cpu_seconds": round(seconds, 2), "mib": round(grown, 1)}


def own_parts(count: int) -> dict[str, Any]:
    """Measure the CPU seconds of one rank to compute its shards of ``count`` DTensors.

    The mesh is FSDP 64 x TP 8, on a fake process group.
    """
    dist.init_process_group("fake", rank=0, world_size=512, store=FakeStore())
    mesh = init_device_mesh("cpu", (64, 8))
    held = {
        f"layers.{n}.w": DTensor.from_local(torch.zeros(32, 8), mesh, [Shard(0), Shard(0)])
        for n in range(count)
    }
    found = {}
    for name, action in (
        ("save", lambda: holders.table_of(held)),
        ("load", lambda: [*map(holders.box_of, held.values())]),
    ):
        cpu = time.process_time()
        action()
        found[f"{name}_cpu_seconds"] = round(time.process_time() - cpu, 2)
    return found


def real_save(mebibytes: int) -> dict[str, Any]:
    """Save, check and read a sharded model on two real ranks.

    Memory is the peak of a rank during the call, minus its resident memory before.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        processes = []
        for rank in range(2):
            receiver, sender = multiprocessing.Pipe(False)
            job = multiprocessing.get_context("fork").Process(
                target=save_and_read, args=(folder, rank, mebibytes, sender)
            )
            job.start()
            pipes.append(receiver)
            processes.append(job)
        told = [pipe.recv() for pipe in pipes]
        for job in processes:
            job.join()
    return {key: [one[key] for one in told] for key in told[0]}


def host_reduce(size: int) -> dict[str, Any]:
    """Measure a host all-reduce over ``size`` real ranks: median milliseconds of ten, on the slowest rank."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(False) for _ in range(size)]
        ranks = [
            context.Process(target=delayed_reductions, args=(folder, rank, size, sender))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        medians = [receiver.recv() for receiver, _ in pipes]
        for rank in ranks:
            rank.join()
    return {
        "milliseconds": round(max(medians), 1),
        "messages_in_sequence": host_collectives.hops(size),
        "messages_in_sequence_of_a_ring": 2 * (size - 1),
    }


def delayed_reductions(folder: str, rank: int, size: int, sender: Any) -> None:
    """Run reductions on one rank with delayed messages, and send their median milliseconds."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size
    )
    send = dist.isend

    def delayed_send(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.002)
        return send(*arguments, **named)

    dist.isend = delayed_send
    host_collectives.RING_UP_TO = 1
    seconds = []
    for _ in range(10):
        dist.barrier()
        start = time.perf_counter()
        host_collectives.all_reduce(torch.ones(4, dtype=torch.float64))
        seconds.append(time.perf_counter() - start)
    sender.send(1000 * sorted(seconds)[5])
    dist.barrier()
    dist.destroy_process_group()


def host_step(size: int) -> dict[str, Any]:
    """Measure the host work in a step of the debug preset with ``size`` real ranks: median milliseconds of four.

    Host work is the processor time of rank 0's main thread, without forward, backward and update, and a delay of
    2 ms for each message of a host collective. Processor time excludes the wait for a core, because there are more
    ranks than cores.
    """
    from shardtrain import cli
    from shardtrain.train import trainer

    steps: list[dict[str, float]] = []
    clock = {"device": 0.0, "messages": 0.0, "end": 0.0}
    sender, receiver = os.pipe()

    def as_device_work(function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                clock["device"] += time.thread_time() - start

        return timed

    send = dist.isend
    train_step = trainer.step

    def delayed_send(*arguments: Any, **named: Any) -> Any:
        clock["messages"] += 1
        time.sleep(0.002)
        return send(*arguments, **named)

    def step(run: Any) -> Any:
        if not clock["end"]:
            run.runner.forward_backward = as_device_work(run.runner.forward_backward)
        outcome = train_step(run)
        now = time.thread_time()
        steps.append({**clock, "total": now - clock["end"]})
        clock.update(device=0.0, messages=0.0, end=now)
        if len(steps) == 6 and os.environ["RANK"] == "0":
            os.write(receiver, json.dumps(steps[2:]).encode())
        return outcome

    dist.isend = delayed_send
    host_collectives.RING_UP_TO = 1
    trainer.step = step
    trainer._update = as_device_work(trainer._update)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "training.steps": "6",
            "training.seq_len": "64",
            "training.local_batch_size": "1",
            "training.global_batch_size": str(size),
            "job.dump_folder": folder,
            "metrics.log_freq": "100",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        status = cli.main(["train", "debug", "--nproc", str(size), *words])
    if status:
        raise SystemExit(f"the run of {size} ranks ended with {status}")
    measured = json.loads(os.read(sender, 65536))
    processor_ms = [1000 * (one["total"] - one["device"]) for one in measured]
    messages = sorted(one["messages"] for one in measured)[2]
    median_ms = sorted(processor_ms)[2]
    return {
        "processor_milliseconds": round(median_ms, 1),
        "messages_in_sequence": messages,
        "milliseconds": round(median_ms + 2 * messages, 1),
    }


def save_and_read(folder: str, rank: int, mebibytes: int, sender: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    count = 96
    # Divide by 3, because each weight has two moments of the same size.
    rows = mebibytes * 2**20 // 4 // 1024 // count // 3
    model = {}
    for section, end in (("model", ""), ("optimizer", ".exp_avg"), ("optimizer", ".exp_avg_sq")):
        for n in range(count):
            local = torch.randn(rows // 2, 1024)
            name = f"{section}.layers.{n}.w{end}"
            model[name] = DTensor.from_local(local, mesh, [Shard(0)])
    kept = Checkpoints(
        Config(job=Job(dump_folder=f"{folder}/run"), checkpoint=Checkpoint(enable=True))
    )

    def above(action: Callable[[], Any]) -> float:
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM, the peak of resident memory
        before = peak("VmRSS")
        action()
        return round((peak("VmHWM") - before) / 1024, 1)

    told = {"tensors_mib": sum(t.to_local().nbytes for t in model.values()) >> 20}
    save = lambda: kept.save(1, model, {}, {"state": {"step": 1}}, last=False)  # noqa: E731
    told |= {"first_save_mib": above(save)}
    kept.close()
    again = Checkpoints(
        Config(job=Job(dump_folder=f"{folder}/run"), checkpoint=Checkpoint(enable=True))
    )
    told |= {"check_and_read_mib": above(lambda: again.load(again.to_continue(), model, {}))}  # type: ignore[arg-type]
    again.close()
    sender.send(told)
    dist.destroy_process_group()


def peak(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def peer_rows(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        writer = ShardWriter(Path(folder, "s"), 300, 2**20)
        for number in range(8):
            writer.add_documents(np.full(2**10, 2**10))
            writer.add_tokens((np.arange(2**20, dtype=np.int32) + number) % 300)
        writer.finish(tokenizer="0" * 64, tokenizer_name="bytes")
        pipes = []
        processes = []
        for rank in range(count):
            receiver, sender = multiprocessing.Pipe(False)
            arguments = (folder, rank, count, sender)
            processes.append(
                multiprocessing.get_context("fork").Process(target=rows_of_peer, args=arguments)
            )
            processes[-1].start()
            pipes.append(receiver)
        told = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
        each_tokenizes = seconds_to_tokenize(
            Path(folder, "text.jsonl"), Path(folder, "tokenizer"), 8192
        )
    found = {key: round(max(one[key] for one in told), 6) for key in told[0]}
    return found | {"each_tokenizes_cpu_seconds": round(each_tokenizes, 6)}


def seconds_to_tokenize(text: Path, tokenizer: Path, tokens: int) -> float:
    """Return CPU seconds to tokenize ``tokens`` tokens of a JSONL file."""
    make_text(text, 4)
    train_tokenizer(text, tokenizer)
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()[:500]]
    encoder = open_tokenizer(str(tokenizer))
    encoder.encode_batch(documents[:10])
    begun = time.process_time()
    made = sum(map(len, encoder.encode_batch(documents)))
    return (time.process_time() - begun) / made * tokens


def rows_of_peer(folder: str, rank: int, count: int, sender: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", count), rank=rank, world_size=count
    )
    packing = Packing(8192, "concat")
    rows = pack(ShardTokenBuffer(Path(folder, "s")), packing, None)
    out = PackedSequences(1, packing)
    asked = np.random.default_rng(1).integers(0, rows.num_rows, 500).tolist()
    sent = torch.zeros(8193, dtype=torch.int32)

    def seconds_of_a_row(action: Callable[[int], Any]) -> float:
        action(asked[0])
        dist.barrier()
        begun = time.process_time()
        for row in asked:
            action(row)
        return (time.process_time() - begun) / len(asked)

    def receive(row: int) -> None:
        if rank == 0:
            rows.write(row, out, 0)
        dist.broadcast(sent, 0)

    told = {"each_reads_cpu_seconds": seconds_of_a_row(lambda row: rows.write(row, out, 0))}
    sender.send(told | {"one_sends_cpu_seconds": seconds_of_a_row(receive)})
    dist.barrier()
    dist.destroy_process_group()


def retained(count: int) -> dict[str, Any]:
    """Measure retention with ``count`` older checkpoints, which ``keep_forever`` excludes from deletion."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = Manifest(
            1,
            1,
            "0",
            "benchmark",
            (TensorFile("rank-00000.bin", 0, "0" * 64),),
            {},
            {"state": {"step": 1}},
        )
        for step in range(10, 10 * count + 1, 10):
            (folder / f"step-{step}").mkdir()
            (folder / f"step-{step}" / "rank-00000.bin").touch()
            (folder / f"step-{step}" / "manifest.json").write_bytes(whole.to_bytes())
        reads = []
        read = retention.read
        retention.read = lambda path: (reads.append(1), read(path))[1]  # type: ignore[attr-defined]
        seconds, _ = timed(
            lambda: retention.delete_old(folder, 10 * count, 2, 10, 0, "", retention.Removals())
        )
        listed, _ = timed(lambda: retention.step_folders(folder))
        return {"seconds": seconds, "manifests_read": len(reads), "list_seconds": listed}


def commit(count: int) -> dict[str, Any]:
    """Measure the commit by rank 0 after ``count`` ranks have written: sizes, manifest, rename, completeness check."""
    digest = hashlib.sha256().hexdigest()
    names = [f"rank-{rank:05d}.bin" for rank in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        storage = LocalStorage(Path(folder))
        draft = Path(folder, "step-1.tmp-0")
        draft.mkdir()
        for name in names:
            (draft / name).write_bytes(b"12345678")
        tensor = StoredTensor("int64", (count,), (Grid((0,), (1,), 0, 0, (Axis(count, 0, 1),)),))
        files = tuple(TensorFile(name, 8, digest) for name in names)
        whole = Manifest(
            1, count, "0", "benchmark", files, {"model.a": tensor}, {"state": {"step": 1}}
        )
        seconds, final = timed(lambda: storage.publish(draft, whole, lambda: None))
        look_seconds, _ = timed(lambda: retention.is_complete(final))
        markers = Path(folder)
        for rank in range(count):
            async_save.write_marker(markers, rank, "t", files[rank])
        wait_seconds, _ = timed(
            lambda: async_save.wait_for_markers(markers, range(count), "t", lambda: None)
        )
    return {"seconds": seconds, "is_whole_seconds": look_seconds, "markers_seconds": wait_seconds}


OPENS = """
import importlib, sys
opened = []
sys.addaudithook(lambda event, _: opened.append(event) if event == "open" else None)
importlib.import_module(sys.argv[1])
own = sum(name.partition(".")[0] == "shardtrain" for name in sys.modules)
print(len(opened), len(sys.modules), own)
"""


def imports(module: str) -> dict[str, Any]:
    """Count the files that a process opens to import a module, as every rank under torchrun or srun does."""
    command = [sys.executable, "-P", "-c", OPENS, module]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=300
    ).stdout
    num_opens, num_modules, num_own_modules = map(int, printed.split())
    return {"opens": num_opens, "modules": num_modules, "own_modules": num_own_modules}


def in_fresh_process(measure: Callable[[Any], dict[str, Any]], count: Any) -> dict[str, Any]:
    """Run a measurement in a forked process, because peak memory of earlier measurements would remain."""
    receiver, sender = multiprocessing.Pipe(False)
    process = multiprocessing.get_context("fork").Process(
        target=lambda: sender.send(measure(count))
    )
    process.start()
    sender.close()
    found: dict[str, Any] = receiver.recv()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="the name of one measurement")
    options = parser.parse_args()
    ranks = (8, 64, 512, 4096, 16384)
    asked: list[tuple[Callable[[Any], dict[str, Any]], tuple[Any, ...]]] = [
        (slow_ranks, ranks), (metrics, (10**4, 10**6, 10**7)), (shards, (100, 1000, 10_000)),
        (many_files, (10**4, 10**5, 10**6)), (whole_documents, (10**6, 10**7)), (prepared_documents, (10**6, 10**9)),
        (saving, tuple(MESHES)), (resuming, tuple(RESUMES)), (own_parts, (4548,)), (commit, ranks),
        (real_save, (768, 3072)), (host_reduce, (16, 32, 64)),
        (host_step, (16, 32, 64)), (peer_rows, (2, 8)), (retained, (100, 10_000)),
        (imports, ("torch", "torch.distributed.tensor", "torch._dynamo", "shardtrain.train.trainer")),
    ]  # fmt: skip
    found: dict[str, Any] = {"processor": f"{processor_facts()}, {os.cpu_count()} threads"}
    for measure, counts in asked:
        if options.only not in (None, measure.__name__):
            continue
        for count in counts:
            found.setdefault(measure.__name__, {})[str(count)] = told = in_fresh_process(
                measure, count
            )
            print(measure.__name__, count, told, flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
