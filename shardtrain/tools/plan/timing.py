"""Seconds of a training step: a roofline for each operator, collectives by size and link, and a
simulated pipeline.

A kernel takes the longer of its FLOPs and its bytes (Williams et al. 2009, the roofline model).
Large products reach a share of the peak that is set in ``devices.toml``, and small ones less. A
collective takes the time to send its bytes over the slowest link between its ranks, plus a latency.
Gathers and reductions of FSDP overlap with computation on a GPU.

On a CPU nothing overlaps, because kernel launches, the Python overhead of collectives and gloo's
copies run on the same cores as computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardtrain.ops import host_collectives
from shardtrain.tools.plan import schedule
from shardtrain.tools.plan.hardware import Device
from shardtrain.tools.plan.job_sizes import PlannedJob
from shardtrain.tools.plan.layer_memory import recomputes
from shardtrain.tools.plan.layer_timing import (
    COLLECTIVE_LAUNCHES,
    FUSED,
    layer_pass,
    product_seconds,
)
from shardtrain.tools.plan.link_timing import (
    bandwidth,
    copy_seconds,
    host_seconds,
    memory_rate,
    network_rate,
    node_rate,
    ring_seconds,
    shared_memory_rate,
    stride,
    tree_seconds,
)
from shardtrain.tools.plan.parameter_shards import parameters_of_stage, sharded, trained, unsharded
from shardtrain.tools.plan.schedule import Action
from shardtrain.tools.plan.shapes import Linear, ModelShape, ParameterShape

HIDDEN_SHARE = 0.85
"""Share of computation that a collective can overlap with."""
CONTENTION = 0.06
"""Slowdown of computation during a collective."""
THREADS_EXPONENT = 0.9
"""n threads of a CPU are n ** THREADS_EXPONENT times as fast as one."""
HOST_BYTES_PER_SECOND = 33e9
"""Bandwidth between a device and host memory, and of an optimizer on the host."""
HOST_MESSAGE_SECONDS = 30e-6
"""Time of one small message of gloo over TCP between hosts of a cluster."""
BUBBLE = "pipeline bubble and sends"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank.

    ``costs`` by kind add up to ``seconds``; ``bubble`` is a share.
    """

    seconds: float
    costs: Mapping[str, float]
    bubble: float

    def largest(self, count: int = 3) -> list[tuple[str, float]]:
        """Return the largest costs, in descending order."""
        return sorted(self.costs.items(), key=lambda item: -item[1])[:count]


def of_step(
    model: ModelShape,
    job: PlannedJob,
    device: Device,
    orders: Sequence[Sequence[Action]] | None,
) -> StepTime:
    """Estimate the time of a step.

    ``orders`` has the actions of each pipeline rank (``schedule.orders``). None estimates the
    bubble by a formula.
    """
    if device.is_cpu:
        device = _with_threads(device, job.world_size)
    forward = {}
    backward = {}
    for index in range(len(job.stages)):
        forward[index], backward[index] = _stage(model, job, device, index)

    # Add up the costs of all micro-batches. In a pipeline, count the busiest rank and its bubble.
    send_seconds = _send_seconds(model, job, device)
    bubble = 0.0
    if job.pp == 1:
        costs = _costs_of_stages([0], forward, backward, job)
    elif orders is None:
        # Estimate by a formula: the time of the busiest rank,
        # and the share of it that is the pipeline bubble.
        busiest = _busiest_rank(backward, job)
        costs = _costs_of_stages(job.stages_of_rank(busiest), forward, backward, job)
        stages_per_rank = len(job.stages_of_rank(0))
        bubble = schedule.bubble(job.schedule, job.pp, stages_per_rank, job.num_microbatches)
        waiting_seconds = sum(costs.values()) * bubble
        costs[BUBBLE] = waiting_seconds + 2 * job.pp * send_seconds
    else:
        # By a simulation: the time in which the busiest rank does not compute.
        action_seconds = _action_seconds(forward, backward)
        timeline = schedule.simulate(orders, action_seconds, send_seconds)
        busiest = max(range(job.pp), key=lambda rank: timeline.busy_seconds[rank])
        costs = _costs_of_stages(job.stages_of_rank(busiest), forward, backward, job)
        costs[BUBBLE] = max(0.0, timeline.seconds - sum(costs.values()))
        bubble = timeline.bubble
    _add(costs, _once_a_step(model, job, device, costs), 1)
    costs = {name: seconds for name, seconds in costs.items() if seconds > 0}
    return StepTime(sum(costs.values()), costs, bubble)


