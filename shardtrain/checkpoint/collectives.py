"""Collectives on JSON values and errors: if an action fails on one rank, all ranks raise the same error.

Values are sent as JSON, never as pickles. Flags, first values and broadcasts cost one reduction and at most
one broadcast, whose size does not depend on the number of ranks. Only ``all_gather_json`` stores the values
of all ranks on every rank, so its values must be short.
"""

from __future__ import annotations

import hashlib
import json
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardtrain.ops import host_collectives
from shardtrain.utils import storage_errors
from shardtrain.utils.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FolderTaken,
    OutOfMemoryError,
    PeerError,
    ShardtrainError,
    StorageError,
)

_KINDS: dict[str, type[ShardtrainError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        FolderTaken,
        DataError,
        CheckpointError,
        OutOfMemoryError,
        StorageError,
        PeerError,
    )
}


def all_gather_json(value: Any) -> list[Any]:
    """Gather a JSON value of every rank, in order of rank (a collective). One process needs no
    process group.
    """
    if _is_alone():
        return [json.loads(json.dumps(value))]
    # Do not reduce sizes with an all-reduce. A rank in another all-reduce would contribute a number that is
    # not a size.
    data = bytearray(json.dumps(value).encode())
    sizes = host_collectives.all_gather(torch.tensor([len(data)]))
    return [json.loads(text) for text in _padded_texts(data, int(sizes.max()))]


def gather_json(value: Any) -> list[Any]:
    """Return the JSON values of all ranks on rank 0, and an empty list on the others (a collective)."""
    if _is_alone():
        return [json.loads(json.dumps(value))]
    data = bytearray(json.dumps(value).encode())
    longest = torch.tensor([len(data)])
    host_collectives.all_reduce(longest, dist.ReduceOp.MAX)
    texts = _padded_texts(data, int(longest))
    if _own_rank() != 0:
        return []
    return [json.loads(text) for text in texts]


