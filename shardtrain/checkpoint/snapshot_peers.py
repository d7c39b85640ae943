"""Exchange of snapshots between nodes: copies for the next node of a ring, and reads from other nodes.

The background threads that send copies use a separate process group for each pair of ranks, because
messages of the trainer's groups must keep their order.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint.collectives import any_rank
from shardtrain.utils import activity
from shardtrain.utils.units import MIB

MakeGroup = Callable[[Callable[[], Any]], Any]
"""Calls a function that creates a gloo group, and protects the group's sockets."""

_MOST_MESSAGE_BYTES = 2**27
"""Largest description of a snapshot that is received. It includes the manifest."""
_ROUND_BYTES = 128 * MIB
"""Bytes that a rank sends in one round of ``fetch`` if every rank requests the maximum from it."""
_LEAST_BYTES = MIB


@dataclass(frozen=True)
class Ring:
    """The nodes of a run in the order of their first ranks. The i-th rank of a node sends to the i-th of the next.

    Attributes:
        node_of: Number of each rank's node.
    """

    node_of: Sequence[int]

    @cached_property
    def members(self) -> list[list[int]]:
        """Ranks of each node, ascending."""
        members: list[list[int]] = [[] for _ in range(max(self.node_of) + 1)]
        for rank, node in enumerate(self.node_of):
            members[node].append(rank)
        return members

    def target(self, rank: int) -> int | None:
        """Return the rank that holds a copy for ``rank``. None with a single node."""
        num_nodes = len(self.members)
        if num_nodes == 1:
            return None
        node = self.node_of[rank]
        place = self.members[node].index(rank)
        # The next node may have fewer ranks.
        next_members = self.members[(node + 1) % num_nodes]
        return next_members[place % len(next_members)]

    def sources(self, rank: int) -> list[int]:
        """Return the ranks for which ``rank`` holds copies, ascending."""
        num_nodes = len(self.members)
        if num_nodes == 1:
            return []
        # The node before node 0 is the last one, which has the index -1.
        previous = self.members[self.node_of[rank] - 1]
        return [source for source in previous if self.target(source) == rank]

    def writer_of(self, rank: int, node: int) -> int | None:
        """Return the rank of ``node`` that writes files of ``rank`` there, or None."""
        if self.node_of[rank] == node:
            return rank
        target = self.target(rank)
        if target is None or self.node_of[target] != node:
            return None
        return target


_numbers = itertools.count()
"""Numbers for the names of groups in the store. All ranks create the same sets of groups."""


class PeerGroup:
    """A gloo group of this rank and one other rank, with messages in both directions."""

    def __init__(self, group: Any, place: int) -> None:
        self._group = group
        self._other = 1 - place

    def send(self, tensor: Tensor) -> dist.Work:
        """Start to send a tensor."""
        work: dist.Work = self._group.send([tensor], self._other, 0)
        return work

    def receive(self, tensor: Tensor) -> None:
        """Receive a tensor of this size. Raises RuntimeError if the peer has ended or does not answer."""
        self._group.recv([tensor], self._other, 0).wait()


def make_pairs(ring: Ring, make_group: MakeGroup, timeout_seconds: int) -> dict[int, PeerGroup]:
    """Create a group with each rank that exchanges copies with this rank (a collective). Keys are those ranks."""
    this_rank = dist.get_rank()
    # With two nodes, two ranks may send to each other, and share one group.
    members = set()
    for rank in range(len(ring.node_of)):
        target = ring.target(rank)
        if target is not None:
            members.add((min(rank, target), max(rank, target)))
    number = next(_numbers)
    pairs: dict[int, PeerGroup] = {}
    # Both ranks of a pair wait for each other. All ranks use the same order, so there is no deadlock.
    # ``dist.new_group`` would need a barrier of all ranks for each pair.
    for low, high in sorted(members):
        if this_rank not in (low, high):
            continue
        # The prefix keeps the keys of different groups apart in the store that all ranks share.
        prefix = f"snapshots-{number}-{low}-{high}"
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        place = int(this_rank == high)
        other_rank = low if place else high
        timeout = timedelta(seconds=timeout_seconds)
        create = partial(dist.ProcessGroupGloo, store, place, 2, timeout)
        pairs[other_rank] = PeerGroup(make_group(create), place)
    return pairs


class Copy(NamedTuple):
    """A copy that this rank receives: its source, its description as JSON, and the buffer of its bytes."""

    source: int
    description: Any
    data: Tensor


