"""Seconds of a training step: a roofline of each operator, collectives by size and link, the pipeline played out.

A kernel takes the longer of its FLOPs and its bytes (Williams et al. 2009, the roofline model). Large products reach a
share of the peak that ``devices.toml`` says, small ones less. A collective takes its bytes over the slowest link that
its ranks need, and a latency. FSDP's gathers and reductions hide behind computation where there is enough of it.

A CPU is its own host: what starts kernels, Python of collectives and gloo's copies all take time from the same cores,
so that nothing hides behind anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardtrain.tools.plan import rank_memory, schedule
from shardtrain.tools.plan.hardware import Device, Link
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.schedule import Action
from shardtrain.tools.plan.shapes import Layer, Linear, ModelShape

HALF_SIZE = 96
"""A dimension of a product at which half of the rate of a large one is reached."""
STREAM_PASSES = 20.0
"""Reads and writes of a layer's residual stream in forward, one kernel at a time."""
HIDDEN_PASSES = 5.0
"""The same of its feed-forward's insides."""
FUSED = 0.5
"""What the compiler leaves of both."""
LAUNCHES = 26
"""Kernels of a layer's forward."""
EXPERT_LAUNCHES = 40
"""Those that routing and sorting rows add; where experts are exchanged, the host waits for the device before them."""
HIDDEN_SHARE = 0.85
"""Share of computation behind which a collective can hide."""
FLOAT8_SHARE = 0.88
"""What products in float8 reach of what those in bfloat16 reach of their peaks."""
GROUPED_SHARE = 0.45
"""What a grouped product of experts reaches of the rate of a plain one of the same rows."""
ROW_PASSES = 14
"""Reads and writes in forward of the rows of experts: gathered, exchanged, sorted, brought back, weighted."""
LOAD = 1.25
"""Rows of the busiest rank over the mean, where experts are on different ranks."""
CONTENTION = 0.06
"""By how much computation slows down while a collective runs beside it."""
COLLECTIVE_LAUNCHES = 24
"""Kernels that a CPU would start in the time that Python takes for a collective of FSDP."""
DTENSOR_LAUNCHES = 48
"""The same for a collective of a DTensor, with the dispatch of what comes before it."""
PIECE_LAUNCHES = 12
"""And for each part of the keys that queries attend to under context parallelism: kernel, cuts, merging."""
THREADS_EXPONENT = 0.9
"""A CPU's n threads do n to this as much as one."""
DTENSOR_PRODUCTS = 0.91
"""What products of DTensors in float32 reach on a CPU of those by oneDNN, which plain weights alone have."""
SHARED_MEMORY = 2.0
"""Bytes per second by memory that ranks share over those by gloo: gathers 2.3, sums 1.4 (docs/performance_cpu.md)."""
KEYS_AT_ONCE = 512
"""Keys that PyTorch's attention on a CPU takes at a time; those after a query are left out by whole blocks."""
HOST_BYTES_PER_SECOND = 33e9
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


def of_step(model: ModelShape, job: PlannedJob, device: Device, orders: Sequence[Sequence[Action]] | None) -> StepTime:
    """How long a step takes; ``orders`` as for ``memory.of_ranks``, or None to take the bubble from a formula."""
    if device.is_cpu:
        device = _with_threads(device, job.world_size)
    last = len(job.stages) - 1
    forward = {}
    backward = {}
    for index, layers in enumerate(job.stages):
        forward[index], backward[index] = _stage(model, job, device, index, layers, last)

    # The passes of all micro-batches: without a pipeline one after the other; else those of the busiest rank, and the
    # time that it waits, by a formula or as the schedule is played out.
    costs: dict[str, float] = {}
    bubble = 0.0
    if job.pp == 1:
        for one in (forward[0], backward[0]):
            _add(costs, one, job.num_microbatches)
    elif orders is None:
        of_rank = {rank: sum(sum(backward[index].values()) for index in _own(job, rank)) for rank in range(job.pp)}
        slowest = max(of_rank, key=lambda rank: of_rank[rank])
        for index in _own(job, slowest):
            for one in (forward[index], backward[index]):
                _add(costs, one, job.num_microbatches)
        bubble = schedule.bubble(job.schedule, job.pp, len(_own(job, 0)), job.num_microbatches)
        costs["pipeline bubble and sends"] = sum(costs.values()) * bubble + 2 * job.pp * _send(model, job, device)
    else:
        seconds = {}
        for index in forward:
            ahead = sum(forward[index].values())
            back = sum(backward[index].values())
            seconds["F", index] = ahead
            seconds["B", index] = back
            # apart, the gradients of inputs with attention take a little more than those of weights
            seconds["I", index] = back * 0.55
            seconds["W", index] = back * 0.45
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


