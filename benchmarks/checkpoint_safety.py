"""Effects of damage, kills and write errors on checkpoints: shardtrain and PyTorch's
distributed checkpoint (DCP).

    python benchmarks/checkpoint_safety.py [--flips 400] [--kills 100] [--megabytes 64]

DCP is used like torchtitan does, with a folder per step that is complete if it has ``.metadata``, and also
with one folder that is overwritten by each save ("in place").
Everything runs in one process on the CPU, in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
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
from shardtrain.utils.errors import ShardtrainError

State = dict[str, torch.Tensor]


def state(step: int, numel: int = 50_000, tensors: int = 4) -> State:
    """Return tensors whose elements identify the step."""
    return {f"model.{i}": torch.full((numel,), float(step)) for i in range(tensors)}


class Ours:
    name = "shardtrain"

    def __init__(self, root: Path) -> None:
        options = Checkpoint(enable=True, keep_latest_k=2)
        self.kept = Checkpoints(Config(job=Job(dump_folder=str(root)), checkpoint=options))
        self.root = root

    def folder(self, step: int) -> Path:
        return self.root / f"checkpoint/step-{step}"

    def save(self, step: int, tensors: State) -> None:
        self.kept.save(step, tensors, {}, {"state": {"step": step}}, last=False)

    def newest(self) -> int:
        return max(self.kept.steps(), default=0)

    def load(self, step: int, into: State) -> None:
        options = Checkpoint(enable=True, load_only=True)
        Checkpoints(Config(job=Job(dump_folder=str(self.root)), checkpoint=options)).load(
            self.folder(step), into, {}
        )


class PlainDcp:
    name = "DCP, a folder per step"
    threads = 1

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def save(self, step: int, tensors: State) -> None:
        writer = dcp.FileSystemWriter(str(self.folder(step)), thread_count=self.threads)
        dcp.save(dict(tensors), storage_writer=writer)

    def newest(self) -> int:
        return max(
            (int(path.parent.name[5:]) for path in self.root.glob("step-*/.metadata")), default=0
        )

    def load(self, step: int, into: State) -> None:
        dcp.load(into, checkpoint_id=str(self.folder(step)))


class DcpThreads(PlainDcp):
    name = "DCP, thread_count=2"
    threads = 2


class DcpInPlace(PlainDcp):
    name = "DCP, in place"

    def folder(self, step: int) -> Path:
        return self.root / "latest"

    def newest(self) -> int:
        return int((self.root / "latest/.metadata").exists())


WAYS: list[Any] = [Ours, PlainDcp, DcpThreads, DcpInPlace]


@contextlib.contextmanager
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def outcome(load: Callable[[], State]) -> str:
    """Load a checkpoint and classify the result.

    Returns:
        "whole" if all elements are of one step, "silent" if a load without an error returns
        wrong numbers, and "refused" if it raises an error.
    """
    try:
        loaded = load()
    except (ShardtrainError, BaseException):  # errors of DCP derive only from BaseException
        return "refused"
    values = torch.cat(list(loaded.values()))
    return "whole" if bool((values == values[0]).all()) and values[0] > 0 else "silent"


def load_into(way: Any, step: int) -> State:
    into = state(-1)
    way.load(step, into)
    return into


def flips(kind: Any, root: Path, number: int) -> dict[str, int]:
    """Flip single random bits, alternately in files of tensors and of metadata."""
    counts = {"refused": 0, "silent": 0, "whole": 0}
    with alone():
        way = kind(root)
        way.save(3, state(3))
        files = sorted(path for path in way.folder(3).iterdir())
        dice = random.Random(0)
        for count in range(number):
            path = files[count % len(files)]
            content = path.read_bytes()
            changed = bytearray(content)
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
            path.write_bytes(changed)
            # Numbers that differ only in the last bit are wrong too, so compare with the saved numbers.
            counts[outcome(lambda: load_into(way, 3))] += 1
            path.write_bytes(content)
    return counts


def save_repeatedly(kind: Any, root: Path, first: int, ready: Any) -> None:
    torch.set_num_threads(1)
    quiet()
    with alone():
        way = kind(root)
        step = first
        ready.send_bytes(b"ready")
        while True:
            step += 1
            way.save(step, state(step))


def kills(kind: Any, root: Path, number: int) -> dict[str, int]:
    """Send SIGKILL at a random moment, then load the newest checkpoint."""
    counts = {"refused": 0, "silent": 0, "whole": 0, "none": 0}
    dice = random.Random(1)
    first = 0
    for _ in range(number):
        receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=save_repeatedly, args=(kind, root, first, sender), daemon=True
        )
        process.start()
        receiver.poll(60)
        time.sleep(0.02 + dice.random() * 0.1)
        process.kill()
        process.join()
        with alone():
            way = kind(root)
            newest = way.newest()
            counts[outcome(lambda: load_into(way, newest)) if newest else "none"] += 1  # noqa: B023
            first = max(first + 50, newest)
    return counts


LARGE = 100_000
SMALL = 1_000


def uneven(step: int) -> State:
    """Return one large and three small tensors, filled with ``step``.

    Only the large one exceeds the file size limit, so only one of two writer threads fails.
    """
    return {f"model.{i}": torch.full((SMALL if i else LARGE,), float(step)) for i in range(4)}


def limited_save(kind: Any, root: Path, sender: Any) -> None:
    torch.set_num_threads(1)
    quiet()
    # Hide the traceback that a writer thread of DCP prints.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with alone():
        way = kind(root)
        way.save(1, uneven(1))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * LARGE, resource.RLIM_INFINITY))
        try:
            way.save(2, uneven(2))
            sender.send_bytes(b"saved")
        except BaseException:
            sender.send_bytes(b"failed")
    os._exit(0)


def write_errors(kind: Any, root: Path, number: int = 10) -> dict[str, int]:
    """Limit the file size to half of the large tensor, and save.

    Count the saves that report an error, and what a load of the newest checkpoint returns.
    """
    counts = {"said failed": 0, "said saved": 0, "newest whole": 0, "newest unusable": 0}
    for trial in range(number):
        receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
        (root / str(trial)).mkdir()
        process = multiprocessing.get_context("fork").Process(
            target=limited_save, args=(kind, root / str(trial), sender)
        )
        process.start()
        counts[f"said {receiver.recv_bytes().decode()}" if receiver.poll(60) else "said saved"] += 1
        process.kill()
        process.join()
        with alone():
            way = kind(root / str(trial))
            into = uneven(-1)
            newest = way.newest()

            def load(way: Any = way, newest: int = newest, into: State = into) -> State:
                way.load(newest, into)
                return into

            counts["newest whole" if outcome(load) == "whole" else "newest unusable"] += 1
    return counts


def seconds(kind: Any, root: Path, megabytes: int) -> dict[str, float]:
    """Return the best of three times for saving and loading."""
    tensors = state(1, megabytes * 2**20 // 16)
    into = state(-1, megabytes * 2**20 // 16)
    saves = []
    loads = []
    with alone():
        way = kind(root)
        for step in (1, 2, 3):
            started = time.perf_counter()
            way.save(step, tensors)
            saves.append(time.perf_counter() - started)
            started = time.perf_counter()
            way.load(step, into)
            loads.append(time.perf_counter() - started)
    return {"save": round(min(saves), 3), "load": round(min(loads), 3)}


def quiet() -> None:
    logging.getLogger().setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=400)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for kind in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for name in ("flips", "kills", "error", "seconds"):
                (root / name).mkdir()
            outcomes: dict[str, dict[str, Any]] = {
                "flipped bits": flips(kind, root / "flips", options.flips),
                "kill -9": kills(kind, root / "kills", options.kills),
                "write error": write_errors(kind, root / "error"),
                f"seconds, {options.megabytes} MiB": seconds(
                    kind, root / "seconds", options.megabytes
                ),
            }
        results[kind.name] = outcomes
        print(kind.name)
        for name, counts in outcomes.items():
            print(
                f"  {name:20s} " + ", ".join(f"{key} {value}" for key, value in counts.items()),
                flush=True,
            )
    if options.output:
        options.output.write_text(
            json.dumps({"torch": torch.__version__, **results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
