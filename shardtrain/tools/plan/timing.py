"""Seconds of a training step: a roofline of each operator, collectives by size and link, the pipeline played out.

A kernel takes the longer of its FLOPs and its bytes (Williams et al. 2009, the roofline model). Large products reach a
share of the peak that ``hardware.toml`` says, small ones less. A collective takes its bytes over the slowest link that
its ranks need, and a latency. FSDP's gathers and reductions hide behind computation where there is enough of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardtrain.tools.plan import memory, schedule
from shardtrain.tools.plan.hardware import Device, Link
from shardtrain.tools.plan.job import Job
from shardtrain.tools.plan.schedule import Action
from shardtrain.tools.plan.shapes import Layer, Linear, ModelShape

HALF_SIZE = 96
"""A dimension of a product at which half of the rate of a large one is reached."""
STREAM_PASSES, HIDDEN_PASSES = 20.0, 5.0
"""Reads and writes in forward, of a layer's residual stream and of its feed-forward's insides, one kernel at a time."""
FUSED = 0.5
"""What the compiler leaves of them."""
LAUNCHES = 26
"""Kernels of a layer's forward."""
HIDDEN_SHARE = 0.85
"""Share of computation behind which a collective can hide."""
CONTENTION = 0.06
"""By how much computation slows down while a collective runs beside it."""
HOST_BYTES_PER_SECOND = 25e9
"""Of a device's path to host memory, and of the host's optimizer."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank, and what they go to: ``costs`` add up to ``seconds``."""

    seconds: float
    costs: Mapping[str, float]
    bubble: float

    def largest(self, count: int = 3) -> list[tuple[str, float]]:
        """The largest costs, largest first."""
        return sorted(self.costs.items(), key=lambda item: -item[1])[:count]


