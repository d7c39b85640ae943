"""Frozen models beside the one that learns: the weights that a run began with, with which a task of preferences
compares, and the teacher of a distillation.

The first weights are read again at every start, from ``checkpoint.initial_load_path``, or drawn again from the seed; a
teacher's are read from its folder. They are sharded as the model is. So they are not part of a checkpoint, and any mesh
can continue a run. What ``first_weights`` says of them is part of what the data are known by, so that a run continues
with no others than its own.
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
from shardtrain.train.model import Built, build_model
from shardtrain.train.run import model_state_dict
from shardtrain.utils.errors import CheckpointError
from shardtrain.utils.log import logger
from shardtrain.utils.units import format_count


def frozen_configs(task: Any, config: Config) -> dict[str, Config]:
    """The frozen models that a task needs beside the one that learns, by what they are called; empty for most."""
    if isinstance(task, Distillation):
        return {"teacher": task.teacher()}
    if getattr(task, "needs_reference", False):
        # adapters begin by adding nothing, so what they are beside is what the run began with
        parallelism = replace(config.parallelism, shard_optimizer_states=False)
        return {"reference": replace(config, lora=replace(config.lora, enable=False), parallelism=parallelism)}
    return {}


def hold(task: Any, runner: Runner, config: Config, mesh: Mesh) -> None:
    """Give a task that needs one its frozen model (a collective); does nothing for others.

    Raises:
        ConfigError: when a teacher's folder holds another model than it says.
        CheckpointError: when the first weights or a teacher's are damaged, or of another model.
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
                f"teacher: {folder}, {frozen.model.name} of {format_count(built.num_params)} parameters, frozen"
            )
            continue
        start = start_of(config)
        if start is not None:
            _fill(built, config, start)
        task.reference = built.runner.parts[0]
        logger.info(f"reference: {start or f'the weights drawn from debug.seed={config.debug.seed}'}, frozen")


def _fill(built: Built, config: Config, start: Place) -> None:
    weights = model_state_dict(built.runner)
    if config.checkpoint.initial_load_in_hf:
        all_ranks(partial(importing.fill_as_configured, weights, Path(str(start)), config))
        return

    def verify() -> None:
        if damage := tensors.find_damaged_file(manifest.read(start), start):
            raise CheckpointError(f"checkpoint {start} cannot be used: {damage}; use another one")

    all_ranks(verify)
    stored = manifest.read(start)
    tensors.check_names(weights, stored, start)
    all_ranks(lambda: tensor_reader.read(weights, stored, start))
