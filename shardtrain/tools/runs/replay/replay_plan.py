"""Plan of a replay: checkpoint, steps and configuration. Does not import torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from shardtrain.checkpoint import manifest, retention
from shardtrain.checkpoint.manifest import Manifest
from shardtrain.config import Config
from shardtrain.tools.runs.run_files import RunFolder
from shardtrain.utils.errors import CheckpointError


@dataclass(frozen=True)
class ReplayPlan:
    """The replay of steps ``base`` + 1 to ``last`` of the run in ``run_folder``."""

    run_folder: Path
    checkpoints: Path
    base: int
    """Step of the checkpoint from which the replay starts, or 0 for the start of the run."""
    last: int
    world_size: int | None
    """Number of ranks of the run, or None if unknown."""
    rewinds: tuple[tuple[int, ...], ...]
    """Data rows that the run skipped after rollbacks, from its newest checkpoint. See ``loss_spikes.Rewind``."""


def plan(config: Config, first: int, last: int) -> ReplayPlan:
    """Choose the checkpoint to start from, and collect the known facts of the run.

    Raises:
        CheckpointError: the folder has neither metrics nor a readable checkpoint.
    """
    run_folder = Path(config.job.dump_folder)
    files = RunFolder(run_folder)
    folder = run_folder / config.checkpoint.folder
    known: dict[int, Manifest] = {}
    damages = []
    for step in retention.steps(folder):
        try:
            known[step] = manifest.read(folder / f"step-{step}")
        except CheckpointError as error:
            damages.append(str(error))
    if not known and not files.metrics.is_file():
        text = f"{run_folder} has neither metrics.jsonl nor a checkpoint, so there is nothing to compare with"
        raise CheckpointError(f"{text}{'; ' + damages[0] if damages else ''}; name the run's job.dump_folder")

    # Find the newest complete checkpoint before the steps. A save of only the weights has no state to resume from.
    usable = [step for step, stored in known.items() if step < first and not stored.facts.get("weights_only")]
    usable = [step for step in usable if retention.is_complete(folder / f"step-{step}")]
    base = max(usable, default=0)

    # The newest checkpoint records every rollback of the run, and so the rows that the run skipped.
    guard = known[max(known)].facts.get("guard", {}) if known else {}
    rewinds = guard.get("rewinds", []) if isinstance(guard, dict) else []

    world_size = known[base].world_size if base else files.world_size()
    return ReplayPlan(run_folder, folder, base, last, world_size, tuple(map(tuple, rewinds)))


def config_of(config: Config, found: ReplayPlan, output: Path) -> Config:
    """Return the run's configuration, changed to load its checkpoint and to write only a log."""
    path = str(found.checkpoints / f"step-{found.base}") if found.base else config.checkpoint.initial_load_path
    # A replay from the start loads the initial weights in the same way as the run did.
    part = {"initial_load_model_only": False, "exclude_from_loading": []} if found.base else {}
    checkpoint = dataclasses.replace(
        config.checkpoint,
        enable=bool(found.base) or config.checkpoint.enable,
        load_only=bool(found.base) or config.checkpoint.enable,  # without checkpoints there is nothing to save either
        load_step=-1,
        initial_load_path=config.checkpoint.initial_load_path if config.lora.enable else path,
        create_seed_checkpoint=False,
        keep_best="",  # it requires a validation, which a replay skips
        accept_changes=[*config.checkpoint.accept_changes, "training.spike_policy"],  # changed below
        **part,  # type: ignore[arg-type]
    )
    lora = config.lora
    if lora.enable and found.base:
        lora = dataclasses.replace(lora, initial_load_path=path)
    # The run's metrics do not contain spikes that caused a rollback, and a replay must not roll back.
    policy = "log" if config.training.spike_policy == "rewind" else config.training.spike_policy
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, dump_folder=str(output), save_config_file=None),
        checkpoint=checkpoint,
        lora=lora,
        training=dataclasses.replace(config.training, spike_policy=policy),
        validation=dataclasses.replace(config.validation, enable=False),
        profiling=dataclasses.replace(config.profiling, enable_profiling=False, enable_memory_snapshot=False),
        metrics=dataclasses.replace(config.metrics, enable_tensorboard=False, enable_wandb=False, sinks=[]),
    )
