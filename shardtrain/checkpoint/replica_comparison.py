"""Compare replicas before a save: find any bit that differs, and name its rank.

A checkpoint contains each box once. If replicas differ, the save would silently store one of them and
drop the others. Boxes with one holder, as with FSDP, have no replicas to compare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint.collectives import all_gather_json
from shardtrain.checkpoint.holders import Held
from shardtrain.checkpoint.resharding import Ints
from shardtrain.ops import host_collectives
from shardtrain.ops.dtensor import local_tensor

COUNTERS = ("step", "samples_consumed", "order_hash")
"""Counters that must be equal on all ranks."""

_WIDTH = 1024
_MASK = 2**64 - 1


def find_odd(
    tensors: Mapping[str, Tensor], held: Mapping[str, Held], counters: Mapping[str, int]
) -> str:
    """Return the first tensors or counters that differ, and the odd ranks, or "" (a collective).

    The result is equal on all ranks. Ranks exchange two numbers per tensor, for any number of
    ranks. All holders of a box add its checksum to a sum, and one of them subtracts its own
    checksum once per other holder. The sum modulo 2^64 is 0 if all checksums are equal. The last
    holder subtracts in one number and the first in the other, so a single rank that differs always
    changes one of them. Checksums are mixed first, so differences of two boxes do not cancel.

    Args:
        held: The holders of each tensor, equal on all ranks.
    """
    size = dist.get_world_size()
    rank = dist.get_rank()
    if size == 1:
        return ""
    # This rank's values: the step's counters, and the checksum of each box that has other holders.
    everybody = np.arange(size)
    own: dict[str, tuple[Ints, int]] = {
        f"counter {name}": (everybody, counters.get(name, 0)) for name in COUNTERS
    }
    replicated = []
    for name, tensor in held.items():
        if any(part.holders > 1 for part in tensor.parts):
            replicated.append(name)
    names = [*own, *replicated]
    checked = []
    for name in replicated:
        for part in held[name].parts:
            if part.holders <= 1:
                continue
            row = part.row_of(rank)
            if row is not None:
                checked.append((name, part.ranks[row]))
    if checked:
        sums = torch.stack([checksum(tensors[name]) for name, _ in checked]).tolist()
        for (name, ranks), value in zip(checked, sums, strict=True):
            own[name] = (ranks, value)

    # Two numbers for each name, in one all-reduce. int64 wraps around, so the sums are modulo 2^64.
    numbers = []
    for name in names:
        if name not in own:
            numbers += [0, 0]
            continue
        ranks, value = own[name]
        for balancing in (ranks[-1], ranks[0]):
            factor = 1 - len(ranks) if rank == balancing else 1
            numbers.append(_signed(factor * _mixed(value)))
    totals = torch.tensor(numbers)
    host_collectives.all_reduce(totals)
    odd = totals.view(-1, 2).any(1).nonzero().reshape(-1).tolist()
    if not odd:
        return ""

    # All ranks exchange their checksum of the first odd name, with the first holder of their box.
    # The odd ranks are among the holders of a box whose checksums differ.
    first = names[odd[0]]
    answer = None
    if first in own:
        ranks, value = own[first]
        answer = [int(ranks[0]), value & _MASK]
    values = all_gather_json([answer])
    boxes: dict[int, dict[int, int]] = {}  # first holder of a box -> checksum of each holder
    for holder, (part,) in enumerate(values):
        if part:
            first_holder, box_sum = part
            boxes.setdefault(first_holder, {})[holder] = box_sum
    unlike = next(sums for sums in boxes.values() if len({*sums.values()}) > 1)
    listed = ", ".join(names[place].removeprefix("model.") for place in odd[:3])
    if len(odd) > 3:
        listed += f" and {len(odd) - 3} more"
    return f"{listed}: {_who(unlike)}"


def checksum(tensor: Tensor) -> Tensor:
    """A sum of a local tensor's bits, 8 bytes at a time and weighted by their place, modulo 2^64:
    an int64 scalar.

    Exact, changed by every flip of a single bit, and by any two numbers that change places within 8 KiB.
    """
    data = local_tensor(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
    # A view as int64 needs bytes that begin at a multiple of 8.
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
    """Odd factors of the checksum: multiplying by an odd number loses no bit."""
    return torch.arange(_WIDTH, dtype=torch.int64, device=device) * 0x2545F4914F6CDD1E + 1


def _mixed(value: int) -> int:
    """One of 2^64 numbers as another, none as two (the end of SplitMix64): near ones become unlike."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _signed(value: int) -> int:
    """Return the signed 64-bit integer that is equal to ``value`` modulo 2^64."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value


def _who(sums: Mapping[int, int]) -> str:
    most, count = Counter(sums.values()).most_common(1)[0]
    if 2 * count > len(sums):
        odd = [str(rank) for rank, value in sums.items() if value != most]
        return f"rank {', '.join(odd[:8])} differs from the other {count} that hold it"
    ranks = [str(rank) for rank in sums]
    return f"ranks {', '.join(ranks[:8])} differ, and no majority says which is right"
