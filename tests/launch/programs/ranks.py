"""A run with a minimal trainer: ``ranks.py FOLDER NPROC MODE HOW``, where HOW is "fork", "fresh" or "alone"."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from shardtrain.config.schema import Checkpoint, Config, Job, Metrics
from shardtrain.launch import environment, local, signals
from shardtrain.utils import stop_signals
from shardtrain.utils.errors import ConfigError, DataError, Preempted, Problem


def loaded(folder):
    checkpoint = Checkpoint(
        enable=mode in ("wait", "stubborn"), grace_seconds=int(os.environ.get("GRACE", "60"))
    )
    return SimpleNamespace(
        config=Config(job=Job(dump_folder=folder), metrics=Metrics(), checkpoint=checkpoint)
    )


def meeting():
    """Return the rendezvous store of the ranks."""
    from datetime import timedelta

    from shardtrain.distributed.rendezvous.attempt_store import store_of_attempt

    with store_of_attempt(os.environ, timedelta(seconds=300)) as store:
        return store


def trainer(mode):
    def main(_loaded):
        import torch
        import torch.distributed as dist

        folder = Path(_loaded.config.job.dump_folder)
        rank = int(os.environ["RANK"])
        world_size = int(os.environ["WORLD_SIZE"])
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
        os.write(1, f"rank {rank} says hello\n".encode())  # print may write the newline separately

        # Failures before the ranks meet
        if mode == "early" and rank == 1:
            raise RuntimeError("boom")
        if mode.startswith("exit-") and rank == 1:
            sys.exit(int(mode.removeprefix("exit-")))

        world = {} if world_size == 1 else {"store": meeting()}
        dist.init_process_group("gloo", **world, rank=rank, world_size=world_size)
        number = torch.ones(1)
        dist.all_reduce(number)
        assert int(number) == dist.get_world_size()

        # Ranks that wait for a signal, before and after the first step
        if mode == "listen":
            (folder / f"ready-{rank}").touch()
            time.sleep(60)
        if mode == "wait":
            (folder / f"ready-{rank}").touch()
            while not signals.current().is_requested():
                time.sleep(0.02)
            raise Preempted("saved at step 3")
        signals.current().is_starting = False  # like the trainer in its first step
        if mode == "stubborn":
            signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals.GRACEFUL)
            (folder / f"ready-{rank}").touch()
            time.sleep(60)

        # Failures of rank 1 while rank 0 waits in a collective
        if rank == 1:
            act(mode)
        if mode != "none":
            dist.all_reduce(number)

    def act(mode):
        if mode == "boom":
            raise RuntimeError("boom")
        if mode == "data":
            raise DataError("the data ends at sample 7")
        if mode == "config":
            raise ConfigError(
                [Problem("a.b", 1, "is wrong", "use 2"), Problem("c.d", 3, "is wrong", "use 4")]
            )
        if mode == "memory":
            raise MemoryError
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode.startswith("leave-"):
            os._exit(int(mode.removeprefix("leave-")))
        if mode == "alone_stubborn":
            raise RuntimeError("boom")

    return main


if __name__ == "__main__":
    folder, count, mode, how = sys.argv[1:]
    run = loaded(folder)
    if "SHARDTRAIN_PARENT" in os.environ:
        local.detach(int(os.environ["SHARDTRAIN_PARENT"]))
        local.leave(local.run_rank(run, trainer(mode)))
    started_as = {name: os.environ[name] for name in environment.RANK_NAMES if name in os.environ}
    environment.set_process_defaults(os.environ, int(count), 2, alone=True)
    if how == "alone":
        os.environ |= started_as  # one rank, started like torchrun does
        local.prepare(Path(folder), note_killed=True)
        sys.exit(local.run_rank(run, trainer(mode)))
    if how == "fork":
        import torch.distributed  # noqa: F401  imported in the parent, for its forks

        sys.exit(local.launch(run, int(count), main=trainer(mode)))
    sys.exit(local.launch(run, int(count), command=(sys.executable, *sys.argv)))
