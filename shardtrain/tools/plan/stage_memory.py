"""Bytes that one micro-batch needs on one pipeline stage, at each moment of forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from shardtrain.ops import cross_entropy, split_cross_entropy
from shardtrain.ops.linear_cross_entropy import WORTH_IT_BYTES, rows_of_chunk, saved_bytes
from shardtrain.tools.plan.fsdp_memory import GatheredBytes
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.layer_memory import (
    Kernels,
    LayerBytes,
    gathered_input_bytes,
    layer_bytes,
    norm_bytes,
    recomputes,
)
from shardtrain.tools.plan.parameter_shards import trained, unsharded
from shardtrain.tools.plan.shapes import Layer, ModelShape

BEFORE_BACKWARD = ("the end of forward", "gathering the logits", "the loss")
"""Names of the moments before the backward pass of a micro-batch."""


@dataclass(frozen=True)
class Moment:
    """Bytes of activations, FSDP's buffers and gradients at one moment.

    Accumulated gradients are not included.
    """

    name: str
    activations: int
    gathered: int = 0
    gradients: int = 0


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one micro-batch on one pipeline stage.

    Attributes:
        kept: Activations from forward to backward.
        extra: Bytes that PyTorch's pipeline stage keeps in addition. It is negative for a shared buffer.
        output: Part of ``extra`` for the logits.
        most: Largest activations of any moment.
        waiting: Activations that wait for the backward pass of weights, in schedules that split backward.
        moments: Bytes at each possible peak of the forward and backward pass, in their order.
    """

    kept: int
    extra: int
    output: int
    most: int
    waiting: int
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class _HeadBytes:
    """Bytes of the final norm, the logits and the loss on the last stage.

    Attributes:
        norm: Saved by the norm, and the input of the head.
        logits: Logits of the micro-batch, or of a chunk of it.
        chunk: Float32 tensors of the loss.
        products: Gradients that a loss at the head computes in forward. Then logits are not kept.
    """

    norm: int
    logits: int
    chunk: int
    products: int


