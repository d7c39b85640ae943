"""Process groups: a single process needs no launcher, ranks that disagree stop, and collectives have a timeout."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from shardtrain.config.schema import Comm, Config
from shardtrain.distributed import config_consistency
from shardtrain.distributed.process_group import (
    gather_flags,
    join,
    pick_device_type,
    set_timeout,
)
from shardtrain.distributed.rendezvous import gloo_sockets
from shardtrain.ops import accelerator
from shardtrain.utils.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("requested", "available", "expected"),
    [
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu"),
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cuda", True, "cuda"),
        ("xpu", "xpu", "xpu"),
        ("auto", "xpu", "xpu"),
        ("auto", "mps", "cpu"),  # MPS has no 64-bit floats and no collectives
    ],
)
def test_device_is_the_requested_or_the_best_available_one(
    requested, available, expected, monkeypatch
) -> None:
    monkeypatch.setattr(
        accelerator, "device_type", lambda: {True: "cuda", False: ""}.get(available, available)
    )
    assert pick_device_type(requested) == expected


def test_missing_device_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(accelerator, "device_type", lambda: "")
    with pytest.raises(
        ConfigError, match=r'training.device="cuda" finds no such device; use "cpu"'
    ):
        pick_device_type("cuda")


def _single_process(_: int) -> None:
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    with join(Comm(), "cpu") as world:
        assert (world.rank, world.size, world.local_rank, world.device) == (0, 1, 0, CPU)
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="broken"), join(Comm(), "cpu"):
        raise RuntimeError("broken")
    assert not dist.is_initialized()  # destroyed even if the run fails
    # run_ranks expects a group to destroy
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_single_process_is_a_world_of_one_without_a_launcher() -> None:
    run_ranks(1, _single_process)


def _timeouts() -> list[timedelta]:
    return [
        group._get_backend(CPU).options._timeout for group in dist.distributed_c10d._world.pg_map
    ]


def _together(rank: int) -> None:
    assert gather_flags(False, CPU) == []
    assert gather_flags(rank == 1, CPU) == [1]
    assert gather_flags(rank != 1, CPU) == [0, 2]
    assert gather_flags(True, CPU) == [0, 1, 2]
    dist.new_group([0, 1])
    dist.new_group([0, 1, 2])
    set_timeout(77)
    assert set(_timeouts()) == {timedelta(seconds=77)}
    dist.barrier()


def test_many_ranks_connect_lazily(monkeypatch) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    for most, expected in [(1, None), (0, "1")]:
        monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
        monkeypatch.setattr(gloo_sockets, "MOST_IN_A_FULL_MESH", most)
        with join(Comm(), "cpu"):
            assert os.environ.get("TORCH_GLOO_LAZY_INIT") == expected
        monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    with join(Comm(), "cpu"):
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0", "a value set by the user must be kept"


def test_ranks_agree_on_which_rank_disagrees_or_signals() -> None:
    run_ranks(3, _together)


def _of_two_agents(rank: int) -> None:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
    config_consistency.check(Config(), dist.distributed_c10d._get_default_store(), rank, 2)


def test_ranks_of_agents_with_different_restart_counts_find_each_other() -> None:
    """The agent of a rejoined node starts at restart count 0, while other agents have a higher count."""
    run_ranks(2, _of_two_agents)
