"""Location and fingerprint of a run's initial weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.storage import Place, place
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.hf.folder_config import is_hub_folder
from shardtrain.hf.weights import weight_files
from shardtrain.utils import atomic_io, bounded_reads
from shardtrain.utils.errors import CheckpointError

_SAMPLE_BYTES = 2**20


def start_of(config: Config) -> Place | None:
    """Return the location of the run's initial weights, or None if they are randomly initialized."""
    named = derived.initial_weights(config)
    if config.checkpoint.enable and named is not None:
        return place(named)
    return None


def identity(config: Config) -> str:
    """Return a fingerprint of the initial weights that does not depend on their location.

    The fingerprint of a checkpoint is the hash of its manifest, which contains the hashes of all files. For a
    Hugging Face folder, see ``of_folder``.

    Raises:
        CheckpointError: the weights do not exist.
    """
    start = start_of(config)
    if start is None:
        return f"seed {config.debug.seed}"
    if not config.checkpoint.initial_load_in_hf:
        return hashlib.sha256(manifest.read_bytes(start)).hexdigest()
    folder = Path(str(start))
    if not is_hub_folder(folder):
        raise CheckpointError(
            f"{folder} has no config.json; restore this folder, because the "
            f"run's initial weights are its reference model"
        )
    return of_folder(folder)


def of_adapters(named: str) -> str:
    """Return a fingerprint of initial adapters: a PEFT folder, or a checkpoint of a LoRA run."""
    start = place(named)
    folder = Path(str(start))
    if bounded_reads.is_present(folder / "adapter_config.json"):
        return of_folder(folder)
    return hashlib.sha256(manifest.read_bytes(start)).hexdigest()


def of_folder(folder: Path) -> str:
    """Return a hash of names, sizes, and first and last MiB of the JSON and
    weights files of a Hugging Face folder.
    """
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.json"), *weight_files(folder)]):
        size = path.stat().st_size
        with open(path, "rb", opener=atomic_io.without_waiting) as file:
            digest.update(f"{path.name}:{size}:".encode() + file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
