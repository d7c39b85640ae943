"""Origin of a run's weights: the Hugging Face folder from which an export copies config.json and other files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from shardtrain import config as configs
from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.manifest import MANIFEST
from shardtrain.config import derived
from shardtrain.config.describe_folder import describe
from shardtrain.config.schema import Config
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.hf import as_is, source
from shardtrain.hf.source import FolderSource
from shardtrain.hub_formats.format import FREE
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ConfigError, ShardtrainError
from shardtrain.utils.log import logger

_LEVELS = 3
"""Maximum depth of a checkpoint below the folder of its run."""
_MAX_CHAIN = 8
"""Maximum length of a chain of runs, each of which started from a checkpoint of the previous run."""


def of_run(
    config: Config,
    module: ModuleType,
    shape: Any,
    max_chain: int = _MAX_CHAIN,
) -> FolderSource | None:
    """Return the folder that a run's weights came from, directly or through
    at most ``max_chain`` earlier runs.

    Without such a folder, return ``model.hf_assets_path`` if its config.json describes this model,
    or else None.

    Raises:
        CheckpointError: the initial weights cannot be read.
    """
    if as_is.is_as_is(module):
        return source.of_folder(Path(shape.path))
    initial_path = None
    if config.checkpoint.enable:
        initial_path = derived.initial_weights(config)
    if initial_path is not None and "://" not in initial_path:
        if origin := of_path(Path(initial_path), module, shape, max_chain):
            return origin
        if not Path(initial_path).exists():
            logger.warning(
                f"the initial weights {initial_path} do not exist anymore, so a new config.json is written",
            )
    assets = Path(config.model.hf_assets_path)
    if _is_of(assets, module, shape):
        return source.of_folder(assets)
    return None


def of_path(
    path: Path, module: ModuleType, shape: Any, max_chain: int = _MAX_CHAIN
) -> FolderSource | None:
    """Return the origin of a path, or None if it is unknown.

    A Hugging Face folder is its own origin. A checkpoint records its origin, or has the origin of its run's
    initial weights.
    """
    if not (path / MANIFEST).is_file():
        if bounded_reads.is_present(path / "config.json"):
            return source.of_folder(path)
        return None
    if origin := source.of_checkpoint(path, manifest.read(path)):
        return origin
    above = list(Path(os.path.realpath(path)).parents)[:_LEVELS]
    resolved = next(
        (level / RESOLVED_CONFIG for level in above if (level / RESOLVED_CONFIG).is_file()), None
    )
    if resolved is None or not max_chain:
        return None
    try:
        return of_run(configs.load(resolved).config, module, shape, max_chain - 1)
    except ConfigError:
        # The run was written by another version or was moved, so its origin is unknown.
        return None


def _is_of(folder: Path, module: ModuleType, shape: Any) -> bool:
    """True if a folder's config.json describes this model. The vocabulary size may differ."""
    if not (folder / "config.json").is_file():
        return False
    try:
        hub_model = describe(folder)
    except ShardtrainError:
        return False
    if hub_model.hub is not getattr(module, "HUB", None):
        return False
    # Some fields may differ without making it another model.
    ours = dataclasses.asdict(shape)
    ignored = {
        "vocab_size",
        *FREE,
        *(hub_model.hub.unused(hub_model.values) & hub_model.hub.unused(ours)),
    }
    for key, value in hub_model.values.items():
        if key not in ignored and "_coeff" not in key and ours.get(key) != value:
            return False
    return True
