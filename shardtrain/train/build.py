"""Build everything that a run needs before its first step: numerics, mesh, model, optimizer and data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from shardtrain import distributed, optim
from shardtrain.checkpoint.collectives import first_rank
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config import changes, derived
from shardtrain.config.schema import Config
from shardtrain.distributed import BATCH_AXES
from shardtrain.distributed.process_group import World
from shardtrain.ops.seeding import set_determinism
from shardtrain.optim.moving_average import MovingAverage
from shardtrain.train import reference_models
from shardtrain.train.open_together import require_same_data, together
from shardtrain.train.run import Run
from shardtrain.train.task_model import BuiltModel, build_model
from shardtrain.utils.allocator import keep_freed_memory
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.data import DataLoader
    from shardtrain.ops.chosen_kernels import Kernels


def set_numerics(config: Config, device: torch.device) -> None:
    """Set PyTorch's determinism switches, and choose the CPU kernels (a collective).

    Call it before any computation.
    """
    if config.debug.deterministic:
        set_determinism(config.debug.deterministic_warn_only)
    kernels = use_fastest_kernels(config, device)
    if kernels is not None:
        logger.info(kernels.describe())


def use_fastest_kernels(config: Config, device: torch.device) -> Kernels | None:
    """Choose the fastest kernels of this CPU for all models that are built afterwards (a collective).

    Returns None on other devices, or if the configuration requires PyTorch's own kernels.
    """
    if device.type != "cpu":
        return None
    # imported here, because a run on an accelerator must not import CPU kernels
    from shardtrain.ops import chosen_kernels
    from shardtrain.ops.cpu import kernel_speed

    if config.training.cpu_kernels == "pytorch" or config.debug.deterministic:
        chosen_kernels.use(chosen_kernels.PYTORCH)
        return None
    # Call this before the measurement, which would otherwise include the time to clear new memory pages.
    keep_freed_memory()
    # Rank 0 measures for all ranks, because results of different kernels differ in the last bits.
    kernels = chosen_kernels.Kernels(
        **first_rank(lambda: asdict(kernel_speed.remembered_or_measured()))
    )
    chosen_kernels.use(kernels)
    return kernels


def build(config: Config, world: World) -> Run:
    """Build mesh, sharded model with initial weights, optimizer and data."""
    # Build the model on its mesh, and the optimizer of this rank's shards.
    mesh = distributed.build(config, world)
    built = build_model(config, mesh, may_compile=True)
    if built.config.compile.enable and not config.compile.enable:
        logger.info(
            "compile.enable: torch.compile is used, because this run is long enough to benefit; the first start "
            "takes about a minute longer, later starts a few seconds (compile.enable=false disables it)"
        )
    config = built.config
    task = built.task
    runner = built.runner
    training = config.training
    optimizer = optim.build(
        runner.optimizer_parameters().items(), config.optimizer, built.names, config.debug.seed
    )
    if config.optimizer.early_step_in_backward:
        runner.update_in_backward(optimizer)
    # Scale the loss for float16, whose range is too small for many gradients.
    scaler = None
    if derived.compute_dtype(config) == "float16":
        scaler = optim.LossScaler(training.initial_loss_scale, training.loss_scale_growth_interval)

    # Open the data. Each data-parallel rank reads different rows.
    ramp_options: dict[str, Any] = {}
    if training.batch_ramp or training.sequence_ramp:
        ramp_options["sizes"] = derived.step_sizes(config, world.size)
    with together(config):
        stream = task.open_dataloader(
            batch_rank=mesh.rank(*BATCH_AXES),
            num_batch_ranks=mesh.size(*BATCH_AXES),
            accumulation=derived.accumulation_steps(config, world.size),
            **ramp_options,
        )
    task.check(stream, built.module, built.shape)
    reference_models.load_frozen_models(task, runner, config, mesh)
    require_same_data(stream, "the training data")

    # Put everything together. With training.epochs, the data determine the number of steps.
    total_steps = training.steps
    if training.epochs is not None and stream.steps_left is not None:
        total_steps = stream.steps_left
    flops_per_token = _mean_flops_per_token(built, stream)
    run = Run(
        config,
        mesh,
        runner,
        optimizer,
        scaler,
        stream,
        TrainState(),
        total_steps,
        built.num_params,
        flops_per_token,
    )
    # FLOPs per token depend on the sequence length, which a ramp changes.
    for _, length in training.sequence_ramp:
        run.flops_of_lengths[length] = built.flops_per_token(length)
    run.names = tuple(built.names)
    run.files = changes.file_hashes(config)
    run.adapters = built.adapters
    if training.ema_decay is not None:
        run.moving_average = MovingAverage(runner.parameters(), training.ema_decay)
    return run


def _mean_flops_per_token(built: BuiltModel, stream: DataLoader) -> float:
    """Return the FLOPs per token, as the mean over all tokens of the data.

    The FLOPs of attention depend on the length of a row, and the rows of some tasks differ in length.
    """
    rows_of_length = stream.sequence_lengths
    # Without known lengths, assume that all rows are full.
    if not rows_of_length:
        return float(built.flops_per_token(built.config.training.seq_len))
    flops = 0.0
    num_tokens = 0
    for length, rows in rows_of_length.items():
        flops += length * rows * built.flops_per_token(length)
        num_tokens += length * rows
    if built.flops_per_row is not None:
        for row in stream.feed.rows:  # type: ignore[attr-defined]
            flops += built.flops_per_row(row)
    return flops / num_tokens
