"""Special tokens and sampling defaults of a Hugging Face folder: its ``generation_config.json`` or ``config.json``.

As in transformers, the keys of a ``generation_config.json`` replace all generation keys of ``config.json``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from shardtrain.config.rules.image_rules import IMAGE_TEXT
from shardtrain.config.rules.task_rules import OF_TEXT
from shardtrain.config.schema import Config
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.data.build_dataset import formats_of
from shardtrain.data.documents.encode import end_tokens
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer
from shardtrain.hf.source import FolderSource
from shardtrain.hub_formats.config_json import CONFIG
from shardtrain.hub_formats.format import GENERATION_KEYS
from shardtrain.utils import checked_json
from shardtrain.utils.errors import CheckpointError, ShardtrainError

GENERATION = "generation_config.json"
EOS = "eos_token_id"
TOKENS = ("bos_token_id", EOS, "pad_token_id")
_MAX_ID = 2**31 - 1
"""Highest token ID. Some files have -1 for no token."""
_TEXT_PARTS = ("decoder", "generator", "text_config")
"""Nested sections of a config.json. Their keys apply if the top level does not have the key."""


def read_settings(source: FolderSource) -> dict[str, Any]:
    """Return the generation settings of a folder.

    Raises:
        CheckpointError: ``generation_config.json`` cannot be read.
    """
    # Without the file, transformers takes the settings from config.json. Its top level takes precedence.
    if GENERATION not in source.files:
        inherited: dict[str, Any] = {}
        for config in (_text_config(source.config), source.config):
            for key, value in config.items():
                if key in GENERATION_KEYS and value is not None:
                    inherited[key] = value
        return inherited
    # With the file, transformers ignores the settings in config.json.
    try:
        settings = checked_json.parse(source.read(GENERATION))
    except (OSError, ValueError, RecursionError) as error:
        raise _not_an_object(source, error) from None
    if not isinstance(settings, dict):
        raise _not_an_object(source, settings)
    return dict(settings)


def _not_an_object(source: FolderSource, content: Any) -> CheckpointError:
    """Return the error about a generation_config.json that contains, or fails with, ``content``."""
    reason = str(content)[:100]
    return CheckpointError(
        f"{source.where}: {GENERATION} is not a JSON object ({reason}); copy or download it again"
    )


def end_ids(settings: Mapping[str, Any]) -> list[int]:
    """Return the token IDs in ``eos_token_id``, which is one ID or a list.

    Raises:
        CheckpointError: it is something else.
    """
    ids = _as_list(settings.get(EOS))
    if not all(type(token) is int and -_MAX_ID <= token <= _MAX_ID for token in ids):
        raise CheckpointError(
            f"{EOS}={ids!r} in {GENERATION} must be a token ID or a list of token IDs"
        )
    return ids


def unused_settings(settings: Mapping[str, Any]) -> str:
    """List the settings that change the generated text but that ``shardtrain generate`` ignores, as ``key=value``."""
    named = []
    for key in sorted(GENERATION_KEYS.intersection(settings).difference(TOKENS)):
        value = settings[key]
        # Many files spell out defaults, such as temperature=1. In Python, True equals 1.
        is_neutral = value is not True and value in (None, False, 1, [], {})
        if not is_neutral:
            named.append(f"{key}={value!r}")
    return ", ".join(named)


def trained_tokens(tokenizer: Tokenizer, config: Config) -> dict[str, list[int]]:
    """Return the special tokens of a run by key. ``eos_token_id`` contains all
    tokens that end a document or a turn.

    A task that does not predict the next token has only a padding token. Transformers uses it to
    find the end of a row.

    Raises:
        ConfigError: the chat template cannot be used.
    """
    if config.task.name not in (*OF_TEXT, IMAGE_TEXT):
        if tokenizer.pad_id in (None, tokenizer.eos_id):
            return {}
        return {"pad_token_id": [tokenizer.pad_id]}
    try:
        formats = set(formats_of(config, config.training).values())
    except ShardtrainError:
        # Prepared shards that were moved cannot be read. Assume that they may contain conversations.
        formats = {"chat"}
    has_conversations = config.task.name not in OF_NEXT_TOKENS or formats != {"text"}
    # Empty if the tokenizer has no such token.
    bos_ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    pad_ids = [] if tokenizer.pad_id is None else [tokenizer.pad_id]
    return {
        "bos_token_id": bos_ids,
        EOS: [*end_tokens(tokenizer, config.data, has_conversations)],
        "pad_token_id": pad_ids,
    }


def with_tokens(
    source: FolderSource, tokens: Mapping[str, list[int]]
) -> tuple[FolderSource, list[str]]:
    """Add the special tokens of a run to a folder. Return the changed folder and a list of the changes.

    ``config.json`` gets the first end token, like from transformers' Trainer, and ``generation_config.json``
    gets all of them. Existing end tokens are kept, because the model may still use them. Files that need no
    change are not rewritten.

    Raises:
        CheckpointError: ``generation_config.json`` cannot be read.
    """
    if not tokens:
        return source, []
    config = dict(source.config)
    settings = read_settings(source)
    changes = []
    for name, values, inherited in (
        (CONFIG, config, _text_config(config)),
        (GENERATION, settings, {}),
    ):
        for key, ids in tokens.items():
            new_ids = ids
            if values is config:
                new_ids = ids[:1]
            before = values.get(key, inherited.get(key))
            old_ids = _as_list(before)
            if set(new_ids) <= set(old_ids):
                continue
            # Put the new end tokens first, and write a single token as a number.
            after = list(new_ids)
            if key == EOS and (values is settings or isinstance(before, list)):
                after += [token for token in old_ids if token not in new_ids]
            values[key] = after
            if len(after) == 1:
                values[key] = after[0]
            changes.append(f"{name}: {key} {before} -> {values[key]}")
    # Keep the bytes of a generation_config.json that needs no change.
    if not any(change.startswith(GENERATION) for change in changes):
        return dataclasses.replace(source, config=config), changes
    content = (json.dumps(settings, indent=2) + "\n").encode()
    files = {**source.files, GENERATION: (source.where, 0, len(content))}
    rewritten = {**source.rewritten, GENERATION: content}
    return dataclasses.replace(source, config=config, files=files, rewritten=rewritten), changes


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the nested section that describes the language model, or {}."""
    for part in _TEXT_PARTS:
        if isinstance(config.get(part), dict):
            return config[part]  # type: ignore[no-any-return]
    return {}


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]
