"""Seconds of collectives: bytes over the slowest link between the ranks, and latency."""

from __future__ import annotations

import math

from shardtrain.tools.plan.hardware import Device, Link
from shardtrain.tools.plan.job_sizes import PlannedJob

SHARED_MEMORY = 2.0
"""Bandwidth of memory shared by ranks, relative to gloo: gathers 2.3, sums 1.4 (benchmarks/LOG.md)."""


def stride(job: PlannedJob, axis: str) -> int:
    """Return the difference between the ranks of two neighbors on a mesh axis (distributed/mesh.py: tp is
    innermost, pp outermost).
    """
    if axis == "tp":
        return 1
    if axis == "cp":
        return job.tp
    ranks_per_replica = job.tp * job.cp * job.dp_shard
    if axis == "dp_replicate":
        return ranks_per_replica
    return ranks_per_replica * job.dp_replicate


def memory_rate(device: Device) -> float:
    """Return the bytes per second that kernels read and write."""
    return device.memory_bytes_per_second * device.memory_efficiency


def network_rate(device: Device) -> float:
    """Return the bytes per second of one network port."""
    return device.network.bytes_per_second * device.network.efficiency


def bandwidth(device: Device, ranks: int, stride: int) -> float:
    """Return the bytes per second that each of some ranks receives in a collective, in one direction.

    Ranks of a node use its links. Between nodes, the ranks of a node use their network ports together.
    """
    per_node = min(ranks, max(1, device.linked // stride))
    inside = node_rate(device, per_node)
    if per_node == ranks:
        return inside
    outside = network_rate(device) * per_node
    # More nodes have more switches between them.
    return min(inside, outside / (1 + 0.05 * math.log2(ranks / per_node)))


def node_rate(device: Device, ranks: int) -> float:
    """Return the bytes per second of each rank if these ranks of a node communicate.

    Without a switch, they only use the links between them.
    """
    rate = device.link.bytes_per_second * device.link.efficiency
    if not device.link.peers:
        return rate
    # The bandwidth of a device is divided between its links to the other devices of the node.
    used_links = max(1, ranks - 1)
    return rate * min(1.0, used_links / device.link.peers)


def shared_memory_rate(device: Device, ranks: int, rate: float) -> float:
    """Return the rate of FSDP's collectives.

    Ranks of one CPU share memory (distributed/cpu/shared_memory.py).
    """
    if device.is_cpu and ranks <= device.linked:
        return SHARED_MEMORY * rate
    return rate


def exchange_seconds(size: float, job: PlannedJob, device: Device) -> float:
    """Return the seconds in which each expert-parallel rank sends ``size`` bytes to the others.

    To other nodes, each rank only uses its own network port.
    """
    near_ranks = min(job.ep, device.linked)
    # All other ranks receive the same number of bytes.
    far_share = (job.ep - near_ranks) / max(1, job.ep - 1)
    near_size = size * (1 - far_share)
    far_size = size * far_share
    # The links of a node and the network transfer simultaneously.
    near_seconds = near_size / node_rate(device, near_ranks)
    far_seconds = far_size / network_rate(device)
    return max(near_seconds, far_seconds)


def ring_seconds(device: Device, ranks: int, stride: int) -> float:
    """Return the latency of a ring over all ranks.

    NCCL only uses rings for gathers and for reductions to shards.
    """
    if device.is_cpu:
        return device.link.latency_seconds
    # A ring passes each node once, so it has one hop per node over the network.
    # The other hops are within a node.
    per_node = min(ranks, max(1, device.linked // stride))
    hops_between_nodes = ranks // per_node if ranks > per_node else 0
    hops_within_nodes = ranks - max(1, hops_between_nodes)
    network_seconds = hops_between_nodes * device.network.latency_seconds
    # ``latency_seconds`` is the latency of a collective. A single hop over a link takes half of it.
    link_seconds = hops_within_nodes * device.link.latency_seconds / 2
    return network_seconds + link_seconds


def tree_seconds(device: Device, ranks: int, job: PlannedJob) -> float:
    """Return the latency of a collective over a tree of ranks."""
    if job.world_size == 1:
        return 0.0
    link: Link = device.link if ranks <= device.linked else device.network
    depth = math.log2(max(2, ranks))
    return link.latency_seconds * (1 + depth / 2)


def host_seconds(device: Device, launches: int) -> float:
    """Return the seconds of Python around a collective.

    An accelerator's host runs ahead of it, so these are hidden.
    """
    if not device.is_cpu:
        return 0.0
    return launches * device.launch_seconds


def copy_seconds(device: Device, size: float) -> float:
    """Return the seconds to copy ``size`` bytes into and out of a collective's buffers.

    Only a CPU does not hide it.
    """
    if not device.is_cpu:
        return 0.0
    return 2 * size / memory_rate(device)
