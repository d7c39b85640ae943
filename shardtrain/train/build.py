"""How a run is put together for its first step."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from shardtrain import distributed, optim
from shardtrain.checkpoint.collectives import first_rank
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config import changes, derived
from shardtrain.config.schema import Config
from shardtrain.distributed import BATCH_AXES
from shardtrain.distributed.process_group import World
from shardtrain.ops.seeding import set_determinism
from shardtrain.train import reference_models
from shardtrain.train.model import build_model
from shardtrain.train.open_together import require_same_data, together
from shardtrain.train.run import Run
from shardtrain.utils.allocator import keep_freed_memory
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.ops.chosen_kernels import Kernels


def set_numerics(config: Config, device: torch.device) -> None:
    """PyTorch's switches for determinism, and the kernels of a CPU, before anything is computed (a collective)."""
    if config.debug.deterministic:
        set_determinism(config.debug.deterministic_warn_only)
    kernels = use_fastest_kernels(config, device)
    if kernels is not None:
        logger.info(kernels.describe())


def use_fastest_kernels(config: Config, device: torch.device) -> Kernels | None:
    """Let models built from now on compute by the kernels that a CPU is fastest with (a collective).

    None where that is not wanted: on other devices, and where the config asks for PyTorch's own.
    """
    if device.type != "cpu":
        return None
    from shardtrain.ops import chosen_kernels
    from shardtrain.ops.cpu import kernel_speed  # a run on an accelerator imports no kernel of a CPU

    if config.training.cpu_kernels == "pytorch" or config.debug.deterministic:
        chosen_kernels.use(chosen_kernels.PYTORCH)
        return None
    # what is fastest depends on the processor, and ranks that computed differently would not agree to the last bit
    keep_freed_memory()  # before the measurement, which would see pages cleared
    kernels = chosen_kernels.Kernels(**first_rank(lambda: asdict(kernel_speed.remembered_or_measured())))
    chosen_kernels.use(kernels)
    return kernels


def build(config: Config, world: World) -> Run:
    """Everything for the first step: mesh, model on it with its initial weights, optimizer, data."""
    # the model on its mesh, and the optimizer of what this rank holds of it
    mesh = distributed.build(config, world)
    built = build_model(config, mesh, may_compile=True)
    if built.config.compile.enable and not config.compile.enable:
        logger.info(
            "layers and the loss are compiled, which takes a minute at the first start and a few seconds at the next "
            "ones, and is faster in a run as long as this one (compile.enable = false leaves it out)"
        )
    config = built.config
    task = built.task
    runner = built.runner
    training = config.training
    optimizer = optim.build(runner.optimizer_parameters().items(), config.optimizer, built.names, config.debug.seed)
    if config.optimizer.early_step_in_backward:
        runner.update_in_backward(optimizer)
    scaler = None
    # float16 alone has too few small numbers for gradients as they are
    if derived.compute_dtype(config) == "float16":
        scaler = optim.LossScaler(training.initial_loss_scale, training.loss_scale_growth_interval)
    # the data; each data-parallel rank reads its own rows of them
    with together(config):
        stream = task.open_dataloader(
            batch_rank=mesh.rank(*BATCH_AXES),
            num_batch_ranks=mesh.size(*BATCH_AXES),
            accumulation=derived.accumulation_steps(config, world.size),
        )
    task.check(stream, built.module, built.shape)
    reference_models.hold(task, runner, config, mesh)
    require_same_data(stream, "the training data")
    total_steps = training.steps
    if training.epochs is not None and stream.steps_left is not None:
        total_steps = stream.steps_left
    # Mean over the tokens: attention reaches over the length of a sequence, which differs between rows of a task.
    tokens_of = {length: length * count for length, count in stream.sequence_lengths.items()} or {training.seq_len: 1}
    flops = sum(count * built.flops_per_token(length) for length, count in tokens_of.items()) / sum(tokens_of.values())
    run = Run(config, mesh, runner, optimizer, scaler, stream, TrainState(), total_steps, built.num_params, flops)
    run.names = tuple(built.names)
    run.files = changes.file_hashes(config)
    run.adapters = built.adapters
    return run
