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
    """Data rows that the run skipped after rollbacks, from its newest checkpoint.

    See ``loss_spikes.Rewind``.
    """


def plan(config: Config, first: int, last: int) -> ReplayPlan:
    """Choose the checkpoint to start from, and collect the known facts of the run.

    Raises:
        CheckpointError: the folder has neither metrics nor a readable checkpoint.
    """
    run_folder = Path(config.job.dump_folder)
    files = RunFolder(run_folder)
    folder = run_folder / config.checkpoint.folder
    # A damaged checkpoint is skipped. It only matters if nothing else can be compared.
    manifests: dict[int, Manifest] = {}
    damages = []
    for step in retention.steps(folder):
        try:
            manifests[step] = manifest.read(folder / f"step-{step}")
        except CheckpointError as error:
            damages.append(str(error))
    if not manifests and not files.metrics.is_file():
        text = f"{run_folder} has neither metrics.jsonl nor a checkpoint, so there is nothing to compare with"
        if damages:
            text += f"; {damages[0]}"
        raise CheckpointError(f"{text}; name the run's job.dump_folder")

    # Find the newest complete checkpoint before the steps. A save of only the weights has no state to
    # resume from.
    base = 0
    world_size = files.world_size()
    for step, stored in manifests.items():
        is_usable = base < step < first and not stored.facts.get("weights_only")
        if is_usable and retention.is_complete(folder / f"step-{step}"):
            base = step
            world_size = stored.world_size

    # The newest checkpoint records every rollback of the run, and so the rows that the run skipped.
    rewinds: list[list[int]] = []
    if manifests:
        newest = manifests[max(manifests)]
        guard = newest.facts.get("guard", {})
        if isinstance(guard, dict):
            rewinds = guard.get("rewinds", [])
    return ReplayPlan(run_folder, folder, base, last, world_size, tuple(map(tuple, rewinds)))


def config_of(config: Config, replay_plan: ReplayPlan, output: Path) -> Config:
    """Return the run's configuration, changed to load its checkpoint and to write only a log."""
    # A replay from the start loads the initial weights in the same way as the run did, so it keeps the
    # run's checkpoint.enable. A replay never saves: load_only.
    has_checkpoints = config.checkpoint.enable
    checkpoint = config.checkpoint
    lora = config.lora
    if replay_plan.base:
        has_checkpoints = True
        path = str(replay_plan.checkpoints / f"step-{replay_plan.base}")
        checkpoint = dataclasses.replace(
            checkpoint, initial_load_model_only=False, exclude_from_loading=[]
        )
        # With LoRA, the initial path is that of the base model, which the run's checkpoints do not contain.
        if lora.enable:
            lora = dataclasses.replace(lora, initial_load_path=path)
        else:
            checkpoint = dataclasses.replace(checkpoint, initial_load_path=path)
    checkpoint = dataclasses.replace(
        checkpoint,
        enable=has_checkpoints,
        load_only=has_checkpoints,
        load_step=-1,
        create_seed_checkpoint=False,
        keep_best="",  # it requires a validation, which a replay skips
        # exports are saved, too
        hf_interval=0,
        last_save_in_hf=False,
        # both are changed below
        accept_changes=[
            *checkpoint.accept_changes,
            "training.spike_policy",
            "training.ema_decay",
        ],
    )

    # The run's metrics do not contain spikes that caused a rollback, and a replay must not roll back.
    training = config.training
    if training.spike_policy == "rewind":
        training = dataclasses.replace(training, spike_policy="log")
    # Averages are only read by checkpoints and validation, and a replay has neither.
    training = dataclasses.replace(training, ema_decay=None)
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, dump_folder=str(output), save_config_file=None),
        checkpoint=checkpoint,
        lora=lora,
        training=training,
        validation=dataclasses.replace(config.validation, enable=False, use_ema=False),
        profiling=dataclasses.replace(
            config.profiling, enable_profiling=False, enable_memory_snapshot=False
        ),
        metrics=dataclasses.replace(
            config.metrics, enable_tensorboard=False, enable_wandb=False, sinks=[]
        ),
    )
