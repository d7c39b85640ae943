"""All ranks come to the same end: what one could not do, none has done. Ranks tell each other JSON, never pickles."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardtrain.utils.errors import (
    CheckpointError,
    ConfigError,
    FolderTaken,
    PeerError,
    ShardtrainError,
    StorageError,
)

_KINDS: dict[str, type[ShardtrainError]] = {
    kind.__name__: kind for kind in (ConfigError, FolderTaken, CheckpointError, StorageError, PeerError)
}


def all_gather_json(value: Any) -> list[Any]:
    """What every rank says, by rank (a collective); values are JSON. A process without peers needs no process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [json.loads(json.dumps(value))]
    data = bytearray(json.dumps(value).encode())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = int(max(int(size) for size in sizes))
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    texts = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(texts, own)
    return [json.loads(bytes(text[: int(size)].numpy())) for text, size in zip(texts, sizes, strict=True)]


def all_ranks(action: Callable[[], Any], only_first: bool = False) -> list[Any]:
    """Do something on every rank (or the first alone) and give what each got, as JSON (a collective).

    Raises:
        ShardtrainError: on all ranks the same, when any rank met one; an OSError becomes a StorageError that names the
            path, the reason and the rank.
    """
    answer, failure, told = None, None, None
    if not only_first or dist.get_rank() == 0:
        try:
            answer = action()
        except Exception as error:
            failure, told = error, _tell(error)
    said = all_gather_json([answer, told])
    failed = [error for _, error in said if error]
    if failed:
        # an error with a name of ours explains more than a bug that followed from it
        kind, text = next((e for e in failed if e[0] != "PeerError"), failed[0])
        if failure and told and told[0] == "PeerError":
            raise failure  # a fault of the program: whoever met it shows it whole
        raise _KINDS[kind](text) from failure
    return [value for value, _ in said]


def _tell(error: Exception) -> list[str]:
    rank = dist.get_rank()
    if isinstance(error, OSError):
        where = f"rank {rank} on {socket.gethostname()}: " if dist.get_world_size() > 1 else ""
        name = f" {error.filename}" if error.filename else ""
        reason, fix = error.strerror or str(error), "free space or fix job.dump_folder, then start again"
        if "://" in str(error.filename):
            fix = "fix checkpoint.folder, or what this host may do there, then start again"
        elif isinstance(error, FileNotFoundError) and dist.get_world_size() > 1:
            fix = "job.dump_folder must be a folder that all nodes see"
        return ["StorageError", f"{where}cannot write checkpoint{name}: {reason} (errno {error.errno}); {fix}"]
    if type(error).__name__ in _KINDS:
        return [type(error).__name__, str(error)]
    return ["PeerError", f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0]]
