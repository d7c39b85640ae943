"""Starts on nodes that do not share disks resume the newest complete checkpoint of any node, or fail.

Each rank is a node with its own folder. A start lists the nodes in the order of their ranks.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from tiers import cases
from tiny import Ended, assert_bitwise, shallow_config, train_whole

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.utils.errors import CheckpointError

STEPS = 6
SAVED = 4
"""The newest step on the disk of node "a", which saved steps 2 and 4."""


def config(folder: Path, **checkpoint: Any) -> Config:
    return shallow_config(
        job={"dump_folder": str(folder)},
        training={"steps": STEPS, "global_batch_size": 12},
        checkpoint={"enable": True, "interval": 2, "storage": "first_node", **checkpoint},
    )


def start(
    rank: int, disks: Path, nodes: str, stop_after: int | None, options: dict[str, Any]
) -> tuple[Ended, str]:
    """Train as the only rank of a node. Return the result and the log."""
    os.environ["LOCAL_RANK"] = "0"
    os.uname = lambda: SimpleNamespace(nodename=f"node-{nodes[rank]}")  # type: ignore[assignment,return-value]
    folder = disks / nodes[rank]
    ended = train_whole(rank, config(folder, **options), stop_after)
    log = folder / f"logs/rank-{rank}.log"
    return ended, log.read_text() if log.exists() else ""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Disks of nodes "a" and "b" after a run was killed in step 6, and the result of the same run without the kill."""
    disks = tmp_path_factory.mktemp("disks")
    run_ranks(2, start, disks, "ab", 5, {})
    undisturbed, _ = run_ranks(2, start, tmp_path_factory.mktemp("undisturbed"), "ab", None, {})[0]
    return disks, undisturbed


def cut(disks: Path) -> None:
    path = disks / f"a/checkpoint/step-{SAVED}/rank-00001.bin"
    path.write_bytes(path.read_bytes()[:-1])


def copied_to_b_then_cut(disks: Path) -> None:
    shutil.copytree(disks / "a/checkpoint", disks / "b/checkpoint")
    cut(disks)


def newest_moved_to_b(disks: Path) -> None:
    (disks / "b/checkpoint").mkdir()
    (disks / f"a/checkpoint/step-{SAVED}").rename(disks / f"b/checkpoint/step-{SAVED}")


def manifest_lost(disks: Path) -> None:
    (disks / f"a/checkpoint/step-{SAVED}/manifest.json").unlink()


def newest_deleted(disks: Path) -> None:
    shutil.rmtree(disks / f"a/checkpoint/step-{SAVED}")


def notes_deleted(disks: Path) -> None:
    for note in disks.glob("*/first_node.json"):
        note.unlink()


def unreadable_notes(disks: Path) -> None:
    for note in disks.glob("*/first_node.json"):
        note.write_text("[1e999, {}")


LOST = "step-4 was saved on node-a, and no node of this run has it.*first_node.json on all nodes to"

STARTS: dict[str, tuple[str, Any, dict[str, Any], int | str]] = {
    # name: (nodes in the order of ranks, what happened to the disks, options, the step to continue from or the error)
    "same nodes": ("ab", None, {}, SAVED),
    "another order": ("ba", None, {}, SAVED),
    "one node more, which is first": ("cab", None, {}, SAVED),
    "one node more, which is last": ("abc", None, {}, SAVED),
    "the first node left": ("b", None, {}, LOST),
    "the first node is new": ("cb", None, {}, LOST),
    "the second node left": ("a", None, {}, SAVED),
    "the second node is new": ("ac", None, {}, SAVED),
    "the newest is damaged": ("ba", cut, {}, 2),
    "the newest has no manifest": ("ba", manifest_lost, {}, 2),
    "the newest is damaged on the first node, complete on the second": (
        "ab",
        copied_to_b_then_cut,
        {},
        SAVED,
    ),
    "the newest is on the second node, older ones on the first": (
        "ab",
        newest_moved_to_b,
        {},
        SAVED,
    ),
    "the newest was deleted": ("ba", newest_deleted, {}, "all nodes to continue from step 2"),
    "a step is named": ("ba", None, {"load_step": 2}, 2),
    "a named step after the newest was deleted": ("ab", newest_deleted, {"load_step": 2}, 2),
    "a named step that no node has": (
        "cb",
        None,
        {"load_step": 2},
        "load_step=2: .* has no such step",
    ),
    "a run that only loads, on the node that saved": ("ab", None, {"load_only": True}, SAVED),
    "a run that only loads, on another node": ("ba", None, {"load_only": True}, SAVED),
    "the notes were deleted": ("cb", notes_deleted, {}, 0),
    "the notes are damaged": ("cb", unreadable_notes, {}, 0),
}
DEFAULT = (
    "another order",
    "one node more, which is first",
    "the first node left",
    "the newest is damaged",
)


