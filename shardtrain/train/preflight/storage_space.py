"""Whether there is room for what a run writes: a checkpoint in its folder, and the batches of workers in /dev/shm.

Sizes are lower bounds, from shapes without memory. A save looks again before it writes: what is free now may be gone by
then, and the other way round.
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
_PREFETCH = 4
_BYTES_OF_A_TOKEN = 24
"""Of a batch: its id, its target and its position, of 8 bytes each."""

Build = Callable[[], list[ParameterMemory] | None]


def address_problem(config: Config) -> ShardtrainError | None:
    """What opening the object store of ``checkpoint.folder`` would raise before anything is asked of it."""
    if not config.checkpoint.enable or "://" not in config.checkpoint.folder:
        return None
    from shardtrain.checkpoint.objects import refuse_unknown_store

    try:
        refuse_unknown_store(config.checkpoint.folder)
    except ShardtrainError as error:
        return error
    return None


def look(loaded: Loaded, machine: Machine, build: Build) -> tuple[list[ShardtrainError], list[str]]:
    """Refuse a folder without room for one checkpoint; tell of one without room for all that would be kept.

    ``build`` gives the parameters of the model, or None where it cannot be built; it is called only where a generous
    guess of their number does not fit.
    """
    config = loaded.config
    options = config.checkpoint
    if not options.enable or options.load_only or "://" in options.folder:
        return [], []
    if options.storage == "first_node" and machine.world_size != machine.local_ranks:
        return [], []  # this may be another node than the one that writes
    folder = Path(config.job.dump_folder, options.folder).absolute()
    try:
        # the folder may not be there yet: the nearest one above it is on the same filesystem
        existing = next(one for one in (folder, *folder.parents) if one.is_dir())
        filesystem = os.statvfs(existing)
        kept = sum(1 for one in folder.glob("step-*") if one.is_dir()) if folder.is_dir() else 0
    except OSError:
        return [], []  # storage that does not answer now may do so when the run saves
    free = filesystem.f_bavail * filesystem.f_frsize
    new = max(1, _most_kept(config) + 1 - kept)  # one more than is kept, as the oldest goes once the newest is there
    # building the model takes seconds, and a guess from its sizes is mostly enough
    guess = memory_fit.generous_guess(model_shape(loaded) or {})
    guessed = [ParameterMemory(guess, tensor=True, expert=False, trained=True)] if guess is not None else []
    if guessed and new * SPARE * memory_fit.checkpoint_bytes(config, guessed) <= free:
        return [], []
    parameters = build()
    if parameters is None:
        return [], []
    size = memory_fit.checkpoint_bytes(config, parameters)
    fits = int(free / (SPARE * size)) if size else new
    if fits < 1:
        return [
            StorageError(
                f"{folder}: a checkpoint of this run is {format_bytes(size)}, a save begins where {SPARE} times that "
                f"are free, and {format_bytes(free)} are: free space, or set checkpoint.folder to another filesystem"
            )
        ], []
    if fits < new:
        what = f"checkpoint.keep_latest_k={options.keep_latest_k}" if options.keep_latest_k else "all checkpoints"
        return [], [
            f"{what}: {new} more checkpoints of {format_bytes(size)} would lie in {folder} before one is deleted, and "
            f"{format_bytes(free)} are free, room for {fits}"
        ]
    return [], []


def _most_kept(config: Config) -> int:
    """Checkpoints that lie there at most, by their number alone; what is kept for ever besides is not counted."""
    options = config.checkpoint
    most = config.checkpoint.keep_latest_k
    if options.interval_type != "steps":
        return most or 1
    saves = -(-config.training.steps // max(1, options.interval)) if config.training.epochs is None else most or 1
    return min(most, saves) if most else saves


def shared_memory_problem(loaded: Loaded, machine: Machine) -> Problem | None:
    """What is wrong where workers prepare batches in a /dev/shm that is too small: they die of a bus error there."""
    training = loaded.config.training
    option = "training.dataloader.num_workers"
    workers = training.dataloader.num_workers
    try:
        if not workers or not SHARED.is_dir():
            return None
        filesystem = os.statvfs(SHARED)
    except OSError:
        return None
    ahead = training.dataloader.prefetch_factor or _PREFETCH
    batch = _BYTES_OF_A_TOKEN * training.local_batch_size * training.seq_len
    needed = machine.local_ranks * workers * ahead * batch
    there = filesystem.f_bavail * filesystem.f_frsize
    if needed <= there:
        return None
    rule = (
        f"keeps up to {ahead} batches of each worker and rank in {SHARED}: {format_bytes(needed)} or more, and "
        f"{format_bytes(there)} are free there"
    )
    fix = "set it to 0, lower training.dataloader.prefetch_factor, or give the container more (docker run --shm-size)"
    return Problem(option, workers, rule, fix, loaded.where(option))