@lru_cache(maxsize=64)
def _with_threads(device: Device, ranks: int) -> Device:
    """A CPU whose ranks share its cores, of which a row says what one does; what starts kernels has one thread."""
    threads = max(1, device.devices_per_node // min(ranks, device.devices_per_node))
    if threads == 1:
        return device
    faster = device.slower(threads**-THREADS_EXPONENT)
    return replace(faster, launch_seconds=device.launch_seconds, link=device.link, network=device.network)


def _stage(
    model: ModelShape, job: PlannedJob, device: Device, index: int, layers: range, last: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of forward and of backward of a micro-batch on one stage, by cost, FSDP's exposed part included."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}

    # Layers that are equal, and recomputed alike, are counted once.
    alike: dict[tuple[int, str], list[int]] = {}
    for place, number in enumerate(layers):
        alike.setdefault((id(model.layers[number]), rank_memory.recomputes(job, place)), []).append(number)
    for (_, mode), numbers in alike.items():
        one = _layer(model.layers[numbers[0]], job, device, model.dim)
        _add(forward, one.forward, len(numbers))
        _add(backward, one.backward, len(numbers))
        if mode == "full":
            _add(backward, one.forward, len(numbers))
        elif mode == "op":
            _add(backward, one.again, len(numbers))
        elif mode == "core":
            _add(backward, {"attention": one.forward["attention"]}, len(numbers))

    # The head and the loss, which reads and writes the logits in float32 and in the compute type.
    if index == last:
        columns = -(-model.vocab // job.tp)
        product = Linear("head", model.dim, columns, "replicate")
        seconds = _product(product, replace(job, float8=False), device, job.local_tokens, 1)
        each = (4 * 6 + job.compute_width * 4) * (FUSED if job.fused else 1.0)
        if job.loss == "fused":  # written once, read and overwritten by the gradient
            each = 3 * job.compute_width
        logits = job.local_tokens * columns * each
        forward["head and loss"] = seconds + logits / (device.memory_bytes_per_second * device.memory_efficiency)
        backward["head and loss"] = 2 * seconds
    gather = _gather_seconds(model, job, device, index) if job.fsdp and job.frees_gathered else 0.0
    if gather:
        for costs in (forward, backward):
            _hide(costs, gather, "FSDP gathers", len(layers), device)
    return forward, backward


def _once_a_step(model: ModelShape, job: PlannedJob, device: Device, costs: Mapping[str, float]) -> dict[str, float]:
    """Seconds of what is counted for a step: gradients are reduced, gathers without freeing, casts, the optimizer."""
    worst = max({0, job.pp - 1}, key=lambda rank: sum(_elements(model, job, index) for index in _own(job, rank)))
    own = _own(job, worst)
    once: dict[str, float] = {}

    # Gradients: beside the last micro-batch's backward pass, two thirds of a pass, as far as that is long enough.
    gradients = _reduce_seconds(model, job, device, own)
    if job.fsdp and not job.frees_gathered:
        gradients += sum(_gather_seconds(model, job, device, index) for index in own)
    passes = sum(v for k, v in costs.items() if k != "pipeline bubble and sends")
    backward = passes / job.num_microbatches * 2 / 3 / max(1, len(own))
    if gradients and (device.is_cpu or not job.overlaps):
        once["gradient reduction"] = gradients
    elif gradients:
        once["gradient reduction"] = max(gradients - HIDDEN_SHARE * backward, gradients / 16)

    # Without FSDP copies are cast before each micro-batch, and their gradients after it.
    rate = device.memory_bytes_per_second * device.memory_efficiency
    if job.copies:
        parameters = tuple(rank_memory.parameters_of_stage(model, job, 0))
        learning = rank_memory.unsharded(rank_memory.trained(parameters), job.tp, job.ep)
        numbers = (_elements(model, job, 0) + learning) * job.num_microbatches
        once["casts"] = numbers * (job.compute_width + job.stored_width) / rate

    # The update reads weights and gradients and writes weights; it reads and writes the state.
    held = sum(
        rank_memory.sharded(one, job) for index in own for one in rank_memory.parameters_of_stage(model, job, index)
    )
    states = held / (job.dp_replicate if job.shard_states else 1)
    moved = held * (3 * job.stored_width) + states * job.states * job.state_width * 2 + states * job.stored_width * 2
    once["optimizer"] = moved / rate + 2e-4
    if job.shard_states:
        group = _bandwidth(device, job.dp_replicate, _stride(job, "dp_replicate"))
        units = sum(len(job.stages[index]) for index in own) + 2
        around = _ring(device, job.dp_replicate, _stride(job, "dp_replicate"))
        once["optimizer"] += held * job.stored_width / group + units * around
    if job.offload != "nothing":
        once["optimizer"] = (moved * 2) / HOST_BYTES_PER_SECOND
    return once


def _own(job: PlannedJob, rank: int) -> Sequence[int]:
    return job.stages_of_rank(rank) if job.pp > 1 else [0]


def _elements(model: ModelShape, job: PlannedJob, index: int) -> int:
    ends = (model.first if index == 0 else ()) + (model.last if index == len(job.stages) - 1 else ())
    layers = sum(rank_memory.unsharded(model.layers[n].parameters, job.tp, job.ep) for n in job.stages[index])
    return layers + rank_memory.unsharded(ends, job.tp, job.ep)


@lru_cache(maxsize=16384)
def _layer(layer: Layer, job: PlannedJob, device: Device, dim: int) -> _Pass:
    """Seconds of one layer's passes on a micro-batch."""
    c = job.compute_width
    tokens = job.local_tokens
    rate = device.memory_bytes_per_second * device.memory_efficiency
    split = tokens // job.tp if job.split_sequence else tokens

    # Products. Recomputation of operations keeps every second one, and a frozen weight needs no gradient.
    products = [(one, _product(one, job, device, tokens, job.tp)) for one in layer.linears if one.word != "router"]
    matmul = sum(seconds for _, seconds in products)
    cast_forward, cast_backward = _casts(layer, job, device) if _is_float8(job, device) else (0.0, 0.0)
    kept = sum(seconds for number, (_, seconds) in enumerate(products) if number % 2 == 0)
    frozen = sum(seconds for one, seconds in products if not one.trained)
    hidden = sum(one.out_features for one in layer.inside("ffn") if one.word != "rowwise") / job.tp * tokens

    # Experts: products of groups of rows, as many as there are experts on this rank, and an exchange of rows before
    # and after them.
    exchange = 0.0
    if layer.experts:
        rows = int(split * layer.experts.top_k * (LOAD if job.ep > 1 else 1))
        groups = max(1, layer.experts.count // job.ep)
        expert = Linear("", dim, layer.experts.ffn, "replicate")
        types = replace(job, float8=job.float8_experts)
        of_experts = (3 if layer.gated else 2) * groups * _product(expert, types, device, max(1, rows // groups), 1)
        matmul += of_experts / GROUPED_SHARE
        hidden += (2 if layer.gated else 1) * rows * layer.experts.ffn + ROW_PASSES * rows * dim / HIDDEN_PASSES
        if job.ep > 1:
            moved = rows * dim * c * (job.ep - 1) / job.ep
            exchange = 2 * (_exchange(moved, job, device) + _latency(device, job.ep, job))

    # Attention, and everything that is bound by reading and writing memory.
    attention = _attention(layer, job, device)
    heads = tokens * (layer.heads + layer.kv_heads) * layer.qk_dim / job.tp
    passes = (STREAM_PASSES * split * dim + HIDDEN_PASSES * hidden + 6 * heads) * c
    elementwise = passes / rate * (FUSED if job.fused else 1.0)

    # Tensor parallelism: two gathers and two reductions, or two all-reduces.
    stream = tokens * dim * c
    tensor = 0.0
    if job.tp > 1:
        one = stream * (job.tp - 1) / job.tp / _bandwidth(device, job.tp, 1) + _latency(device, job.tp, job)
        tensor = 4 * (one + _host(device, DTENSOR_LAUNCHES) + _copies(device, stream))
        if job.gathers_float8 and _is_float8(job, device):
            tensor *= 0.75

    # Context parallelism: keys and values of all ranks. Each part of the keys gives an output, which is merged with
    # those before it in float32.
    context = 0.0
    if job.cp > 1:
        kv_heads = layer.heads if job.repeats_kv else layer.kv_heads
        kv = 2 * tokens * kv_heads * layer.qk_dim * c / job.tp
        context = kv * (job.cp - 1) / _bandwidth(device, job.cp, job.tp) + _latency(device, job.cp, job)
        merged = tokens * layer.heads * layer.v_dim / job.tp * (c + 4 * 4)
        context += (job.cp if job.cp_method == "ring" else 2) * merged / rate
        messages = job.cp if job.cp_method == "ring" else 2  # keys and values
        pieces = 2 * job.cp - 1 + (job.cp_method == "ring")
        context += messages * _host(device, COLLECTIVE_LAUNCHES) + pieces * _host(device, PIECE_LAUNCHES)

    # Starting kernels: beside the device's work, so that only what is longer than that counts. A CPU is its own host,
    # and an exchange of experts makes the host wait for the device.
    launches = LAUNCHES * device.launch_seconds * (0.5 if job.fused else 1.0)
    routing = EXPERT_LAUNCHES * device.launch_seconds if layer.experts else 0.0
    work = matmul + attention + elementwise
    host = launches + routing if device.is_cpu else max(0.0, launches + routing - work)
    if job.ep > 1:
        host = max(host, routing)

    # Backward has two products for each of forward's, of inputs and of weights. Its attention computes the scores again
    # and has four products more, 2.5 times the FLOPs.
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
    return _Pass(forward, backward, again)


def _product(one: Linear, job: PlannedJob, device: Device, tokens: int, tp: int) -> float:
    """Seconds of one product of (tokens, in) by (in, out) on a rank."""
    into = one.in_features / tp if one.word == "rowwise" else one.in_features
    out = one.out_features / tp if one.word in ("colwise", "head") else one.out_features
    fast = _is_float8(job, device)
    peak = device.peak("float8" if fast else job.compute_dtype) * device.matmul_efficiency
    half_size = HALF_SIZE
    if fast:
        peak = peak * FLOAT8_SHARE
        half_size = 2 * HALF_SIZE  # twice as fast, with the same time to begin
    size = math.prod(d / (d + half_size) for d in (tokens, into, out))
    if device.is_cpu:
        size = DTENSOR_PRODUCTS if job.tp > 1 and job.compute_dtype == "float32" else 1.0
    # the roofline: bound by FLOPs or by reading two matrices and writing one
    moved = (tokens * (into + out) + into * out) * job.compute_width
    rate = device.memory_bytes_per_second * device.memory_efficiency
    return max(2 * tokens * into * out / (peak * size), moved / rate)


def _is_float8(job: PlannedJob, device: Device) -> bool:
    return job.float8 and "float8" in device.flops


def _casts(layer: Layer, job: PlannedJob, device: Device) -> tuple[float, float]:
    """Seconds of casting to float8, in forward and in backward: inputs that products share once, weights, gradients.

    Under tensor parallelism each rank casts what was gathered, or with ``gathers_float8`` its own part before.
    """
    tokens = job.local_tokens
    tp = job.tp
    rate = device.memory_bytes_per_second * device.memory_efficiency
    inputs = outputs = weights = 0.0
    seen: set[tuple[str, int, bool]] = set()
    for one in layer.linears:
        if one.word == "router":
            continue
        split = tp if one.word in ("colwise", "rowwise") else 1
        weights += one.in_features * one.out_features / split
        outputs += tokens * one.out_features / split
        shared = (one.path.rpartition(".")[0], one.in_features, one.word == "rowwise")
        if shared not in seen:
            seen.add(shared)
            inputs += tokens * one.in_features / (split if one.word == "rowwise" or job.gathers_float8 else 1)
    # a cast reads two bytes and writes one; backward casts gradients, and turns inputs and weights around
    return 3 * (inputs + weights) / rate, (3 * outputs + 2 * inputs + 2 * weights) / rate


def _attention(layer: Layer, job: PlannedJob, device: Device) -> float:
    """Seconds of softmax(q k) v in forward: half of the square where it is causal."""
    tokens = job.local_tokens
    span = job.seq_len if not layer.limit else min(job.seq_len, layer.limit)
    share = 0.5 if layer.causal and span == job.seq_len else 1.0
    if device.is_cpu and share < 1:
        part = span if job.cp == 1 else max(1, span // (2 * job.cp))  # context parallelism attends part by part
        share = (1 + min(part, KEYS_AT_ONCE) / span) / 2
    flops = 2 * tokens * span * layer.heads / job.tp * (layer.qk_dim + layer.v_dim)
    rate = device.memory_bytes_per_second * device.memory_efficiency
    if not job.flash:
        scores = tokens * span * layer.heads / job.tp
        peak = device.peak(job.compute_dtype) * device.matmul_efficiency * 0.7
        return flops / peak + 5 * scores * job.compute_width / rate
    small = min(1.0, (layer.qk_dim + 32) / 160)  # heads below 128 leave units of a GPU idle
    long = span / (span + 512)
    if device.is_cpu:
        small = long = 1.0
    peak = (
        device.peak("bfloat16" if job.compute_width == 2 else job.compute_dtype)
        * device.attention_efficiency
        * job.attention_speed
    )
    moved = 4 * tokens * layer.heads / job.tp * layer.qk_dim * job.compute_width
    return max(flops * share / (peak * small * long), moved / rate)


def _hide(costs: dict[str, float], seconds: float, name: str, layers: int, device: Device) -> None:
    """Let a collective run beside the computation of a pass: what does not fit is exposed, the rest slows it down."""
    if device.is_cpu:
        costs[name] = seconds
        return
    work = sum(costs.values())
    hidden = min(seconds * (1 - 1 / max(1, layers + 1)), HIDDEN_SHARE * work)
    costs[name] = seconds - hidden + CONTENTION * hidden


def _gather_seconds(model: ModelShape, job: PlannedJob, device: Device, index: int) -> float:
    """Seconds of gathering all weights of a stage once over the ranks that FSDP shards over."""
    ranks = job.dp_shard * job.cp
    if ranks == 1 and not device.is_cpu:
        return 0.0
    size = float(_elements(model, job, index) * job.compute_width)
    if job.float8_gather:
        layers = sum(rank_memory.unsharded(model.layers[n].parameters, job.tp, job.ep) for n in job.stages[index])
        size -= layers * (job.compute_width - 1)
    units = len(job.stages[index]) + 2
    rate = _shared(device, ranks, _bandwidth(device, ranks, _stride(job, "cp")))
    each = _ring(device, ranks, _stride(job, "cp")) + _host(device, COLLECTIVE_LAUNCHES)
    copies = _copies(device, size * (1 + 1 / ranks))
    return size * (ranks - 1) / ranks / rate + units * each + copies


def _reduce_seconds(model: ModelShape, job: PlannedJob, device: Device, own: Sequence[int]) -> float:
    """Seconds of reducing the gradients of a rank's stages once over shards and replicas."""
    trained = sum(
        rank_memory.unsharded(
            rank_memory.trained(tuple(rank_memory.parameters_of_stage(model, job, index))), job.tp, job.ep
        )
        for index in own
    )
    size = trained * job.reduce_width
    total = 0.0
    ranks = job.dp_shard * job.cp
    units = sum(len(job.stages[index]) for index in own) + 2
    if job.fsdp:
        total += _copies(device, size * (1 + 1 / ranks))
    if ranks > 1:
        rate = _shared(device, ranks, _bandwidth(device, ranks, _stride(job, "cp")))
        total += size * (ranks - 1) / ranks / rate
        total += units * (_ring(device, ranks, _stride(job, "cp")) + _host(device, COLLECTIVE_LAUNCHES))
    if job.dp_replicate > 1:
        part = size / ranks
        rate = _bandwidth(device, job.dp_replicate, _stride(job, "dp_replicate"))
        total += 2 * part * (job.dp_replicate - 1) / job.dp_replicate / rate
        total += units * (2 * _latency(device, job.dp_replicate, job) + _host(device, COLLECTIVE_LAUNCHES))
    return total


def _send(model: ModelShape, job: PlannedJob, device: Device) -> float:
    size = job.local_tokens / job.tp * model.dim * job.compute_width
    if _stride(job, "pp") < device.linked:
        return size / _inside(device, 2) + device.link.latency_seconds
    network = device.network
    return size / (network.bytes_per_second * network.efficiency) + network.latency_seconds


def _stride(job: PlannedJob, axis: str) -> int:
    """Ranks between two neighbours of an axis of the mesh (distributed/mesh.py: tp is innermost, pp outermost)."""
    inner = {"tp": 1, "cp": job.tp, "dp_replicate": job.tp * job.cp * job.dp_shard}
    return inner.get(axis, job.tp * job.cp * job.dp_shard * job.dp_replicate)


def _bandwidth(device: Device, ranks: int, stride: int) -> float:
    """Bytes that each of some ranks receives per second in a collective, one way.

    Ranks of a node use its links. Between nodes, those of one node use their network ports together.
    """
    per_node = min(ranks, max(1, device.linked // stride))
    inside = _inside(device, per_node)
    if per_node == ranks:
        return inside
    outside = device.network.bytes_per_second * device.network.efficiency * per_node
    return min(inside, outside / (1 + 0.05 * math.log2(ranks / per_node)))  # more nodes, more switches on the way


def _inside(device: Device, ranks: int) -> float:
    """Bytes per second that each of some ranks of a node gets over its links; without a switch, over those to them."""
    rate = device.link.bytes_per_second * device.link.efficiency
    return rate * min(1.0, max(1, ranks - 1) / device.link.peers) if device.link.peers else rate


def _exchange(moved: float, job: PlannedJob, device: Device) -> float:
    """Seconds in which each of the expert-parallel ranks sends so many bytes to the others: to other nodes, by its own
    port of the network alone.
    """
    near = min(job.ep, device.linked)
    far = (job.ep - near) / max(1, job.ep - 1)
    inside = moved * (1 - far) / _inside(device, near)
    return max(inside, moved * far / (device.network.bytes_per_second * device.network.efficiency))


def _ring(device: Device, ranks: int, stride: int) -> float:
    """Seconds in which a message of no length passes all ranks: NCCL gathers and reduces to shards on rings alone."""
    if device.is_cpu:
        return device.link.latency_seconds
    per_node = min(ranks, max(1, device.linked // stride))
    between = ranks // per_node if ranks > per_node else 0
    return between * device.network.latency_seconds + (ranks - max(1, between)) * device.link.latency_seconds / 2


def _latency(device: Device, ranks: int, job: PlannedJob) -> float:
    link: Link = device.link if ranks <= device.linked else device.network
    return link.latency_seconds * (1 + math.log2(max(2, ranks)) / 2) if job.world_size > 1 else 0.0


def _host(device: Device, launches: int) -> float:
    """Seconds of Python around a collective, where its host is the device; elsewhere it runs ahead of the device."""
    return launches * device.launch_seconds if device.is_cpu else 0.0


def _shared(device: Device, ranks: int, rate: float) -> float:
    """FSDP's bytes per second between ranks of a CPU: through memory that they share (cpu/shared_memory.py)."""
    return SHARED_MEMORY * rate if device.is_cpu and ranks <= device.linked else rate


def _copies(device: Device, size: float) -> float:
    """Seconds of copying so many bytes into and out of a collective's buffers, where nothing hides it."""
    return 2 * size / (device.memory_bytes_per_second * device.memory_efficiency) if device.is_cpu else 0.0


def _add(total: dict[str, float], more: Mapping[str, float], times: float) -> None:
    for name, seconds in more.items():
        total[name] = total.get(name, 0.0) + times * seconds
