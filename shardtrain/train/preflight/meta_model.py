"""The model of a configuration on tensors without memory: whether it can be built, and its parameters."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardtrain import distributed, models, optim, tasks
from shardtrain.config import stages
from shardtrain.config.schema import Config
from shardtrain.distributed import fake_backend, float8_modules
from shardtrain.distributed.tensor_parallel import plan as tensor_parallel
from shardtrain.layout import SPLIT_STYLES, Layout, style_of
from shardtrain.lora import quantize, spec
from shardtrain.train.preflight import own_files
from shardtrain.train.preflight.memory_fit import ParameterMemory
from shardtrain.utils.errors import ConfigError, Problem, ShardtrainError


def build(config: Config, world_size: int | None = None) -> tuple[list[ShardtrainError], list[ParameterMemory] | None]:
    """Build the model with its head and adapters on the meta device, and the optimizer, as a run of so many ranks does.

    Returns the errors that the run would raise, or the parameters of the unsharded model.
    """
    try:
        parameters = _parameters(config)
        if config.optimizer.name == "AdamW8bit" and (world_size or 1) > 1 and "RANK" not in os.environ:
            _build_on_ranks(config, world_size or 1)
        return [], parameters
    except ShardtrainError as error:
        return [error], None
    except (Exception, SystemExit) as error:
        return [own_files.explain(error, config)], None


def _parameters(config: Config) -> list[ParameterMemory]:
    if config.compile.enable:
        known = torch._dynamo.list_backends(exclude_tags=())
        backend = config.compile.backend
        if backend not in known:
            rule = f"is not a backend of torch.compile in PyTorch {torch.__version__}"
            raise ConfigError(Problem("compile.backend", backend, rule, f"use one of {', '.join(known)}"))
    task, module, shape, model = _model(config)
    layout = module.LAYOUT
    split = config.parallelism.tensor_parallel_degree > 1 and not hasattr(model, "tensor_plan")
    if split and (problems := tensor_parallel.misnamed(model, layout)):
        raise ConfigError(problems)
    spec.adapt(model, module, shape, config.lora, bool(task.num_labels))
    float8_modules.check(model, config)
    named = dict(model.named_parameters())
    if config.optimizer.name.endswith(".py"):
        optim.check_own(config.optimizer)
    optim.build(named.items(), config.optimizer, list(named))
    _check_ranks(model, layout, config)
    parameters = []
    for name, parameter in named.items():
        word = style_of(layout, name.rpartition(".")[0])
        is_split = word in SPLIT_STYLES
        parameters.append(ParameterMemory(parameter.numel(), is_split, word == "expert", parameter.requires_grad))
    quantize.take_out(model, layout, config.lora.base_dtype)
    return parameters


def _model(config: Config) -> tuple[tasks.LanguageModel | tasks.RowTask, ModuleType, Any, nn.Module]:
    """Return task, model file, shape, and the model with the task's head on the meta device."""
    task = tasks.open_task(config)
    module, shape = models.configured(config.model)
    with torch.device("meta"):
        return task, module, shape, task.adapt(models.build(module, shape), module.LAYOUT)


def _build_on_ranks(config: Config, world_size: int) -> None:
    """Build the optimizer of the first rank of each pipeline stage, on a fake process group and without memory.

    Only the sharded parameters tell whether a block of the optimizer's state is cut. Not done in a rank of torchrun:
    that process is about to join the real group.
    """
    stride = max(1, world_size // config.parallelism.pipeline_parallel_degree)
    for rank in range(0, world_size, stride):
        task, module, shape, model = _model(config)
        spec.adapt(model, module, shape, config.lora, bool(task.num_labels))
        names = [name for name, _ in model.named_parameters()]
        quantize.take_out(model, module.LAYOUT, config.lora.base_dtype)
        with fake_backend.join(rank, world_size) as world:
            mesh = distributed.build(config, world)
            runner = distributed.parallelize(model, module.LAYOUT, mesh, config, task.num_outputs(shape))
            with fake_backend.materialized(runner):
                optim.build(runner.optimizer_parameters().items(), config.optimizer, names)


def _check_ranks(model: nn.Module, layout: Layout, config: Config) -> None:
    """Each pipeline rank must have a parameter to train, or it has no optimizer."""
    p = config.parallelism
    degree = p.pipeline_parallel_degree
    if degree == 1 or not layout.layers:
        return
    layers: nn.ModuleDict = getattr(model, layout.layers)
    parts = stages.modules_per_stage(p, layout.first, layout.layers, list(layers), layout.last)
    trained = {name for name, tensor in model.named_parameters(remove_duplicate=False) if tensor.requires_grad}
    schedule = stages.schedule_name(p.pipeline_parallel_schedule) or ""
    for rank in range(degree):
        own = [name for index in stages.stages_of_rank(schedule, rank, degree, len(parts)) for name in parts[index]]
        if not any(name.startswith(f"{part}.") for name in trained for part in own):
            rule = f"leaves pipeline rank {rank} nothing to train: it holds {', '.join(own)}"
            fix = "name modules of each rank there or in lora.modules_to_save, or use other stages"
            raise ConfigError(Problem("lora.target_modules", config.lora.target_modules, rule, fix))
