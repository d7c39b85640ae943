"""Checkpoints where only the first rank's node sees the folder: bytes travel over the process group, piece by piece.

No rank ever holds more than a piece of what is not its own. The first rank writes and reads all of it, so this costs
the time of one node's disk and one network link; a folder that all nodes see has no such limit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint import files
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.collectives import all_gather_json, broadcast_json, gather_distinct_json
from shardtrain.checkpoint.grids import Chunk
from shardtrain.checkpoint.holders import box_of
from shardtrain.checkpoint.manifest import ITEM_BYTES, Manifest, StoredFile
from shardtrain.checkpoint.resharding import Box, overlap
from shardtrain.checkpoint.save_plan import Plan
from shardtrain.checkpoint.storage import Place
from shardtrain.utils import storage_errors
from shardtrain.utils.errors import CheckpointError, StorageError


def check_seen_by_all(folder: Place, nonce: str) -> None:
    """Refuse a folder that is not one and the same on all nodes (a collective).

    The first rank leaves a file there, and the first rank of each node looks for it as long as a network filesystem
    may take to show it.

    Raises:
        StorageError: on all ranks; names the hosts that do not see it.
    """
    if dist.get_world_size() == 1 or not isinstance(folder, Path):
        return  # an object store has one address for all
    # The first rank leaves a file, or says why it cannot: an error of its own would keep the others waiting.
    sign = folder / f"probe-{broadcast_json(nonce)}"
    problem = ""
    if dist.get_rank() == 0:
        try:
            files.write_whole(sign, b"")
        except OSError as error:
            problem = str(storage_errors.cannot("write", sign, error, "set job.dump_folder to another folder"))
    problem = broadcast_json(problem)
    if problem:
        raise StorageError(problem)

    # One rank of each node looks, where the launcher says which it is: the others would see the same.
    seen = os.environ.get("LOCAL_RANK", "0") != "0" or _appears(sign)
    blind = sorted({host for host, sees in all_gather_json([os.uname().nodename, seen]) if not sees})
    if dist.get_rank() == 0:
        sign.unlink(missing_ok=True)
    if blind:
        named = ", ".join(blind[:5]) + (f" and {len(blind) - 5} more" if len(blind) > 5 else "")
        raise StorageError(
            f"checkpoint.folder: {named} {'do' if len(blind) > 1 else 'does'} not see what the first rank wrote into "
            f"{folder} within {files.SEEN_SECONDS:g} s; put job.dump_folder into a folder that all nodes see, use an "
            'object store, or send all through the first node with checkpoint.storage = "first_node"'
        )


def _appears(sign: Path) -> bool:
    deadline = time.monotonic() + files.SEEN_SECONDS
    while True:
        try:
            # Listed, since some network filesystems answer from memory where they are asked for a name.
            if sign.name in os.listdir(sign.parent):
                return True
        except OSError:
            pass  # the folder itself may come late
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def write(tensors: Mapping[str, Tensor], shares: Plan, draft: Place) -> list[StoredFile]:
    """Write the files of all ranks on the first one (a collective); gives them there, and none elsewhere.

    Raises:
        OSError: on the first rank, when the others have sent everything.
    """
    written = []
    # One rank after the other: the first rank takes what each sends while the others wait for their turn.
    for rank in range(dist.get_world_size()):
        own = rank == dist.get_rank()
        names = shares.names_of(rank)
        if not names:
            continue
        if dist.get_rank() == 0:
            blocks = (tensor_files.bytes_of(tensors[name]) for name in names) if own else _received(shares, rank)
            try:
                written.append(files.write_hashed(draft / f"rank-{rank:05d}.bin", blocks))
            finally:
                # After an error too: a sender waits until all is taken, whatever became of it.
                for _ in blocks:
                    pass
        elif own:
            # In the pieces that ``_received`` takes.
            for name in names:
                block = tensor_files.bytes_of(tensors[name])
                for start in range(0, len(block), files.PIECE_BYTES):
                    piece = block[start : start + files.PIECE_BYTES]
                    dist.send(torch.frombuffer(piece, dtype=torch.uint8), 0)
    return written


def _received(shares: Plan, rank: int) -> Iterator[memoryview]:
    """What a rank sends, in its order."""
    for _, size in shares.pieces_of(rank):
        for start in range(0, size, files.PIECE_BYTES):
            piece = torch.empty(min(files.PIECE_BYTES, size - start), dtype=torch.uint8)
            dist.recv(piece, rank)
            yield memoryview(piece.numpy().data)


def find_damaged_file(manifest: Manifest, folder: Place) -> str:
    """What is wrong with the first damaged file, found by the first rank alone; empty on the others."""
    if dist.get_rank() != 0:
        return ""
    return next((damage for file in manifest.files if (damage := files.find_damage(folder, file))), "")


def read(tensors: Mapping[str, Tensor], manifest: Manifest, folder: Place) -> None:
    """Fill all ranks' parts of the tensors from what the first rank reads (a collective).

    Raises:
        OSError: on the first rank, when all have taken part to the end.
    """
    # All ranks take part to the end, whatever the first one meets: it sends zeros after an error, which it then raises.
    failure: Exception | None = None
    for name in sorted({name for names in gather_distinct_json(sorted(tensors))[0] for name in names}):
        stored = manifest.tensors[name]
        for chunk in stored.chunks():
            reader = None
            for box in _rows(chunk, ITEM_BYTES[stored.dtype]):
                piece = torch.zeros(box[1], dtype=getattr(torch, stored.dtype))
                if dist.get_rank() == 0 and failure is None:
                    try:
                        reader = reader or files.open_stored(folder / manifest.files[chunk.file].name)
                        piece = tensor_files.read_box(reader, chunk, stored.dtype, box).contiguous()
                    except (OSError, CheckpointError) as error:
                        failure = error
                dist.broadcast(piece.reshape(-1).view(torch.uint8), 0)
                _take(tensors.get(name), piece, box)
            if reader:
                reader.close()
    if failure:
        raise failure


def _rows(chunk: Chunk, item_bytes: int) -> Iterator[Box]:
    """Boxes of whole rows of a piece of a tensor, each of about PIECE_BYTES or one row."""
    if not chunk.sizes:
        yield chunk.offsets, chunk.sizes
        return
    row_bytes = max(1, chunk.numel // chunk.sizes[0] * item_bytes)
    at_once = max(1, files.PIECE_BYTES // row_bytes)
    for start in range(0, chunk.sizes[0], at_once):
        count = min(at_once, chunk.sizes[0] - start)
        yield (chunk.offsets[0] + start, *chunk.offsets[1:]), (count, *chunk.sizes[1:])


def _take(tensor: Tensor | None, piece: Tensor, box: Box) -> None:
    """Copy what this rank holds of a box."""
    if tensor is None:
        return
    own = box_of(tensor)
    shared = overlap(own, box)
    if shared is not None:
        into = tensor_files.local_tensor(tensor).detach()
        tensor_files.part(into, shared, own[0]).copy_(tensor_files.part(piece, shared, box[0]))
