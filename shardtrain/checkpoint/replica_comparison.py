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
    tensors: Mapping[str, Tensor], holdings: Mapping[str, Held], counters: Mapping[str, int]
) -> str:
    """Return the first tensors or counters that differ, and the odd ranks, or "" (a collective).

    The result is equal on all ranks. Ranks exchange two numbers per tensor, for any number of
    ranks. All holders of a box add its checksum to a sum, and one of them subtracts its own
    checksum once per other holder. The sum modulo 2^64 is 0 if all checksums are equal. The last
    holder subtracts in one number and the first in the other, so a single rank that differs always
    changes one of them. Checksums are mixed first, so differences of two boxes do not cancel.

    Args:
        holdings: The holders of each tensor, equal on all ranks.
    """
    size = dist.get_world_size()
    rank = dist.get_rank()
    if size == 1:
        return ""
    # This rank's values, with the ranks that must have the same value: the counters of the step, and the
    # checksum of each box that has other holders.
    everybody = np.arange(size)
    values_of_rank: dict[str, tuple[Ints, int]] = {}
    for counter in COUNTERS:
        values_of_rank[f"counter {counter}"] = (everybody, counters.get(counter, 0))
    names = list(values_of_rank)
    checked_names = []
    checksums = []
    for name, tensor in holdings.items():
        # All ranks append the same names, because ``holdings`` is equal on all of them.
        replicated = [part for part in tensor.parts if part.holders > 1]
        if not replicated:
            continue
        names.append(name)
        for part in replicated:
            row = part.row_of(rank)
            if row is not None:
                values_of_rank[name] = (part.ranks[row], 0)
                checked_names.append(name)
                checksums.append(checksum(tensors[name]))
    if checksums:
        # Copy all checksums to the host together, because each copy waits for the device.
        checksums_on_host = torch.stack(checksums).tolist()
        for name, value in zip(checked_names, checksums_on_host, strict=True):
            ranks, _ = values_of_rank[name]
            values_of_rank[name] = (ranks, value)

    # Reduce two numbers for each name in one all-reduce. int64 wraps around, so the sums are modulo 2^64.
    numbers = []
    for name in names:
        if name not in values_of_rank:
            numbers += [0, 0]
            continue
        ranks, value = values_of_rank[name]
        for balancing_rank in (ranks[-1], ranks[0]):
            factor = 1
            if rank == balancing_rank:
                factor = 1 - len(ranks)
            numbers.append(_signed(factor * _mixed(value)))
    totals = torch.tensor(numbers)
    host_collectives.all_reduce(totals)
    is_odd = totals.view(-1, 2).any(1)
    odd_places = is_odd.nonzero().reshape(-1).tolist()
    odd_names = [names[place] for place in odd_places]
    if not odd_names:
        return ""

    listed = ", ".join(name.removeprefix("model.") for name in odd_names[:3])
    if len(odd_names) > 3:
        listed += f" and {len(odd_names) - 3} more"
    checksums_of_box = _unequal_box(values_of_rank.get(odd_names[0]))
    return f"{listed}: {_who(checksums_of_box)}"


def _unequal_box(value_of_rank: tuple[Ints, int] | None) -> dict[int, int]:
    """Return the value of each holder of the first box whose holders differ (a collective).

    ``value_of_rank`` are the holders of this rank's box and its value. None if this rank has no box.
    """
    answer = None
    if value_of_rank is not None:
        ranks, value = value_of_rank
        first_holder = int(ranks[0])
        answer = [first_holder, value & _MASK]
    answers = all_gather_json([answer])
    boxes: dict[int, dict[int, int]] = {}  # first holder of a box -> value of each holder
    for holder, (answer_of_rank,) in enumerate(answers):
        if answer_of_rank:
            first_holder, value = answer_of_rank
            boxes.setdefault(first_holder, {})[holder] = value
    for values in boxes.values():
        if len(set(values.values())) > 1:
            return values
    raise AssertionError("the values of no box differ")


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a local tensor's bits as an int64 scalar: a weighted sum of groups of 8 bytes modulo 2^64.

    Every flip of a single bit changes it. So does an exchange of two numbers within 8 KiB.
    """
    data = local_tensor(tensor).detach().contiguous().reshape(-1).view(torch.uint8)
    # A view as int64 needs bytes that begin at a multiple of 8.
    if data.storage_offset() % 8:
        data = data.clone()
    row_bytes = 8 * _WIDTH
    bytes_in_rows = len(data) - len(data) % row_bytes
    rows = data[:bytes_in_rows].view(torch.int64).view(-1, _WIDTH)
    # Integers add up exactly in any order, so the checksum does not depend on the device.
    sums = rows.sum(0)
    if bytes_in_rows < len(data):
        last_row = data.new_zeros(row_bytes)
        last_row[: len(data) - bytes_in_rows] = data[bytes_in_rows:]
        sums += last_row.view(torch.int64)
    return (sums * _weights(data.device)).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    """Odd factors of the checksum: multiplying by an odd number loses no bit."""
    return torch.arange(_WIDTH, dtype=torch.int64, device=device) * 0x2545F4914F6CDD1E + 1


def _mixed(value: int) -> int:
    """Permute the numbers below 2^64, and make close numbers dissimilar (the last steps of SplitMix64)."""
    value &= _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def _signed(value: int) -> int:
    """Return the signed 64-bit integer that is equal to ``value`` modulo 2^64."""
    value &= _MASK
    if value >= 2**63:
        return value - 2**64
    return value


def _who(values: Mapping[int, int]) -> str:
    """Name the ranks to blame. ``values`` are the checksums of the holders of a box."""
    majority_value, count = Counter(values.values()).most_common(1)[0]
    if 2 * count > len(values):
        odd = [str(rank) for rank, value in values.items() if value != majority_value]
        return f"rank {', '.join(odd[:8])} differs from the other {count} that hold it"
    ranks = [str(rank) for rank in values]
    return f"ranks {', '.join(ranks[:8])} differ, and there is no majority to decide which is right"
