"""The network: how fast all-reduce and all-gather are along each axis of the mesh, whether sums are right, who is slow.

Bus bandwidth is that of NVIDIA's nccl-tests (doc/PERFORMANCE.md): bytes times 2 (n - 1) / n for all-reduce and
(n - 1) / n for all-gather, over the seconds: what each link of a ring carries, whatever the number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.ops import accelerator
from shardtrain.tools.doctor import groups, links
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import Facts
from shardtrain.utils.errors import PeerError
from shardtrain.utils.units import MIB

AREA = "network"

BYTES = {"cpu": 8 * MIB, "accelerator": 256 * MIB}
PAIR_BYTES = {"cpu": 4 * MIB, "accelerator": 64 * MIB}
REPEATS = 5
SMALL_REPEATS = 20


def collect(context: RankContext, facts: Facts) -> None:
    """Measure the collectives of each axis, then pairs of neighbours; a world of one has no network."""
    facts["cards"] = links.network_cards()
    facts["collectives"] = []
    facts["pairs"] = []
    if context.size == 1:
        return
    hosts = _hosts(context)
    context.line.mark("joining the process group")
    context.torch_device()
    # longer than any limit of ours: the line says who waits, and PyTorch would end the process
    timeout = timedelta(seconds=20 * context.limit_seconds)
    store = dist.PrefixStore("doctor-group", context.store)
    backend = accelerator.collectives(context.device)
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.size, timeout=timeout)
    for axis, divided in groups.of_run(context.loaded, hosts).items():
        context.line.mark(f"making the groups of {axis}")
        found: Any = dist.new_subgroups_by_enumeration(divided, timeout=timeout)
        group: dist.ProcessGroup = found[0]
        place = next(number for number, ranks in enumerate(divided) if context.rank in ranks)
        for name, measure in COLLECTIVES.items():
            context.line.meet(f"{name} on {axis}")
            measured = measure(context, group)
            facts["collectives"].append(
                {"axis": axis, "name": name, "group": place, "ranks": divided[place], **measured}
            )
    _measure_pairs(context, facts, hosts)
    context.line.meet("leaving the process group")
    dist.destroy_process_group()


def _hosts(context: RankContext) -> list[str]:
    """The host of each rank, in order."""
    import socket

    context.line.send(f"host-{context.rank}", socket.gethostname())
    context.line.meet("network")
    if context.rank == 0:
        context.line.send("hosts", [context.line.receive(f"host-{rank}") for rank in range(context.size)])
    found = context.line.receive("hosts", context.limit_seconds)
    if found is None:
        raise PeerError("rank 0 has not sent the hosts of the ranks")
    return [str(host) for host in found]


def _seconds(context: RankContext, work: Callable[[], object], repeats: int) -> float:
    """The shortest of some repetitions after one that connects: other work slows some of them, a slow link all."""
    found = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        accelerator.finish(context.torch_device())
        found.append(time.perf_counter() - started)
    return min(found[1:])


def all_reduce(context: RankContext, group: dist.ProcessGroup) -> Facts:
    """Check a sum of whole numbers, then time sums of zeros: large ones, and one number alone."""
    size = group.size()
    tensor = torch.full((BYTES[context.kind] // 4,), float(group.rank() + 1), device=context.torch_device())
    dist.all_reduce(tensor, group=group)
    right = bool((tensor == size * (size + 1) // 2).all())
    small = tensor[:1].zero_().clone()
    tensor.zero_()
    seconds = _seconds(context, lambda: dist.all_reduce(tensor, group=group), REPEATS)
    latency = _seconds(context, lambda: dist.all_reduce(small, group=group), SMALL_REPEATS)
    return {"right": right, "rate": 2 * (size - 1) / size * tensor.nbytes / seconds, "latency": latency}


def all_gather(context: RankContext, group: dist.ProcessGroup) -> Facts:
    """Check that each rank's numbers arrive in its place, then time it."""
    size = group.size()
    part = torch.full((BYTES[context.kind] // 4 // size,), float(group.rank() + 1), device=context.torch_device())
    whole = part.new_empty(size * part.numel())
    # the first is the name since torch 2.13, which warns of the second
    gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
    gather(whole, part, group=group)
    wanted = torch.arange(1, size + 1, device=whole.device, dtype=whole.dtype)
    right = bool((whole.view(size, -1) == wanted[:, None]).all())
    seconds = _seconds(context, lambda: gather(whole, part, group=group), REPEATS)
    return {"right": right, "rate": (size - 1) / size * whole.nbytes / seconds}


COLLECTIVES: dict[str, Callable[[RankContext, dist.ProcessGroup], Facts]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
}


def _measure_pairs(context: RankContext, facts: Facts, hosts: list[str]) -> None:
    """Exchange a buffer with each neighbour, all pairs of a round at once."""
    for kind, rounds in groups.pair_rounds(hosts).items():
        for number, pairs in enumerate(rounds):
            context.line.meet(f"{kind}, round {number + 1}")
            peer = next((a + b - context.rank for a, b in pairs if context.rank in (a, b)), None)
            if peer is None:
                continue
            sent = torch.zeros(PAIR_BYTES[context.kind] // 4, device=context.torch_device())
            received = torch.empty_like(sent)
            seconds = _seconds(context, lambda: _exchange(sent, received, peer), REPEATS)  # noqa: B023
            facts["pairs"].append({"kind": kind, "peer": peer, "rate": sent.nbytes / seconds})


def _exchange(sent: Tensor, received: Tensor, peer: int) -> None:
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)])
    for one in work:
        one.wait()
