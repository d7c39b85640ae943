"""Parallelism: a pure model, its layout and a mesh become a Runner. One file per axis or step, in one visible order."""

from __future__ import annotations

import torch
from torch import nn

from shardtrain.config.schema import Config
from shardtrain.distributed import (
    activation_checkpoint,
    compile,
    context_parallel,
    expert_parallel,
    float8,
    fsdp,
    pipeline_parallel,
    reading,
    tensor_parallel,
)
from shardtrain.distributed.mesh import BATCH_AXES, LOSS_AXES, Mesh, build
from shardtrain.distributed.runner import ModelParts, PlainRunner, Runner
from shardtrain.layout import Layout
from shardtrain.ops import cpu_kernels, layer_norm, onednn_linear, rms_norm

__all__ = ["BATCH_AXES", "LOSS_AXES", "Mesh", "Runner", "build", "parallelize"]


def use_chosen_kernels(model: nn.Module) -> None:
    """Let a model's linear layers and norms be computed by the kernels that this CPU has chosen, in place."""
    if cpu_kernels.chosen().uses("onednn_linear"):
        onednn_linear.use(model)
    if cpu_kernels.chosen().uses("rms_norm"):
        rms_norm.use(model)
    layer_norm.use(model)  # whatever is faster: PyTorch's gradients in 16 bits are wrong


def parallelize(model: nn.Module, layout: Layout, mesh: Mesh, config: Config, vocab_size: int) -> Runner:
    """Cut, swap and shard a model that is still on the meta device; no memory is used before ``materialize``.

    What is off is not called: the file of an axis of one rank has no part in a run.
    """
    if config.training.dtype != "float32":
        model.to(getattr(torch, config.training.dtype))
    if layout.expert:
        expert_parallel.mesh_of_experts(mesh, config)  # by all ranks together, also those of a stage without experts
    if mesh.size("cp", "tp") > 1:
        context_parallel.check_cores(model, layout, mesh, config)
    if config.model.converters:
        float8.convert(model, layout, mesh, config)
    if mesh.device.type == "cpu":
        use_chosen_kernels(model)
    has_experts = expert_parallel.has_experts([model])
    piped = mesh.size("pp") > 1
    modules = pipeline_parallel.cut(model, layout, mesh, config) if piped else [model]
    for module in modules:
        if config.model.name.endswith(".py"):
            reading.apply(module, layout, mesh, config)
        if mesh.size("tp") > 1:
            tensor_parallel.apply(module, layout, mesh, config)
        if mesh.size("cp") > 1:
            context_parallel.apply(module, layout, mesh, config)
        if layout.expert:
            expert_parallel.apply(module, layout, mesh, config)
        # a layer that recomputes is compiled around the recomputation, or has been compiled within it
        if config.activation_checkpoint.mode != "none":
            activation_checkpoint.apply(module, layout, mesh, config)
        if config.compile.enable:
            compile.apply(module, layout, mesh, config)
        # last: FSDP keeps the parameters that it finds, so that none may be replaced after it
        fsdp.apply(module, layout, mesh, config)
    vocabulary = None
    if mesh.size("tp") > 1 and not config.parallelism.disable_loss_parallel:
        vocabulary = tensor_parallel.SplitVocabulary(mesh, vocab_size)
    chunk_loss = None
    if config.compile.enable and vocabulary is None:
        chunk_loss = compile.compiled_chunk_loss(config)
    parts = ModelParts(modules, mesh, config, chunk_loss, vocabulary, has_experts)
    return pipeline_parallel.PipelineRunner(parts, model, layout, vocab_size) if piped else PlainRunner(parts)
