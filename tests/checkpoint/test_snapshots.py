"""Restarts continue from the newest snapshot that the memory of the remaining nodes holds, or from a checkpoint.

Each rank is a node with its own folder, which represents the memory of the node.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiers import cases
from tiny import Ended, assert_bitwise, shallow_config, train_whole

from shardtrain.checkpoint import snapshot_folder, snapshots
from shardtrain.checkpoint.snapshot_folder import FileRecord
from shardtrain.checkpoint.snapshot_peers import Range, Ring, fetch
from shardtrain.config.schema import Config
from shardtrain.utils import temporary
from shardtrain.utils.errors import ConfigError

STEPS = 7
SAVED = 3
"""Step of the only checkpoint on disk when the run is killed."""
NEWEST = 5
"""Last completed step before the kill. The generations in memory are of this step and of the one before."""


def config(folder: Path, **checkpoint: Any) -> Config:
    return shallow_config(
        job={"dump_folder": str(folder)},
        training={"steps": STEPS, "local_batch_size": 1, "global_batch_size": 12},
        checkpoint={"enable": True, "interval": SAVED, "snapshot_interval": 1, **checkpoint},
    )


def start(
    rank: int, place: Path, nodes: str, stop_after: int | None, options: dict[str, Any]
) -> tuple[Ended, str]:
    """Train with rank i on the node that ``nodes[i]`` names. Return the result and the log."""
    memory = place / "memory" / nodes[rank]
    if options.pop("memory", "on") == "short":
        snapshot_folder.free_bytes = lambda folder: 1000
    os.environ[snapshot_folder.VARIABLE] = str(memory)
    ended = train_whole(rank, config(place / "run", **options), stop_after)
    log = place / f"run/logs/rank-{rank}.log"
    return ended, log.read_text() if log.exists() else ""


def make_nodes(place: Path, nodes: str) -> None:
    for node in nodes:
        memory = place / "memory" / node
        for generation in snapshot_folder.GENERATIONS:
            (memory / generation).mkdir(parents=True, exist_ok=True)
        memory.chmod(0o700)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Disk and memory of three nodes after a run was killed in step 6, and the result of the undisturbed run."""
    place = tmp_path_factory.mktemp("killed")
    make_nodes(place, "abc")
    run_ranks(3, start, place, "abc", NEWEST, {})
    undisturbed = tmp_path_factory.mktemp("undisturbed")
    ended, _ = run_ranks(3, start, undisturbed, "abc", None, {"snapshot_interval": 0})[0]
    return place, ended


def generation_of(place: Path, node: str, step: int) -> Path:
    memory = place / "memory" / node
    for number, record in snapshot_folder.records(memory):
        if record.step == step:
            return memory / snapshot_folder.GENERATIONS[number]
    raise AssertionError(f"node {node} has nothing of step {step}")


def flip(place: Path, node: str, step: int, name: str) -> None:
    path = generation_of(place, node, step) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def one_copy_damaged(place: Path) -> None:
    flip(place, "b", NEWEST, "rank-00001.bin")


def both_copies_damaged(place: Path) -> None:
    flip(place, "b", NEWEST, "rank-00001.bin")
    flip(place, "c", NEWEST, "rank-00001.bin")


def one_manifest_damaged(place: Path) -> None:
    flip(place, "a", NEWEST, "manifest.json")


def both_manifests_damaged(place: Path) -> None:
    flip(place, "a", NEWEST, "manifest.json")
    flip(place, "b", NEWEST, "manifest.json")


def killed_while_taking(place: Path) -> None:
    """Simulate a kill while rank 1 replaces its older snapshot: no node has its complete new file."""
    snapshot_folder.forget_file(generation_of(place, "b", NEWEST), "rank-00001.bin")
    snapshot_folder.forget_file(generation_of(place, "c", NEWEST), "rank-00001.bin")


def damaged_records(place: Path) -> None:
    for path in (place / "memory").glob(f"*/*/*{snapshot_folder._RECORD}"):
        path.write_text('["token", 99, "../../../etc/passwd", 1, "00"]')


def all_damaged(place: Path) -> None:
    for path in (place / "memory").glob("*/*/rank-00002.bin"):
        path.write_bytes(b"\0" * path.stat().st_size)


def newest_on_disk(place: Path) -> None:
    """Make the snapshots older than the newest checkpoint."""
    for generation in (place / "memory").glob("*/*"):
        for path in generation.glob(f"*{snapshot_folder._RECORD}"):
            token, step, *rest = json.loads(path.read_text())
            path.write_text(json.dumps([token, step - 3, *rest]))


