"""Check that the weights that a run starts from exist: its last checkpoint, or the configured path."""

from __future__ import annotations

import os
from pathlib import Path

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ShardtrainError


def _lease_error(folders: list[Path]) -> ShardtrainError | None:
    """Return an error if another run on this host is writing to one of the folders."""
    for folder in folders:
        if os.path.lexists(folder / "lease.json"):
            from shardtrain.checkpoint.lease import Lease

            try:
                Lease(folder).refuse_if_held_here()
            except ShardtrainError as error:
                return error
    return None


def find_errors(config: Config, is_alone: bool) -> list[ShardtrainError]:
    """Return errors if weights are missing or belong to a different model.

    Reads neither the weights themselves nor object stores.

    Args:
        config: the configuration of the run.
        is_alone: True if the run uses only this node. Otherwise leases are not checked, because another node
            of the same run may already hold them.
    """
    options = config.checkpoint
    folder = Path(config.job.dump_folder, options.folder)
    if is_alone and (taken := _lease_error([Path(config.job.dump_folder), folder])):
        return [taken]
    is_in_object_store = "://" in options.folder or "://" in config.job.dump_folder
    is_on_other_node = options.storage == "first_node" and not is_alone
    if not options.enable or is_in_object_store or is_on_other_node:
        return []
    # There is nothing to check if the run draws its initial weights, or loads them from an object store.
    base = derived.initial_weights(config)
    adapters = config.lora.initial_load_path if config.lora.enable else None
    local_paths = [path for path in (base, adapters) if path is not None and "://" not in path]
    if options.load_step == -1 and not local_paths:
        return []
    from shardtrain.checkpoint import manifest, retention
    from shardtrain.checkpoint.storage import place

    try:
        steps = retention.steps(folder) if folder.is_dir() else []
        if options.load_step != -1 and options.load_step not in steps:
            return [retention.no_such_step(folder, options.load_step, steps)]
        # A resumed run reads its own checkpoint instead of the configured weights. But a LoRA run reads its
        # base weights every time.
        resumes = bool(steps)
        starts = []
        if adapters is not None and not resumes:
            starts.append(adapters)
        loads_base = config.lora.enable or not resumes
        if base is not None and "://" not in base and loads_base:
            if options.initial_load_in_hf:
                from shardtrain.hf import importing

                # Without any tensors to fill, this call only checks the folder.
                importing.fill_as_configured({}, Path(base), config)
            else:
                starts.insert(0, base)
        # Check the manifest of each checkpoint that the run would load.
        for start in starts:
            is_peft = bounded_reads.is_present(Path(start) / "adapter_config.json")
            if not Path(start).is_dir() or is_peft:
                continue
            try:
                manifest.read(place(start))
            except ShardtrainError as error:
                return [retention.unusable(place(start), str(error))]
    except ShardtrainError as error:
        return [error]
    except OSError:
        # The storage does not answer now, but it may do so when the run starts.
        return []
    return []
