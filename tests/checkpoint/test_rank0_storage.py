"""Nodes with local disks: an error before the first step, or storage on rank 0's node (``storage = "first_node"``).

Each of two ranks has its own folder, like two nodes with local disks.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import Ended, assert_bitwise, tiny_config, train_whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardtrain.checkpoint import files, rank0_storage, save_plan
from shardtrain.checkpoint.collectives import all_ranks
from shardtrain.config.schema import Config
from shardtrain.utils.errors import CheckpointError, StorageError

STEPS = 4
SAVED = 2


def config(folder: Path, parallelism: dict[str, Any] | None = None, **checkpoint: Any) -> Config:
    return tiny_config(
        job={"dump_folder": str(folder)},
        training={"steps": STEPS, "local_batch_size": 4},
        parallelism=parallelism or {},
        checkpoint={"enable": True, "interval": SAVED, **checkpoint},
    )


def runs(rank: int, root: Path) -> dict[str, Ended]:
    """Train on two nodes with separate disks. Only node 0 stores checkpoints.

    Return the result of each run by name.
    """
    os.environ["LOCAL_RANK"] = "0"  # each rank is on its own node
    files.SEEN_SECONDS = 0.3
    files.PIECE_BYTES = 5000  # smaller than a tensor, which is then sent in several pieces
    node_folder = root / f"node-{rank}"
    first = {"storage": "first_node"}
    runs_by_name = {
        "straight": train_whole(rank, config(root / "shared")),
        "refused": train_whole(rank, config(node_folder / "refused")),
        "killed": train_whole(rank, config(node_folder / "run", **first), stop_after=3),
    }
    # Node 1 is replaced, with an empty disk. The run resumes from the disk of node 0.
    if rank:
        shutil.rmtree(node_folder)
    dist.barrier()
    runs_by_name["resumed"] = train_whole(rank, config(node_folder / "run", **first))
    two_stages = {"pipeline_parallel_degree": 2}
    runs_by_name["other mesh"] = train_whole(
        rank, config(node_folder / "run", two_stages, **first, load_step=2)
    )
    # The newest checkpoint is truncated.
    if rank == 0:
        path = node_folder / "run/checkpoint/step-4/rank-00001.bin"
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    runs_by_name["damaged"] = train_whole(rank, config(node_folder / "run", **first, load_step=4))
    write_durable = files.write_hashed

    def full_disk(path: Path, *arguments: Any) -> Any:
        if path.name == "rank-00001.bin":
            next(iter(arguments[0]))
            raise OSError(28, "No space left on device", str(path))
        return write_durable(path, *arguments)

    rank0_storage.files.write_hashed = full_disk  # type: ignore[assignment]
    runs_by_name["full"] = train_whole(rank, config(node_folder / "full", **first))
    return runs_by_name


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def ended(root: Path) -> list[dict[str, Ended]]:
    return run_ranks(2, runs, root)


def test_unshared_disks_are_reported_before_the_first_step(
    root: Path, ended: list[dict[str, Ended]]
) -> None:
    for rank in ended:
        error = rank["refused"].error
        assert isinstance(error, StorageError)
        assert error.exit_code == 8
        assert rank["refused"].losses == []
        assert f"{os.uname().nodename} does not see" in str(error)
        assert "\n" not in str(error)
        assert 'checkpoint.storage = "first_node"' in str(error)
        assert "job.dump_folder" in str(error)

    assert not [*root.glob("node-0/refused/checkpoint/*"), *root.glob("shared/checkpoint/probe-*")]


def test_first_node_stores_the_checkpoints_of_all(
    root: Path, ended: list[dict[str, Ended]]
) -> None:
    for rank in ended:
        straight = rank["straight"]
        resumed = rank["resumed"]
        assert resumed.error is None
        assert resumed.losses == straight.losses[SAVED:]
        assert_bitwise(resumed.weights, straight.weights)
        assert_bitwise(resumed.optimizer, straight.optimizer)
    for name in ("rank-00000.bin", "rank-00001.bin"):
        shared_file = root / "shared/checkpoint/step-2" / name
        node_file = root / "node-0/run/checkpoint/step-2" / name
        assert shared_file.read_bytes() == node_file.read_bytes(), (
            "bytes differ from those in a shared folder"
        )

    assert not (root / "node-1/run/checkpoint").exists()


def test_checkpoint_of_the_first_node_is_loaded_on_another_mesh(
    ended: list[dict[str, Ended]],
) -> None:
    for rank in ended:
        assert rank["other mesh"].error is None
        assert abs(rank["other mesh"].losses[0] - rank["straight"].losses[SAVED]) < 1e-6


def test_damage_and_a_full_disk_are_reported_on_all_ranks(ended: list[dict[str, Ended]]) -> None:
    for rank in ended:
        assert isinstance(rank["damaged"].error, CheckpointError)
        assert "rank-00001.bin" in str(rank["damaged"].error)
        assert isinstance(rank["full"].error, StorageError)
        assert "errno 28" in str(rank["full"].error)


def write_to_a_full_disk(rank: int, folder: Path) -> str:
    """Save 16 MiB of each rank through rank 0, whose disk is full when it writes the share of rank 1."""
    mesh = init_device_mesh("cpu", (3,))
    tensors = {"w": distribute_tensor(torch.zeros(3 * 2**22), mesh, [Shard(0)])}
    shares = save_plan.plan(tensors)
    write_hashed = files.write_hashed

    def full_disk(path: Path, *arguments: Any) -> Any:
        if path.name == "rank-00001.bin":
            next(iter(arguments[0]))
            raise OSError(28, "No space left on device", str(path))
        return write_hashed(path, *arguments)

    rank0_storage.files.write_hashed = full_disk  # type: ignore[assignment]

    def write() -> None:
        rank0_storage.write(tensors, shares, folder)

    with pytest.raises(StorageError) as raised:
        all_ranks(write)
    return str(raised.value)


def test_full_disk_does_not_block_later_ranks(tmp_path: Path) -> None:
    assert all("errno 28" in text for text in run_ranks(3, write_to_a_full_disk, tmp_path))
