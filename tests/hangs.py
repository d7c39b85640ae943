"""Run small trainings in which one rank hangs at a given place."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import patience
import torch
from launched import HELD, TIMEOUT, fork
from ports import free_port
from tiny import text_file, tiny_config

from shardtrain.checkpoint import collectives, tensors
from shardtrain.config import Loaded
from shardtrain.config.schema import DataLoaderOptions
from shardtrain.data import DataLoader
from shardtrain.data.loader import MicroBatches
from shardtrain.distributed.rendezvous import private_store
from shardtrain.distributed.runner import PlainRunner
from shardtrain.launch import environment, local
from shardtrain.metrics.profiling import Profiler
from shardtrain.models.layers import Attention
from shardtrain.train import trainer as train
from shardtrain.train.open_together import Together

LIMIT = max(3, round(patience.seconds(0.5)))
"""comm.hang_timeout_seconds: longer than a healthy rank can be silent on a machine with this load."""
WAIT = round(patience.seconds(30))
STEPS = 6
PLACES = {
    "stop": "step",
    "data": "data",
    "worker": "data",
    "forward": "step",
    "update": "step",
    "validation": "validation",
    "save": "checkpoint",
}
"""For each place of a hang, the phase that the report must name."""


def config(
    folder: Path,
    workers: int = 0,
    comm: dict | None = None,
    parallelism: dict | None = None,
    **training,
):
    return tiny_config(
        job={"dump_folder": str(folder)},
        training={
            "steps": STEPS,
            "local_batch_size": 2,
            "dataloader": DataLoaderOptions(num_workers=workers),
            **training,
        },
        parallelism=parallelism or {},
        comm={
            "hang_timeout_seconds": LIMIT,
            "init_timeout_seconds": WAIT,
            "train_timeout_seconds": WAIT,
            **(comm or {}),
        },
        checkpoint={"enable": True, "interval": HELD, "grace_seconds": 60},
        validation={
            "enable": True,
            "freq": HELD,
            "steps": 3,
            "dataset": "text",
            "dataset_path": text_file(),
            "seq_len": 64,
            "local_batch_size": 2,
        },
    )


def before(owner, name: str, call: int, action) -> None:
    """Patch a method to run ``action`` before its call number ``call``."""
    original = getattr(owner, name)
    calls = []

    def patched(*arguments, **names):
        calls.append(1)
        if len(calls) == call:
            action()
        return original(*arguments, **names)

    setattr(owner, name, patched)


def patch(folder: Path, place: str) -> None:
    """Patch this process, which is a single rank, to hang at a place."""

    def sleep() -> None:
        (folder / "hangs").touch()
        time.sleep(10 * TIMEOUT)

    def stop() -> None:
        time.sleep(LIMIT / 2)  # wait until a heartbeat has reported this phase
        (folder / "hangs").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    if place == "stop":
        before(PlainRunner, "forward_backward", HELD, stop)
    elif place == "data":
        before(DataLoader, "__next__", HELD, sleep)
    elif place == "worker":

        def stop_worker():
            (folder / "pid-worker").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

        before(MicroBatches, "__getitem__", 9, stop_worker)
    elif place == "forward":

        def hang_in_forward() -> None:
            before(Attention, "forward", 2, sleep)

        before(PlainRunner, "forward_backward", HELD, hang_in_forward)
    elif place == "update":
        before(train.optim, "set_learning_rate", HELD, sleep)
    elif place == "validation":
        before(PlainRunner, "evaluate", 2, sleep)
    elif place == "save":
        before(tensors, "write", 1, sleep)
    elif place == "slow validation":
        for call in (1, 2, 3):
            before(PlainRunner, "evaluate", call, lambda: time.sleep(0.5 * LIMIT))
    elif place == "long opening":
        broadcast = Together._broadcast
        seconds = [5 * LIMIT]

        def late(self, make, source, group):
            def look():
                time.sleep(seconds.pop() if seconds else 0)
                return make()

            return broadcast(self, look, source, group)

        Together._broadcast = late  # type: ignore[method-assign]
    elif place == "long trace":
        before(Profiler, "step", 3, lambda: time.sleep(1.5 * LIMIT))
    elif place == "long steps":
        for call in range(1, STEPS):
            before(PlainRunner, "forward_backward", call, lambda: time.sleep(1.5 * LIMIT))
    elif place == "long first step":
        later = int(os.environ["RANK"]) * LIMIT
        before(PlainRunner, "forward_backward", 1, lambda: time.sleep(7 * LIMIT + later))
    elif place == "slow":
        forward = PlainRunner.forward_backward
        last = [0.1]

        def five_times(*arguments):
            # at least 0.25 s, so this rank remains the slowest even if load slows down its peer
            time.sleep(max(0.25, 4 * last[0]))
            started = time.perf_counter()
            try:
                return forward(*arguments)
            finally:
                last[0] = time.perf_counter() - started

        PlainRunner.forward_backward = five_times  # type: ignore[method-assign]
    elif place == "data and store":
        before(DataLoader, "__next__", HELD, sleep)
        stall_store()
    elif place == "mismatch":
        before(train.grad_clip, "gradient_norm", HELD, lambda: collectives.all_gather_json("lost"))


def stall_store() -> None:
    """Block writes to the heartbeat folder from the first step on, like a disk that has failed."""

    def stall() -> None:
        before(private_store.FolderStore, "set", 1, lambda: time.sleep(10 * TIMEOUT))

    before(PlainRunner, "forward_backward", 1, stall)


def trainer(folder: Path, place: str, culprits: tuple[int, ...]):
    def main(loaded):
        torch.set_num_threads(1)
        rank = int(os.environ["RANK"])
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        if rank in culprits:
            patch(folder, place)
        elif place == "data and store":
            stall_store()
        return train.main(loaded)

    return main


def _launch(run_config, place, culprits, count):
    environment.set_process_defaults(os.environ, count, 2, alone=True)
    folder = Path(run_config.job.dump_folder)
    # line-buffered, because os._exit does not flush
    sys.stderr = (folder / "terminal").open("w", buffering=1)
    os._exit(local.launch(Loaded(run_config), count, main=trainer(folder, place, culprits)))


def run(run_config, place: str = "none", culprits: tuple[int, ...] = (), count: int = 2):
    Path(run_config.job.dump_folder).mkdir(parents=True, exist_ok=True)
    return fork(_launch, run_config, place, culprits, count)


def _rank(run_config, place, culprits, count, rank, port):
    """Run one rank as srun would start it. Rank 0 hosts the store."""
    environment.set_process_defaults(os.environ, count, 2, alone=True)
    os.environ.update(
        environment.rank_environment(rank, count, port, "foreign"),
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    del os.environ["TORCHELASTIC_RUN_ID"]
    folder = Path(run_config.job.dump_folder)
    local.leave(local.run_rank(Loaded(run_config), trainer(folder, place, culprits), count))


def run_foreign(run_config, place: str = "none", culprits: tuple[int, ...] = (), count: int = 2):
    """Start the ranks of a run without this package's launcher."""
    port = free_port()
    Path(run_config.job.dump_folder).mkdir(parents=True, exist_ok=True)
    return [fork(_rank, run_config, place, culprits, count, rank, port) for rank in range(count)]
