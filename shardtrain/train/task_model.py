"""Build a model on a mesh, with its initial weights and the loss of its task.

Used for trained and frozen models.
"""

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
    """A sharded model with its initial weights, and facts about it."""

    config: Config
    """The configuration, with ``compile.enable`` decided if it was unset."""
    task: tasks.LanguageModel | tasks.RowTask
    module: ModuleType
    """The Python module that defines the model."""
    shape: Any
    runner: Runner
    names: list[str]
    """Names of all parameters of the unsharded model."""
    num_params: int
    flops_per_token: Callable[[int], int]
    """Maps a sequence length to the FLOPs per token."""
    flops_per_row: Callable[[Any], float] | None = None
    """Maps a row to the FLOPs of modules that do not process tokens, if the model has any."""
    adapters: adapters.Spec | None = None


def build_model(
    config: Config,
    mesh: Mesh,
    may_compile: bool = False,
    with_loss: Callable[[Runner], Runner] | None = None,
) -> BuiltModel:
    """Build the model of a configuration on a mesh (a collective).

    Args:
        may_compile: compile a long run if ``compile.enable`` is unset.
        with_loss: returns a runner with another loss than that of the task.
    """
    # Build the unsharded model on the meta device.
    task = tasks.open_task(config)
    module, shape = models.configured(config.model)
    layout = module.LAYOUT
    model = task.adapt(models.build(module, shape), layout)
    spec: adapters.Spec | None = None
    added: dict[str, Draw] = {}
    if config.lora.enable:
        spec, added = adapters.adapt(model, module, shape, config.lora, bool(task.num_labels))
    num_params, flops = count_model(model, layout, shape)
    flops_per_row = task.flops_per_row(model)
    names = [name for name, _ in model.named_parameters()]
    base_names = [name for name in names if name not in added]
    # Initial values depend only on the seed and on names in the unsharded model.
    # So they are the same on every mesh.
    num_layers = len(getattr(model, layout.layers))
    draws = init_weights.plan(base_names, module.initial(shape), layout, num_layers) | added
    if config.lora.base_dtype != quantize.WHOLE:
        quantize.check_installed(config.lora.base_dtype)
        quantize.remove_quantized_weights(model, layout, config.lora.base_dtype)
    if may_compile and not expert_parallel.has_experts([model]):
        config = compile.decided(config, mesh, flops(config.training.seq_len))

    # Shard the model, which still has no memory.
    runner = distributed.parallelize(model, layout, mesh, config, task.num_outputs(shape))
    # Replace the next-token loss with the loss of the caller or of the task.
    if with_loss is not None:
        runner = with_loss(runner)
    elif isinstance(task, Distillation):
        runner = DistillationRunner(runner, task.mix)
    elif task.loss is not None:
        runner = TaskRunner(runner, task.loss)
    # Allocate and initialize this rank's shards.
    runner.materialize(draws, config.debug.seed)
    return BuiltModel(
        config, task, module, shape, runner, names, num_params, flops, flops_per_row, spec
    )
