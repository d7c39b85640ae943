"""Build the frozen models of a task: the reference model of preference tasks, the teacher of distillation.

A teacher is loaded from its folder, and so is a reference model if ``task.reference_path`` is set. Otherwise,
the reference model has the run's initial weights. Whenever the run starts or resumes, it loads these from
``checkpoint.initial_load_path``, or draws them from the seed again.

Frozen models are sharded like the trained model. They are not part of checkpoints, so a run can resume on any
mesh. The fingerprint of the data includes ``hf.initial_weights.identity``. Resuming with different reference
weights is therefore an error.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardtrain.checkpoint import manifest, tensor_reader, tensors
from shardtrain.checkpoint.collectives import all_ranks
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.storage import Place, place
from shardtrain.config.frozen_models import REFERENCE, frozen_config, has_comparable_tokenizer
from shardtrain.config.schema import Config
from shardtrain.distributed import Mesh, Runner
from shardtrain.distributed.distillation_runner import DistillationRunner
from shardtrain.hf import importing
from shardtrain.hf.initial_weights import start_of
from shardtrain.lora import peft, quantize
from shardtrain.tasks.distillation import Distillation
from shardtrain.train import base_weights
from shardtrain.train.run import model_state_dict
from shardtrain.train.task_model import BuiltModel, build_model
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.log import logger
from shardtrain.utils.units import format_count


def frozen_configs(task: Any, config: Config) -> dict[str, Config]:
    """Return the configurations of the frozen models of a task, by name. Most tasks need none."""
    if isinstance(task, Distillation):
        return {"teacher": task.teacher()}
    if not getattr(task, "needs_reference", False):
        return {}
    if config.task.reference_path:
        reference = frozen_config(config, REFERENCE)
        if isinstance(reference, Problem):
            raise ConfigError(reference)
        return {"reference": reference}
    # The reference is the initial model. New adapters do not change its outputs, so build the reference
    # without adapters. But loaded adapters and quantized base weights do, so keep them.
    lora = config.lora
    if not _is_adapted(config):
        lora = replace(lora, enable=False)
    parallelism = replace(config.parallelism, shard_optimizer_states=False)
    return {"reference": replace(config, lora=lora, parallelism=parallelism)}


def _is_adapted(config: Config) -> bool:
    lora = config.lora
    return lora.enable and (lora.initial_load_path is not None or lora.base_dtype != quantize.WHOLE)


def load_frozen_models(task: Any, runner: Runner, config: Config, mesh: Mesh) -> None:
    """Build and load the frozen model of a task, if it needs one (a collective).

    Raises:
        ConfigError: a folder contains another model than its config.json describes.
        CheckpointError: the weights are damaged, or belong to a different model.
    """
    for name, frozen in frozen_configs(task, config).items():
        built = build_model(frozen, mesh)
        for part in built.runner.parts:
            part.eval().requires_grad_(False)
        model = built.runner.parts[0]
        if name == "teacher":
            assert isinstance(runner, DistillationRunner)
            runner.teacher = model
            folder = config.task.teacher_path
        else:
            task.reference = model
            folder = config.task.reference_path
        if folder:
            weights = model_state_dict(built.runner)
            all_ranks(partial(importing.fill, weights, Path(folder), built.module, built.shape))
            count = format_count(built.num_params)
            logger.info(f"{name} (frozen): {frozen.model.name} from {folder}, {count} parameters")
            if not has_comparable_tokenizer(config, folder):
                logger.warning(
                    f"{name}: {folder} has no tokenizer to compare with the model's; results are only correct if "
                    "both models use the same token ids"
                )
            continue
        # Without a folder, the reference has the run's initial weights.
        # build_model has drawn them from the seed.
        start = start_of(config)
        if _is_adapted(frozen):
            _fill_adapted(built, frozen, mesh)
        elif start is not None:
            _fill(built, config, start)
        origin = start or f"drawn from debug.seed={config.debug.seed}"
        logger.info(f"reference model (frozen): initial weights of this run, {origin}")


def _fill_adapted(built: BuiltModel, config: Config, mesh: Mesh) -> None:
    """Load the run's base weights and initial adapters into a frozen model."""
    checkpoints = Checkpoints(
        replace(config, checkpoint=replace(config.checkpoint, load_only=True))
    )
    assert built.adapters is not None
    facts = base_weights.load(config, built.runner, built.adapters, mesh.device, checkpoints)
    if config.lora.initial_load_path is None:
        return
    # The run starts from existing adapters, either of PEFT or of a checkpoint.
    parameters = built.runner.parameters()
    start = place(config.lora.initial_load_path)
    if peft.is_folder(start):
        peft.load(config, facts, parameters, Path(str(start)))
        return
    adapters = {}
    for name, tensor in parameters.items():
        if built.adapters.holds(name):
            adapters[f"{manifest.WEIGHTS_PREFIX}{name}"] = tensor.detach()
    checkpoints.load(start, adapters, {})


def _fill(built: BuiltModel, config: Config, start: Place) -> None:
    """Load the run's initial weights into a frozen model, from a Hugging Face folder or a checkpoint."""
    weights = model_state_dict(built.runner)
    if config.checkpoint.initial_load_in_hf:
        all_ranks(partial(importing.fill_as_configured, weights, Path(str(start)), config))
        return

    # Look for damaged files before reading. If one rank finds one, all ranks raise.
    def verify() -> None:
        damage = tensors.find_damaged_file(manifest.read(start), start)
        if damage:
            raise CheckpointError(
                f"checkpoint {start} cannot be used: {damage}; use another checkpoint"
            )

    all_ranks(verify)
    stored = manifest.read(start)
    tensors.check_names(weights, stored, start)
    all_ranks(lambda: tensor_reader.read(weights, stored, start))