STARTS: dict[str, tuple[str, Callable[[Path], None] | None, int, str]] = {
    # name: (node of each rank, what happened to the memory, the step to continue from, part of the log)
    "same nodes": ("abc", None, NEWEST, "restored step 5 from snapshots in host memory"),
    "nodes in another order": ("cab", None, NEWEST, ""),
    "a node was replaced": ("adc", None, NEWEST, ""),
    "the first node was replaced": (
        "dbc",
        None,
        NEWEST,
        "the newest checkpoint on disk is of step 3",
    ),
    "a node left": ("ac", None, NEWEST, ""),
    "the ranks are on one node now": ("bb", None, SAVED, ""),
    "two nodes are lost, with both copies of a shard": ("c", None, SAVED, "step-3"),
    "one node more": ("abcd", None, NEWEST, ""),
    "one copy is damaged": ("abc", one_copy_damaged, NEWEST, "rank-00001.bin is damaged"),
    "both copies are damaged": (
        "abc",
        both_copies_damaged,
        NEWEST - 1,
        "snapshot of step 5: no node has an intact rank-00001.bin: skipped",
    ),
    "one manifest is damaged": ("abc", one_manifest_damaged, NEWEST, "manifest.json is damaged"),
    "both manifests are damaged": ("abc", both_manifests_damaged, NEWEST - 1, "skipped"),
    "killed while taking a snapshot": ("abc", killed_while_taking, NEWEST - 1, ""),
    "all copies are damaged": ("abc", all_damaged, SAVED, "step-3"),
    "records are damaged": ("abc", damaged_records, SAVED, "step-3"),
    "the checkpoint is newer": ("abc", newest_on_disk, SAVED, "step-3"),
}
DEFAULT = (
    "same nodes",
    "the first node was replaced",
    "a node left",
    "both copies are damaged",
    "all copies are damaged",
)


@pytest.mark.parametrize(
    "name", cases(DEFAULT, nightly=[name for name in STARTS if name not in DEFAULT])
)
def test_newest_complete_snapshot_is_restored(
    killed: tuple[Path, Ended], tmp_path: Path, name: str
) -> None:
    place, undisturbed = killed
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    nodes, damage, expected, line = STARTS[name]
    if damage:
        damage(tmp_path)
    # The memory of a lost node is lost too.
    for node in "abc":
        if node not in nodes:
            shutil.rmtree(tmp_path / "memory" / node)
    make_nodes(tmp_path, nodes)
    log_bytes = len((tmp_path / "run/logs/rank-0.log").read_text())
    results = run_ranks(len(nodes), start, tmp_path, nodes, None, {})

    assert line in results[0][1][log_bytes:]

    for ended, log in results:
        assert ended.error is None and len(ended.losses) == STEPS - expected, log
        if len(nodes) == 3:
            assert ended.losses == undisturbed.losses[expected:]
            assert_bitwise(ended.weights, undisturbed.weights)
        else:
            assert ended.losses == pytest.approx(undisturbed.losses[expected:], rel=1e-6)

    assert not [*(tmp_path / "memory").glob("*/loading-*")]

    newest = {record.step for _, record in snapshot_folder.records(tmp_path / "memory" / nodes[0])}
    # Step 6 and the last step are saved to disk instead of as snapshots.
    assert newest <= {NEWEST - 1, NEWEST}


def start_with_default_batch(rank: int, place: Path, nodes: str, stop: int | None) -> Ended:
    os.environ[snapshot_folder.VARIABLE] = str(place / "memory" / nodes[rank])
    run_config = config(place / "run", interval=100)
    training = dataclasses.replace(run_config.training, global_batch_size=-1)
    return train_whole(rank, dataclasses.replace(run_config, training=training), stop)


def test_batch_size_of_a_snapshot_is_kept_on_fewer_ranks(tmp_path: Path) -> None:
    make_nodes(tmp_path, "ab")
    run_ranks(2, start_with_default_batch, tmp_path, "ab", 3)
    shutil.rmtree(tmp_path / "memory/b")
    (ended,) = run_ranks(1, start_with_default_batch, tmp_path, "a", None)

    assert ended.error is None and len(ended.losses) == STEPS - 3

    log = (tmp_path / "run/logs/rank-0.log").read_text()
    assert "training.global_batch_size=2 is taken from the checkpoint" in log


def test_snapshots_stop_with_one_warning_if_memory_is_short(tmp_path: Path) -> None:
    make_nodes(tmp_path, "ab")
    results = run_ranks(2, start, tmp_path, "ab", 4, {"memory": "short", "interval": 100})
    warnings = [line for line in results[0][1].splitlines() if "WARNING" in line]
    (line,) = [line for line in warnings if "snapshot" in line]

    assert "checkpoint.snapshot_interval=1: no more snapshots, because they need" in line
    assert "1000 B are free" in line
    assert [*(tmp_path / "memory").glob("*/*/*")] == []
    assert all(len(ended.losses) == 4 for ended, _ in results)


def test_run_without_a_launcher_is_rejected(tmp_path: Path) -> None:
    def run(rank: int) -> Ended:
        os.environ.pop(snapshot_folder.VARIABLE, None)
        return train_whole(rank, config(tmp_path), None)

    (ended,) = run_ranks(1, run)
    assert isinstance(ended.error, ConfigError)
    assert "checkpoint.snapshot_interval=1 is for runs that shardtrain restarts" in str(ended.error)


