"""Build the frozen models of a task: the reference model of preference tasks, the teacher of distillation.

A reference model has the initial weights of the run. Every start loads them from
``checkpoint.initial_load_path`` or draws them from the seed again; a teacher is loaded from its folder.
Both are sharded like the trained model and are not part of checkpoints, so a run can resume on any mesh.
The fingerprint of the data includes ``hf.initial_weights.identity``, so a resume with other reference
weights is rejected.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardtrain.checkpoint import manifest, tensor_reader, tensors
from shardtrain.checkpoint.collectives import all_ranks
from shardtrain.checkpoint.storage import Place
from shardtrain.config.schema import Config
from shardtrain.distributed import Mesh, Runner
from shardtrain.distributed.distillation_runner import DistillationRunner
from shardtrain.hf import importing
from shardtrain.hf.initial_weights import start_of
from shardtrain.tasks.distillation import Distillation
from shardtrain.train.run import model_state_dict
from shardtrain.train.task_model import BuiltModel, build_model
from shardtrain.utils.errors import CheckpointError
from shardtrain.utils.log import logger
from shardtrain.utils.units import format_count


def frozen_configs(task: Any, config: Config) -> dict[str, Config]:
    """Return the configurations of the frozen models of a task, by name. Most tasks need none."""
    if isinstance(task, Distillation):
        return {"teacher": task.teacher()}
    if getattr(task, "needs_reference", False):
        # New adapters add zero, so the base weights without adapters are the initial model
        parallelism = replace(config.parallelism, shard_optimizer_states=False)
        return {"reference": replace(config, lora=replace(config.lora, enable=False), parallelism=parallelism)}
    return {}


def hold(task: Any, runner: Runner, config: Config, mesh: Mesh) -> None:
    """Build and load the frozen model of a task, if it needs one (a collective).

    Raises:
        ConfigError: the teacher's folder contains another model than its config.json describes.
        CheckpointError: the weights are damaged, or those of another model.
    """
    for name, frozen in frozen_configs(task, config).items():
        built = build_model(frozen, mesh)
        for part in built.runner.parts:
            part.eval().requires_grad_(False)
        if name == "teacher":
            assert isinstance(runner, DistillationRunner)
            folder = Path(config.task.teacher_path)
            all_ranks(partial(importing.fill, model_state_dict(built.runner), folder, built.module, built.shape))
            runner.teacher = built.runner.parts[0]
            logger.info(
                f"teacher (frozen): {frozen.model.name} from {folder}, {format_count(built.num_params)} parameters"
            )
            continue
        start = start_of(config)
        if start is not None:
            _fill(built, config, start)
        task.reference = built.runner.parts[0]
        origin = start or f"drawn from debug.seed={config.debug.seed}"
        logger.info(f"reference model (frozen): initial weights of this run, {origin}")


def _fill(built: BuiltModel, config: Config, start: Place) -> None:
    """Load the initial weights of the run into a frozen model, from a Hugging Face folder or a checkpoint."""
    weights = model_state_dict(built.runner)
    if config.checkpoint.initial_load_in_hf:
        all_ranks(partial(importing.fill_as_configured, weights, Path(str(start)), config))
        return

    def verify() -> None:
        damage = tensors.find_damaged_file(manifest.read(start), start)
        if damage:
            raise CheckpointError(f"checkpoint {start} cannot be used: {damage}; use another checkpoint")

    all_ranks(verify)
    stored = manifest.read(start)
    tensors.check_names(weights, stored, start)
    all_ranks(lambda: tensor_reader.read(weights, stored, start))
