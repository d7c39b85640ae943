"""Bytes of activations that autograd saves in one layer for one micro-batch, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from shardtrain.ops.cpu import expert_mix, rms_norm
from shardtrain.ops.gated_delta_net import BLOCK
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.network_memory import SavedBytes
from shardtrain.tools.plan.parameter_shards import trained, unsharded
from shardtrain.tools.plan.shapes import ExpertShape, Layer, Linear, RecurrenceShape

Kernels = Literal["cpu", "cpu by rows", "cuda"]
"""Kernels of a device. "cpu by rows" has the RMSNorm of ops/cpu/rms_norm.py, "cpu" has no fused RMSNorm."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for one micro-batch.

    Attributes:
        full: Saved for backward without recomputation.
        kept: Saved for backward with the configured recomputation.
        working: Maximum during the layer's backward pass.
    """

    full: int
    kept: int
    working: int


def recomputes(job: PlannedJob, place: int) -> str:
    """Return the recomputation of the layer at an index within its stage: "none", "full", "op" or "core"."""
    if job.recompute in ("none", "full", "op", "core"):
        return job.recompute
    return "full" if place % int(job.recompute) == 0 else "none"


def gathered_input_bytes(job: PlannedJob, stream_bytes: int) -> int:
    """Return the bytes of the input of a linear that is split over tp: it is gathered along the sequence.

    ``stream_bytes`` is this rank's part of the residual stream.
    """
    return stream_bytes * job.tp


def norm_bytes(numel: int, rows: int, job: PlannedJob, kernels: Kernels, layer_norm: bool) -> int:
    """Return the bytes that a norm saves of its input.

    Its output is saved by the next linear and not included.
    """
    if layer_norm or _is_fused_norm(numel, job, kernels):
        statistics_per_row = 2 if layer_norm else 1
        return numel * job.compute_width + rows * 4 * statistics_per_row
    # A float32 copy of the input, and the normalized input in float32.
    return numel * 8 + rows * 4


def _is_fused_norm(numel: int, job: PlannedJob, kernels: Kernels) -> bool:
    """True if an RMSNorm saves only its input. Small or compiled norms on a CPU save more."""
    if kernels == "cuda":
        return True
    return kernels == "cpu by rows" and not job.fused and numel >= rms_norm.SMALLEST_NUMEL


@lru_cache(maxsize=8192)
def layer_bytes(layer: Layer, job: PlannedJob, dim: int, mode: str, kernels: Kernels) -> LayerBytes:
    """Return the bytes of a layer with the recomputation ``mode`` (see ``recomputes``)."""
    if layer.tower is not None:
        job = layer.tower.job(job)
        dim = layer.tower.dim
    width = job.compute_width
    tokens_per_tensor_rank = job.local_tokens // job.tp
    stream = tokens_per_tensor_rank * dim * width
    gathered = gathered_input_bytes(job, stream)
    norm = _block_norm_bytes(layer, tokens_per_tensor_rank, dim, job, kernels)
    attention = _attention_bytes(layer, job, dim, norm, gathered, kernels)
    ffn = _feed_forward_bytes(layer, job, dim, norm, gathered, kernels)

    full = attention.saved + ffn.saved
    if mode == "none":
        kept = full
    elif mode == "full":
        kept = stream
    elif mode == "core":
        kept = full - attention.score_matrices
    else:
        # Selective recomputation keeps the results of attention, which are expensive to compute again.
        of_attention = attention.output + attention.log_sum_exp
        kept = stream + of_attention + _kept_products(layer, job, dim)

    # Backward starts with the feed-forward: gradients of its products, of the stream, and of its
    # own weights.
    weight_gradients = unsharded(trained(layer.parameters), job.tp, job.ep) * width
    ffn_share = ffn.saved / max(1, full)
    ffn_weight_gradients = int(weight_gradients * ffn_share / 3)
    start = full + stream + ffn.gradients + ffn_weight_gradients
    if job.tp > 1:
        start += 2 * gathered
    # At the end of backward, only the tensors of attention are left, and the gradients of all weights exist.
    end = attention.saved + 2 * stream + gathered
    end += attention.queries_keys_values + weight_gradients
    working = max(start, end) + layer.restored_numel * width
    if mode != "none":
        working += stream
    return LayerBytes(full, kept, working)


def _block_norm_bytes(
    layer: Layer, tokens: int, dim: int, job: PlannedJob, kernels: Kernels
) -> int:
    """Return the bytes that the norm before attention or before the feed-forward saves."""
    numel = tokens * dim
    size = norm_bytes(numel, tokens, job, kernels, layer.layer_norm)
    if layer.layer_norm or _is_fused_norm(numel, job, kernels):
        return size
    # Only the gradient of the norm's weight needs the normalized copy.
    for parameter in layer.parameters:
        if parameter.style == "sequence" and parameter.trained:
            return size
    return size - numel * 4


@dataclass(frozen=True)
class _AttentionBytes:
    """Bytes of attention: all that is saved, and parts of it."""

    saved: int
    queries_keys_values: int
    output: int
    log_sum_exp: int
    score_matrices: int


def _attention_bytes(
    layer: Layer,
    job: PlannedJob,
    dim: int,
    norm: int,
    gathered: int,
    kernels: Kernels,
) -> _AttentionBytes:
    """Count attention: its norm, queries, keys, values, output, and the log-sum-exp of the scores
    in float32.
    """
    if layer.saved is not None and not job.fused:
        return _traced_attention_bytes(layer, layer.saved, job, dim, gathered, kernels)
    if layer.recurrence:
        return _recurrence_bytes(layer, layer.recurrence, job, norm, gathered, kernels)
    # Without split projections, every tensor-parallel rank computes all heads. Its projections do not gather their
    # input, but it still needs the full sequence.
    styles = {linear.style for linear in layer.inside("attn")}
    has_split_linears = bool(styles & {"colwise", "rowwise"})
    if not has_split_linears:
        job = replace(job, tp=1)
    width = job.compute_width
    tokens = job.local_tokens
    heads = -(-layer.heads // job.tp)  # rounded up
    kv_heads = -(-layer.kv_heads // job.tp)
    q = tokens * heads * layer.qk_dim * width
    k = tokens * kv_heads * layer.qk_dim * width
    v = tokens * kv_heads * layer.v_dim * width
    out = tokens * heads * layer.v_dim * width
    cut_out = 0
    if layer.v_dim < layer.qk_dim:
        # Kernels require values as wide as keys: narrower values are padded, and the output is cut into
        # a new tensor.
        cut_out = out
        v = k
        out = q
    log_sum_exp = tokens * heads * 4
    score_matrices = 0
    if not job.flash:
        # Softmax, the mask of dropout and its result (Korthikanti et al. 2022, section 4.1).
        keys = min(job.seq_len, layer.limit or job.seq_len)
        bytes_per_score = 2 * width + 1
        score_matrices = tokens * keys * heads * bytes_per_score
    elif _stores_scores(layer, job, kernels):
        # A window only masks scores. Keys and values are repeated for all heads.
        score_matrices = tokens * job.seq_len * heads * _bytes_per_score(layer, width)
        k = tokens * heads * layer.qk_dim * width
        v = tokens * heads * layer.v_dim * width
    saved = norm + q + k + v + out + cut_out + log_sum_exp + score_matrices
    if job.repeats_kv:
        repeated = tokens * heads * layer.qk_dim * width
        saved += 2 * repeated - k - v
    if job.cp > 1 and job.cp_method == "allgather":
        # Keys and values of all ranks, and the output of each part.
        saved += (job.cp - 1) * (k + v) + out
    elif job.cp > 1 and job.cp_method == "ulysses":
        # The output before and after its exchange.
        saved += out

    if _has_trained_inputs(layer):
        saved += gathered
    if layer.head_norms:
        for numel in (q // width, k // width):
            saved += norm_bytes(numel, numel // layer.qk_dim, job, kernels, False)
    if layer.unit_norms:
        # Float32 copies of queries and keys. These norms have no weights.
        saved += (q + k) // width * 4
    for features in _latent_features(layer, dim, has_split_linears):
        # Its norm, and the input of the next linear.
        numel = tokens * features
        saved += norm_bytes(numel, tokens, job, kernels, False)
        saved += numel * width
    return _AttentionBytes(saved, q + k + v, out, log_sum_exp, score_matrices)


def _traced_attention_bytes(
    layer: Layer, saved: SavedBytes, job: PlannedJob, dim: int, gathered: int, kernels: Kernels
) -> _AttentionBytes:
    """Count attention of a ``transformers`` network.

    The traced bytes include queries, keys, values and output. What else its attention function saves is added.
    """
    linears = layer.inside("attn")
    has_split_linears = any(linear.style in ("colwise", "rowwise") for linear in linears)
    gathers_outputs = _gathers_outputs(linears)
    ranks = job.tp if has_split_linears and not gathers_outputs else 1
    width = job.compute_width
    tokens = job.local_tokens
    heads = -(-layer.heads // ranks)
    kv_heads = -(-layer.kv_heads // ranks)
    q = tokens * heads * layer.qk_dim * width
    k = tokens * kv_heads * layer.qk_dim * width
    v = tokens * kv_heads * layer.v_dim * width
    out = tokens * heads * layer.v_dim * width
    log_sum_exp = tokens * heads * 4

    total = _on_tensor_rank(saved.attention, job, gathered, _has_trained_inputs(layer), ranks)
    if gathers_outputs:
        total -= _on_other_ranks(saved.attention_norms, job)
    if ranks > 1:
        # Every rank has the full latents
        for features in _latent_features(layer, dim, has_split_linears):
            latents = tokens * features * width
            norm = norm_bytes(tokens * features, tokens, job, kernels, False)
            total += (latents + norm) * (ranks - 1) // ranks

    score_matrices = 0
    if _stores_scores(layer, job, kernels):
        # Keys and values are repeated for all heads
        score_matrices = tokens * job.seq_len * heads * _bytes_per_score(layer, width)
        total += tokens * (heads - kv_heads) * (layer.qk_dim + layer.v_dim) * width
    elif layer.limit and job.cp == 1:
        # PyTorch's attention converts the mask of a window to the compute dtype, and saves this copy.
        total += tokens * job.seq_len * width
    if job.cp > 1 and job.cp_method == "allgather":
        # Keys and values of all ranks, and the output of each part
        total += (job.cp - 1) * (k + v) + out
    elif job.cp > 1 and job.cp_method == "ulysses":
        # The output before and after its exchange
        total += out
    total += log_sum_exp + score_matrices
    return _AttentionBytes(total, q + k + v, out, log_sum_exp, score_matrices)


def _on_tensor_rank(
    bytes_per_token: float, job: PlannedJob, gathered: int, saves_input: bool, ranks: int
) -> int:
    """Return the traced bytes of a part of a layer on one of ``ranks`` tensor-parallel ranks.

    ``gathered`` is the input of its first linears, which every rank has in full. The rest is divided.
    """
    total = int(bytes_per_token * job.local_tokens)
    if ranks == 1 or not saves_input:
        return total // ranks
    return (total - gathered) // ranks + gathered


def _gathers_outputs(linears: Sequence[Linear]) -> bool:
    """True if tensor-parallel ranks gather the outputs of a part's first linears, and all compute the rest.

    Phi-3 does this because one linear computes queries, keys and values, and OLMo 2 because its norms need the
    features of all heads. Only the norm of the residual stream is then divided, along the sequence.
    """
    styles = {linear.style for linear in linears}
    return "head" in styles and "colwise" not in styles


def _on_other_ranks(bytes_per_token: float, job: PlannedJob) -> int:
    """Return the bytes of a row that other tensor-parallel ranks have, because sequences are split."""
    return int(bytes_per_token * job.local_tokens) * (job.tp - 1) // job.tp


def _stores_scores(layer: Layer, job: PlannedJob, kernels: Kernels) -> bool:
    """True if the attention function of a ``transformers`` network stores its scores.

    Context parallelism replaces this function by a core of this package. On a CPU, PyTorch has no kernel for values
    that are narrower than keys, as in latent attention.
    """
    if job.cp > 1 or not layer.attention:
        return False
    if layer.attention == "eager":
        return True
    return kernels != "cuda" and layer.qk_dim != layer.v_dim


def _bytes_per_score(layer: Layer, width: int) -> int:
    """Return the bytes that the softmax of the scores saves for each score."""
    # gpt-oss, whose heads have sinks, computes its softmax in the compute dtype
    has_sinks = any(parameter.name.endswith("sinks") for parameter in layer.parameters)
    if layer.attention != "eager" or has_sinks or width == 4:
        return width
    # A float32 softmax, and its result in the compute dtype
    return 4 + width


def _latent_features(layer: Layer, dim: int, has_split_linears: bool) -> list[int]:
    """Return the features of the latents of attention, between a first and a second projection."""
    linears = layer.inside("attn")
    if has_split_linears:
        # Every rank needs the full latent.
        return [linear.out_features for linear in linears if linear.style == "replicate"]
    # Without styles, a second projection is one that reads neither the residual stream nor the output of attention.
    outer = (dim, layer.heads * layer.v_dim)
    return [linear.in_features for linear in linears if linear.in_features not in outer]


def _has_trained_inputs(layer: Layer) -> bool:
    """True if a projection at the input of attention is trained, and therefore saves its input."""
    inputs = [linear for linear in layer.inside("attn") if linear.style != "rowwise"]
    return any(linear.trained for linear in inputs)


def _recurrence_bytes(
    layer: Layer,
    shape: RecurrenceShape,
    job: PlannedJob,
    norm: int,
    gathered: int,
    kernels: Kernels,
) -> _AttentionBytes:
    """Count a gated delta net (models/qwen3_next.py, ops/gated_delta_net.py), which computes in float32.

    The numbers of tensors per size were counted in its autograd graph.
    """
    tokens = job.local_tokens
    key_heads = -(-shape.key_heads // job.tp)
    value_heads = -(-shape.value_heads // job.tp)
    # Elements of tensors with a key, or a value, for each token. Keys are also repeated for all heads of
    # values. A state exists for each block of tokens.
    keys = tokens * key_heads * shape.key_dim
    values = tokens * value_heads * shape.value_dim
    keys_of_values = tokens * value_heads * shape.key_dim
    states = tokens // BLOCK * value_heads * shape.key_dim * shape.value_dim
    within_blocks = tokens * BLOCK * (5 * value_heads + 3 * key_heads)
    numel = 10 * keys + 9 * values + 4 * keys_of_values + 2 * states + within_blocks
    if job.cp > 1:
        # The map S_out = A S_in + B from incoming to outgoing state: A and B per block,
        # and their terms per token.
        maps = states * shape.key_dim // shape.value_dim
        numel += values + keys_of_values + states + maps
    # The norm of the output, its gate in float32, and their product.
    # Gates of a head are a few numbers per token.
    gates_of_heads = tokens * value_heads
    numel += 3 * values + 8 * gates_of_heads
    output_norm = norm_bytes(values, gates_of_heads, job, kernels, False)
    mixed = (2 * keys + values) * job.compute_width
    output = values * job.compute_width
    saved = norm + 4 * numel + output_norm + mixed + output
    if _has_trained_inputs(layer):
        saved += gathered
    return _AttentionBytes(saved, mixed, output, log_sum_exp=0, score_matrices=0)


@dataclass(frozen=True)
class _FeedForwardBytes:
    """Bytes of a feed-forward: saved tensors, and gradients of its products."""

    saved: int
    gradients: int


def _feed_forward_bytes(
    layer: Layer, job: PlannedJob, dim: int, norm: int, gathered: int, kernels: Kernels
) -> _FeedForwardBytes:
    """Count a feed-forward: its norm and input, its products and activations, and its experts."""
    width = job.compute_width
    tokens = job.local_tokens
    inner_linears = []
    output_linears = []
    for linear in layer.inside("ffn"):
        if linear.style == "rowwise":
            output_linears.append(linear)
        else:
            inner_linears.append(linear)
    # The outputs of the linears that begin the feed-forward, and the activation of each.
    hidden = 0
    for linear in inner_linears:
        hidden += tokens * _local_features(linear, job) * width
    saved = norm + 2 * hidden
    has_trained_inputs = any(linear.trained for linear in inner_linears)
    if layer.saved is not None and not job.fused:
        gathers_outputs = _gathers_outputs(inner_linears)
        saved = _on_tensor_rank(
            layer.saved.feed_forward,
            job,
            gathered,
            has_trained_inputs or bool(layer.experts),
            1 if gathers_outputs else job.tp,
        )
        if gathers_outputs:
            saved -= _on_other_ranks(layer.saved.feed_forward_norms, job)
        gradients = hidden
        if layer.experts:
            experts_tokens = _tokens_of_experts(layer, layer.experts, job)
            mixture = _network_expert_bytes(layer.experts, experts_tokens, dim, job)
            saved += mixture.saved
            gradients += mixture.gradients
        return _FeedForwardBytes(saved, gradients)
    if has_trained_inputs:
        saved += gathered
    # A frozen output linear does not save its input, which is as large as the output of one inner linear.
    has_trained_output = any(linear.trained for linear in output_linears)
    if output_linears and not has_trained_output:
        saved -= hidden // max(1, len(inner_linears))

    gradients = hidden
    if layer.experts:
        experts_tokens = _tokens_of_experts(layer, layer.experts, job)
        if _is_expert_mix(layer.experts, experts_tokens, job, kernels):
            mixture = _expert_mix_bytes(layer.experts, experts_tokens, dim, width)
        else:
            mixture = _expert_bytes(layer.experts, experts_tokens, dim, job)
        saved += mixture.saved
        gradients += mixture.gradients
    return _FeedForwardBytes(saved, gradients)


def _tokens_of_experts(layer: Layer, experts: ExpertShape, job: PlannedJob) -> int:
    """Return the number of tokens for which a rank computes experts.

    Tensor-parallel ranks divide the tokens, or the experts, which is as much work. Each computes all tokens if the
    layer has a list of experts, or if a network of ``transformers`` has no plan for its stacked experts.
    """
    has_split_experts = any(parameter.style == "expert" for parameter in layer.parameters)
    if experts.listed or not has_split_experts:
        return job.local_tokens
    return job.local_tokens // job.tp


def _local_features(linear: Linear, job: PlannedJob) -> int:
    """Return the output features of a linear on one rank, rounded up."""
    if linear.style == "colwise":
        return -(-linear.out_features // job.tp)
    return linear.out_features


def _is_expert_mix(experts: ExpertShape, tokens: int, job: PlannedJob, kernels: Kernels) -> bool:
    """True if a CPU computes experts as one function: see ``expert_mix.takes``."""
    if kernels == "cuda" or job.ep > 1:
        return False
    if experts.biased or experts.weighs_inputs or experts.listed:
        return False
    return expert_mix.has_many_rows(tokens * experts.top_k, experts.count)


def _expert_mix_bytes(experts: ExpertShape, tokens: int, dim: int, width: int) -> _FeedForwardBytes:
    """Count the experts of ops/cpu/expert_mix.py: rows with padding, and reordered weights of small
    experts.
    """
    rows = tokens * experts.top_k
    numel_per_expert = 3 * experts.ffn * dim
    if width < 4:
        rows += expert_mix.expected_padding(rows, experts.count)
    input_bytes = rows * dim * width
    hidden_bytes = rows * experts.ffn * width
    # The normalized input in float32, its rows in the order of experts, and gate, up and their products.
    saved = tokens * dim * 4 + input_bytes + 4 * hidden_bytes
    # Small experts also save reordered weights, and the gate as part of the combined product of gate and up.
    if width < 4 and numel_per_expert <= expert_mix.SMALL_EXPERT_NUMEL:
        reordered_weights = experts.count * numel_per_expert * width
        saved += reordered_weights + hidden_bytes
    # The router's float32 scores per token, and three int64 indices per row.
    saved += tokens * experts.count * 4 + rows * 3 * 8
    gradients = 2 * hidden_bytes + input_bytes
    return _FeedForwardBytes(saved, gradients)


def _expert_bytes(
    experts: ExpertShape, tokens: int, dim: int, job: PlannedJob
) -> _FeedForwardBytes:
    """Return the bytes of the activations of experts that run as grouped matmuls."""
    width = job.compute_width
    rows = tokens * experts.top_k
    input_bytes = rows * dim * width
    hidden_bytes = rows * experts.ffn * width
    saved = tokens * dim * 4 + 2 * input_bytes
    # Gate, up, the activation of the gate, and their product; or one product and its activation.
    saved += (4 if experts.gated else 2) * hidden_bytes
    if experts.biased:
        # Sums with three biases, and a gate of several operations (models/gpt_oss.py).
        saved += input_bytes + 2 * hidden_bytes
    # The router's float32 scores of each token,
    # and three int64 and three float32 numbers for each routed row.
    saved += tokens * experts.count * 4 + rows * (8 * 3 + 4 * 3)
    # Gradients of the matmul outputs, and of the rows before and after sorting, and after the exchange of ep.
    copies_of_rows = 3 if job.ep > 1 else 2
    return _FeedForwardBytes(saved, 2 * hidden_bytes + copies_of_rows * input_bytes)


def _network_expert_bytes(
    experts: ExpertShape, tokens: int, dim: int, job: PlannedJob
) -> _FeedForwardBytes:
    """Return the bytes of the activations of stacked experts of a ``transformers`` network.

    Their activation was traced. Without a trace, such as for lists of experts, formulas count them.
    """
    if not experts.gate_bytes:
        return _expert_bytes(experts, tokens, dim, job)
    width = job.compute_width
    rows = tokens * experts.top_k
    input_bytes = rows * dim * width
    hidden_bytes = rows * experts.ffn * width
    # Rows sorted by expert, the activation, the input of the last product, and its output, which the router weighs.
    saved = 2 * input_bytes + rows * experts.gate_bytes + hidden_bytes
    # Three int64 indices and the router's weight of each row.
    saved += rows * (8 * 3 + width)
    copies_of_rows = 3 if job.ep > 1 else 2
    return _FeedForwardBytes(saved, 2 * hidden_bytes + copies_of_rows * input_bytes)


def _kept_products(layer: Layer, job: PlannedJob, dim: int) -> int:
    """Return the bytes that selective recomputation keeps: every second product, and results of
    reductions over tp.
    """
    tokens = job.local_tokens
    numel = 0
    linears = [linear for linear in layer.linears if linear.style != "router"]
    for number, linear in enumerate(linears):
        if number % 2 == 0:
            numel += tokens * _local_features(linear, job)
        if linear.style == "rowwise" and job.tp > 1:
            numel += tokens // job.tp * dim
    return numel * job.compute_width
