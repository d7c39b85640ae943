"""Verify a checkpoint: read every byte and compare it with the hashes of the manifest."""

from __future__ import annotations

from shardtrain.checkpoint import manifest, retention
from shardtrain.checkpoint import tensors as tensor_files
from shardtrain.checkpoint.collectives import first_word, rank_and_size
from shardtrain.checkpoint.manifest import MANIFEST, Manifest
from shardtrain.checkpoint.storage import Place
from shardtrain.utils.errors import CheckpointError


def verify(path: Place, reader: int | None = None) -> tuple[Manifest | None, str]:
    """Verify a checkpoint (a collective). Return ``(manifest, "")`` if it is intact, else ``(None, damage)``.

    The ranks divide the files among them. With ``reader``, that rank reads all files, because only
    its node has them.
    """
    # One rank reads the manifest and all ranks parse it; latin-1 turns any bytes into text for JSON.
    problem = text = ""
    try:
        if rank_and_size()[0] == (reader or 0):
            text = manifest.read_bytes(path).decode("latin-1")
    except CheckpointError as error:
        problem = str(error)
    problem = first_word(problem)
    text = first_word(text)
    if problem:
        return None, problem
    try:
        stored = manifest.parse(text.encode("latin-1"), path)
    except CheckpointError as error:
        return None, str(error)  # the same bytes on every rank: the same error
    if retention.step_of(path) not in (None, stored.step):
        return None, f"checkpoint {path}: {MANIFEST} is of step {stored.step}"
    damage = first_word(tensor_files.find_damaged_file(stored, path, reader))
    if damage:
        return (None, f"checkpoint {path}: {damage}")
    return (stored, "")
