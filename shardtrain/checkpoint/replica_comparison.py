"""What several ranks hold alike, compared before it is saved: a bit that differs is found, and its rank is named.

A checkpoint holds each part once, whoever writes it, so a rank that holds other bits than its replicas would be saved,
or forgotten, in silence. What is held once, as under FSDP, has nothing to be compared with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint.collectives import all_gather_json
from shardtrain.ops.dtensor import local_tensor

COUNTERS = ("step", "samples_consumed", "order_hash")
"""Counters that all ranks must share, whatever they hold."""

T = TypeVar("T")
"""What names a part of a tensor."""

_WIDTH = 1024
_LEAST = -(2**63)


def find_odd(
    tensors: Mapping[str, Tensor], holders: Mapping[tuple[str, T], Sequence[int]], counters: Mapping[str, int]
) -> str:
    """Name the first tensors or counters that are not alike, and the odd ranks; empty where all is (a collective).

    ``holders``: which ranks hold which part of which tensor; equal on all ranks, as is the answer.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return ""
    parts: list[tuple[str, Sequence[int]]] = [(f"counter {name}", range(size)) for name in COUNTERS]
    parts += [(name, ranks) for (name, _), ranks in holders.items() if len(ranks) > 1]
    held = [place for place, (_, ranks) in enumerate(parts) if rank in ranks]
    own = torch.full((len(parts),), _LEAST)
    counts = [counters.get(name, 0) for name in COUNTERS]
    # a count may fill 64 bits, and a tensor of int64 takes them as a signed number
    own[: len(COUNTERS)] = torch.tensor([count - 2**64 if count >= 2**63 else count for count in counts])
    sums = [checksum(tensors[parts[place][0]]) for place in held[len(COUNTERS) :]]
    if sums:
        own[held[len(COUNTERS) :]] = torch.stack(sums).cpu()
    # the most of the sums and the most of their complements, in one reduction: alike where they are of one number
    both = torch.stack([own, own.bitwise_not()])
    both[1, own == _LEAST] = _LEAST
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    odd = (both[0] != both[1].bitwise_not()).nonzero().reshape(-1).tolist()
    if not odd:
        return ""
    _, ranks = parts[odd[0]]
    said = all_gather_json(int(own[odd[0]]))
    names = ", ".join(parts[place][0].removeprefix("model.") for place in odd[:3])
    more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
    return f"{names}{more}: {_who({rank: said[rank] for rank in ranks})}"


def checksum(tensor: Tensor) -> Tensor:
    """A sum of a local tensor's bits, 8 bytes at a time and weighted by their place, modulo 2^64: an int64 scalar.

    Exact, changed by every flip of a single bit, and by any two numbers that change places within 8 KiB.
    """
    data = local_tensor(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = len(data) - len(data) % (8 * _WIDTH)
    sums = data[:whole].view(torch.int64).view(-1, _WIDTH).sum(0)
    if whole < len(data):
        rest = data.new_zeros(8 * _WIDTH)
        rest[: len(data) - whole] = data[whole:]
        sums += rest.view(torch.int64)
    return (sums * _weights(data.device)).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers, so that no bit is lost when it is multiplied."""
    return torch.arange(_WIDTH, dtype=torch.int64, device=device) * 0x2545F4914F6CDD1E + 1


def _who(sums: Mapping[int, int]) -> str:
    most, count = Counter(sums.values()).most_common(1)[0]
    if 2 * count > len(sums):
        odd = [rank for rank, value in sums.items() if value != most]
        return f"rank {', '.join(map(str, odd[:8]))} differs from the other {count} that hold it"
    return f"ranks {', '.join(map(str, [*sums][:8]))} differ, and no majority says which is right"
