"""Whether a run continues as the one that was saved: its options and data against those of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardtrain.config import changes
from shardtrain.config.changes import ACCEPT, ALL, Change
from shardtrain.utils.errors import ConfigError
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run


def record(run: Run) -> dict[str, Any]:
    """For the facts of a checkpoint: the options that matter, and every change of them that was accepted so far."""
    return {
        "config": changes.to_record(run.config, dist.get_world_size()),
        "accepted_changes": run.accepted_changes,
    }


def find_changes(run: Run, facts: Mapping[str, Any], excluded: Sequence[str]) -> list[Change]:
    """The options that are not those of a checkpoint and are not free, parts that are not loaded left out."""
    return changes.find(facts.get("config"), run.config, dist.get_world_size(), excluded)


def refuse(run: Run, path: object, found: Sequence[Change], other_data: str) -> None:
    """Stop a run that would take another course; ``other_data`` says how the data differ, and is empty if they do not.

    Raises:
        ConfigError: with a line for each change that was not accepted, and one for the data.
    """
    accepted = run.config.checkpoint.accept_changes
    lines = [
        f"checkpoint {path} was saved with another {change}; use the old value, or accept it with "
        f'{ACCEPT} = ["{change.option}"]'
        for change in found
        if change.kind == "error" and change.option not in accepted and ALL not in accepted
    ]
    if other_data:
        by_option = "".join(f", {change}" for change in found if change.kind == "data")
        lines.append(
            f"checkpoint {path} was trained on other data ({other_data}{by_option}); use the same, "
            'or start the data from the beginning with checkpoint.exclude_from_loading=["dataloader"]'
        )
    if lines:
        raise ConfigError(lines)


def keep_history(run: Run, facts: Mapping[str, Any], found: Sequence[Change]) -> None:
    """Say and keep, for the checkpoints to come, what was changed with the user's consent."""
    # what was accepted in earlier continuations stays part of the record
    before = facts.get("accepted_changes")
    run.accepted_changes = [*before] if isinstance(before, list) else []
    for change in found:
        if change.kind == "warn":
            logger.warning(f"{change}: the rest of the learning-rate schedule may differ from the one begun")
        if change.kind == "error":
            logger.warning(f"{change}: accepted by {ACCEPT} at step {run.state.step}")
        if change.kind in ("error", "warn"):
            entry = {"step": run.state.step, "option": change.option, "old": change.old, "new": change.new}
            run.accepted_changes.append(entry)