def exchange(
    pairs: Mapping[int, PeerGroup],
    target: int,
    description: Any,
    data: Tensor,
    buffers: Mapping[int, Tensor],
) -> Iterator[Copy]:
    """Send a description and bytes to ``target``, and yield what each source sends. Runs in a background thread.

    Args:
        pairs: Groups by the other rank.
        buffers: Buffer for the bytes of each source, of exactly their size.

    Raises:
        RuntimeError: a peer has ended, or did not answer within the group's timeout.
        ValueError: a peer sent an invalid description.
    """
    encoded = bytearray(json.dumps(description).encode())
    text = torch.frombuffer(encoded, dtype=torch.uint8)
    size = torch.tensor([text.numel()])
    # Start all sends before the first receive. If every rank of the ring sent first and waited, none would
    # receive.
    sent = []
    for message in (size, text, data):
        if message.numel():
            sent.append(pairs[target].send(message))
    for source, buffer in buffers.items():
        pair = pairs[source]
        received_size = torch.zeros(1, dtype=torch.int64)
        pair.receive(received_size)
        num_bytes = int(received_size)
        # The size comes from the network, and decides how much memory is allocated.
        if not 0 < num_bytes <= _MOST_MESSAGE_BYTES:
            raise ValueError(f"rank {source} sent a description of {num_bytes} bytes")
        received_text = torch.empty(num_bytes, dtype=torch.uint8)
        pair.receive(received_text)
        if buffer.numel():
            pair.receive(buffer)
        yield Copy(source, json.loads(bytes(received_text.numpy())), buffer)
    for work in sent:
        work.wait()


class Range(NamedTuple):
    """Consecutive bytes of a file, and the rank that reads them. ``file`` is its number in the manifest."""

    holder: int
    file: int
    begin: int
    num_bytes: int


def fetch(
    needed: Iterable[Range],
    read: Callable[[int, int, int], Tensor],
    write: Callable[[int, int, Tensor], None],
) -> None:
    """Read the needed ranges from their holders (a collective), in rounds of bounded memory.

    Args:
        needed: Ranges that this rank needs. Ranks may need different numbers of them.
        read: Called with a file, an offset and a number of bytes. Returns the bytes.
        write: Called with a file, an offset and the received bytes.
    """
    size = dist.get_world_size()
    most_bytes = max(_LEAST_BYTES, _ROUND_BYTES // size)
    waiting = _pieces(needed, most_bytes)
    piece = next(waiting, None)
    # A rank that needs nothing more still takes part, because other ranks need its bytes.
    while any_rank(piece is not None):
        # Request at most ``most_bytes`` from each holder in a round.
        requested: list[list[Range]] = [[] for _ in range(size)]
        requested_bytes = [0] * size
        while piece is not None:
            total = requested_bytes[piece.holder] + piece.num_bytes
            if total > most_bytes:
                break
            requested[piece.holder].append(piece)
            requested_bytes[piece.holder] = total
            piece = next(waiting, None)
        _round(requested, read, write)
        activity.tick()


def _pieces(needed: Iterable[Range], most_bytes: int) -> Iterator[Range]:
    """Split ranges into pieces of at most ``most_bytes``."""
    for full_range in needed:
        for start in range(0, full_range.num_bytes, most_bytes):
            begin = full_range.begin + start
            num_bytes = min(most_bytes, full_range.num_bytes - start)
            yield full_range._replace(begin=begin, num_bytes=num_bytes)


def _round(
    requested: Sequence[Sequence[Range]],
    read: Callable[[int, int, int], Tensor],
    write: Callable[[int, int, Tensor], None],
) -> None:
    """Read the pieces that each rank requests from each other rank (a collective). Items are those of each holder."""
    # Exchange the numbers of requests first, because a collective needs the size of what it receives.
    counts = torch.tensor([len(pieces) for pieces in requested])
    counts_for_us = torch.empty_like(counts)
    dist.all_to_all_single(counts_for_us, counts)

    # Exchange the requests.
    rows = []
    for pieces in requested:
        rows += [[piece.file, piece.begin, piece.num_bytes] for piece in pieces]
    requests = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    requests_to_us = torch.empty(int(counts_for_us.sum()), 3, dtype=torch.int64)
    dist.all_to_all_single(requests_to_us, requests, counts_for_us.tolist(), counts.tolist())

    # Exchange the bytes. The empty tensor keeps ``cat`` from failing if nobody requests anything from this
    # rank.
    answers = [torch.empty(0, dtype=torch.uint8)]
    for file, begin, count in requests_to_us.tolist():
        answers.append(read(file, begin, count))
    answer = torch.cat(answers)
    answer_bytes = []
    for requests_of_rank in requests_to_us.split(counts_for_us.tolist()):
        answer_bytes.append(int(requests_of_rank[:, 2].sum()))
    received_bytes = [sum(piece.num_bytes for piece in pieces) for pieces in requested]
    received = torch.empty(sum(received_bytes), dtype=torch.uint8)
    dist.all_to_all_single(received, answer, received_bytes, answer_bytes)

    # The bytes arrive in the order of the requests.
    start = 0
    for pieces in requested:
        for piece in pieces:
            write(piece.file, piece.begin, received[start : start + piece.num_bytes])
            start += piece.num_bytes
