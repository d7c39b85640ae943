"""How long saves block training: blocking and background saves of shardtrain and of PyTorch.

    python benchmarks/checkpoint_stall.py [--megabytes 16 64 256] [--rounds 5] [--output FILE.json]

Runs in one process on the CPU. Each round measures every method, so other load affects all of them. A save
begins between two steps (a matrix product of about ten milliseconds). Steps during a save are compared with
undisturbed steps. DCP is used like in torchtitan: a folder per step, and one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Checkpoint, Config, Job

State = dict[str, torch.Tensor]


class Ours:
    """A save of shardtrain. ``done`` is True once it is on disk."""

    def __init__(self, root: Path, mode: Any) -> None:
        options = Checkpoint(enable=True, keep_latest_k=2, async_mode=mode)
        self.kept = Checkpoints(Config(job=Job(dump_folder=str(root)), checkpoint=options))

    def save(self, step: int, tensors: State) -> None:
        self.kept.save(step, tensors, {}, {"state": {"step": step}}, last=False)

    def done(self) -> bool:
        return self.kept.saving.writing is None or self.kept.saving.writing.ended

    def finish(self) -> None:
        self.kept.finish()


class PlainDcp:
    """``dcp.save`` and ``dcp.async_save``."""

    def __init__(self, root: Path, in_background: bool) -> None:
        self.root = root
        self.in_background = in_background
        self.future = None

    def save(self, step: int, tensors: State) -> None:
        writer = dcp.FileSystemWriter(str(self.root / f"step-{step}"), thread_count=1)
        if self.in_background:
            self.future: Any = dcp.async_save(dict(tensors), storage_writer=writer)
        else:
            dcp.save(dict(tensors), storage_writer=writer)

    def done(self) -> bool:
        return self.future is None or self.future.done()

    def finish(self) -> None:
        if self.future is not None:
            self.future.result()
            self.future = None


WAYS: dict[str, Callable[[Path], Any]] = {
    "shardtrain": lambda root: Ours(root, "disabled"),
    "shardtrain async": lambda root: Ours(root, "async"),
    "dcp": lambda root: PlainDcp(root, False),
    "dcp async": lambda root: PlainDcp(root, True),
}


def one_step(a: torch.Tensor) -> float:
    begun = time.perf_counter()
    torch.mm(a, a)
    return time.perf_counter() - begun


def once(way: Any, step: int, tensors: State, a: torch.Tensor) -> dict[str, float]:
    """Return times in seconds: the time that a save blocks training, the time of the save, and the
    times of a step without and during a save.
    """
    peace = statistics.median(one_step(a) for _ in range(20))
    begun = time.perf_counter()
    way.save(step, tensors)
    stall = time.perf_counter() - begun
    meanwhile = []
    while not way.done():
        meanwhile.append(one_step(a))
    total = time.perf_counter() - begun
    way.finish()
    return {
        "stall": stall,
        "total": total,
        "step": peace,
        "step_meanwhile": statistics.median(meanwhile or [peace]),
    }


def measure(megabytes: int, rounds: int, root: Path) -> dict[str, dict[str, float]]:
    tensors = {f"model.{i}": torch.randn(megabytes * 2**20 // 4 // 16) for i in range(16)}
    a = torch.randn(700, 700)
    ways = {}
    for name, make in WAYS.items():
        folder = f"{name.replace(' ', '-')}-{megabytes}"
        ways[name] = make(root / folder)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            result = once(way, number + 1, tensors, a)
            if number:  # the first save allocates memory that later ones reuse
                times[name].append(result)

    medians: dict[str, dict[str, float]] = {}
    for name, results in times.items():
        medians[name] = {}
        for key in results[0]:
            medians[name][key] = round(statistics.median(result[key] for result in results), 5)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "what": "median seconds; stall: time that a save blocks the trainer; total: time until it is on disk",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_before": os.getloadavg()[0],
        "rounds": arguments.rounds,
        "sizes": {},
    }
    with contextlib.ExitStack() as stack:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for megabytes in arguments.megabytes:
            results = measure(megabytes, arguments.rounds, root)
            ratio = results["shardtrain async"]["stall"] / results["shardtrain"]["stall"]
            result["sizes"][f"{megabytes} MiB"] = {
                **results,
                "stall_async_of_sync": round(ratio, 4),
            }
            for name, numbers in results.items():
                print(
                    f"{megabytes:5} MiB  {name:17}",
                    "  ".join(f"{key} {value:.4f}" for key, value in numbers.items()),
                )
            print(
                f"{megabytes:5} MiB  an asynchronous save blocks training for {100 * ratio:.1f} % of the time of a "
                "synchronous one"
            )
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