@dataclass(frozen=True)
class _Pass:
    """Seconds of one layer's forward, backward (without recomputation) and recomputation, by kind of cost."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    again: Mapping[str, float]


def of_step(model: ModelShape, job: Job, device: Device, orders: Sequence[Sequence[Action]] | None) -> StepTime:
    """How long a step takes; ``orders`` as for ``memory.of_ranks``, or None to take the bubble from a formula."""
    last = len(job.stages) - 1
    forward, backward = {}, {}
    for index, layers in enumerate(job.stages):
        forward[index], backward[index] = _stage(model, job, device, index, layers, last)
    costs: dict[str, float] = {}
    bubble = 0.0
    if job.pp == 1:
        for one in (forward[0], backward[0]):
            _add(costs, one, job.num_microbatches)
    elif orders is None:
        slowest = max(range(job.pp), key=lambda rank: sum(sum(backward[index].values()) for index in _own(job, rank)))
        for index in _own(job, slowest):
            for one in (forward[index], backward[index]):
                _add(costs, one, job.num_microbatches)
        bubble = schedule.bubble(job.schedule, job.pp, len(_own(job, 0)), job.num_microbatches)
        costs["pipeline bubble and sends"] = sum(costs.values()) * bubble + 2 * job.pp * _send(model, job, device)
    else:
        seconds = {}
        for index in forward:
            ahead, back = sum(forward[index].values()), sum(backward[index].values())
            seconds["F", index], seconds["B", index] = ahead, back
            seconds["I", index], seconds["W", index] = back * 0.55, back * 0.45
        send = _send(model, job, device)
        line = schedule.simulate(orders, seconds, send)
        busiest = max(range(job.pp), key=lambda rank: line.busy_seconds[rank])
        for index in job.stages_of_rank(busiest):
            for one in (forward[index], backward[index]):
                _add(costs, one, job.num_microbatches)
        waits = max(0.0, line.seconds - sum(costs.values()))
        costs["pipeline bubble and sends"] = waits
        bubble = line.bubble
    _add(costs, _once_a_step(model, job, device, costs), 1)
    costs = {name: seconds for name, seconds in costs.items() if seconds > 0}
    return StepTime(sum(costs.values()), costs, bubble)


def _stage(
    model: ModelShape, job: Job, device: Device, index: int, layers: range, last: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of forward and of backward of a micro-batch on one stage, by cost, FSDP's exposed part included."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    alike: dict[tuple[int, str], list[int]] = {}
    for place, number in enumerate(layers):
        alike.setdefault((id(model.layers[number]), memory.recomputes(job, place)), []).append(number)
    for (_, mode), numbers in alike.items():
        one = _layer(model.layers[numbers[0]], job, device, model.dim)
        _add(forward, one.forward, len(numbers))
        _add(backward, one.backward, len(numbers))
        if mode == "full":
            _add(backward, one.forward, len(numbers))
        elif mode == "op":
            _add(backward, one.again, len(numbers))
    if index == last:
        columns = -(-model.vocab // job.tp)
        product = Linear("head", model.dim, columns, "replicate")
        seconds = _product(product, job, device, job.local_tokens, 1)
        logits = job.local_tokens * columns * (4 * 6 + job.compute_width * 4) * (FUSED if job.fused else 1.0)
        forward["head and loss"] = seconds + logits / (device.memory_bytes_per_second * device.memory_efficiency)
        backward["head and loss"] = 2 * seconds
    gather = _gather_seconds(model, job, device, index) if job.fsdp and job.frees_gathered else 0.0
    if gather:
        for costs in (forward, backward):
            _hide(costs, gather, "FSDP gathers", len(layers))
    return forward, backward


def _once_a_step(model: ModelShape, job: Job, device: Device, costs: Mapping[str, float]) -> dict[str, float]:
    """Seconds of what happens once a step: gradients are reduced, gathers without freeing, the optimizer."""
    worst = max({0, job.pp - 1}, key=lambda rank: sum(_elements(model, job, index) for index in _own(job, rank)))
    own = _own(job, worst)
    once: dict[str, float] = {}
    gradients = _reduce_seconds(model, job, device, own)
    if job.fsdp and not job.frees_gathered:
        gradients += sum(_gather_seconds(model, job, device, index) for index in own)
    passes = sum(v for k, v in costs.items() if k != "pipeline bubble and sends")
    backward = passes / job.num_microbatches * 2 / 3 / max(1, len(own))
    if gradients:
        once["gradient reduction"] = max(gradients - HIDDEN_SHARE * backward, gradients / 16)
    held = sum(memory.sharded(one, job) for index in own for one in memory.parameters_of_stage(model, job, index))
    states = held / (job.dp_replicate if job.shard_states else 1)
    moved = held * (3 * job.stored_width) + states * job.states * job.state_width * 2 + states * job.stored_width * 2
    rate = device.memory_bytes_per_second * device.memory_efficiency
    once["optimizer"] = moved / rate + 2e-4
    if job.shard_states:
        group = _bandwidth(device, job.dp_replicate, _stride(job, "dp_replicate"))
        once["optimizer"] += held * job.stored_width / group
    if job.offload != "nothing":
        once["optimizer"] = (moved * 2) / HOST_BYTES_PER_SECOND
    return once


def _own(job: Job, rank: int) -> Sequence[int]:
    return job.stages_of_rank(rank) if job.pp > 1 else [0]


def _elements(model: ModelShape, job: Job, index: int) -> int:
    ends = (model.first if index == 0 else ()) + (model.last if index == len(job.stages) - 1 else ())
    layers = sum(memory.unsharded(model.layers[n].parameters, job.tp, job.ep) for n in job.stages[index])
    return layers + memory.unsharded(ends, job.tp, job.ep)


@lru_cache(maxsize=16384)
def _layer(layer: Layer, job: Job, device: Device, dim: int) -> _Pass:
    c, tokens = job.compute_width, job.local_tokens
    rate = device.memory_bytes_per_second * device.memory_efficiency
    split = tokens // job.tp if job.split_sequence else tokens
    products = [(one, _product(one, job, device, tokens, job.tp)) for one in layer.linears if one.word != "router"]
    matmul = sum(seconds for _, seconds in products)
    kept = sum(seconds for number, (_, seconds) in enumerate(products) if number % 2 == 0)
    frozen = sum(seconds for one, seconds in products if not one.trained)
    hidden = sum(one.out_features for one in layer.inside("ffn") if one.word != "rowwise") / job.tp * tokens
    exchange = 0.0
    if layer.experts:
        rows = split * layer.experts.top_k
        # products of groups of rows, as many as there are experts on this rank
        groups = max(1, layer.experts.count // job.ep)
        expert = Linear("", dim, layer.experts.ffn, "replicate")
        matmul += (3 if layer.gated else 2) * groups * _product(expert, job, device, max(1, rows // groups), 1)
        hidden += (2 if layer.gated else 1) * rows * layer.experts.ffn + 6 * rows * dim / HIDDEN_PASSES
        if job.ep > 1:
            moved = rows * dim * c * (job.ep - 1) / job.ep
            exchange = 2 * (moved / _bandwidth(device, job.ep, _stride(job, "cp")) + _latency(device, job.ep, job))
    attention = _attention(layer, job, device)
    heads = tokens * (layer.heads + layer.kv_heads) * layer.qk_dim / job.tp
    passes = (STREAM_PASSES * split * dim + HIDDEN_PASSES * hidden + 6 * heads) * c
    elementwise = passes / rate * (FUSED if job.fused else 1.0)
    stream = tokens * dim * c
    tensor = 0.0
    if job.tp > 1:
        one = stream * (job.tp - 1) / job.tp / _bandwidth(device, job.tp, 1) + _latency(device, job.tp, job)
        tensor = 4 * one  # two gathers and two reductions, or as many bytes in two all-reduces
    context = 0.0
    if job.cp > 1:
        kv = 2 * tokens * layer.kv_heads * layer.qk_dim * c / job.tp
        context = kv * (job.cp - 1) / _bandwidth(device, job.cp, job.tp) + _latency(device, job.cp, job)
    launches = LAUNCHES * device.launch_seconds * (0.5 if job.fused else 1.0)
    work = matmul + attention + elementwise
    host = max(0.0, launches - work)
    links = {"tensor parallel": tensor, "context parallel": context, "expert exchange": exchange}
    forward = {"matmul": matmul, "attention": attention, "elementwise": elementwise, "kernel launches": host, **links}
    backward = {
        "matmul": 2 * matmul - frozen,
        "attention": 2.5 * attention,
        "elementwise": 2 * elementwise,
        "kernel launches": 2 * host,
        "tensor parallel": tensor,
        "context parallel": 2 * context,
        "expert exchange": exchange,
    }
    again = {
        "matmul": matmul - kept,
        "elementwise": elementwise,
        "kernel launches": host,
        "tensor parallel": tensor / 2,
    }
    return _Pass(forward, backward, again)


def _product(one: Linear, job: Job, device: Device, tokens: int, tp: int) -> float:
    """Seconds of one product of (tokens, in) by (in, out) on a rank."""
    into = one.in_features / tp if one.word == "rowwise" else one.in_features
    out = one.out_features / tp if one.word in ("colwise", "head") else one.out_features
    fast = job.float8 and "float8" in device.flops
    peak = device.peak("float8" if fast else job.compute_dtype) * device.matmul_efficiency * (0.8 if fast else 1.0)
    size = math.prod(d / (d + HALF_SIZE) for d in (tokens, into, out)) if device.name != "cpu" else 1.0
    moved = (tokens * (into + out) + into * out) * job.compute_width
    rate = device.memory_bytes_per_second * device.memory_efficiency
    casts = (tokens * into * 3 + into * out * 3) / rate if fast else 0.0
    return max(2 * tokens * into * out / (peak * size), moved / rate) + casts


def _attention(layer: Layer, job: Job, device: Device) -> float:
    """Seconds of softmax(q k) v in forward: half of the square where it is causal."""
    tokens = job.local_tokens
    span = job.seq_len if not layer.limit else min(job.seq_len, layer.limit)
    share = 0.5 if layer.causal and span == job.seq_len else 1.0
    flops = 2 * tokens * span * layer.heads / job.tp * (layer.qk_dim + layer.v_dim)
    rate = device.memory_bytes_per_second * device.memory_efficiency
    if not job.flash:
        scores = tokens * span * layer.heads / job.tp
        peak = device.peak(job.compute_dtype) * device.matmul_efficiency * 0.7
        return flops / peak + 5 * scores * job.compute_width / rate
    small = min(1.0, (layer.qk_dim + 32) / 160)  # heads below 128 leave units of a GPU idle
    long = span / (span + 512)
    if device.name == "cpu":
        small = long = 1.0
    peak = device.peak("bfloat16" if job.compute_width == 2 else job.compute_dtype) * device.attention_efficiency
    moved = 4 * tokens * layer.heads / job.tp * layer.qk_dim * job.compute_width
    return max(flops * share / (peak * small * long), moved / rate)


def _hide(costs: dict[str, float], seconds: float, name: str, layers: int) -> None:
    """Let a collective run beside the computation of a pass: what does not fit is exposed, the rest slows it down."""
    work = sum(costs.values())
    hidden = min(seconds * (1 - 1 / max(1, layers + 1)), HIDDEN_SHARE * work)
    costs[name] = seconds - hidden + CONTENTION * hidden


def _gather_seconds(model: ModelShape, job: Job, device: Device, index: int) -> float:
    """Seconds of gathering all weights of a stage once over the ranks that FSDP shards over."""
    ranks = job.dp_shard * job.cp
    if ranks == 1:
        return 0.0
    size = _elements(model, job, index) * job.compute_width
    units = len(job.stages[index]) + 2
    rate = _bandwidth(device, ranks, _stride(job, "cp"))
    return size * (ranks - 1) / ranks / rate + units * _latency(device, ranks, job)


def _reduce_seconds(model: ModelShape, job: Job, device: Device, own: Sequence[int]) -> float:
    """Seconds of reducing the gradients of a rank's stages once over shards and replicas."""
    trained = sum(
        memory.unsharded(memory.trained(tuple(memory.parameters_of_stage(model, job, index))), job.tp, job.ep)
        for index in own
    )
    size, total = trained * job.reduce_width, 0.0
    ranks, units = job.dp_shard * job.cp, sum(len(job.stages[index]) for index in own) + 2
    if ranks > 1:
        total += size * (ranks - 1) / ranks / _bandwidth(device, ranks, _stride(job, "cp"))
        total += units * _latency(device, ranks, job)
    if job.dp_replicate > 1:
        part = size / ranks
        rate = _bandwidth(device, job.dp_replicate, _stride(job, "dp_replicate"))
        total += 2 * part * (job.dp_replicate - 1) / job.dp_replicate / rate
        total += 2 * units * _latency(device, job.dp_replicate, job)
    return total


