"""Run configuration derived from the files of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.config.load import Loaded
from shardtrain.config.schema import Config, Model, Training
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.hf import source
from shardtrain.hf.hub_model import recognise
from shardtrain.hub_formats.config_json import CONFIG, read_json
from shardtrain.utils import bounded_reads
from shardtrain.utils.log import logger

_TOKENS = 2048
"""Sequence length if config.json does not specify the maximum."""


def is_hub_folder(path: Path) -> bool:
    """True if a path is a folder in the format of ``transformers``."""
    return bounded_reads.is_present(path / CONFIG)


def config_of(folder: Path, tokenizer: str | None = None) -> Loaded:
    """Return the configuration of a folder: its model, its dtype, and its
    tokenizer unless another one is named.

    ``model.hf_assets_path`` is empty if neither exists.

    Raises:
        ConfigError: neither this package nor ``transformers`` supports the model.
        CheckpointError: ``config.json`` cannot be read.
    """
    hub_model = recognise(folder)
    hf_config = read_json(folder / CONFIG)
    if hub_model.hub is not None:
        hf_config = hub_model.hub.text_config(hf_config)
    for notice in hub_model.notices:
        logger.info(notice)
    if tokenizer is None:
        tokenizer = ""
        if source.of_folder(folder).has_tokenizer:
            tokenizer = str(folder)
    model = {
        "name": hub_model.name,
        "flavor": hub_model.flavor,
        "overrides": dict(hub_model.overrides),
    }
    return loaded_of(model, hf_config, tokenizer)


def loaded_of(model: Mapping[str, Any], hf_config: Mapping[str, Any], assets: str) -> Loaded:
    """Return the configuration of a model.

    Args:
        model: Values of ``[model]``: name, flavor, overrides and, optionally, norm_type.
        hf_config: Content of config.json for dtype and sequence length, or {}.
        assets: ``model.hf_assets_path``.
    """
    # Unusable values in the file are replaced by defaults.
    dtype: Any = hf_config.get("dtype") or hf_config.get("torch_dtype")
    if dtype not in COMPUTE_DTYPES:
        dtype = "float32"
    tokens = hf_config.get("max_position_embeddings")
    if type(tokens) is not int or tokens <= 0:
        tokens = _TOKENS
    return Loaded(
        Config(
            model=Model(
                name=model["name"],
                flavor=model["flavor"],
                overrides=dict(model["overrides"]),
                norm_type=model.get("norm_type", "rmsnorm"),
                hf_assets_path=assets,
            ),
            training=Training(
                mixed_precision_param=dtype,
                seq_len=tokens,
            ),
        )
    )
