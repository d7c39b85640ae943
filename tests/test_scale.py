"""Costs that must not grow with the number of ranks, for up to 16,384 pretended ones; see docs/scale.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from tiers import cases
from tiny import tiny_config, train_whole

from shardtrain.resilience.watchdog.watchdog import beat_seconds, monitors

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import scale

NODES = (1, 8, 64, 512, 2048)


@pytest.mark.parametrize(
    "mesh",
    cases(
        ["1T pp 16 fsdp 1024 ep 64"],
        nightly=[mesh for mesh in scale.MESHES if mesh != "1T pp 16 fsdp 1024 ep 64"],
    ),
)
def test_what_ranks_say_before_a_save_and_its_manifest_stay_small(mesh):
    found = scale.saving(mesh)
    assert max(found["said_bytes"]) <= 4096  # of one rank of each pipeline stage; the others say a number
    assert sum(found["said_bytes"]) <= 16 * 4096
    # a file of each rank has a checksum; beyond 16,384 ranks these are more than all else
    assert found["manifest_bytes"] <= max(5_000_000, 130 * found["ranks"])


@pytest.mark.parametrize("nodes", NODES)
def test_the_store_of_a_run_hears_a_bounded_number_of_heartbeats(nodes):
    # a node says one thing and asks for the verdict; the ranks that judge ask for what all nodes said in one request
    requests_per_beat = 2 * nodes + len(monitors(8 * nodes))
    assert requests_per_beat / beat_seconds(100.0, nodes) <= 2_000
    assert beat_seconds(100.0, nodes) <= 3.0, "a hang is still named within its time"


def noting(asked: list[str], name: str, forward):
    return lambda *arguments: (asked.append(name), forward(*arguments))[1]


def asked_of_stores(rank: int, folder: Path) -> list[str]:
    """What a rank asks of any store in a run of four steps, once its process group exists."""
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("set", "get", "add", "wait", "check", "compare_set", "multi_get", "multi_set", "delete_key"):
            patch.setattr(dist.Store, name, noting(asked, name, getattr(dist.Store, name)))
        dist.PrefixStore("seen", dist.HashStore()).set("key", "value")
        ended = train_whole(rank, tiny_config(job={"dump_folder": str(folder)}, training={"steps": 4}))
    assert len(ended.losses) == 4
    return asked


def test_a_step_asks_nothing_of_a_store(tmp_path):
    assert run_ranks(2, asked_of_stores, tmp_path) == [["set"]] * 2, "the one that shows that they are counted"