def _costs_of_stages(
    stages: Iterable[int],
    forward: Mapping[int, Mapping[str, float]],
    backward: Mapping[int, Mapping[str, float]],
    job: PlannedJob,
) -> dict[str, float]:
    """Return the costs of all micro-batches on some stages."""
    costs: dict[str, float] = {}
    for index in stages:
        _add(costs, forward[index], job.num_microbatches)
        _add(costs, backward[index], job.num_microbatches)
    return costs


def _busiest_rank(backward: Mapping[int, Mapping[str, float]], job: PlannedJob) -> int:
    """Return the pipeline rank whose backward passes take longest."""

    def backward_seconds(rank: int) -> float:
        seconds = 0.0
        for index in job.stages_of_rank(rank):
            seconds += sum(backward[index].values())
        return seconds

    return max(range(job.pp), key=backward_seconds)


def _action_seconds(
    forward: Mapping[int, Mapping[str, float]], backward: Mapping[int, Mapping[str, float]]
) -> dict[tuple[str, int], float]:
    """Return the seconds of each action of a pipeline, by its letter and stage."""
    seconds = {}
    for index in forward:
        backward_seconds = sum(backward[index].values())
        seconds["F", index] = sum(forward[index].values())
        seconds["B", index] = backward_seconds
        # Gradients of inputs include attention, so they take a little longer than gradients of weights.
        seconds["I", index] = backward_seconds * 0.55
        seconds["W", index] = backward_seconds * 0.45
    return seconds


