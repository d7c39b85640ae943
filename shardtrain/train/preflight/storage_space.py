"""Check the free space in the checkpoint folder, and in /dev/shm for the batches of loader workers.

The required sizes are lower bounds, computed only from shapes. Each save checks the free space again before
it writes, because it changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shardtrain.checkpoint.storage import SPARE
from shardtrain.config import Loaded
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.schema import Config
from shardtrain.train.preflight import memory_fit
from shardtrain.train.preflight.machine import Machine
from shardtrain.train.preflight.memory_fit import ParameterMemory
from shardtrain.utils.errors import Problem, ShardtrainError, StorageError
from shardtrain.utils.units import format_bytes

SHARED = Path("/dev/shm")
_DEFAULT_PREFETCH = 4
_BYTES_PER_TOKEN = 24
"""Bytes of a token in a batch: its id, target and position, int64 each."""

Build = Callable[[], list[ParameterMemory] | None]


def address_problem(config: Config) -> ShardtrainError | None:
    """Return an error if ``checkpoint.folder`` is an invalid address of an object store.

    The store is not contacted.
    """
    if not config.checkpoint.enable or "://" not in config.checkpoint.folder:
        return None
    from shardtrain.checkpoint.objects import refuse_unknown_store

    try:
        refuse_unknown_store(config.checkpoint.folder)
    except ShardtrainError as error:
        return error
    return None


def find_errors(
    loaded: Loaded, machine: Machine, build: Build
) -> tuple[list[ShardtrainError], list[str]]:
    """Check the free space of the checkpoint folder.

    Args:
        loaded: the configuration.
        machine: the machine that the run would use.
        build: returns the parameters of the model, or None if it cannot be built. It is called only if an
            upper bound of the size of checkpoints does not fit.

    Returns:
        Errors and warnings: an error if not even one checkpoint fits, and a warning if one fits, but not all
        checkpoints that the run would keep.
    """
    config = loaded.config
    options = config.checkpoint
    if not options.enable or options.load_only or "://" in options.folder:
        return [], []
    # With several nodes, this may not be the node that writes.
    if options.storage == "first_node" and machine.world_size != machine.local_ranks:
        return [], []

    # Find the free space, and the number of existing checkpoints.
    folder = Path(config.job.dump_folder, options.folder).absolute()
    try:
        # The folder may not exist yet. Its nearest existing parent is on the same filesystem.
        existing = next(path for path in (folder, *folder.parents) if path.is_dir())
        filesystem = os.statvfs(existing)
        num_existing = 0
        if folder.is_dir():
            num_existing = sum(path.is_dir() for path in folder.glob("step-*"))
    except OSError:
        # The storage does not answer now, but it may do so when the run saves.
        return [], []
    free_bytes = filesystem.f_bavail * filesystem.f_frsize

    # There must be space for one more checkpoint than is kept, because the oldest one is deleted only after
    # the newest is complete.
    num_new = max(1, _most_kept(config) + 1 - num_existing)

    # Building the model takes seconds, so first try an upper bound computed from its sizes.
    upper_bound = memory_fit.max_num_elements(model_shape(loaded) or {})
    if upper_bound is not None:
        parameters = [ParameterMemory(upper_bound, tensor=True, expert=False, trained=True)]
        if num_new * SPARE * memory_fit.checkpoint_bytes(config, parameters) <= free_bytes:
            return [], []

    # The upper bound does not fit, so build the model to find the actual size.
    built = build()
    if built is None:
        return [], []
    checkpoint_bytes = memory_fit.checkpoint_bytes(config, built)
    num_fitting = int(free_bytes / (SPARE * checkpoint_bytes)) if checkpoint_bytes else num_new
    if num_fitting < 1:
        error = StorageError(
            f"{folder}: a save requires {format_bytes(SPARE * checkpoint_bytes)} of free space ({SPARE} times the "
            f"size of a checkpoint, {format_bytes(checkpoint_bytes)}), but only {format_bytes(free_bytes)} are free; "
            "delete files, or set checkpoint.folder to another filesystem"
        )
        return [error], []
    if num_fitting < num_new:
        policy = "keeping all checkpoints"
        if options.keep_latest_k:
            policy = f"checkpoint.keep_latest_k={options.keep_latest_k}"
        warning = (
            f"{policy}: {folder} must hold {num_new} more checkpoints of "
            f"{format_bytes(checkpoint_bytes)} before the first is deleted, "
            f"but the free space of {format_bytes(free_bytes)} is enough for only {num_fitting}"
        )
        return [], [warning]
    return [], []


def _most_kept(config: Config) -> int:
    """Return the maximum number of checkpoints in the folder, apart from those that are never deleted."""
    options = config.checkpoint
    limit = options.keep_latest_k
    if options.interval_type != "steps" or config.training.epochs is not None:
        return limit or 1
    num_saves = -(-config.training.steps // max(1, options.interval))
    return min(limit, num_saves) if limit else num_saves


def shared_memory_problem(loaded: Loaded, machine: Machine) -> Problem | None:
    """Return a problem if /dev/shm is too small for the batches of loader workers.

    A worker that runs out of shared memory is killed by a bus error.
    """
    training = loaded.config.training
    option = "training.dataloader.num_workers"
    workers = training.dataloader.num_workers
    try:
        if not workers or not SHARED.is_dir():
            return None
        filesystem = os.statvfs(SHARED)
    except OSError:
        return None
    batches_per_worker = training.dataloader.prefetch_factor or _DEFAULT_PREFETCH
    batch_bytes = _BYTES_PER_TOKEN * training.local_batch_size * training.seq_len
    needed_bytes = machine.local_ranks * workers * batches_per_worker * batch_bytes
    free_bytes = filesystem.f_bavail * filesystem.f_frsize
    if needed_bytes <= free_bytes:
        return None
    rule = (
        f"keeps up to {batches_per_worker} batches of each worker and rank in {SHARED}: "
        f"{format_bytes(needed_bytes)} or more, but only {format_bytes(free_bytes)} are free there"
    )
    return Problem(
        option,
        workers,
        rule=rule,
        fix="set it to 0, lower training.dataloader.prefetch_factor, or raise --shm-size of docker run",
        where=loaded.where(option),
    )
