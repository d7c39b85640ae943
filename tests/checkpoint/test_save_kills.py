"""A kill during a save leaves all earlier checkpoints complete and unchanged.

SHARDTRAIN_KILLS=1000 kills more often.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import patience
import pytest
import torch
import torch.distributed as dist
from small_checkpoint import assert_is_of_its_step, checkpoints, save, world_of_one
from tiers import cases

KILLS = int(os.environ.get("SHARDTRAIN_KILLS", "100"))
FEW_KILLS = 40
NUMEL = 20_000


def save_until_killed(
    rank: int,
    size: int,
    root: Path,
    number: int,
    sender: Connection,
    mode: str,
    prepare: Callable[[], object],
) -> None:
    """Resume the newest checkpoint, then save step after step and send the number of each saved step."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(root / f"store-{number}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    manager = checkpoints(root, keep_latest_k=2, async_mode=mode)
    newest = manager.to_continue()
    step = 0 if newest is None else assert_is_of_its_step(newest, NUMEL)
    sender.send_bytes(b"%d" % step)
    prepare()
    while True:
        step += 1
        save(manager, step, NUMEL)
        sender.send_bytes(b"%d" % manager.saved_step)  # background saves: still the previous step


def start_ranks(
    size: int, root: Path, number: int, mode: str, prepare: Callable[[], object] = lambda: None
) -> tuple[list[Any], Any]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [
        context.Process(
            target=save_until_killed,
            args=(rank, size, root, number, sender, mode, prepare),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    sender.close()
    return ranks, receiver


def kill_ranks(ranks: list[Any], receiver: Connection) -> int:
    """Kill the remaining ranks and return the last step reported as saved."""
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join(patience.seconds(30))
    reported = 0
    try:
        while receiver.poll(patience.seconds(10)):
            reported = max(reported, int(receiver.recv_bytes()))
    except EOFError:
        pass
    return reported


def assert_nothing_is_lost(root: Path, reported: int) -> int:
    with world_of_one():  # destroyed before the next fork: children would lack its threads
        reader = checkpoints(root, load_only=True)
        steps = reader.steps()
        for step in steps:
            assert assert_is_of_its_step(root / f"checkpoint/step-{step}", NUMEL) == step
        to_continue = reader.to_continue()
    newest = max(steps, default=0)
    assert newest >= reported, "a step reported as saved is missing"
    assert (to_continue is None and newest == 0) or (
        to_continue is not None and to_continue.name == f"step-{newest}"
    )
    return newest


@pytest.mark.parametrize("kills", cases([FEW_KILLS], nightly=[KILLS]))
@pytest.mark.parametrize(
    ("size", "mode", "share"),
    [(1, "disabled", 0.4), (1, "async", 0.3), (2, "disabled", 0.1), (2, "async", 0.2)],
)
def test_random_kills_lose_nothing(
    size: int, mode: str, share: float, kills: int, tmp_path: Path
) -> None:
    dice = random.Random(size)
    newest = 0
    gained = 0
    for number in range(int(kills * share)):
        ranks, receiver = start_ranks(size, tmp_path, number, mode)
        assert receiver.poll(patience.seconds(60))
        reported = int(receiver.recv_bytes())  # the step from which the ranks resumed
        assert reported == newest

        # Wait for some completed saves and then for part of another, measured in durations of saves. So kills hit all
        # phases of a save, however fast the machine is.
        begin = time.monotonic()
        saves_to_wait_for = dice.randrange(4)
        # every rank reports
        reports = saves_to_wait_for * size + size - 1 if saves_to_wait_for else 0
        for _ in range(reports):
            assert receiver.poll(patience.seconds(60))
            reported = max(reported, int(receiver.recv_bytes()))
        seconds_per_save = 0.02
        if saves_to_wait_for:
            seconds_per_save = (time.monotonic() - begin) / saves_to_wait_for
        time.sleep(dice.random() * min(1.0, 1.5 * seconds_per_save))

        victim = dice.randrange(size + 1)  # one rank, or all
        victims = ranks if victim == size else [ranks[victim]]
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        last_reported = max(reported, kill_ranks(ranks, receiver))
        newest_after_kill = assert_nothing_is_lost(tmp_path, last_reported)
        gained += newest_after_kill > newest
        newest = newest_after_kill

    assert gained > (kills * share / 4 if kills == KILLS else 0), (
        "kills must also hit during and between saves, not only before the first one"
    )


CHANGES = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "link", "utime")


def kill_at(operation: int) -> Callable[[], None]:
    """Return a function that arms a SIGKILL of this process right before its n-th change of the disk."""

    def arm() -> None:
        calls_left = [operation]

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                calls_left[0] -= 1
                if calls_left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return call

        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name)))

    return arm


@pytest.mark.parametrize("every", cases([9], nightly=[1]))
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_kill_before_each_change_of_the_disk_loses_nothing(
    tmp_path: Path, mode: str, every: int
) -> None:
    """Three saves of one rank make about 80 changes: the first save, a second, and one that deletes a checkpoint."""
    newest = 0
    for operation in range(1, 82, every):
        root = tmp_path / str(operation)
        root.mkdir()
        ranks, receiver = start_ranks(1, root, 0, mode, kill_at(operation))
        ranks[0].join(patience.seconds(60))
        assert ranks[0].exitcode == -signal.SIGKILL
        newest = max(newest, assert_nothing_is_lost(root, kill_ranks(ranks, receiver)))

    assert newest >= 3
