"""Compare the options and data of a resumed run with those of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardtrain.checkpoint import retention
from shardtrain.checkpoint.collectives import all_ranks_gather, first_rank
from shardtrain.checkpoint.folder import read_facts
from shardtrain.checkpoint.storage import folder_of, place
from shardtrain.config import changes, derived
from shardtrain.config.changes import ACCEPT, ALL, OptionChange
from shardtrain.config.load import Loaded
from shardtrain.config.problems import problems_of
from shardtrain.config.schema import Config
from shardtrain.distributed.process_group import World
from shardtrain.utils.errors import CheckpointError, ConfigError, StorageError
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run

BATCH = "training.global_batch_size"


def keep_batch_size(loaded: Loaded, world: World) -> Loaded:
    """Give a run that sets no global batch size the one of the checkpoint that it resumes from (a collective).

    Without it, the same command on another number of ranks would train with another batch size. ``loaded`` is returned
    as it is where this mesh cannot take that batch size; ``refuse`` then says what can be done.
    """
    config = loaded.config
    options = config.checkpoint
    is_free = {BATCH, ALL} & {*options.accept_changes} or "train_state" in options.exclude_from_loading
    if config.training.global_batch_size != -1 or not options.enable or is_free:
        return loaded
    # Rank 0 decides, because ranks may see different checkpoints in a shared folder that lags. If nodes do not share
    # disks, the rank with the newest checkpoint decides.
    found = [first_rank(lambda: _saved_batch_size(loaded, world.size))]
    if options.storage == "first_node":
        found = all_ranks_gather(lambda: _saved_batch_size(loaded, world.size))
    size = max(found)[1]
    if not size:
        return loaded
    made = derived.global_batch_size(config, world.size)
    logger.info(f"{BATCH}={size} is kept from the checkpoint; without it, this mesh would make it {made}")
    return _with_batch_size(loaded, size)


def _with_batch_size(loaded: Loaded, size: int) -> Loaded:
    training = replace(loaded.config.training, global_batch_size=size)
    return replace(loaded, config=replace(loaded.config, training=training))


def _saved_batch_size(loaded: Loaded, world_size: int) -> tuple[int, int]:
    """Return the step of the checkpoint to resume from, -1 without one, and its batch size.

    The batch size is 0 if it equals this run's, or if this mesh does not support it.
    """
    options = loaded.config.checkpoint
    lora = loaded.config.lora
    start = lora.initial_load_path if lora.enable else options.initial_load_path
    folder = folder_of(loaded.config.job.dump_folder, options.folder)
    steps = retention.steps(folder) if options.load_step == -1 else [options.load_step]
    paths = [folder / f"step-{step}" for step in reversed(steps)]
    if not paths and start and not options.initial_load_model_only:
        paths = [place(start)]
    for path in paths:
        try:
            size = read_facts(path).get("config", {}).get(BATCH)
        except (CheckpointError, StorageError, OSError, AttributeError):
            continue  # resume() reports a damaged checkpoint
        is_other = isinstance(size, int) and size > 0 and size != derived.global_batch_size(loaded.config, world_size)
        is_kept = is_other and not problems_of(_with_batch_size(loaded, size), world_size)
        return retention.step_of(path) or 0, size if is_kept else 0
    return -1, 0


def record(run: Run) -> dict[str, Any]:
    """Return the facts of a checkpoint about its options: those that matter, and all changes accepted so far."""
    options = changes.to_record(run.config, dist.get_world_size(), run.files)
    if not run.state.step:
        del options[BATCH]  # nothing is trained yet, so a seed checkpoint starts a run of any batch size
    return {"config": options, "accepted_changes": run.accepted_changes}


def find_changes(run: Run, facts: Mapping[str, Any], excluded: Sequence[str]) -> list[OptionChange]:
    """The options that are not those of a checkpoint and are not free, parts that are not loaded left out."""
    return changes.find(facts.get("config"), run.config, dist.get_world_size(), excluded, run.files)


def refuse(run: Run, path: object, found: Sequence[OptionChange], other_data: str) -> None:
    """Stop a run that would take another course; ``other_data`` says how the data differ, and is empty if they do not.

    Raises:
        ConfigError: with a line for each change that was not accepted, and one for the data.
    """
    accepted = run.config.checkpoint.accept_changes
    lines = []
    for change in found:
        if change.kind == "error" and change.option not in accepted and ALL not in accepted:
            fix = "use the old value"
            if change.option == BATCH and run.config.training.global_batch_size == -1:
                fix = _way_to_keep(run.config, change)
            lines.append(
                f"checkpoint {path} was saved with another {change}; {fix}, or accept it with "
                f'{ACCEPT} = ["{change.option}"]'
            )
    if other_data:
        by_option = "".join(f", {change}" for change in found if change.kind == "data")
        lines.append(
            f"checkpoint {path} was trained on other data ({other_data}{by_option}); use the same, "
            'or start the data from the beginning with checkpoint.exclude_from_loading=["dataloader"]'
        )
    if lines:
        raise ConfigError(lines)


def _way_to_keep(config: Config, change: OptionChange) -> str:
    """Say how this number of ranks can take the sequences per step of the checkpoint."""
    local = config.training.local_batch_size
    ranks = derived.data_parallel_degree(config, dist.get_world_size())
    made = f"{ranks} data-parallel ranks x training.local_batch_size={local} make {change.new}"
    fitting = [size for size in range(1, local + 1) if change.old % (size * ranks) == 0]
    if fitting:
        return f"{made}: set training.local_batch_size={fitting[-1]}"
    return f"{made}: start a number of ranks that divides {change.old}"


def keep_history(run: Run, facts: Mapping[str, Any], found: Sequence[OptionChange]) -> None:
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
