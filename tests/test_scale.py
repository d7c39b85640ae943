"""Costs that must not grow with the number of ranks, for up to 16,384 simulated ranks; see docs/scale.md."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
def test_messages_and_manifest_of_a_save_stay_small(mesh):
    sizes = scale.saving(mesh)
    # Only one rank of each pipeline stage sends a full message. The other ranks send a number.
    assert max(sizes["said_bytes"]) <= 4096
    assert sum(sizes["said_bytes"]) <= 16 * 4096
    # beyond 16,384 ranks, checksums of the files of ranks dominate the manifest
    assert sizes["manifest_bytes"] <= max(5_000_000, 130 * sizes["ranks"])


@pytest.mark.parametrize("nodes", NODES)
def test_number_of_heartbeat_requests_is_bounded(nodes):
    # a node sends its heartbeat and requests the verdict; a monitoring rank reads those of all nodes in one request
    requests_per_beat = 2 * nodes + len(monitors(8 * nodes))
    assert requests_per_beat / beat_seconds(100.0, nodes) <= 2_000
    assert beat_seconds(100.0, nodes) <= 3.0, "a hang is not detected in time"


def recording(requests: list[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        requests.append(name)
        return method(*arguments)

    return call


def store_requests(rank: int, folder: Path) -> list[str]:
    """Return the requests of a rank to any store in a run of four steps, in an existing process group."""
    requests: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "set",
            "get",
            "add",
            "wait",
            "check",
            "compare_set",
            "multi_get",
            "multi_set",
            "delete_key",
        ):
            patch.setattr(dist.Store, name, recording(requests, name, getattr(dist.Store, name)))
        dist.PrefixStore("seen", dist.HashStore()).set("key", "value")
        ended = train_whole(
            rank, tiny_config(job={"dump_folder": str(folder)}, training={"steps": 4})
        )
    assert len(ended.losses) == 4
    return requests


def test_a_step_sends_no_request_to_a_store(tmp_path):
    # the only request is the one that store_requests itself makes to prove that requests are recorded
    assert run_ranks(2, store_requests, tmp_path) == [["set"]] * 2
