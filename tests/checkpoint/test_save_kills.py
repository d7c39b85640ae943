"""A save killed at any moment: what was committed before is there, whole, and is what it was.

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


def life(
    rank: int, size: int, root: Path, number: int, sender: Connection, mode: str, before: Callable[[], object]
) -> None:
    """Continue from the newest checkpoint and save one after the other, telling each that is done."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(root / f"store-{number}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    kept = checkpoints(root, keep_latest_k=2, async_mode=mode)
    found = kept.to_continue()
    step = 0 if found is None else assert_is_of_its_step(found, NUMEL)
    sender.send_bytes(b"%d" % step)
    before()
    while True:
        step += 1
        save(kept, step, NUMEL)
        sender.send_bytes(b"%d" % kept.saved_step)  # in the background: the one before


def start(
    size: int, root: Path, number: int, mode: str, before: Callable[[], object] = lambda: None
) -> tuple[list[Any], Any]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=life, args=(rank, size, root, number, sender, mode, before), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    sender.close()
    return ranks, receiver


def end(ranks: list[Any], receiver: Connection) -> int:
    """Kill what is left; gives the last step that was said to be saved."""
    for process in ranks:
        process.kill()
    for process in ranks:
        process.join(patience.seconds(30))
    told = 0
    try:
        while receiver.poll(patience.seconds(10)):
            told = max(told, int(receiver.recv_bytes()))
    except EOFError:
        pass
    return told


def assert_nothing_is_lost(root: Path, told: int) -> int:
    with world_of_one():  # not while a process is forked: its threads would be missing in the child
        reader = checkpoints(root, load_only=True)
        steps = reader.steps()
        for step in steps:
            assert assert_is_of_its_step(root / f"checkpoint/step-{step}", NUMEL) == step
        found = reader.to_continue()
    newest = max(steps, default=0)
    assert newest >= told, "what was said to be saved is there"
    assert (found is None and newest == 0) or (found is not None and found.name == f"step-{newest}")
    return newest


@pytest.mark.parametrize("kills", cases([FEW_KILLS], nightly=[KILLS]))
@pytest.mark.parametrize(
    ("size", "mode", "share"), [(1, "disabled", 0.4), (1, "async", 0.3), (2, "disabled", 0.1), (2, "async", 0.2)]
)
def test_random_kills_lose_nothing(size: int, mode: str, share: float, kills: int, tmp_path: Path) -> None:
    dice, newest, gained = random.Random(size), 0, 0
    for number in range(int(kills * share)):
        ranks, receiver = start(size, tmp_path, number, mode)
        assert receiver.poll(patience.seconds(60))
        told = int(receiver.recv_bytes())  # it has found the newest
        assert told == newest
        # so many saves, and then a part of one: whatever the machine's speed, kills hit all of it
        begun, waits = time.monotonic(), dice.randrange(4)
        for _ in range(waits * size + size - 1 if waits else 0):  # each rank tells
            assert receiver.poll(patience.seconds(60))
            told = max(told, int(receiver.recv_bytes()))
        pace = (time.monotonic() - begun) / waits if waits else 0.02
        time.sleep(dice.random() * min(1.0, 1.5 * pace))
        victim = dice.randrange(size + 1)  # one rank, or all at once
        for process in ranks if victim == size else [ranks[victim]]:
            os.kill(process.pid, signal.SIGKILL)
        after = assert_nothing_is_lost(tmp_path, max(told, end(ranks, receiver)))
        gained += after > newest
        newest = after
    assert gained > (kills * share / 4 if kills == KILLS else 0), (
        "kills must hit between saves and in them, not before the first"
    )


CHANGES = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "link", "utime")


def kill_at(operation: int) -> Callable[[], None]:
    """Let this process be killed right before its n-th change of the disk."""

    def arm() -> None:
        left = [operation]

        def counted(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return call

        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name)))

    return arm


@pytest.mark.parametrize("every", cases([9], nightly=[1]))
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_kill_before_each_change_of_the_disk_loses_nothing(tmp_path: Path, mode: str, every: int) -> None:
    """Three saves of one rank have about 80 changes: the first, one that only adds, and one that deletes an old one."""
    newest = 0
    for operation in range(1, 82, every):
        root = tmp_path / str(operation)
        root.mkdir()
        ranks, receiver = start(1, root, 0, mode, kill_at(operation))
        ranks[0].join(patience.seconds(60))
        assert ranks[0].exitcode == -signal.SIGKILL
        newest = max(newest, assert_nothing_is_lost(root, end(ranks, receiver)))
    assert newest >= 3
