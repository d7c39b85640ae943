"""Seconds of one layer's forward, backward and recomputation on one micro-batch, by kind of cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from shardtrain.ops.gated_delta_net import BLOCK
from shardtrain.tools.plan.hardware import Device
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.link_timing import (
    bandwidth,
    copy_seconds,
    exchange_seconds,
    host_seconds,
    memory_rate,
    tree_seconds,
)
from shardtrain.tools.plan.shapes import ExpertShape, Layer, Linear, RecurrenceShape

UNFUSED_MATMUL_SHARE = 0.7
"""Efficiency of the matmuls of attention without a fused kernel, relative to other matmuls."""
SCORE_PASSES = 5
"""Passes over the attention scores without a fused kernel."""
HALF_SIZE = 96
"""Dimension of a product that reaches half of the rate of a large product."""
STREAM_PASSES = 20.0
"""Reads and writes of a layer's residual stream in forward, with one kernel per operation."""
HIDDEN_PASSES = 5.0
"""Reads and writes of the hidden features of its feed-forward."""
FUSED = 0.5
"""Share of both that remains after compilation."""
LAUNCHES = 26
"""Kernels in a layer's forward."""
EXPERT_LAUNCHES = 40
"""Additional kernels for routing and sorting rows.

With expert parallelism, the host waits for the device before.
"""
FLOAT8_SHARE = 0.88
"""Share of its peak that float8 reaches, relative to the share that bfloat16 reaches of its own peak."""
GROUPED_SHARE = 0.45
"""Rate of a grouped product of experts, relative to a plain product with the same rows."""
ROW_PASSES = 14
"""Reads and writes of the rows of experts in forward: gathered, exchanged, sorted, brought back, weighted."""
LOAD = 1.25
"""Rows of the busiest rank relative to the mean, with expert parallelism and routers that are not balanced by force."""
COLLECTIVE_LAUNCHES = 24
"""Python time of a collective of FSDP, in kernels that a CPU starts in that time."""
DTENSOR_LAUNCHES = 48
"""Python time of a collective of a DTensor and its dispatch, in kernels."""
PIECE_LAUNCHES = 12
"""Python time of each part of the keys under context parallelism, in kernels: attention, cuts, merging."""
DTENSOR_PRODUCTS = 0.91
"""Rate of float32 products of DTensors on a CPU, relative to oneDNN, which only plain weights use."""
KEYS_AT_ONCE = 512
"""Keys per block of PyTorch's attention on a CPU. It skips entire blocks of keys after a query."""


@dataclass(frozen=True)
class LayerPass:
    """Seconds of one layer by kind of cost: forward, backward without recomputation, and selective
    recomputation.
    """

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    again: Mapping[str, float]