@pytest.mark.parametrize(
    "name", cases(DEFAULT, nightly=[name for name in STARTS if name not in DEFAULT])
)
def test_newest_complete_checkpoint_of_any_node_is_resumed(
    saved: tuple[Path, Ended], tmp_path: Path, name: str
) -> None:
    disks, undisturbed = saved
    shutil.copytree(disks, tmp_path / "disks")
    nodes, damage, options, expected = STARTS[name]
    if damage:
        damage(tmp_path / "disks")
    results = run_ranks(len(nodes), start, tmp_path / "disks", nodes, None, options)
    for ended, log in results:
        if isinstance(expected, str):
            error = ended.error or AssertionError(f"continued with {len(ended.losses)} steps")
            with pytest.raises(CheckpointError, match=expected):
                raise error
            assert ended.losses == []
            assert "\n" not in str(ended.error)
            continue

        assert ended.error is None and len(ended.losses) == STEPS - expected, log
        if len(nodes) == 2:
            # The mesh is the same, so the results are bitwise equal.
            assert ended.losses == undisturbed.losses[expected:]
            assert_bitwise(ended.weights, undisturbed.weights)
        else:
            # Other meshes sum in a different order, so float32 rounding differs.
            assert ended.losses == pytest.approx(undisturbed.losses[expected:], abs=1e-5)

    # The node of rank 0 saves.
    if isinstance(expected, int) and not options.get("load_only"):
        last_step = tmp_path / "disks" / nodes[0] / f"checkpoint/step-{STEPS}"
        assert last_step.is_dir()


def test_log_names_the_node_with_the_checkpoint(saved: tuple[Path, Ended], tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path / "disks")
    _, log = run_ranks(2, start, tmp_path / "disks", "ba", None, {})[0]
    assert "step-4 is on node-a, and not on the node of rank 0" in log


def undo(rank: int, disks: Path) -> None:
    os.environ["LOCAL_RANK"] = "0"
    checkpoints = Checkpoints(config(disks / "ba"[rank]))
    assert checkpoints.to_continue() == disks / "ba"[rank] / "checkpoint/step-4"
    checkpoints.forget(range(3, 5), started_at=4)
    checkpoints.close()
    dist.barrier()
    again = Checkpoints(config(disks / "ba"[rank]))
    assert again.to_continue() == disks / "ba"[rank] / "checkpoint/step-2"
    again.close()


def test_rollback_deletes_undone_steps_on_all_nodes(
    saved: tuple[Path, Ended], tmp_path: Path
) -> None:
    shutil.copytree(saved[0], tmp_path / "disks")
    shutil.copytree(tmp_path / "disks/a/checkpoint/step-2", tmp_path / "disks/b/checkpoint/step-2")
    run_ranks(2, undo, tmp_path / "disks")

    assert sorted(
        path.parent.parent.name for path in tmp_path.glob("disks/*/checkpoint/step-*")
    ) == ["a", "b"]


def train_with_two_batch_sizes(rank: int, disks: Path) -> str:
    """Train with node "a" first, then continue with node "b" first and half the local batch.

    Both parts have steps of 8 sequences. Return the log of the second part.
    """
    os.environ["LOCAL_RANK"] = "0"
    for nodes, local_batch_size, steps in (("ab", 4, 2), ("ba", 2, 3)):
        training = {"steps": steps, "local_batch_size": local_batch_size, "global_batch_size": -1}
        node_config = config(disks / nodes[rank])
        ended = train_whole(
            rank, replace(node_config, training=replace(node_config.training, **training))
        )
        # this rank's half of 8 sequences
        assert ended.error is None
        assert {len(ids) for ids in ended.sample_ids} == {4}
    return (disks / "ba"[rank] / f"logs/rank-{rank}.log").read_text()


def test_batch_size_is_kept_from_a_checkpoint_of_another_node(tmp_path: Path) -> None:
    assert (
        "global_batch_size=8 is taken from the checkpoint"
        in run_ranks(2, train_with_two_batch_sizes, tmp_path)[0]
    )
