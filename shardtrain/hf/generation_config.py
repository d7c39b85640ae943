"""Special tokens and sampling defaults of a Hugging Face folder: its ``generation_config.json`` or ``config.json``.

As in transformers, a ``generation_config.json`` replaces the generation keys of ``config.json``. The two are not mixed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardtrain.hf.format import GENERATION_KEYS
from shardtrain.hf.source import Source
from shardtrain.utils.errors import CheckpointError

GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TEXT_PARTS = ("decoder", "generator", "text_config")
"""Parts of a composed config.json whose keys apply where its top level has none."""


def read_settings(source: Source) -> dict[str, Any]:
    """Return the generation settings of a folder that are not null.

    Raises:
        CheckpointError: ``generation_config.json`` cannot be read.
    """
    if GENERATION in source.files:
        try:
            settings = json.loads(source.read(GENERATION))
        except (OSError, ValueError, RecursionError) as error:
            settings = error
        if not isinstance(settings, dict):
            reason = str(settings)[:100]
            raise CheckpointError(
                f"{source.where}: {GENERATION} is not a JSON object ({reason}); copy or download it again"
            )
    else:
        text_config = next((source.config[part] for part in _TEXT_PARTS if source.config.get(part)), {})
        settings = {}
        for config in (text_config, source.config):
            for key in GENERATION_KEYS.intersection(config):
                settings[key] = config[key] if config[key] is not None else settings.get(key)
    return {key: value for key, value in settings.items() if value is not None}


def end_ids(settings: Mapping[str, Any]) -> list[int]:
    """Return the ids of ``eos_token_id``, which is an id or a list of ids.

    Raises:
        CheckpointError: it is something else.
    """
    value = settings.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(f"eos_token_id={value!r} of {GENERATION} is neither a token id nor a list of token ids")
    return ids


def unused_settings(settings: Mapping[str, Any]) -> str:
    """Name the settings that ``shardtrain generate`` ignores and that change a text, as ``key=value`` pairs."""
    named = []
    for key in sorted(GENERATION_KEYS.intersection(settings).difference(TOKENS)):
        value = settings[key]
        is_neutral = value is not True and value in (False, 1, [], {})
        if not is_neutral:
            named.append(f"{key}={value!r}")
    return ", ".join(named)
