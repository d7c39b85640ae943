"""Verify a checkpoint: read every byte and compare it with the hashes of the manifest."""

from __future__ import annotations

from shardtrain.checkpoint import manifest, rank0_storage, retention
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.collectives import broadcast_json, first_word, rank_and_size
from shardtrain.checkpoint.manifest import MANIFEST, Manifest
from shardtrain.checkpoint.storage import Place
from shardtrain.utils.errors import CheckpointError


def verify(path: Place, only_rank_0: bool = False) -> tuple[Manifest | None, str]:
    """Verify a checkpoint (a collective). Return ``(manifest, "")`` if it is intact, else ``(None, damage)``.

    The ranks divide the files among them. With ``only_rank_0``, rank 0 reads all files.
    """
    # Rank 0 reads the manifest and all ranks parse it; latin-1 turns any bytes into text for JSON.
    problem = ""
    text = None
    try:
        text = manifest.read_bytes(path).decode("latin-1") if rank_and_size()[0] == 0 else None
    except CheckpointError as error:
        problem = str(error)
    problem, text = broadcast_json([problem, text])
    if problem:
        return None, problem
    try:
        stored = manifest.parse(text.encode("latin-1"), path)
    except CheckpointError as error:
        return None, str(error)  # the same bytes on every rank: the same error
    if retention.step_of(path) not in (None, stored.step):
        return None, f"checkpoint {path}: {MANIFEST} is of step {stored.step}"

    storage = rank0_storage if only_rank_0 else tensor_files
    damage = first_word(storage.find_damaged_file(stored, path))
    return (None, f"checkpoint {path}: {damage}") if damage else (stored, "")