@pytest.mark.parametrize(
    ("node_of", "targets"),
    [
        ([0, 0], [None, None]),
        ([0, 0, 1, 1], [2, 3, 0, 1]),
        ([0, 1, 2], [1, 2, 0]),
        ([0, 0, 1], [2, 2, 0]),
        ([0, 1, 1], [1, 0, 0]),
        ([0, 1, 0, 1], [1, 0, 3, 2]),
    ],
)
def test_each_rank_sends_to_the_next_node(node_of: list[int], targets: list[int | None]) -> None:
    ring = Ring(node_of)
    assert [ring.target(rank) for rank in range(len(node_of))] == targets

    for rank, target in enumerate(targets):
        nodes_with_file = {node_of[rank]}
        if target is not None:
            nodes_with_file.add(node_of[target])
            assert rank in ring.sources(target)
        for node in set(node_of):
            assert (ring.writer_of(rank, node) is not None) == (node in nodes_with_file)


def fetch_some(rank: int) -> dict[tuple[int, int], bytes]:
    """Fetch ranges of files when each rank holds one file.

    Rank 1 requests more than fits into one round, and rank 2 requests nothing.
    """
    contents = [bytes((7 * i + file) % 251 for i in range(3_000_000)) for file in range(3)]
    ranges_of_rank = {
        0: [Range(2, 2, 10, 5), Range(1, 1, 0, 3)],
        1: [Range(0, 0, 100, 2_500_000), Range(2, 2, 7, 9)],
        2: [],
    }
    needed = ranges_of_rank[rank]
    received: dict[tuple[int, int], bytes] = {}

    def read(file: int, begin: int, num_bytes: int) -> torch.Tensor:
        assert file == rank
        part = bytearray(contents[file][begin : begin + num_bytes])
        return torch.frombuffer(part, dtype=torch.uint8)

    def write(file: int, begin: int, data: torch.Tensor) -> None:
        received[file, begin] = bytes(data.numpy())

    import shardtrain.checkpoint.snapshot_peers as peers

    peers._ROUND_BYTES = 0
    fetch(iter(needed), read, write)

    assert sum(map(len, received.values())) == sum(range_.num_bytes for range_ in needed)
    for (file, begin), data in received.items():
        assert data == contents[file][begin : begin + len(data)]

    dist.barrier()
    return received


def test_ranges_are_fetched_in_rounds() -> None:
    results = run_ranks(3, fetch_some)
    assert results[2] == {}
    assert len(results[1]) == 4, "2.5 MB arrive in pieces of 1 MiB"


def forget(rank: int, place: Path) -> int:
    os.environ[snapshot_folder.VARIABLE] = str(place / "memory" / "abc"[rank])
    reader = snapshots.Snapshots(config(place), lambda make: make())
    before = reader.find(-1)
    reader.forget()
    assert before is not None and reader.find(-1) is None
    return before.stored.step


def test_rollback_invalidates_snapshots_of_all_nodes(
    killed: tuple[Path, Ended], tmp_path: Path
) -> None:
    shutil.copytree(killed[0], tmp_path, dirs_exist_ok=True)
    assert run_ranks(3, forget, tmp_path) == [NEWEST] * 3


@pytest.mark.parametrize("planted", ["link", "shared", "file", "missing"])
def test_folder_of_others_is_rejected(tmp_path: Path, planted: str) -> None:
    folder = tmp_path / "memory"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif planted == "shared":
        folder.mkdir()
        folder.chmod(0o755)
    elif planted == "file":
        folder.write_text("")

    with pytest.raises(ConfigError, match=snapshot_folder.VARIABLE):
        snapshot_folder.of_rank({snapshot_folder.VARIABLE: str(folder)})


def test_record_is_valid_only_for_its_file(tmp_path: Path) -> None:
    record = FileRecord("token", 3, "rank-00000.bin", 5, "0" * 64)
    for generation in snapshot_folder.GENERATIONS:
        (tmp_path / generation).mkdir()
    snapshot_folder.write_record(tmp_path / "0", record)

    assert snapshot_folder.records(tmp_path) == [(0, record)]

    path = snapshot_folder._record_path(tmp_path / "0", record.name)
    path.rename(path.with_name("rank-00001.bin.done"))
    assert snapshot_folder.records(tmp_path) == []


def test_launcher_creates_and_removes_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(temporary, "SHARED_MEMORY", tmp_path)
    with snapshot_folder.created(config(tmp_path), 1) as variables:
        folder = Path(variables[snapshot_folder.VARIABLE])
        assert folder.parent == tmp_path
        assert snapshot_folder.of_rank(variables) == folder
        assert snapshot_folder.newest_step(variables) == -1

    assert not folder.exists()

    # Without snapshots, no folder is created. Snapshots without restarts are refused: nothing reads them.
    with snapshot_folder.created(config(tmp_path, snapshot_interval=0), 0) as variables:
        assert variables == {}
    with (
        pytest.raises(ConfigError, match="add --max_restarts N"),
        snapshot_folder.created(config(tmp_path), 0),
    ):
        pass
