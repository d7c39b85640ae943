"""Parallelism: a pure model, its layout and a mesh become a Runner. One file per axis or step, in one visible order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardtrain.config.schema import Config
from shardtrain.distributed import (
    activation_checkpoint,
    compile,
    context_parallel,
    expert_parallel,
    fsdp,
    pipeline_parallel,
    reading,
    tensor_parallel,
)
from shardtrain.distributed.mesh import BATCH_AXES, LOSS_AXES, Mesh, build
from shardtrain.distributed.runner import ModelParts, PlainRunner, Runner
from shardtrain.layout import Layout
from shardtrain.ops import cpu_kernels, onednn_linear
from shardtrain.ops.cross_entropy import ChunkFunction, split_vocabulary_chunk_loss

__all__ = ["BATCH_AXES", "LOSS_AXES", "STEPS", "Mesh", "Runner", "build", "parallelize"]

STEPS: tuple[Callable[[nn.Module, Layout, Mesh, Config], None], ...] = (
    reading.apply,
    tensor_parallel.apply,
    context_parallel.apply,
    expert_parallel.apply,
    activation_checkpoint.apply,
    compile.apply,
    fsdp.apply,  # last: it must see final parameters
)
"""What happens to each part of a model, in order; cutting it into pipeline stages comes before."""


def parallelize(model: nn.Module, layout: Layout, mesh: Mesh, config: Config, vocab_size: int) -> Runner:
    """Cut, swap and shard a model that is still on the meta device; no memory is used before ``materialize``."""
    if config.training.dtype != "float32":
        model.to(getattr(torch, config.training.dtype))
    if layout.expert:
        expert_parallel.mesh_of_experts(mesh, config)  # by all ranks together, also those of a stage without experts
    context_parallel.check_cores(model, layout, mesh, config)
    if mesh.device.type == "cpu" and cpu_kernels.chosen().uses("onednn_linear"):
        onednn_linear.use(model)
    piped = mesh.size("pp") > 1
    modules = pipeline_parallel.cut(model, layout, mesh, config) if piped else [model]
    for module in modules:
        for step in STEPS:
            step(module, layout, mesh, config)
    parts = ModelParts(modules, mesh, config, _chunk_loss(mesh, config, vocab_size))
    return pipeline_parallel.PipelineRunner(parts, model, layout, vocab_size) if piped else PlainRunner(parts)


def _chunk_loss(mesh: Mesh, config: Config, vocab_size: int) -> ChunkFunction | None:
    if mesh.size("tp") > 1 and not config.parallelism.disable_loss_parallel:
        return split_vocabulary_chunk_loss(tensor_parallel.SplitVocabulary(mesh, vocab_size))
    return compile.compiled_chunk_loss(config)
