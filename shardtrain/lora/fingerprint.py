"""By what frozen weights are known: what is in their files, and not where they lie.

A checkpoint's fingerprint is made of the hash of its manifest, which holds the hashes of all its files; a Hugging Face
folder's is made of those of its weights and its config.json.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.storage import Place
from shardtrain.config.schema import Config
from shardtrain.hf import layer_files
from shardtrain.hf.config_json import CONFIG
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import CheckpointError


def random_fingerprint(config: Config, device_type: str) -> str:
    """Initial weights are a function of these; the draws of a GPU are not those of the CPU."""
    model = config.model
    overrides = sorted(model.overrides.items())
    facts = (config.debug.seed, device_type, model.name, model.flavor, overrides, model.norm_type)
    return f"random-{hashlib.sha256(repr(facts).encode()).hexdigest()}"


def fingerprint(path: Place, in_hub: bool, rank: int = 0, size: int = 1) -> dict[str, str]:
    """Hashes of what is at a path, by file; of a Hugging Face folder this rank's share. Raises CheckpointError."""
    if not in_hub:
        return {manifest.MANIFEST: hashlib.sha256(manifest.read_bytes(path)).hexdigest()}
    folder = Path(str(path))
    names = [CONFIG, *(file.relative_to(folder).as_posix() for file in layer_files.weight_files(folder))]
    try:
        return {name: _sha256(folder / name) for name in names[rank::size]}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error


def joined(hashes: Mapping[str, str]) -> str:
    """One fingerprint of all files."""
    return f"sha256-{hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()}"


def _sha256(path: Path) -> str:
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