@lru_cache(maxsize=16384)
def layer_pass(layer: Layer, job: PlannedJob, device: Device, dim: int) -> LayerPass:
    """Return the seconds of one layer's passes on a micro-batch.

    ``dim`` is the width of the residual stream.
    """
    if layer.tower is not None:
        job = layer.tower.job(job)
        dim = layer.tower.dim
    tokens = job.local_tokens
    stream_tokens = tokens
    if job.split_sequence:
        stream_tokens = tokens // job.tp

    # Count matrix products. Selective recomputation keeps the output of every second product, and a frozen
    # weight needs no product for its gradient.
    matmul = 0.0
    kept = 0.0
    frozen = 0.0
    linears = [linear for linear in layer.linears if linear.style != "router"]
    for number, linear in enumerate(linears):
        seconds = product_seconds(linear, job, device, tokens, job.tp)
        matmul += seconds
        if number % 2 == 0:
            kept += seconds
        if not linear.trained:
            frozen += seconds
    cast_forward = 0.0
    cast_backward = 0.0
    if _is_float8(job, device):
        cast_forward, cast_backward = _cast_seconds(layer, job, device)
    hidden_features = 0
    for linear in layer.inside("ffn"):
        if linear.style != "rowwise":
            hidden_features += linear.out_features
    hidden = hidden_features / job.tp * tokens

    # Experts: one product per expert on this rank, and an exchange of rows before and after.
    exchange = 0.0
    if layer.experts:
        # All ranks wait for the rank whose experts have the most rows.
        load = LOAD if job.ep > 1 and not job.balanced else 1
        rows = int(stream_tokens * layer.experts.top_k * load)
        matmul += _expert_product_seconds(layer, layer.experts, rows, job, device, dim)
        num_hidden = 2 if layer.gated else 1
        # ``hidden`` is multiplied by HIDDEN_PASSES below, so divide the passes of rows by it here.
        hidden += num_hidden * rows * layer.experts.ffn + ROW_PASSES * rows * dim / HIDDEN_PASSES
        if job.ep > 1:
            # A rank keeps the rows of its own experts.
            size = rows * dim * job.compute_width * (job.ep - 1) / job.ep
            latency = tree_seconds(device, job.ep, job)
            exchange = 2 * (exchange_seconds(size, job, device) + latency)

    # Attention, and all operations that are bound by memory bandwidth.
    attention = _attention_seconds(layer, job, device)
    heads = tokens * (layer.heads + layer.kv_heads) * layer.qk_dim / job.tp
    stream = stream_tokens * dim
    moved_numel = STREAM_PASSES * stream + HIDDEN_PASSES * hidden + 6 * heads
    elementwise = moved_numel * job.compute_width / memory_rate(device)
    if job.fused:
        elementwise *= FUSED
    tensor = _tensor_parallel_seconds(job, device, dim)
    context = _context_parallel_seconds(layer, job, device)
    host = _launch_seconds(layer, job, device, matmul + attention + elementwise)

    # Backward has two products for each of forward: gradients of inputs and of weights. Attention
    # computes the scores again and has four more products, 2.5 times the FLOPs.
    forward = {
        "matmul": matmul + cast_forward,
        "attention": attention,
        "elementwise": elementwise,
        "kernel launches": host,
        "tensor parallel": tensor,
        "context parallel": context,
        "expert exchange": exchange,
    }
    backward = {
        "matmul": 2 * matmul - frozen + cast_backward,
        "attention": 2.5 * attention,
        "elementwise": 2 * elementwise,
        "kernel launches": 2 * host,
        "tensor parallel": tensor,
        "context parallel": 2 * context,
        "expert exchange": exchange,
    }
    again = {
        "matmul": matmul - kept + cast_forward / 2,
        "elementwise": elementwise,
        "kernel launches": host,
        "tensor parallel": tensor / 2,
    }
    return LayerPass(forward, backward, again)


