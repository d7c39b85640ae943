"""Build the model of a configuration on the meta device, to find errors and count its parameters."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardtrain import distributed, models, optim, tasks
from shardtrain.config import stages
from shardtrain.config.schema import Config
from shardtrain.distributed import (
    embedding_noise,
    expert_parallel,
    fake_backend,
    float8_modules,
    hf_experts,
    hf_stages,
    pipeline_parallel,
    qk_clip,
)
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.tensor_parallel import plan as tensor_parallel
from shardtrain.layout import SPLIT_STYLES, Layout, style_of
from shardtrain.lora import quantize, spec
from shardtrain.train.preflight import longest_sequence, own_files
from shardtrain.train.preflight.memory_fit import ParameterMemory
from shardtrain.utils.errors import ConfigError, Problem, ShardtrainError


def build(
    config: Config, world_size: int | None = None
) -> tuple[list[ShardtrainError], list[ParameterMemory] | None]:
    """Build the model, with head and adapters, and its optimizer on the meta device.

    Returns:
        The errors that a run on ``world_size`` ranks would raise, and the parameters of the unsharded model.
        None instead of the parameters if there are errors.
    """
    try:
        parameters = _parameters(config)
        if (
            config.optimizer.name == "AdamW8bit"
            and (world_size or 1) > 1
            and "RANK" not in os.environ
        ):
            _build_on_ranks(config, world_size or 1)
        return [], parameters
    except ShardtrainError as error:
        return [error], None
    except (Exception, SystemExit) as error:
        return [own_files.explain(error, config)], None


def _parameters(config: Config) -> list[ParameterMemory]:
    """Build the unsharded model and its optimizer, and return its parameters.

    Raises:
        ShardtrainError: a run with this configuration would raise it too.
    """
    if config.compile.enable:
        backends = torch._dynamo.list_backends(exclude_tags=())
        backend = config.compile.backend
        if backend not in backends:
            rule = f"is not a backend of torch.compile in PyTorch {torch.__version__}"
            raise ConfigError(
                Problem("compile.backend", backend, rule, f"use one of {', '.join(backends)}")
            )
    task, module, shape, model = _model(config)
    layout = module.LAYOUT
    longest_sequence.check(model, config)
    if config.parallelism.tensor_parallel_degree > 1:
        tensor_parallel.check(model, layout, config)
    if config.training.neftune_noise_alpha is not None:
        embedding_noise.check(model, layout)
    if config.optimizer.qk_clip_threshold > 0:
        qk_clip.check(model, layout)
    if config.parallelism.context_parallel_degree > 1 and hasattr(model, "hf"):
        context_parallel.check_network(model, config)
    if expert_parallel.splits_hf_experts(model, config):
        hf_experts.check(model, config)
    # Adapters, float8 and the optimizer check their options themselves when they are built.
    spec.adapt(model, module, shape, config.lora, bool(task.num_labels))
    float8_modules.check(model, config)
    named = dict(model.named_parameters())
    if config.optimizer.name.endswith(".py"):
        optim.check_own(config.optimizer)
    optimizer = optim.build(named.items(), config.optimizer, list(named))
    ema_decay = config.training.ema_decay
    if ema_decay is not None and hasattr(optimizer, "evaluation_weights"):
        rule = (
            f"averages weights that {config.optimizer.name} does not evaluate (evaluation_weights)"
        )
        raise ConfigError(Problem("training.ema_decay", ema_decay, rule, "remove it"))
    _check_ranks(model, layout, config)
    # Collect the sizes of the parameters, from which later checks estimate the memory.
    parameters = []
    for name, parameter in named.items():
        style = style_of(layout, name.rpartition(".")[0])
        parameters.append(
            ParameterMemory(
                num_elements=parameter.numel(),
                tensor=style in SPLIT_STYLES,
                expert=style == "expert",
                trained=parameter.requires_grad,
            )
        )
    quantize.remove_quantized_weights(model, layout, config.lora.base_dtype)
    return parameters


def _model(
    config: Config,
) -> tuple[tasks.LanguageModel | tasks.RowTask, ModuleType, Any, nn.Module]:
    """Build the model with the task's head on the meta device.

    Returns:
        The task, the Python module that defines the model, the model's shape, and the model.
    """
    task = tasks.open_task(config)
    module, shape = models.configured(config.model)
    with torch.device("meta"):
        model = task.adapt(models.build(module, shape), module.LAYOUT)
    return task, module, shape, model


def _build_on_ranks(config: Config, world_size: int) -> None:
    """Build the optimizer on one rank of each pipeline stage, with a fake process group and fake tensors.

    An 8-bit optimizer raises an error if sharding would split one of its blocks, so it must be built on
    sharded parameters. Do not call this in a rank that torchrun has started, because that process will join
    the real process group.
    """
    stride = max(1, world_size // config.parallelism.pipeline_parallel_degree)
    for rank in range(0, world_size, stride):
        task, module, shape, model = _model(config)
        spec.adapt(model, module, shape, config.lora, bool(task.num_labels))
        names = [name for name, _ in model.named_parameters()]
        quantize.remove_quantized_weights(model, module.LAYOUT, config.lora.base_dtype)
        with fake_backend.join(rank, world_size) as world:
            mesh = distributed.build(config, world)
            runner = distributed.parallelize(
                model, module.LAYOUT, mesh, config, task.num_outputs(shape)
            )
            with fake_backend.materialized(runner):
                optim.build(runner.optimizer_parameters().items(), config.optimizer, names)


def _check_ranks(model: nn.Module, layout: Layout, config: Config) -> None:
    """Raise ConfigError if a pipeline rank has no parameter to train, and so no optimizer."""
    p = config.parallelism
    degree = p.pipeline_parallel_degree
    if degree == 1 or not layout.layers:
        return
    parts = pipeline_parallel.chain_names(model, layout).per_stage(p)
    if hf_stages.is_hf(model):
        pipeline_parallel.check(model, layout, config)
    trained = {
        name
        for name, tensor in model.named_parameters(remove_duplicate=False)
        if tensor.requires_grad
    }
    schedule = stages.schedule_name(p.pipeline_parallel_schedule) or ""
    # With interleaved schedules, a rank has several stages.
    for rank in range(degree):
        modules: list[str] = []
        for stage in stages.stages_of_rank(schedule, rank, degree, len(parts)):
            modules += parts[stage]
        prefixes = tuple(f"{module}." for module in modules)
        if not any(name.startswith(prefixes) for name in trained):
            rule = f"leaves pipeline rank {rank} without a parameter to train: it has {', '.join(modules)}"
            fix = "name modules of each rank there or in lora.modules_to_save, or use other stages"
            raise ConfigError(Problem("lora.target_modules", config.lora.target_modules, rule, fix))
