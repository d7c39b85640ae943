"""Parallelism: ``parallelize`` turns a model, its layout and a mesh into a Runner.

Each file implements one axis of the mesh or one step of ``parallelize``.
"""

from __future__ import annotations

import torch
from torch import nn

from shardtrain.config.schema import Config
from shardtrain.distributed import (
    activation_checkpoint,
    compile,
    embedding_noise,
    expert_parallel,
    float8_modules,
    fsdp,
    hf_balance,
    hf_experts,
    hf_stages,
    outside_reads,
    pipeline_parallel,
)
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.mesh import BATCH_AXES, LOSS_AXES, Mesh, build
from shardtrain.distributed.multi_token_runner import MultiTokenRunner
from shardtrain.distributed.runner import ModelParts, PlainRunner, Runner, loss_terms
from shardtrain.distributed.tensor_parallel import plan as tensor_parallel
from shardtrain.distributed.tensor_parallel.split_vocabulary import SplitVocabulary
from shardtrain.layout import Layout

__all__ = ["BATCH_AXES", "LOSS_AXES", "Mesh", "Runner", "build", "parallelize"]


def use_chosen_kernels(model: nn.Module) -> None:
    """Replace linear layers and norms in place with the kernels that are faster on this CPU.

    The choice was measured before (``ops/chosen_kernels.py``).
    """
    from shardtrain.ops import chosen_kernels
    from shardtrain.ops.cpu import layer_norm, onednn_linear, rms_norm

    if chosen_kernels.chosen().uses("onednn_linear"):
        onednn_linear.use(model)
    if chosen_kernels.chosen().uses("rms_norm"):
        rms_norm.use(model)
    # always, because PyTorch's LayerNorm gradients are wrong in 16 bits on a CPU
    layer_norm.use(model)


def parallelize(
    model: nn.Module, layout: Layout, mesh: Mesh, config: Config, vocab_size: int
) -> Runner:
    """Cut a model into stages, replace modules, and shard it (a collective).

    All this happens on the meta device. ``Runner.materialize`` allocates the memory later. Steps that
    belong to disabled features are skipped.

    Raises:
        ConfigError: the model or the options do not support the mesh.
    """
    # Start with the steps that compare or replace modules of all stages. They need the full model.
    if config.training.dtype != "float32":
        model.to(getattr(torch, config.training.dtype))
    splits_hf_experts = expert_parallel.splits_hf_experts(model, config)
    if splits_hf_experts:
        hf_experts.check(model, config)
    if layout.expert or splits_hf_experts:
        # A collective, so ranks whose stage has no experts must call it too.
        expert_parallel.mesh_of_experts(mesh, config)
    if mesh.size("cp", "tp") > 1:
        context_parallel.check_cores(model, layout, mesh, config)
    if mesh.size("tp") > 1:
        tensor_parallel.prepare(model, config)
    if config.model.converters:
        float8_modules.convert(model, layout, mesh, config)
    if mesh.device.type == "cpu":
        use_chosen_kernels(model)
    has_experts = expert_parallel.has_experts([model])
    num_depths = len(getattr(model, layout.mtp_layers, ()))
    has_noise = config.training.neftune_noise_alpha is not None
    if has_noise:
        embedding_noise.check(model, layout)
    clip = None
    if config.optimizer.qk_clip_threshold > 0:
        # Imported here, because runs without it do not need the file.
        from shardtrain.distributed import qk_clip

        qk_clip.check(model, layout)
        clip = qk_clip.QKClip(mesh, config)

    # Prepare each pipeline stage of this rank, or the entire model without a pipeline.
    is_pipelined = mesh.size("pp") > 1
    modules = [model]
    if is_pipelined:
        modules = pipeline_parallel.cut(model, layout, mesh, config)
    for module in modules:
        if config.model.name.endswith(".py"):
            outside_reads.apply(module, layout, mesh, config)
        fsdp.sum_embedding_gradients_in_float32(module, mesh, config)
        if mesh.size("tp") > 1:
            tensor_parallel.apply(module, layout, mesh, config)
        if mesh.size("cp") > 1:
            context_parallel.apply(module, layout, mesh, config)
        if clip is not None:
            clip.apply(module, layout)
        if layout.expert:
            expert_parallel.apply(module, layout, mesh, config)
        if splits_hf_experts:
            expert_parallel.apply_to_hf(module, mesh, config)
        if hf_stages.is_hf(module):
            # Let experts without tokens take part in backward, whose reductions are collectives.
            hf_experts.give_gradients(module)
            hf_balance.apply(module, mesh, config)
        # before compile, to compile a layer together with its recomputation
        if config.activation_checkpoint.mode != "none":
            activation_checkpoint.apply(module, layout, mesh, config)
        if config.compile.enable:
            compile.apply(module, layout, mesh, config)
        # last, because FSDP keeps references to parameters, so none may be replaced after it
        fsdp.apply(module, layout, mesh, config)

    # Only the first stage of the model has the embedding, and so its noise.
    noise = None
    if has_noise:
        noise = embedding_noise.of_stage(modules[0], layout, mesh, config)

    # Choose the loss function. If tensor parallelism splits the vocabulary, each rank computes a part of
    # the loss.
    vocabulary = None
    if mesh.size("tp") > 1 and not config.parallelism.disable_loss_parallel:
        vocabulary = SplitVocabulary(mesh, vocab_size)
    chunk_loss = training_chunk_loss = None
    if vocabulary is None:
        chunk_loss = training_chunk_loss = compile.chunk_loss(config)
        terms = loss_terms(config)
        if not terms.is_cross_entropy:
            training_chunk_loss = compile.chunk_loss(config, terms)
    parts = ModelParts(
        modules,
        mesh,
        config,
        chunk_loss,
        vocabulary,
        has_experts,
        training_chunk_loss,
        noise,
        num_depths,
        clip,
    )
    if is_pipelined:
        return pipeline_parallel.PipelineRunner(parts, model, layout, vocab_size)
    if num_depths:
        return MultiTokenRunner(parts)
    return PlainRunner(parts)