def _send(model: ModelShape, job: Job, device: Device) -> float:
    size = job.local_tokens / job.tp * model.dim * job.compute_width
    stride = _stride(job, "pp")
    link = device.link if stride < device.devices_per_node else device.network
    return size / (link.bytes_per_second * link.efficiency) + link.latency_seconds


def _stride(job: Job, axis: str) -> int:
    """Ranks between two neighbours of an axis of the mesh (distributed/mesh.py: tp is innermost, pp outermost)."""
    inner = {"tp": 1, "cp": job.tp, "dp_replicate": job.tp * job.cp * job.dp_shard}
    return inner.get(axis, job.tp * job.cp * job.dp_shard * job.dp_replicate)


def _bandwidth(device: Device, ranks: int, stride: int) -> float:
    """Bytes that each of some ranks receives per second in a collective, one way.

    Ranks of a node use its links. Between nodes, those of one node use their network ports together.
    """
    per_node = min(ranks, max(1, device.devices_per_node // stride))
    inside = device.link.bytes_per_second * device.link.efficiency
    if per_node == ranks:
        return inside
    outside = device.network.bytes_per_second * device.network.efficiency * per_node
    return min(inside, outside / (1 + 0.05 * math.log2(ranks / per_node)))  # more nodes, more switches on the way


def _latency(device: Device, ranks: int, job: Job) -> float:
    link: Link = device.link if ranks <= device.devices_per_node else device.network
    return link.latency_seconds * (1 + math.log2(max(2, ranks)) / 2) if job.world_size > 1 else 0.0


def _add(total: dict[str, float], more: Mapping[str, float], times: float) -> None:
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + times * seconds