def _padded_texts(data: bytearray, longest: int) -> list[bytes]:
    """Gather the JSON text of every rank, padded with blanks to the length of the longest one (a
    collective).
    """
    # Pad the texts to one length with spaces, which JSON ignores.
    sent = torch.full((longest,), ord(" "), dtype=torch.uint8)
    sent[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    # Not a gather to the first rank, which would need a connection to every other rank.
    texts = host_collectives.all_gather(sent)
    return [bytes(text) for text in texts.numpy()]


def gather_distinct_json(value: Any) -> tuple[list[Any], list[int]]:
    """Gather the distinct JSON values of all ranks, and the index of each rank's value (a collective).

    Values are in the order of their first rank. Ranks of a pipeline stage have consecutive numbers
    and equal values, so a stage costs one broadcast and one reduction. With more than
    ``_MOST_RUNS`` runs of equal neighbors, ranks exchange hashes instead.
    """
    if _is_alone():
        return [json.loads(json.dumps(value))], [0]
    own_text = json.dumps(value)
    rank = dist.get_rank()
    size = dist.get_world_size()
    texts: list[str] = []
    numbers: list[int] = []
    for _ in range(_MOST_RUNS):
        # A run of ranks starts at ``source`` and ends before the next rank with another value.
        source = len(numbers)
        text = _broadcast(own_text, source)
        is_in_run = own_text == text or rank <= source
        end = torch.tensor([size if is_in_run else rank])
        host_collectives.all_reduce(end, dist.ReduceOp.MIN)
        if text not in texts:
            texts.append(text)
        numbers += [texts.index(text)] * (int(end) - source)
        if len(numbers) == size:
            return [json.loads(text) for text in texts], numbers
    return _gather_by_hash(value)


def _gather_by_hash(value: Any) -> tuple[list[Any], list[int]]:
    """Like ``gather_distinct_json``: gather hashes, then broadcast each value from its first rank."""
    text = json.dumps(value).encode()
    own_digest = bytearray(hashlib.sha256(text).digest())
    sent_digest = torch.frombuffer(own_digest, dtype=torch.uint8)
    digests = host_collectives.all_gather(sent_digest)

    # The number of each distinct digest, and the first rank that has it.
    number_of: dict[bytes, int] = {}
    first_ranks = []
    numbers = []
    for rank, row in enumerate(digests.numpy()):
        digest = row.tobytes()
        if digest not in number_of:
            number_of[digest] = len(number_of)
            first_ranks.append(rank)
        numbers.append(number_of[digest])

    values = []
    for rank in first_ranks:
        source = rank if dist.get_rank() == rank else _NOBODY
        values.append(_said(value, source))
    return values, numbers


def broadcast_json(value: Any) -> Any:
    """Return the JSON value of rank 0 (a collective); the values of other ranks are ignored."""
    is_source = _is_alone() or dist.get_rank() == 0
    return _said(value, 0 if is_source else _NOBODY)


def any_rank(flag: bool) -> bool:
    """True if the flag is set on any rank (a collective)."""
    return any_ranks([flag])[0]


def any_ranks(flags: Sequence[bool]) -> list[bool]:
    """Return for each flag True if it is set on any rank (a collective)."""
    if _is_alone():
        return list(flags)
    totals = torch.tensor(list(map(int, flags)))
    host_collectives.all_reduce(totals, dist.ReduceOp.MAX)
    return [bool(one) for one in totals]


def first_word(text: str) -> str:
    """Return the text of the lowest rank whose text is not empty, or "" (a collective)."""
    return _said(text, _own_rank() if text else _NOBODY) or ""


def all_ranks(action: Callable[[], Any]) -> Any:
    """Run an action on every rank and return the JSON result of rank 0 (a collective).

    Raises:
        ShardtrainError: the same on all ranks, if the action raised one on any rank. An OSError
            becomes a StorageError with the path, the reason and the rank.
    """
    answer = None
    failure = None
    description = None
    try:
        answer = action()
    except Exception as error:
        failure = error
        description = _tell(error)
    _raise_alike(failure, description)
    return broadcast_json(answer)


def first_rank(action: Callable[[], Any]) -> Any:
    """Run an action only on rank 0 and return its JSON result on all (a collective).

    Raises like ``all_ranks``.
    """
    if _own_rank() == 0:
        return all_ranks(action)
    return all_ranks(lambda: None)


def all_ranks_gather(action: Callable[[], Any]) -> list[Any]:
    """Run an action on every rank and return all JSON results (a collective). Raises like ``all_ranks``."""
    answers: list[Any] = []
    all_ranks(lambda: answers.append(action()))
    return all_gather_json(answers[0])


def all_ranks_to_first(action: Callable[[], Any]) -> list[Any]:
    """Like ``all_ranks_gather``, but only rank 0 gets the results.

    Other ranks get an empty list (a collective).
    """
    answers: list[Any] = []
    all_ranks(lambda: answers.append(action()))
    return gather_json(answers[0])


_NOBODY = 2**62
_MOST_RUNS = 64


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def rank_and_size() -> tuple[int, int]:
    """Return rank and world size, or (0, 1) without a process group."""
    if _is_alone():
        return (0, 1)
    return (dist.get_rank(), dist.get_world_size())


def _own_rank() -> int:
    return rank_and_size()[0]


def _said(value: Any, urgency: int) -> Any:
    """Return the value of the rank with the lowest ``urgency``. None if all pass ``_NOBODY`` (a collective).

    ``urgency`` modulo the world size is the number of the rank that passes it.
    """
    if _is_alone():
        if urgency < _NOBODY:
            return json.loads(json.dumps(value))
        return None
    first = torch.tensor([urgency])
    host_collectives.all_reduce(first, dist.ReduceOp.MIN)
    if int(first) == _NOBODY:
        return None
    source = int(first) % dist.get_world_size()
    text = ""
    if dist.get_rank() == source:
        text = json.dumps(value)
    return json.loads(_broadcast(text, source))


def _broadcast(text: str, source: int) -> str:
    """Broadcast a text, compressed, from rank ``source``."""
    is_source = dist.get_rank() == source
    data = bytearray()
    if is_source:
        data = bytearray(zlib.compress(text.encode()))
    size = torch.tensor([len(data)])
    dist.broadcast(size, source)
    packed = torch.empty(int(size), dtype=torch.uint8)
    if is_source:
        packed = torch.frombuffer(data, dtype=torch.uint8)
    dist.broadcast(packed, source)
    return zlib.decompress(bytes(packed.numpy())).decode()


def _raise_alike(failure: Exception | None, description: list[str] | None) -> None:
    """Raise the error of one rank on all ranks, if there is one (a collective)."""
    # The lowest number wins. Errors of this package precede unexpected exceptions, which may be consequences.
    is_bug = description is not None and description[0] == "PeerError"
    size = 1 if _is_alone() else dist.get_world_size()
    number = _NOBODY
    if description is not None:
        number = _own_rank()
        if is_bug:
            number += size
    chosen = _said(description, number)
    if chosen is None:
        return
    # A rank with an unexpected exception raises that exception itself, which keeps its traceback.
    if failure and is_bug:
        raise failure
    kind, text = chosen
    raise _KINDS[kind](text) from failure


def _tell(error: Exception) -> list[str]:
    rank = dist.get_rank()
    has_peers = dist.get_world_size() > 1
    if isinstance(error, OSError):
        where = ""
        if has_peers:
            where = f"rank {rank} on {socket.gethostname()}: "
        fix = "set job.dump_folder to another folder"
        if isinstance(error, FileNotFoundError) and has_peers:
            fix = "set job.dump_folder to a folder that all nodes see"
        explained = storage_errors.cannot("write checkpoint", "", error, fix)
        return [type(explained).__name__, f"{where}{explained}"]
    if type(error).__name__ in _KINDS:
        return [type(error).__name__, str(error)]
    return ["PeerError", f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0]]
