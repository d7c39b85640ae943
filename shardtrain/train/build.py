"""How a run is put together for its first step."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from shardtrain import distributed, models, optim, tasks
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.distributed import BATCH_AXES, Mesh, Runner, process_group
from shardtrain.distributed.distillation_runner import DistillationRunner
from shardtrain.distributed.process_group import World
from shardtrain.distributed.task_runner import with_loss
from shardtrain.lora import quantize
from shardtrain.lora import spec as adapters
from shardtrain.metrics.flops import count_model
from shardtrain.ops import init_weights
from shardtrain.tasks.distillation import Distillation
from shardtrain.train import reference_models
from shardtrain.train.run import Run
from shardtrain.train.state import TrainState


@dataclass(frozen=True)
class Built:
    """A model on a mesh, with its initial weights, under the loss of a task."""

    task: tasks.LanguageModel | tasks.RowTask
    module: ModuleType
    shape: Any
    runner: Runner
    names: list[str]
    num_params: int
    flops_per_token: int
    adapters: adapters.Spec | None = None


def build_model(config: Config, mesh: Mesh) -> Built:
    """The model of a config; a second one of the same mesh is another model, which a task may hold frozen."""
    task, module = tasks.open_task(config), models.find(config.model.name)
    shape = models.shape_of(module, config.model.flavor, config.model.overrides, config.model.norm_type)
    model = task.adapt(models.build(module, shape), module.LAYOUT)
    spec, added = adapters.adapt(model, module, shape, config.lora, bool(task.num_labels))
    num_params, flops = count_model(model, module.LAYOUT, shape, config.training.seq_len)
    names = [name for name, _ in model.named_parameters()]
    own = [name for name in names if name not in added]
    draws = (
        init_weights.plan(own, module.initial(shape), module.LAYOUT, len(getattr(model, module.LAYOUT.layers))) | added
    )
    quantize.check_installed(config.lora.base_dtype)
    quantize.take_out(model, module.LAYOUT, config.lora.base_dtype)
    runner = distributed.parallelize(model, module.LAYOUT, mesh, config, task.num_outputs(shape))
    if isinstance(task, Distillation):
        runner = DistillationRunner(runner, task.mix, task.num_outputs(shape))
    else:
        runner = with_loss(runner, task.loss)
    runner.materialize(draws, config.debug.seed)
    return Built(task, module, shape, runner, names, num_params, flops, spec)


def build(config: Config, here: World) -> Run:
    """Everything for the first step: mesh, model on it with its initial weights, optimizer, data."""
    mesh = distributed.build(config, here)
    built = build_model(config, mesh)
    task, runner, training = built.task, built.runner, config.training
    optimizer = optim.build(runner.optimizer_parameters().items(), config.optimizer, built.names)
    scaler = None
    if derived.compute_dtype(config) == "float16":
        scaler = optim.LossScaler(training.initial_loss_scale, training.loss_scale_growth_interval)
    stream = task.open_dataloader(
        batch_rank=mesh.rank(*BATCH_AXES),
        num_batch_ranks=mesh.size(*BATCH_AXES),
        accumulation=derived.accumulation_steps(config, here.size),
    )
    task.check(stream, built.module, built.shape)
    reference_models.hold(task, runner, config, mesh)
    process_group.check_agreement(stream.fingerprint, "the training data differ between ranks", mesh.device)
    total_steps = training.steps
    if training.epochs is not None and stream.steps_left is not None:
        total_steps = stream.steps_left
    flops = built.flops_per_token * task.tokens_per_target
    run = Run(config, mesh, runner, optimizer, scaler, stream, TrainState(), total_steps, built.num_params, flops)
    run.names, run.adapters = tuple(built.names), built.adapters
    return run
