"""``model.name = "transformers"``: the folder of the tokenizer is the folder of the model, unless one is given."""

from __future__ import annotations

import dataclasses

from shardtrain.config.schema import Config

NAME = "transformers"


def with_folder(config: Config) -> Config:
    """The configuration with ``model.overrides.path`` set, where the model is one of a folder."""
    model = config.model
    if model.name != NAME or "path" in model.overrides:
        return config
    overrides = {**model.overrides, "path": model.hf_assets_path}
    return dataclasses.replace(config, model=dataclasses.replace(model, overrides=overrides))
