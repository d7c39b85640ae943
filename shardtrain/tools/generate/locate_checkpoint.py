"""Find a trained model: its configuration, and a verified checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from shardtrain import config as configs
from shardtrain.checkpoint import choice, manifest, retention
from shardtrain.checkpoint.choice import ChosenCheckpoint
from shardtrain.checkpoint.manifest import MANIFEST
from shardtrain.checkpoint.storage import folder_of
from shardtrain.checkpoint.verification import verify
from shardtrain.config import Config, Loaded
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.hf import source
from shardtrain.hf.folder_config import config_of, is_hub_folder, loaded_of
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem

_LEVELS = 4
"""Number of folders searched for the configuration, from step-N up to job.dump_folder."""


def load_config(
    path: Path, config_file: Path | None = None, tokenizer_path: str | None = None
) -> Loaded:
    """Load a model's configuration from ``config_file``, or find it from a run, checkpoint or hub folder."""
    if is_hub_folder(path):
        if config_file is not None:
            raise ConfigError(
                Problem(
                    "--config",
                    str(config_file),
                    rule=f"has no effect: {path} is a Hugging Face folder, which has its own configuration",
                    fix="remove it",
                )
            )
        return config_of(path, tokenizer_path)

    # A checkpoint written by import or merge records its model and may contain the tokenizer.
    if config_file is None and (path / MANIFEST).is_file():
        loaded = _config_of_import(path, tokenizer_path)
        if loaded is not None:
            return loaded

    if tokenizer_path is not None:
        raise ConfigError(
            Problem(
                "--tokenizer",
                tokenizer_path,
                rule="is only for Hugging Face folders, because a run has its own tokenizer",
                fix="remove it",
            )
        )
    if config_file is not None:
        return configs.load(config_file)
    if not path.exists():
        raise ConfigError(
            Problem(
                "--from",
                str(path),
                rule="does not exist",
                fix="name a run's folder or a checkpoint",
            )
        )
    return _config_of_run(path)


def _config_of_import(path: Path, tokenizer_path: str | None) -> Loaded | None:
    """Return the configuration that a checkpoint records, or None if a run saved the checkpoint."""
    stored = manifest.read(path)
    model = source.noted_model(path, stored)
    if model is None:
        return None
    files = source.of_checkpoint(path, stored)
    config_json = {} if files is None else files.config
    assets = tokenizer_path
    if assets is None:
        assets = ""
        if files is not None and files.has_tokenizer:
            assets = str(source.unpacked(files))
    return loaded_of(model, config_json, assets)


def _config_of_run(path: Path) -> Loaded:
    """Find the configuration that a run wrote to its folder, in the path and its parents, and load it."""
    real_path = Path(os.path.realpath(path))
    folders = [real_path, *real_path.parents][:_LEVELS]
    files = [folder / RESOLVED_CONFIG for folder in folders]
    file = next(filter(bounded_reads.is_present, files), None)
    if file is None:
        raise ConfigError(
            Problem(
                "--from",
                str(path),
                rule=f"has no {RESOLVED_CONFIG} in it or above it, nor the config.json of a Hugging Face folder",
                fix="name the run's configuration with --config",
            )
        )
    loaded = configs.load(file)
    # A downloaded folder may refer to a Python file. Run it only if the user passed the configuration
    # explicitly.
    model = loaded.config.model
    code_options = {"model.name": model.name, "model.tokenizer_path": model.tokenizer_path}
    for option, value in code_options.items():
        if value and value.endswith(".py"):
            raise ConfigError(
                Problem(
                    option,
                    value,
                    rule=f"is a Python file named in {file}, which was not requested explicitly",
                    fix=f"if you trust it, add --config {file}",
                )
            )
    return loaded


def find_checkpoint(path: Path, config: Config, step: str | None = None) -> ChosenCheckpoint:
    """Return a verified checkpoint: ``path`` itself, or the one that ``step`` selects in a run. Collective.

    Raises:
        ConfigError: ``step`` is given and ``path`` is a checkpoint.
        CheckpointError: the checkpoint does not exist, or it is damaged.
    """
    if (path / MANIFEST).exists() or retention.step_of(path) is not None:
        choice.reject_step(step, path)
        stored, damage = verify(path)
        if stored is None:
            raise retention.unusable(path, damage)
        return ChosenCheckpoint(path, stored)
    of_run = folder_of(str(path), config.checkpoint.folder)
    for folder in (path, of_run):
        if retention.step_folders(folder):
            return choice.choose(folder, step, verify)
    raise CheckpointError(
        f"--from {path} has no checkpoint: neither it nor {of_run} has a folder step-N; name a run that saved "
        "checkpoints (--checkpoint.enable)"
    )
