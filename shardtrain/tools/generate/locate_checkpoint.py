"""Where a trained model lies: the configuration that says what it is, and a checkpoint of it that is good."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shardtrain import config as configs
from shardtrain.checkpoint import collectives, files, manifest, retention
from shardtrain.checkpoint.manifest import MANIFEST, Manifest
from shardtrain.config import Config, Loaded
from shardtrain.config.show import RESOLVED_CONFIG
from shardtrain.hf import source
from shardtrain.hf.opening import config_of, is_hub_folder, loaded_of
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.log import logger

_LEVELS = 4
"""A checkpoint lies at most so deep below its run's folder: job.dump_folder, checkpoint.folder, step-N."""


def load_config(path: Path, config_file: Path | None = None, tokenizer_path: str | None = None) -> Loaded:
    """The configuration of a run, from its checkpoint's or its own folder, unless the user names it."""
    if is_hub_folder(path):
        if config_file is not None:
            rule = f"has no effect: {path} is a Hugging Face folder, which says what it is"
            raise ConfigError(Problem("--config", str(config_file), rule, "leave it out"))
        return config_of(path, tokenizer_path)

    # What import or merge wrote: the model that it noted, and the tokenizer that it kept.
    noted = source.noted_model(path, manifest.read(path)) if (path / MANIFEST).is_file() else None
    if noted is not None and config_file is None:
        kept = source.of_checkpoint(path, manifest.read(path))
        if tokenizer_path is None and (kept is None or not kept.has_tokenizer):
            rule = "holds no tokenizer, which the folder that it was made of had none of"
            raise ConfigError(Problem("--from", str(path), rule, 'name one with --tokenizer, a path or "bytes"'))
        assets = tokenizer_path or str(source.unpacked(kept) if kept is not None else "")
        return loaded_of(noted, kept.config if kept is not None else {}, assets)

    if tokenizer_path is not None:
        rule = "is for a Hugging Face folder, and a run has its own"
        raise ConfigError(Problem("--tokenizer", tokenizer_path, rule, "leave it out"))
    if config_file is not None:
        return configs.load(config_file)
    if not path.exists():
        raise ConfigError(Problem("--from", str(path), "does not exist", "name a run's folder or a checkpoint"))

    # The configuration that a run left in its folder.
    whole = Path(os.path.realpath(path))
    levels = [whole, *whole.parents][:_LEVELS]
    found = next((level / RESOLVED_CONFIG for level in levels if (level / RESOLVED_CONFIG).is_file()), None)
    if found is None:
        rule = f"has no {RESOLVED_CONFIG} in it or above it, nor the config.json of a Hugging Face folder"
        raise ConfigError(Problem("--from", str(path), rule, "name the run's configuration with --config"))
    loaded = configs.load(found)
    # A folder from elsewhere may name a file of code, which is run only where the user has named the configuration.
    model = loaded.config.model
    for option, value in (("model.name", model.name), ("model.tokenizer_path", model.tokenizer_path)):
        if value and value.endswith(".py"):
            rule = f"is a file of code, and {found} was found, not named"
            raise ConfigError(Problem(option, value, rule, f"if you trust it, add --config {found}"))
    return loaded


def find_checkpoint(path: Path, config: Config) -> tuple[Path, Manifest]:
    """The folder of a good checkpoint, all its bytes read (a collective)."""
    if (path / MANIFEST).exists() or retention.step_of(path) is not None:
        stored, damage = _verify(path)
        if stored is None:
            raise CheckpointError(f"{damage}; use another one")
        return path, stored
    folder = next((f for f in (path, path / config.checkpoint.folder) if retention.step_folders(f)), None)
    if folder is None:
        raise CheckpointError(
            f"--from {path} holds no checkpoint: no folder named step-N in it or in its checkpoint/; name a run that "
            "has saved, as one does with --checkpoint.enable"
        )
    # The newest that is good. The first rank decides which there are: where a shared folder lags, ranks would open
    # different steps.
    damages: list[str] = []
    for step in reversed(collectives.broadcast_json(retention.step_folders(folder))):
        stored, damage = _verify(folder / f"step-{step}")
        if stored is not None:
            for passed in damages:
                logger.warning(f"{passed}: skipped, using step-{step}")
            return folder / f"step-{step}", stored
        damages.append(damage)
    raise CheckpointError(f"no checkpoint in {folder} can be used: {'; '.join(damages[:3])}")


def _verify(path: Path) -> tuple[Manifest | None, str]:
    """The manifest of a checkpoint that is good, or what is wrong with it; ranks share the reading."""
    # Every rank enters both exchanges, whatever it found: the first damage that any rank has seen is that of all.
    stored = None
    damage = ""
    try:
        stored = manifest.read(path)
    except CheckpointError as error:
        damage = str(error)
    damage = collectives.first_word(damage)
    if stored is not None and not damage:
        rank = 0
        size = 1
        if torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
            size = torch.distributed.get_world_size()
        found = (files.find_damage(path, file) for file in stored.files[rank::size])
        damage = collectives.first_word(next((f"checkpoint {path}: {text}" for text in found if text), ""))
    return (None, damage) if damage else (stored, "")