def _expert_product_seconds(
    layer: Layer, experts: ExpertShape, rows: int, job: PlannedJob, device: Device, dim: int
) -> float:
    """Return the seconds of the products of all experts of this rank on ``rows``."""
    groups = max(1, experts.count // job.ep)
    expert = Linear("", dim, experts.ffn, "replicate")
    expert_job = replace(job, float8=job.float8_experts)
    rows_per_expert = max(1, rows // groups)
    one_product = product_seconds(expert, expert_job, device, rows_per_expert, 1)
    num_products = 3 if layer.gated else 2
    # The product of a rank with one expert is a plain product.
    share = GROUPED_SHARE if groups > 1 else 1.0
    return num_products * groups * one_product / share


def _launch_seconds(layer: Layer, job: PlannedJob, device: Device, device_seconds: float) -> float:
    """Return the seconds that a layer's forward waits for kernel launches.

    The host starts kernels while the device works for ``device_seconds``, so only the excess counts.
    A CPU is its own host, and expert parallelism makes the host wait for the device.
    """
    seconds = LAUNCHES * device.launch_seconds
    if job.fused:
        seconds *= 0.5
    routing = 0.0
    if layer.experts:
        routing = EXPERT_LAUNCHES * device.launch_seconds
    seconds += routing
    if not device.is_cpu:
        seconds = max(0.0, seconds - device_seconds)
    if job.ep > 1:
        seconds = max(seconds, routing)
    return seconds


def product_seconds(linear: Linear, job: PlannedJob, device: Device, tokens: int, tp: int) -> float:
    """Return the seconds of one product (tokens, in) x (in, out) on a rank, by the roofline model."""
    rows: float = linear.in_features
    columns: float = linear.out_features
    if linear.style == "rowwise":
        rows = rows / tp
    elif linear.style in ("colwise", "head"):
        columns = columns / tp
    dtype = job.compute_dtype
    half_size = HALF_SIZE
    share = 1.0
    if _is_float8(job, device):
        dtype = "float8"
        share = FLOAT8_SHARE
        # float8 halves the time of the matmul, but not its launch overhead
        half_size = 2 * HALF_SIZE
    peak = device.peak(dtype) * device.matmul_efficiency * share
    efficiency = 1.0
    if not device.is_cpu:
        for size in (tokens, rows, columns):
            efficiency *= size / (size + half_size)
    elif job.tp > 1 and job.compute_dtype == "float32":
        efficiency = DTENSOR_PRODUCTS
    # Bound by FLOPs, or by reading two matrices and writing one.
    flops = 2 * tokens * rows * columns
    moved_numel = tokens * (rows + columns) + rows * columns
    moved_bytes = moved_numel * job.compute_width
    return max(flops / (peak * efficiency), moved_bytes / memory_rate(device))


def _is_float8(job: PlannedJob, device: Device) -> bool:
    return job.float8 and "float8" in device.flops


def _cast_seconds(layer: Layer, job: PlannedJob, device: Device) -> tuple[float, float]:
    """Return the seconds of casts to float8 in forward and in backward: inputs, weights and gradients.

    Matmuls of one block share the cast of their input. Under tensor parallelism each rank casts the
    gathered input, or with ``gathers_float8`` its own part before the gather.
    """
    tokens = job.local_tokens
    inputs = 0.0
    outputs = 0.0
    weights = 0.0
    cast_inputs: set[tuple[str, int, bool]] = set()
    for linear in layer.linears:
        if linear.style == "router":
            continue
        ranks = job.tp if linear.style in ("colwise", "rowwise") else 1
        weights += linear.in_features * linear.out_features / ranks
        outputs += tokens * linear.out_features / ranks
        # Linears of one block with the same input features have the same input, such as wq, wk and wv.
        is_rowwise = linear.style == "rowwise"
        block = linear.path.rpartition(".")[0]
        shared_input = (block, linear.in_features, is_rowwise)
        if shared_input in cast_inputs:
            continue
        cast_inputs.add(shared_input)
        input_ranks = ranks if is_rowwise or job.gathers_float8 else 1
        inputs += tokens * linear.in_features / input_ranks
    # A cast reads two bytes and writes one. Backward casts gradients, and transposes inputs and weights.
    rate = memory_rate(device)
    forward = 3 * (inputs + weights) / rate
    backward = (3 * outputs + 2 * inputs + 2 * weights) / rate
    return forward, backward


def _attention_seconds(layer: Layer, job: PlannedJob, device: Device) -> float:
    """Return the seconds of softmax(q k) v in forward. Causal attention computes half of the scores."""
    if layer.recurrence:
        return _recurrence_seconds(layer.recurrence, job, device)
    tokens = job.local_tokens
    span = job.seq_len
    if layer.limit:
        span = min(span, layer.limit)
    rate = memory_rate(device)
    # One product of queries and keys, and one of scores and values.
    scores = tokens * span * layer.heads / job.tp
    flops = 2 * scores * (layer.qk_dim + layer.v_dim)
    if not job.flash:
        # Without a fused kernel, all scores are computed, and pass through memory several times.
        peak = device.peak(job.compute_dtype) * device.matmul_efficiency * UNFUSED_MATMUL_SHARE
        return flops / peak + SCORE_PASSES * scores * job.compute_width / rate

    # On a GPU, heads of less than 128 features leave units idle, and short sequences are slower.
    efficiency_of_head = 1.0
    efficiency_of_length = 1.0
    if not device.is_cpu:
        efficiency_of_head = min(1.0, (layer.qk_dim + 32) / 160)
        efficiency_of_length = span / (span + 512)
    dtype = "bfloat16" if job.compute_width == 2 else job.compute_dtype
    peak = device.peak(dtype) * device.attention_efficiency * job.attention_speed
    moved_bytes = 4 * tokens * layer.heads / job.tp * layer.qk_dim * job.compute_width
    computed_flops = flops * _computed_share(layer, job, device, span)
    compute_seconds = computed_flops / (peak * efficiency_of_head * efficiency_of_length)
    return max(compute_seconds, moved_bytes / rate)


def _computed_share(layer: Layer, job: PlannedJob, device: Device, span: int) -> float:
    """Return the share of the scores that a fused kernel computes for ``span`` keys per query."""
    if not layer.causal or span < job.seq_len:
        return 1.0
    if not device.is_cpu:
        return 0.5
    # Context parallelism attends to one part of the keys at a time.
    part = span
    if job.cp > 1:
        part = max(1, span // (2 * job.cp))
    return (1 + min(part, KEYS_AT_ONCE) / span) / 2


def _recurrence_seconds(shape: RecurrenceShape, job: PlannedJob, device: Device) -> float:
    """Return the seconds of a gated delta net in forward: products in float32 within and between blocks of tokens."""
    key_dim = shape.key_dim
    value_dim = shape.value_dim
    # Per token: products of keys and queries, the triangular system, and reading and changing the state.
    of_key_heads = 4 * BLOCK * key_dim * shape.key_heads
    per_value_head = BLOCK * (key_dim + 3 * value_dim) + 6 * key_dim * value_dim
    if job.cp > 1:
        per_value_head += 4 * key_dim * (key_dim + value_dim)
    flops_per_token = of_key_heads + per_value_head * shape.value_heads
    flops = job.local_tokens * flops_per_token / job.tp
    numel_per_value_head = 9 * value_dim + 4 * key_dim + 5 * BLOCK
    numel_per_token = 10 * shape.key_heads * key_dim + shape.value_heads * numel_per_value_head
    moved_bytes = 2 * 4 * job.local_tokens * numel_per_token / job.tp
    peak = device.peak("float32") * device.matmul_efficiency
    return flops / peak + moved_bytes / memory_rate(device)


def _tensor_parallel_seconds(job: PlannedJob, device: Device, dim: int) -> float:
    """Return the seconds of a layer's tensor parallelism: two gathers and two reductions, or two
    all-reduces.
    """
    if job.tp == 1:
        return 0.0
    stream = job.local_tokens * dim * job.compute_width
    rate = bandwidth(device, job.tp, 1)
    # Each rank receives the parts of the others.
    received = stream * (job.tp - 1) / job.tp
    transfer = received / rate + tree_seconds(device, job.tp, job)
    host = host_seconds(device, DTENSOR_LAUNCHES)
    seconds = 4 * (transfer + host + copy_seconds(device, stream))
    if job.gathers_float8 and _is_float8(job, device):
        seconds *= 0.75  # both gathers have half of the bytes
    return seconds


def _context_parallel_seconds(layer: Layer, job: PlannedJob, device: Device) -> float:
    """Return the seconds of context parallelism: exchanging keys and values, and merging the
    outputs of parts.
    """
    if job.cp == 1:
        return 0.0
    width = job.compute_width
    tokens = job.local_tokens
    rate = bandwidth(device, job.cp, job.tp)
    latency = tree_seconds(device, job.cp, job)
    if layer.recurrence:
        # All ranks gather the state transitions of two chunks per rank, in float32.
        shape = layer.recurrence
        map_numel = shape.value_heads / job.tp * shape.key_dim * (shape.key_dim + shape.value_dim)
        rows = max(1, tokens * job.cp // job.seq_len)
        return 2 * (job.cp - 1) * rows * 4 * map_numel / rate + latency

    kv_heads = layer.heads if job.repeats_kv else layer.kv_heads
    kv_bytes = 2 * tokens * kv_heads * layer.qk_dim * width / job.tp
    seconds = kv_bytes * (job.cp - 1) / rate + latency
    num_messages = 2
    num_pieces = 2 * job.cp - 1
    if job.cp_method == "ring":
        num_messages = job.cp
        num_pieces = 2 * job.cp
    # The output of each part of the keys is merged in float32.
    merged_bytes = tokens * layer.heads * layer.v_dim / job.tp * (width + 4 * 4)
    seconds += num_messages * merged_bytes / memory_rate(device)
    of_messages = num_messages * host_seconds(device, COLLECTIVE_LAUNCHES)
    of_pieces = num_pieces * host_seconds(device, PIECE_LAUNCHES)
    return seconds + (of_messages + of_pieces)