@lru_cache(maxsize=64)
def _with_threads(device: Device, ranks: int) -> Device:
    """Scale ``device``, which describes one core of a CPU, to the cores that each rank has.

    The launch overhead does not change, because one thread starts all kernels.
    """
    cores = device.devices_per_node
    threads = max(1, cores // min(ranks, cores))
    if threads == 1:
        return device
    faster = device.slower(threads**-THREADS_EXPONENT)
    return replace(
        faster, launch_seconds=device.launch_seconds, link=device.link, network=device.network
    )


def _stage(
    model: ModelShape,
    job: PlannedJob,
    device: Device,
    index: int,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of forward and of backward of a micro-batch on one stage, by cost.

    They include the part of FSDP's gathers that does not overlap with computation.
    """
    layers = job.stages[index]
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}

    # Equal layers with the same recomputation are counted once.
    groups: dict[tuple[int, str], list[int]] = {}
    for place, number in enumerate(layers):
        key = (id(model.layers[number]), recomputes(job, place))
        groups.setdefault(key, []).append(number)
    for (_, mode), numbers in groups.items():
        num_layers = len(numbers)
        seconds = layer_pass(model.layers[numbers[0]], job, device, model.dim)
        _add(forward, seconds.forward, num_layers)
        _add(backward, seconds.backward, num_layers)
        # Recomputation repeats the forward pass, or a part of it, within backward.
        if mode == "full":
            _add(backward, seconds.forward, num_layers)
        elif mode == "op":
            _add(backward, seconds.again, num_layers)
        elif mode == "core":
            _add(backward, {"attention": seconds.forward["attention"]}, num_layers)

    # The last stage also computes logits and loss.
    if index == len(job.stages) - 1:
        product, loss = _head_seconds(model, job, device)
        forward["head and loss"] = product + loss
        backward["head and loss"] = 2 * product
    # The exchange of experts waits for its rows, unless another micro-batch computes meanwhile.
    if job.hides_exchange:
        for costs in (forward, backward):
            exchange = costs.pop("expert exchange", 0.0)
            _overlap(costs, exchange, "expert exchange", len(layers), device)
    # FSDP gathers the weights once per pass if it frees them after each use.
    if job.fsdp and job.frees_gathered:
        gather = _gather_seconds(model, job, device, index)
        if gather:
            _overlap(forward, gather, "FSDP gathers", len(layers), device)
            _overlap(backward, gather, "FSDP gathers", len(layers), device)
    return forward, backward


def _head_seconds(model: ModelShape, job: PlannedJob, device: Device) -> tuple[float, float]:
    """Return the seconds of the product of the head, and of the loss, for a micro-batch."""
    columns = -(-model.vocab // job.tp)  # rounded up
    head = Linear("head", model.dim, columns, "replicate")
    job_without_float8 = replace(job, float8=False)
    tokens = job.heads * job.local_tokens
    product = product_seconds(head, job_without_float8, device, tokens, 1)
    # The loss reads and writes the logits in float32 and in the compute dtype.
    bytes_per_logit: float = 4 * 6 + job.compute_width * 4
    if job.fused:
        bytes_per_logit *= FUSED
    if job.loss == "fused":
        # Logits are written once, then read and replaced by their gradient.
        bytes_per_logit = 3 * job.compute_width
    loss_bytes = tokens * columns * bytes_per_logit
    return product, loss_bytes / memory_rate(device)


def _once_a_step(
    model: ModelShape,
    job: PlannedJob,
    device: Device,
    costs: Mapping[str, float],
) -> dict[str, float]:
    """Return the seconds of work that happens once per step: reducing gradients, casts, and the optimizer.

    ``costs`` are the costs of all micro-batches.
    """

    def num_elements(rank: int) -> int:
        count = 0
        for index in _stages_of_rank(job, rank):
            count += _elements(model, job, index)
        return count

    # The first or the last rank of the pipeline, whichever has more weights.
    worst = max({0, job.pp - 1}, key=num_elements)
    stages = _stages_of_rank(job, worst)
    seconds: dict[str, float] = {}

    # Each step starts with a sum of a few numbers over the hosts, whose messages follow one another.
    if job.world_size > 1:
        seconds["sums on the host"] = host_collectives.hops(job.world_size) * HOST_MESSAGE_SECONDS

    # Gradients are reduced during the backward pass of the last micro-batch, which is two thirds of
    # its computation.
    reduction = _reduce_seconds(model, job, device, stages)
    # Weights that stay gathered between micro-batches are gathered once per step.
    if job.fsdp and not job.frees_gathered:
        for index in stages:
            reduction += _gather_seconds(model, job, device, index)
    if reduction and (device.is_cpu or not job.overlaps):
        seconds["gradient reduction"] = reduction
    elif reduction:
        computation = sum(value for name, value in costs.items() if name != BUBBLE)
        backward = computation / job.num_microbatches * 2 / 3 / max(1, len(stages))
        exposed = reduction - HIDDEN_SHARE * backward
        seconds["gradient reduction"] = max(exposed, reduction / 16)

    # Without FSDP, weights are cast before each micro-batch, and their gradients after it.
    if job.copies:
        gradients = unsharded(trained(parameters_of_stage(model, job, 0)), job.tp, job.ep)
        num_cast = (_elements(model, job, 0) + gradients) * job.num_microbatches
        bytes_per_cast = job.compute_width + job.stored_width
        seconds["casts"] = num_cast * bytes_per_cast / memory_rate(device)
    seconds["optimizer"] = _optimizer_seconds(model, job, device, stages)
    return seconds


def _optimizer_seconds(
    model: ModelShape, job: PlannedJob, device: Device, stages: Sequence[int]
) -> float:
    """Return the seconds of the update of a rank that has these stages."""
    sharded_elements = 0
    for index in stages:
        for parameter in parameters_of_stage(model, job, index):
            sharded_elements += sharded(parameter, job)
    # The update reads weights, gradients and states, and writes weights and states.
    replicas = job.dp_replicate if job.shard_states else 1
    updated = sharded_elements / replicas
    state_bytes = updated * job.states * job.state_width * 2
    moved_bytes = sharded_elements * (3 * job.stored_width) + state_bytes
    moved_bytes += updated * job.stored_width * 2
    # Averages read the weights and themselves, and write themselves.
    if job.average_width:
        moved_bytes += sharded_elements * (job.stored_width + 2 * job.average_width)
    # With offload, the host updates, and gradients and weights move between device and host.
    if job.offload != "nothing":
        return (moved_bytes * 2) / HOST_BYTES_PER_SECOND
    seconds = moved_bytes / memory_rate(device) + 2e-4
    if job.shard_states:
        # Replicas gather the weights that the others have updated.
        replica_stride = stride(job, "dp_replicate")
        rate = bandwidth(device, job.dp_replicate, replica_stride)
        latency = ring_seconds(device, job.dp_replicate, replica_stride)
        num_units = sum(len(job.stages[index]) for index in stages) + 2
        gather = sharded_elements * job.stored_width / rate
        seconds += gather + num_units * latency
    return seconds


def _stages_of_rank(job: PlannedJob, rank: int) -> Sequence[int]:
    """Return the stages of a pipeline rank. Without a pipeline, there is one stage."""
    if job.pp == 1:
        return [0]
    return job.stages_of_rank(rank)


def _elements(model: ModelShape, job: PlannedJob, index: int) -> int:
    """Return the elements of a stage's weights on one rank when gathered."""
    ends: tuple[ParameterShape, ...] = ()
    if index == 0:
        ends += model.first
    if index == len(job.stages) - 1:
        ends += model.last
    in_layers = _layer_elements(model, job, index)
    return in_layers + unsharded(ends, job.tp, job.ep)


def _layer_elements(model: ModelShape, job: PlannedJob, index: int) -> int:
    """Return the number of weight elements that a rank has when all layers of a stage are gathered."""
    count = 0
    for number in job.stages[index]:
        count += unsharded(model.layers[number].parameters, job.tp, job.ep)
    return count


def _overlap(
    costs: dict[str, float], seconds: float, name: str, layers: int, device: Device
) -> None:
    """Add the cost of a collective that overlaps with the computation of a pass.

    The part that does not overlap counts in full. The rest slows down the computation.
    """
    if device.is_cpu:
        costs[name] = seconds
        return
    # The first gather of a pass has no computation to overlap with.
    share_after_first = 1 - 1 / max(1, layers + 1)
    computation = sum(costs.values())
    overlapped = min(seconds * share_after_first, HIDDEN_SHARE * computation)
    costs[name] = seconds - overlapped + CONTENTION * overlapped


def _gather_seconds(model: ModelShape, job: PlannedJob, device: Device, index: int) -> float:
    """Return the seconds of gathering all weights of a stage once from FSDP's shards."""
    ranks = job.dp_shard * job.cp
    if ranks == 1 and not device.is_cpu:
        return 0.0
    # In float8, the weights of layers have one byte per element. Embedding and head do not change.
    size = float(_elements(model, job, index) * job.compute_width)
    if job.float8_gather:
        saved_per_element = job.compute_width - 1
        size -= _layer_elements(model, job, index) * saved_per_element
    copies = copy_seconds(device, size * (1 + 1 / ranks))
    shard_stride = stride(job, "cp")
    rate = shared_memory_rate(device, ranks, bandwidth(device, ranks, shard_stride))
    transfer = size * (ranks - 1) / ranks / rate
    # Each layer is one collective, and so are the first and the last modules.
    num_units = len(job.stages[index]) + 2
    latency = ring_seconds(device, ranks, shard_stride) + host_seconds(device, COLLECTIVE_LAUNCHES)
    return transfer + num_units * latency + copies


def _reduce_seconds(
    model: ModelShape, job: PlannedJob, device: Device, stages: Sequence[int]
) -> float:
    """Return the seconds of reducing all gradients of some stages once, over shards and replicas."""
    num_trained = 0
    num_units = 2
    for index in stages:
        parameters = trained(parameters_of_stage(model, job, index))
        num_trained += unsharded(parameters, job.tp, job.ep)
        num_units += len(job.stages[index])
    size = num_trained * job.reduce_width
    ranks = job.dp_shard * job.cp
    host = host_seconds(device, COLLECTIVE_LAUNCHES)
    total = 0.0
    # FSDP copies gradients into one buffer per unit, and the result out of it.
    if job.fsdp:
        total += copy_seconds(device, size * (1 + 1 / ranks))
    # Reduce-scatter over the shards, then all-reduce of the shards over the replicas.
    if ranks > 1:
        shard_stride = stride(job, "cp")
        rate = shared_memory_rate(device, ranks, bandwidth(device, ranks, shard_stride))
        latency = ring_seconds(device, ranks, shard_stride)
        total += size * (ranks - 1) / ranks / rate
        total += num_units * (latency + host)
    if job.dp_replicate > 1:
        shard_size = size / ranks
        replicas = job.dp_replicate
        rate = bandwidth(device, replicas, stride(job, "dp_replicate"))
        latency = 2 * tree_seconds(device, replicas, job)
        total += 2 * shard_size * (replicas - 1) / replicas / rate
        total += num_units * (latency + host)
    return total


def _send_seconds(model: ModelShape, job: PlannedJob, device: Device) -> float:
    """Return the seconds of sending the activations of a micro-batch to the next stage."""
    tokens = job.local_tokens / job.tp
    size = tokens * model.dim * job.compute_width
    is_within_node = stride(job, "pp") < device.linked
    if is_within_node:
        return size / node_rate(device, 2) + device.link.latency_seconds
    return size / network_rate(device) + device.network.latency_seconds


def _add(total: dict[str, float], more: Mapping[str, float], times: float) -> None:
    """Add ``times`` the costs ``more`` to ``total``, in place."""
    for name, seconds in more.items():
        before = total.get(name, 0.0)
        total[name] = before + times * seconds
