"""Compare the options and data of a resumed run with those of its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardtrain.checkpoint import retention, snapshot_folder
from shardtrain.checkpoint.collectives import all_ranks_gather, first_rank
from shardtrain.checkpoint.folder import read_facts
from shardtrain.checkpoint.storage import Place, folder_of, place
from shardtrain.config import changes, derived, ramps
from shardtrain.config.changes import ACCEPT, ALL, OptionChange
from shardtrain.config.load import Loaded
from shardtrain.config.problems import problems_of
from shardtrain.config.rules import ramp_rules
from shardtrain.config.schema import Config
from shardtrain.distributed.process_group import World
from shardtrain.utils.errors import CheckpointError, ConfigError, StorageError
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run

BATCH = ramp_rules.BATCH


def keep_batch_size(loaded: Loaded, world: World) -> Loaded:
    """If the global batch size is unset, take it from the checkpoint to resume from (a collective).

    Otherwise the same command on a different number of ranks would train with a different batch size. If this
    mesh does not support the checkpoint's batch size, ``loaded`` is returned unchanged, and ``refuse``
    reports the problem later.
    """
    config = loaded.config
    options = config.checkpoint
    may_change = {BATCH, ALL} & {
        *options.accept_changes
    } or "train_state" in options.exclude_from_loading
    if ramps.batch_sizes(config.training) or not options.enable or may_change:
        return loaded
    # Rank 0 decides, because in a shared folder some ranks may not see the newest checkpoint yet. If nodes do
    # not share disks, the rank with the newest checkpoint decides.
    steps_and_sizes = [first_rank(lambda: _saved_batch_size(loaded, world.size))]
    if options.storage == "first_node" or options.snapshot_interval:
        steps_and_sizes = all_ranks_gather(lambda: _saved_batch_size(loaded, world.size))
    _, saved_size = max(steps_and_sizes)
    if not saved_size:
        return loaded
    default_size = derived.global_batch_size(config, world.size)
    logger.info(
        f"{BATCH}={saved_size} is taken from the checkpoint (the default on this mesh would be {default_size})"
    )
    return _with_batch_size(loaded, saved_size)


def _with_batch_size(loaded: Loaded, size: int) -> Loaded:
    training = replace(loaded.config.training, global_batch_size=size)
    return replace(loaded, config=replace(loaded.config, training=training))


def _saved_batch_size(loaded: Loaded, world_size: int) -> tuple[int, int]:
    """Return the step and the batch size of the checkpoint to resume from.

    The step is -1 without a checkpoint. The batch size is 0 if it need not or cannot be used: it equals this
    run's batch size, or this mesh does not support it.
    """
    for step, path in _checkpoints_to_resume(loaded):
        try:
            size = read_facts(path).get("config", {}).get(BATCH)
        except (CheckpointError, StorageError, OSError, AttributeError):
            continue  # resume() reports a damaged checkpoint
        is_other = (
            isinstance(size, int)
            and size > 0
            and size != derived.global_batch_size(loaded.config, world_size)
        )
        # The batch may not be divisible by the new number of ranks.
        is_supported = is_other and not problems_of(_with_batch_size(loaded, size), world_size)
        if not is_supported:
            return step, 0
        return step, size
    return -1, 0


def _checkpoints_to_resume(loaded: Loaded) -> list[tuple[int, Place]]:
    """Return steps and folders from which the run may resume, newest first.

    Without any, return the checkpoint from which the configuration starts the run, if it has one.
    """
    options = loaded.config.checkpoint
    folder = folder_of(loaded.config.job.dump_folder, options.folder)
    steps = retention.steps(folder) if options.load_step == -1 else [options.load_step]
    paths: list[tuple[int, Place]] = []
    if options.snapshot_interval:
        paths += snapshot_folder.manifest_folders(os.environ)
    paths += [(step, folder / f"step-{step}") for step in steps]
    if paths:
        return sorted(paths, key=lambda step_and_path: step_and_path[0], reverse=True)
    lora = loaded.config.lora
    start = lora.initial_load_path if lora.enable else options.initial_load_path
    if not start or options.initial_load_model_only:
        return []
    path = place(start)
    return [(retention.step_of(path) or 0, path)]


def record(run: Run) -> dict[str, Any]:
    """Return the facts about options for a checkpoint: their values, and all changes accepted so far.

    Options that do not affect results are not recorded.
    """
    options = changes.to_record(run.config, dist.get_world_size(), run.files)
    # A seed checkpoint has no trained steps, so a run with any batch size or ramp may start from it.
    if not run.state.step:
        for name in (BATCH, ramps.BATCH_RAMP, ramps.SEQUENCE_RAMP):
            del options[name]
    return {"config": options, "accepted_changes": run.accepted_changes}


def find_changes(run: Run, facts: Mapping[str, Any], excluded: Sequence[str]) -> list[OptionChange]:
    """Return the options that differ from the checkpoint's and affect the parts that are loaded."""
    return changes.find(facts.get("config"), run.config, dist.get_world_size(), excluded, run.files)


