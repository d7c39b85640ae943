"""A model on a mesh, with its initial weights, under the loss of its task: the one that learns, and frozen ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from shardtrain import distributed, models, tasks
from shardtrain.config.schema import Config
from shardtrain.distributed import Mesh, Runner, compile, expert_parallel
from shardtrain.distributed.distillation_runner import DistillationRunner
from shardtrain.distributed.task_runner import TaskRunner
from shardtrain.layout import Draw
from shardtrain.lora import quantize
from shardtrain.lora import spec as adapters
from shardtrain.metrics.flops import count_model
from shardtrain.ops import init_weights
from shardtrain.tasks.distillation import Distillation


@dataclass(frozen=True)
class BuiltModel:
    """A model on a mesh, with its initial weights, under the loss of a task.

    ``config`` is the configuration with what was decided of it: see ``distributed.compile.decided``.
    """

    config: Config
    task: tasks.LanguageModel | tasks.RowTask
    module: ModuleType
    shape: Any
    runner: Runner
    names: list[str]
    num_params: int
    flops_per_token: Callable[[int], int]
    """A function of the sequence length."""
    adapters: adapters.Spec | None = None


def build_model(config: Config, mesh: Mesh, may_compile: bool = False) -> BuiltModel:
    """The model of a config; a second one of the same mesh is another model, which a task may hold frozen.

    With ``may_compile`` a long run is compiled where ``compile.enable`` leaves that open.
    """
    task = tasks.open_task(config)
    module, shape = models.configured(config.model)
    model = task.adapt(models.build(module, shape), module.LAYOUT)
    spec: adapters.Spec | None = None
    added: dict[str, Draw] = {}
    if config.lora.enable:
        spec, added = adapters.adapt(model, module, shape, config.lora, bool(task.num_labels))
    # counted while the model is whole, on the meta device
    num_params, flops = count_model(model, module.LAYOUT, shape)
    names = [name for name, _ in model.named_parameters()]
    own = [name for name in names if name not in added]
    # how each parameter is drawn: by its name in the whole model, so that a mesh changes no number
    draws = (
        init_weights.plan(own, module.initial(shape), module.LAYOUT, len(getattr(model, module.LAYOUT.layers))) | added
    )
    if config.lora.base_dtype != quantize.WHOLE:
        quantize.check_installed(config.lora.base_dtype)
        quantize.take_out(model, module.LAYOUT, config.lora.base_dtype)
    if may_compile and not expert_parallel.has_experts([model]):
        config = compile.decided(config, mesh, flops(config.training.seq_len))
    # cut and sharded, still without memory
    runner = distributed.parallelize(model, module.LAYOUT, mesh, config, task.num_outputs(shape))
    # the loss of the task in place of that of the next token
    if isinstance(task, Distillation):
        runner = DistillationRunner(runner, task.mix)
    elif task.loss is not None:
        runner = TaskRunner(runner, task.loss)
    runner.materialize(draws, config.debug.seed)
    return BuiltModel(config, task, module, shape, runner, names, num_params, flops, spec)