def stage_bytes(model: ModelShape, job: PlannedJob, index: int, kernels: Kernels) -> StageBytes:
    """Count the layers of a stage, the ends of the model if the stage has them, and each moment."""
    width = job.compute_width
    tokens = job.local_tokens
    stream = tokens // job.tp * model.dim * width
    layers = _layers(model, job, index, kernels)
    # Sines and cosines of the rotary embedding, in float32.
    angles = 2 * tokens * (model.layers[0].qk_dim // 2) * 4
    shared = angles + _mask_bytes(model, job, index)
    kept = shared
    recomputed = 0
    for layer in layers:
        kept += layer.kept
        # Forward frees what backward recomputes, but only at the end of each layer.
        recomputed = max(recomputed, layer.full - layer.kept)
    buffers = GatheredBytes(model, job, index)
    moments = [Moment("the end of forward", kept + recomputed, buffers.end_of_forward)]

    end_bytes = 0
    output = 0
    if index == len(job.stages) - 1:
        head = _head_bytes(model, job, stream, kernels)
        kept_logits = 0 if head.products else head.logits
        moments += _head_moments(model, job, head, kept, kept_logits, buffers)
        end_bytes = head.norm + kept_logits
        # PyTorch's pipeline stage holds its output until its backward pass ends.
        output = kept_logits if job.pp > 1 else 0

    # Backward frees the layers in reverse order. The last layer has the most activations before it, and
    # the first layer has the most gradients after it.
    if layers:
        of_last = kept + layers[-1].working - layers[-1].kept
        moments.append(
            Moment("backward of a layer", of_last, buffers.backward_of_last, buffers.head_shard)
        )
    if len(layers) > 1:
        reduced = buffers.all_shards - buffers.embed_shard - buffers.layer_shard
        of_first = shared + layers[0].working
        moments.append(
            Moment("backward of the first layer", of_first, buffers.backward_of_layer, reduced)
        )
    if index == 0 and trained(model.first):
        # CPU kernels add up the gradient of an embedding in float32 and then cast it.
        bytes_per_element = width
        if kernels != "cuda" and width < 4:
            bytes_per_element += 4
        of_embedding = unsharded(model.first, job.tp, job.ep) * bytes_per_element + stream
        reduced = buffers.all_shards - buffers.embed_shard
        moments.append(
            Moment("backward of the embedding", of_embedding, buffers.backward_of_embed, reduced)
        )

    extra = output
    saves_received = kernels == "cuda" or recomputes(job, 0) != "none"
    if index > 0 and job.stages[index] and saves_received:
        # The input that the first layer saves is the buffer in which the stage received it.
        extra -= stream
    return StageBytes(
        kept=kept + end_bytes,
        extra=extra,
        output=output,
        most=max(moment.activations for moment in moments),
        waiting=_waiting_bytes(model, job, index),
        moments=tuple(moments),
    )


def _mask_bytes(model: ModelShape, job: PlannedJob, index: int) -> int:
    """Return the bytes of the masks that the layers of a stage of a ``transformers`` network share.

    A causal mask without a window is an argument of the attention function, except of an eager one. Context
    parallelism needs no masks.
    """
    if job.cp > 1:
        return 0
    masks = {}
    for number in job.stages[index]:
        layer = model.layers[number]
        if layer.attention == "eager":
            masks[layer.limit] = job.compute_width
        elif layer.attention and layer.limit:
            masks[layer.limit] = 1
    return sum(masks.values()) * job.local_tokens * job.seq_len


def _head_moments(
    model: ModelShape,
    job: PlannedJob,
    head: _HeadBytes,
    kept: int,
    kept_logits: int,
    buffers: GatheredBytes,
) -> list[Moment]:
    """Return the moments of the logits and the loss. ``kept`` are the bytes of the layers."""
    moments = []
    before = kept + head.norm
    if job.tp > 1 and not job.loss_parallel:
        # The columns of this rank, the columns of all ranks, and a copy in the right order.
        copies = head.logits // job.tp + 2 * head.logits
        moments.append(Moment("gathering the logits", before + copies, buffers.loss))
    of_loss = 2 * head.logits + head.chunk + head.products
    moments.append(Moment("the loss", before + of_loss, buffers.loss))
    if job.heads > 1 and job.pp > 1:
        # The stage returns the logits of all predictions as one tensor. Backward copies their gradients into one
        # tensor, while the output of the stage still exists (it is counted as ``output``).
        of_copy = 2 * head.logits
        moments.append(Moment("gradients of all logits", before + of_copy, buffers.loss))
    weight_gradient = unsharded(trained(model.last), job.tp, job.ep) * job.compute_width
    input_gradient = job.local_tokens * model.dim * job.compute_width
    of_head = kept_logits + weight_gradient + input_gradient
    moments.append(Moment("backward of the head", before + of_head, buffers.backward_of_head))
    return moments


def _layers(model: ModelShape, job: PlannedJob, index: int, kernels: Kernels) -> list[LayerBytes]:
    """Count each layer of a stage."""
    # Equal layers are the same object. They are found by identity, because hashing a layer takes as
    # long as counting.
    counted: dict[tuple[int, str], LayerBytes] = {}
    layers = []
    for place, number in enumerate(job.stages[index]):
        layer = model.layers[number]
        mode = recomputes(job, place)
        key = (id(layer), mode)
        if key not in counted:
            counted[key] = layer_bytes(layer, job, model.dim, mode, kernels)
        layers.append(counted[key])
    return layers


def _head_bytes(model: ModelShape, job: PlannedJob, stream: int, kernels: Kernels) -> _HeadBytes:
    """Count the final norm, the logits and the loss."""
    width = job.compute_width
    tokens = job.local_tokens
    rows_of_norm = tokens // job.tp
    is_layer_norm = model.layers[-1].layer_norm
    norm = norm_bytes(rows_of_norm * model.dim, rows_of_norm, job, kernels, is_layer_norm)
    norm += gathered_input_bytes(job, stream)
    tokens *= job.heads
    columns = model.vocab
    if job.loss_parallel:
        columns = -(-model.vocab // job.tp)  # rounded up
    if job.loss == "fused":
        chunk = _chunk_bytes(job, columns, kernels)
        return _HeadBytes(norm, logits=0, chunk=chunk, products=0)

    logits = tokens * columns * width
    if job.loss == "whole":
        # A float32 copy, its log-softmax and its gradient. Compiled code needs one copy less.
        num_copies = 2 if job.fused else 3
        chunk = tokens * columns * 4 * num_copies
        return _HeadBytes(norm, logits, chunk, products=0)
    saved_by_chunks = saved_bytes(tokens, model.dim, model.vocab, width)
    if job.loss == "at head" and saved_by_chunks >= WORTH_IT_BYTES:
        # The gradients of the head's weight and input are computed immediately for each chunk of logits.
        # The chunk is then freed.
        logits_per_chunk = rows_of_chunk(tokens, model.vocab) * columns
        weight_gradient = 0
        if trained(model.last):
            weight_gradient = columns * model.dim * 4
        input_gradient = tokens * model.dim * width
        return _HeadBytes(
            norm,
            logits=logits_per_chunk * width,
            chunk=logits_per_chunk * 4 * 2,
            products=weight_gradient + input_gradient,
        )
    return _HeadBytes(norm, logits, _chunk_bytes(job, columns, kernels), products=0)


def _chunk_bytes(job: PlannedJob, columns: int, kernels: Kernels) -> int:
    """Return the bytes of the float32 tensors of a loss that is computed in chunks of rows."""
    width = job.compute_width
    tokens = job.local_tokens
    chunk_numel = cross_entropy.CHUNK_NUMEL
    if kernels != "cuda" and not job.fused:
        chunk_numel = cross_entropy.CPU_CHUNK_NUMEL
    rows = min(tokens, max(1, chunk_numel // columns))
    is_split = job.tp > 1 and job.loss_parallel
    # ops/split_cross_entropy.py keeps exponentials, in the memory of the gradient if that is float32.
    if is_split and width == 4:
        return rows * columns * 4
    keeps_all = tokens * columns <= split_cross_entropy.MOST_KEPT_NUMEL
    if is_split and kernels != "cuda" and keeps_all:
        return (tokens + rows) * columns * 4
    copies = 1
    if width < 4:
        copies += 1
    if is_split:
        copies += 1
    if rows < tokens:
        copies += 1  # the logits of the previous chunk still exist
    return rows * columns * 4 * copies


def _waiting_bytes(model: ModelShape, job: PlannedJob, index: int) -> int:
    """Return the bytes that wait for the backward pass of weights: results of linears, inputs and
    outputs of norms.
    """
    features_by_layer: dict[int, int] = {}
    features = 0
    for number in job.stages[index]:
        layer = model.layers[number]
        if id(layer) not in features_by_layer:
            features_by_layer[id(layer)] = _waiting_features(layer, job)
        features += features_by_layer[id(layer)]
    return features * job.local_tokens * job.compute_width


def _waiting_features(layer: Layer, job: PlannedJob) -> int:
    """Return the number of features per token in the outputs of a layer's linears, and in the inputs and
    outputs of its norms.
    """
    norms = 0
    for parameter in layer.parameters:
        if parameter.style == "sequence":
            norms += parameter.shape[0]
    outputs = 0
    for linear in layer.linears:
        ranks = job.tp if linear.style == "colwise" else 1
        outputs += linear.out_features // ranks
    return 2 * (norms // job.tp) + outputs
