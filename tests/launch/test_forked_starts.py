"""Ranks are forked from a single-threaded process, and none is lost in any of many starts."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import threading
import time
from pathlib import Path

import patience
import pytest
import torch
import torch.distributed as dist
from tiers import cases

from shardtrain.config import Loaded
from shardtrain.config.schema import Config, Job
from shardtrain.distributed.rendezvous import private_store
from shardtrain.launch import local

STARTS = int(os.environ.get("SHARDTRAIN_FORKED_STARTS", "5"))
"""Consecutive starts for each number of ranks; 667 are 2,000 in total."""


def meet(_: Loaded) -> None:
    """Join a group, compute with autograd, which starts threads, and all-reduce."""
    folder = private_store.folder_of(os.environ)
    assert folder is not None
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=private_store.group_store(folder), rank=rank, world_size=size
    )
    numbers = torch.ones(64, 64, requires_grad=True)
    (numbers @ numbers).sum().backward()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()
    dist.destroy_process_group()


def write_to_the_terminal_of(folder: Path) -> None:
    """Redirect standard error to a file in the folder, also for processes that this one forks."""
    terminal = os.open(folder / "terminal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(terminal, 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)


def starts(folder: Path, ranks: int, count: int) -> None:
    """Start ranks repeatedly in one process. Exit with the number of starts that failed, at most 100."""
    write_to_the_terminal_of(folder)
    torch.set_num_threads(1)
    loaded = Loaded(Config(job=Job(dump_folder=str(folder))))
    failed_starts = 0
    for _ in range(count):
        failed_starts += local.launch(loaded, ranks, main=meet) != 0
    sys.stderr.flush()
    os._exit(min(failed_starts, 100))


@pytest.mark.parametrize("ranks", cases([2], nightly=[1, 4]))
def test_no_rank_of_many_starts_in_a_row_is_lost(ranks: int, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=starts, args=(tmp_path, ranks, STARTS)
    )
    process.start()
    process.join(patience.seconds(30 + 2 * STARTS))

    assert process.exitcode == 0, (tmp_path / "terminal").read_text()[-2000:]
    assert "has threads" not in (tmp_path / "terminal").read_text()


def with_a_thread(folder: Path) -> None:
    threading.Thread(
        target=threading.Event().wait, name="a-thread-of-the-user", daemon=True
    ).start()
    starts(folder, 2, 1)


def test_a_fork_of_a_process_that_has_threads_is_reported(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=with_a_thread, args=(tmp_path,))
    process.start()
    process.join(patience.seconds(60))
    output = (tmp_path / "terminal").read_text()

    assert process.exitcode == 0
    assert "warning: this process has threads (a-thread-of-the-user) and forks its ranks" in output


def dies_at_once(_: Loaded) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def forked_slowly(folder: Path) -> None:
    """Start four ranks of which the second is dead, and reaped, before the third is forked."""
    cleanup = multiprocessing.process._cleanup  # type: ignore[attr-defined]

    def cleanup_later() -> None:
        time.sleep(0.3)
        cleanup()

    multiprocessing.process._cleanup = cleanup_later  # type: ignore[attr-defined]
    write_to_the_terminal_of(folder)
    loaded = Loaded(Config(job=Job(dump_folder=str(folder))))
    code = local.launch(loaded, 4, main=dies_at_once)
    sys.stderr.flush()
    os._exit(code)


def test_a_rank_that_dies_before_the_last_fork_is_reported_like_others(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=forked_slowly, args=(tmp_path,))
    process.start()
    process.join(patience.seconds(60))
    output = (tmp_path / "terminal").read_text()

    assert process.exitcode == 6, output
    assert "rank 1" in output, output
    assert "was killed by signal 9" in output, output
    assert "Traceback" not in output
