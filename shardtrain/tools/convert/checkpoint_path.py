"""Resolve a path to a checkpoint, and read the options of its model."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.choice import reject_step
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ConfigError, ShardtrainError

if TYPE_CHECKING:
    from shardtrain.config import Config

KEEP_HELP = "keep bos, eos and pad of config.json and generation_config.json from before training"


def step_of(path: Path, config: Path | None, step: str | None) -> Path:
    """Return ``path`` if it is a checkpoint.

    If it is a run folder, select ``step``, print its path and return it.
    """
    if (path / manifest.MANIFEST).is_file() or not path.is_dir():
        reject_step(step, path)
        return path
    from shardtrain.tools.generate.locate_checkpoint import find_checkpoint, load_config

    chosen = find_checkpoint(path, load_config(path, config).config, step)
    print(f"using {chosen}")
    return Path(str(chosen.path))


def model_options(checkpoint: Path, config: Path | None) -> dict[str, Any]:
    """Return the model options of a checkpoint.

    The source is ``config``, else the notes of an import, else the configuration of the run that
    contains the checkpoint.

    Raises:
        ConfigError: none of them exists.
    """
    # A run's checkpoint is RUN/checkpoint/step-N, which may be reached through a link.
    config_of_run = Path(os.path.realpath(checkpoint)).parent.parent / RESOLVED_CONFIG
    if config is None and not bounded_reads.is_present(config_of_run):
        from shardtrain.hf import source

        imported_model = source.noted_model(checkpoint, manifest.read(checkpoint))
        if imported_model:
            return imported_model
    path = config or config_of_run
    if not bounded_reads.is_present(path):
        raise ConfigError(
            f"{path} does not exist, so the model of {checkpoint} is unknown; name the run's TOML with --config"
        )
    from shardtrain import config as configs
    from shardtrain import tasks
    from shardtrain.config import derived
    from shardtrain.config.assets import tokenizer_folder

    loaded = configs.load(path, [])
    model = loaded.config.model
    assets = tokenizer_folder(model.tokenizer_path or model.hf_assets_path)
    return {
        "name": model.name,
        "flavor": model.flavor,
        "overrides": dict(model.overrides),
        "norm_type": model.norm_type,
        "labels": tasks.labels_of(loaded.config),
        "seq_len": loaded.config.training.seq_len,
        "base": derived.initial_weights(loaded.config),
        "tokenizer": assets if assets.is_dir() else None,
        "assets": str(assets),
        "loaded": loaded.config,
    }


def tokens_of_run(
    config: Config, is_trusted: bool, folder: Path | None = None
) -> dict[str, list[int]]:
    """Return the special tokens of a run from its tokenizer, or from the tokenizer in ``folder``.

    If the tokenizer cannot be opened, or is a Python file of a configuration that is not trusted, print a
    line and return {}.
    """
    from shardtrain.data.build_dataset import tokenizer_of
    from shardtrain.hf.generation_config import trained_tokens

    if folder is not None:
        model = replace(config.model, tokenizer_path=None, hf_assets_path=str(folder))
        config = replace(config, model=model)
    path = config.model.tokenizer_path or config.model.hf_assets_path
    if path.endswith(".py") and not is_trusted:
        reason = "is Python code; name the run's configuration with --config if you trust it"
    else:
        try:
            return trained_tokens(tokenizer_of(config), config)
        except ShardtrainError as error:
            reason = f"cannot be opened ({error})"
    print(
        f"bos, eos and pad keep their values from before training, because the tokenizer {path} {reason}"
    )
    return {}
