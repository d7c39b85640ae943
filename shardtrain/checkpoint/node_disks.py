"""Find the checkpoints of a run on the disks of its nodes.

With ``checkpoint.storage = "first_node"`` only the node of rank 0 writes checkpoints. At the next
start rank 0 may be on another node, so every node reports its checkpoints. Each other node also
keeps a note with the newest step and the host that saved it. The note distinguishes a run that has
lost its checkpoints from a new run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardtrain.checkpoint import files, manifest, retention
from shardtrain.checkpoint.collectives import (
    all_ranks,
    broadcast_json,
    first_word,
    gather_distinct_json,
    rank_and_size,
)
from shardtrain.checkpoint.storage import Place
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import CheckpointError

NOTE = "first_node.json"


def survey(
    folder: Place,
    run_folder: Path,
    each_node: bool,
) -> tuple[dict[int, list[int]], dict[int, str], list[Any]]:
    """Find the checkpoints on rank 0's node, or on every node with ``each_node`` (a collective).

    Returns:
        - Step -> the ranks that hold its checkpoint. Of ranks that see the same steps,
          only the lowest is listed.
        - Step -> why its entry is not a checkpoint, if no node has a manifest for it.
        - Notes [step, host] of the newest save that the nodes have written.
    """
    seen = list[Any]()

    def look() -> None:
        complete = retention.steps(folder)
        incomplete = []
        if isinstance(folder, Path):  # an object store has no folders
            for step in sorted({*retention.step_folders(folder)} - {*complete}):
                name = f"step-{step}"
                incomplete.append([step, f"{name} {manifest.why_not_one(folder / name)}"])
        note = _read_note(run_folder / NOTE) if each_node else None
        seen.extend([complete, incomplete, note])

    all_ranks(look)
    if each_node:
        values, numbers = gather_distinct_json(seen)
    else:
        # Rank 0 decides for all ranks: they might see different steps in a shared folder.
        values = [broadcast_json(seen)]
        numbers = [0]
    holders: dict[int, list[int]] = {}
    for number, (complete, _, _) in enumerate(values):
        first_rank = numbers.index(number)
        for step in complete:
            holders.setdefault(step, []).append(first_rank)
    # A checkpoint that is complete on one node counts as complete.
    reasons = {}
    for _, incomplete, _ in values:
        for step, reason in incomplete:
            if step not in holders:
                reasons[step] = reason
    notes = [note for _, _, note in values if note]
    return holders, reasons, notes


def refuse_lost(newest: int, notes: Sequence[Any], run_folder: Path) -> None:
    """Stop a run whose newest checkpoint is on none of its nodes.

    Args:
        newest: The newest step that a node holds, -1 for none.
        notes: [step, host] of the newest save, from the notes of the nodes.

    Raises:
        CheckpointError: a note has a newer step. The message names the step and the host that saved it.
    """
    step, host = max(notes, default=(-1, ""))
    if step > newest:
        goes_back = f"continue from step {newest}"
        if newest < 0:
            goes_back = "start from scratch"
        raise CheckpointError(
            f'checkpoint.storage="first_node": step-{step} was saved on {host}, '
            "and no node of this run has it; "
            f"start on a node that has it, or delete {run_folder / NOTE} on all nodes to {goes_back}"
        )


def speaks_for_its_node() -> bool:
    """True on one rank of each node if the launcher sets LOCAL_RANK, else on all ranks."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def host_of(rank: int) -> str:
    """Return the host name of a rank, on all ranks (a collective)."""
    is_named_rank = rank_and_size()[0] == rank
    return first_word(os.uname().nodename if is_named_rank else "")


def note(run_folder: Path, steps: Iterable[int]) -> None:
    """Write the newest of rank 0's ``steps`` and rank 0's host into a note on each other node (a collective).

    Raises:
        StorageError: on all ranks, if a node cannot write its note.
    """
    newest, host = broadcast_json([max(steps, default=-1), os.uname().nodename])
    path = run_folder / NOTE

    def write() -> None:
        if dist.get_rank() == 0:
            path.unlink(missing_ok=True)
        elif speaks_for_its_node():
            atomic_io.write(path, json.dumps([newest, host]), durable=True)

    all_ranks(write)


def _read_note(path: Path) -> list[Any] | None:
    """Return [step, host], or None if there is no readable note."""
    try:
        step, host = json.loads(files.read_small(path))
        shown_host = "".join(char for char in str(host)[:80] if char.isprintable())
        return [int(step), shown_host]
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
