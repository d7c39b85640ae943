"""Whether the weights that a run begins with are there: its own last checkpoint, or those that it names."""

from __future__ import annotations

from pathlib import Path

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.utils.errors import ShardtrainError


def _held_here(folders: list[Path]) -> ShardtrainError | None:
    """The error for a folder that another run of this host writes, if there is one."""
    for folder in folders:
        if (folder / "lease.json").exists():
            from shardtrain.checkpoint.lease import Lease

            try:
                Lease(folder).refuse_if_held_here()
            except ShardtrainError as error:
                return error
    return None


def look(config: Config, is_alone: bool) -> list[ShardtrainError]:
    """What a run would find missing or of another model, without reading the weights; an object store is not asked.

    A run that ``is_alone`` is not one of several nodes, of which another may have begun: the folder must be free.
    """
    options = config.checkpoint
    folder = Path(config.job.dump_folder, options.folder)
    if is_alone and (taken := _held_here([Path(config.job.dump_folder), folder])):
        return [taken]
    is_elsewhere = "://" in options.folder or "://" in config.job.dump_folder
    if not options.enable or is_elsewhere or (options.storage == "first_node" and not is_alone):
        return []  # another node may hold the checkpoints
    named = derived.initial_weights(config)
    adapters = config.lora.initial_load_path if config.lora.enable else None
    if options.load_step == -1 and all(one is None or "://" in one for one in (named, adapters)):
        return []
    from shardtrain.checkpoint import manifest, retention
    from shardtrain.checkpoint.storage import place

    try:
        steps = retention.steps(folder) if folder.is_dir() else []
        if options.load_step != -1 and options.load_step not in steps:
            return [retention.no_such_step(folder, options.load_step, steps)]
        starts = [] if adapters is None or steps else [adapters]
        if named is not None and "://" not in named and (config.lora.enable or not steps):
            if options.initial_load_in_hf:
                from shardtrain.hf import importing

                # with no tensor to fill, this is all that a start from the folder checks
                importing.fill_as_configured({}, Path(named), config)
            else:
                starts.insert(0, named)
        for start in starts:
            if Path(start).is_dir() and not (Path(start) / "adapter_config.json").exists():
                try:
                    manifest.read(place(start))
                except ShardtrainError as error:
                    return [retention.unusable(place(start), str(error))]
    except ShardtrainError as error:
        return [error]
    except OSError:
        return []  # storage that does not answer now may do so when the run asks
    return []
