"""Which checkpoint a path means, and what model it holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.choice import reject_step
from shardtrain.config.show import RESOLVED_CONFIG
from shardtrain.utils.errors import ConfigError


def step_of(path: Path, config: Path | None, step: str | None) -> Path:
    """Return ``path`` if it is a checkpoint; else print and return the one of a run that ``step`` names."""
    if (path / manifest.MANIFEST).is_file() or not path.is_dir():
        reject_step(step, path)
        return path
    from shardtrain.tools.generate.locate_checkpoint import find_checkpoint, load_config

    chosen = find_checkpoint(path, load_config(path, config).config, step)
    print(f"using {chosen}")
    return Path(str(chosen.path))


def model_options(checkpoint: Path, config: Path | None) -> dict[str, Any]:
    """The model of a checkpoint: by the configuration given, by what an import noted, or by the run beside it."""
    run = Path(os.path.realpath(checkpoint)).parent.parent / RESOLVED_CONFIG
    if config is None and not run.is_file():
        from shardtrain.hf import source

        if noted := source.noted_model(checkpoint, manifest.read(checkpoint)):
            return noted
    path = config or run
    if not path.is_file():
        raise ConfigError(f"{path} is missing, so the model of {checkpoint} is not known; give the TOML with --config")
    from shardtrain import config as configs
    from shardtrain.config import derived
    from shardtrain.config.assets import tokenizer_folder

    loaded = configs.load(path, [])
    model = loaded.config.model
    training = loaded.config.training
    assets = tokenizer_folder(model.tokenizer_path or model.hf_assets_path)
    return {
        "name": model.name,
        "flavor": model.flavor,
        "overrides": dict(model.overrides),
        "norm_type": model.norm_type,
        "seq_len": training.seq_len,
        "base": derived.initial_weights(loaded.config),
        "tokenizer": assets if assets.is_dir() else None,
        "assets": str(assets),
        "loaded": loaded.config,
    }
