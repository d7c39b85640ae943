"""Nodes that see each other's files late: saves wait, log the late node, and give up after a timeout."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from lagging_folder import LaggingFolder
from ranks import run_ranks
from tiers import cases
from tiny import Ended, shallow_config, train_whole

from shardtrain.checkpoint import files
from shardtrain.config.schema import Config
from shardtrain.utils.errors import StorageError

STEPS = 2
LAG_SECONDS = 0.5


def config(folder: Path, mode: str) -> Config:
    checkpoint: dict[str, Any] = {"async_mode": "async"} if mode == "in the background" else {}
    if mode == "hub export":
        checkpoint = {"last_save_in_hf": True}
    return shallow_config(
        job={"dump_folder": str(folder)},
        training={"steps": STEPS},
        checkpoint={"enable": True, "interval": 1, **checkpoint},
    )


def start(rank: int, folder: Path, mode: str, kind: str, lag_seconds: float) -> Ended:
    os.environ["LOCAL_RANK"] = "0"  # each rank is a node
    files.LATE_SECONDS = LAG_SECONDS / 2
    LaggingFolder(folder / "checkpoint", lag_seconds, kind)
    return train_whole(rank, config(folder, mode))


MODES = ("blocking", "in the background", "hub export")
DEFAULT = [("blocking", "empty"), ("in the background", "absent")]
NIGHTLY = [case for case in itertools.product(MODES, ("absent", "empty")) if case not in DEFAULT]


@pytest.mark.parametrize(("mode", "kind"), cases(DEFAULT, nightly=NIGHTLY))
def test_saves_wait_for_files_that_appear_late(tmp_path: Path, mode: str, kind: str) -> None:
    for ended in run_ranks(2, start, tmp_path, mode, kind, LAG_SECONDS):
        assert ended.error is None
        assert len(ended.losses) == STEPS

    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names == {"step-1", "step-2", *(["step-2-hf"] if mode == "hub export" else [])}

    log = (tmp_path / "logs/rank-0.log").read_text()
    assert f"{os.uname().nodename}, the node of rank 0, saw files of other nodes" in log

    if kind == "absent":  # at the start, ranks wait for an empty probe file
        assert f"checkpoint.folder: {os.uname().nodename} saw a file of rank 0" in log


def start_with_a_blind_rank(rank: int, folder: Path) -> Ended:
    files.SEEN_SECONDS = LAG_SECONDS
    return start(rank, folder, "blocking", "empty", 1000.0 if rank == 0 else 0.0)


def test_save_gives_up_after_a_timeout_and_names_the_node(tmp_path: Path) -> None:
    for ended in run_ranks(2, start_with_a_blind_rank, tmp_path):
        assert isinstance(ended.error, StorageError)
        assert ended.error.exit_code == 8
        message = rf"rank-00001.bin: {os.uname().nodename}, the node of rank 0, sees 0 of its \d+ bytes after"
        with pytest.raises(StorageError, match=message):
            raise ended.error
