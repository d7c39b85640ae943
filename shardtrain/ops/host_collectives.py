"""Collectives of small CPU tensors over all ranks, with O(log ranks) sequential messages.

gloo's all-reduce and all-gather are rings, with 2 (N - 1) and N - 1 sequential messages on N ranks. With 30
microseconds per message, this takes a second of each step on 16,384 ranks. The functions of this module send
more messages at the same time. The methods are recursive doubling and Bruck's algorithm (Thakur, Rabenseifner
and Gropp 2005, "Optimization of Collective Communication Operations in MPICH"). Up to ``RING_UP_TO`` ranks,
gloo's ring is as fast, and is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

RING_UP_TO = 8
"""Largest number of ranks for gloo's ring, which runs in one call without Python between its messages."""

_REDUCE_TAG = 0x5A11
_GATHER_TAG = 0x5A12
"""Tags of messages.

Ranks that call different collectives wait for each other instead of mixing their numbers.
"""

_timeout: timedelta | None = None
"""Longest wait for one message. None uses the timeout with which the process group was created."""

_OPERATIONS: dict[dist.ReduceOp.RedOpType, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}

Exchange = Callable[[Tensor | None, int | None, Tensor | None, int | None], None]
"""Send a tensor to a rank, and receive another tensor from a rank at the same time.

None skips the direction.
"""


def all_reduce(
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Reduce a tensor over the ranks of a group, or all, in place (a collective). All get the same bits.

    A tensor of another device than the CPU is reduced by its own backend.
    """
    size = dist.get_world_size(group)
    if _is_ring(tensor, size):
        dist.all_reduce(tensor, op, group=group)
    else:
        exchange = partial(_exchange, group, _REDUCE_TAG)
        # A message must be contiguous.
        reduced = tensor.contiguous()
        reduce_by_doubling(reduced, _OPERATIONS[op], dist.get_rank(group), size, exchange)
        if reduced is not tensor:
            tensor.copy_(reduced)


def all_gather(tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks, stacked along a new first dimension (a collective).

    Args:
        tensor: contiguous, of the same shape and type on all ranks.
    """
    size = dist.get_world_size()
    gathered = torch.empty(size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if _is_ring(tensor, size):
        dist.all_gather(list(gathered), tensor)
        return gathered
    gather_by_doubling(
        gathered, tensor, dist.get_rank(), size, partial(_exchange, None, _GATHER_TAG)
    )
    return gathered


def set_timeout(seconds: int) -> None:
    """Set the longest wait for one message. gloo applies a group's later timeout only to its own collectives."""
    global _timeout
    _timeout = timedelta(seconds=seconds)


def hops(size: int) -> int:
    """Return the largest number of messages that follow one another in an all-reduce of ``size`` ranks."""
    if size <= RING_UP_TO:
        return 2 * (size - 1)
    return len(_partners(0, size)) + (2 if size & (size - 1) else 0)


def reduce_by_doubling(
    tensor: Tensor,
    operation: Callable[[Tensor, Tensor], Tensor],
    rank: int,
    size: int,
    exchange: Exchange,
) -> None:
    """Reduce in place: in round k,
    ranks whose numbers differ in bit k exchange what they have reduced so far.

    If the number of ranks is not a power of two, the surplus ranks send their tensor to a partner first, and
    receive the result at the end.
    """
    core = _largest_power_of_two(size)
    received = torch.empty_like(tensor)
    if rank >= core:
        exchange(tensor, rank - core, None, None)
        exchange(None, None, tensor, rank - core)
        return
    if rank + core < size:
        exchange(None, None, received, rank + core)
        tensor.copy_(operation(tensor, received))
    for partner in _partners(rank, size):
        exchange(tensor, partner, received, partner)
        # Partners add the same two numbers, and addition commutes. So both get the same bits.
        tensor.copy_(operation(tensor, received))
    if rank + core < size:
        exchange(tensor, rank + core, None, None)


def gather_by_doubling(
    gathered: Tensor, tensor: Tensor, rank: int, size: int, exchange: Exchange
) -> None:
    """Fill ``gathered`` with the tensors of all ranks: each round doubles the number of tensors that a rank has."""
    # Row i holds the tensor of rank (rank + i) % size until the end.
    gathered[0] = tensor
    count = 1
    while count < size:
        new = min(count, size - count)
        exchange(
            gathered[:new],
            (rank - count) % size,
            gathered[count : count + new],
            (rank + count) % size,
        )
        count += new
    gathered.copy_(gathered.roll(rank, dims=0))


def _partners(rank: int, size: int) -> Sequence[int]:
    rounds = _largest_power_of_two(size).bit_length() - 1
    return [rank ^ (1 << number) for number in range(rounds)]


def _largest_power_of_two(size: int) -> int:
    return 1 << (size.bit_length() - 1)


def _is_ring(tensor: Tensor, size: int) -> bool:
    if size <= RING_UP_TO or tensor.device.type != "cpu":
        return True
    return "gloo" not in dist.get_backend_config()  # a dry run has a backend that sends nothing


def _exchange(
    group: dist.ProcessGroup | None,
    tag: int,
    sent: Tensor | None,
    target: int | None,
    received: Tensor | None,
    source: int | None,
) -> None:
    messages = []
    if sent is not None:
        messages.append(dist.isend(sent, group=group, tag=tag, group_dst=target))
    if received is not None:
        messages.append(dist.irecv(received, group=group, tag=tag, group_src=source))
    for message in messages:
        if message is not None:
            message.wait(_timeout) if _timeout else message.wait()