def refuse(run: Run, path: object, changes: Sequence[OptionChange], other_data: str) -> None:
    """Stop a resumed run if its options or data differ in a way that the user has not accepted.

    Args:
        changes: options that differ from the checkpoint's.
        other_data: description of how the data differ. Empty if they do not.

    Raises:
        ConfigError: one line per change that was not accepted, and one for the data.
    """
    accepted = run.config.checkpoint.accept_changes
    lines = []
    for change in changes:
        if change.kind != "error" or change.option in accepted or ALL in accepted:
            continue
        # An unset batch size depends on the number of ranks, so "use the old value" would not help.
        fix = "use the old value"
        if change.option == BATCH and not ramps.batch_sizes(run.config.training):
            fix = _how_to_keep_batch_size(run.config, change)
        accept = f'{ACCEPT} = ["{change.option}"]'
        lines.append(
            f"checkpoint {path} was saved with another {change}; {fix}, or accept the change with {accept}"
        )
    if other_data.startswith(("reference ", "teacher ")):
        lines.append(
            f"checkpoint {path} was trained with a different frozen model ({other_data}); use the same weights "
            "(task.reference_path or task.teacher_path, checkpoint.initial_load_path, lora.initial_load_path), or "
            "another job.dump_folder"
        )
    elif other_data:
        options = "".join(f", {change}" for change in changes if change.kind == "data")
        lines.append(
            f"checkpoint {path} was trained on other data ({other_data}{options}); use the same data, "
            'or start with the first row of the new data: checkpoint.exclude_from_loading=["dataloader"]'
        )
    if lines:
        raise ConfigError(lines)


def _how_to_keep_batch_size(config: Config, change: OptionChange) -> str:
    """Return advice on how to get the checkpoint's global batch size on this number of ranks."""
    local_size = config.training.local_batch_size
    ranks = derived.data_parallel_degree(config, dist.get_world_size())
    cause = (
        f"{ranks} data-parallel ranks x training.local_batch_size={local_size} make {change.new}"
    )
    # Suggest the largest local batch size that divides the checkpoint's batch evenly.
    for size in range(local_size, 0, -1):
        if change.old % (size * ranks) == 0:
            return f"{cause}: set training.local_batch_size={size}"
    return f"{cause}: use a number of ranks that divides {change.old}"


def keep_history(run: Run, facts: Mapping[str, Any], changes: Sequence[OptionChange]) -> None:
    """Log the changes that were accepted, and record them for later checkpoints."""
    # Keep the changes that were accepted when the run was resumed before.
    earlier = facts.get("accepted_changes")
    run.accepted_changes = [*earlier] if isinstance(earlier, list) else []
    for change in changes:
        if change.kind == "warn":
            logger.warning(
                f"{change}: the rest of the learning-rate schedule may not fit its beginning"
            )
        if change.kind == "error":
            logger.warning(f"{change}: accepted by {ACCEPT} at step {run.state.step}")
        if change.kind in ("error", "warn"):
            entry = {
                "step": run.state.step,
                "option": change.option,
                "old": change.old,
                "new": change.new,
            }
            run.accepted_changes.append(entry)
