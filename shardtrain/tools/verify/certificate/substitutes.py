"""Replace data and tokenizers that this machine lacks, such as those of a preset for a cluster.

A certificate names each replacement, because the replaced part is not proven. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from shardtrain.config import Config, Loaded
from shardtrain.config.schema.data_options import Data
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.tools.verify.meshes import changed

BUILT_IN_DATA = ("python_stdlib", "stdlib_packages")
BUILT_IN_TOKENIZERS = ("bytes", "python_bpe")
NUM_ROWS = 64
_WORDS = ("shard", "rank", "mesh", "loss", "step", "seed", "weight", "norm", "token", "layer")
_VOCAB_SIZE = 512
"""Vocabulary of a model whose tokenizer is replaced by bytes."""


def with_substitutes(loaded: Loaded, folder: Path) -> tuple[Loaded, list[str]]:
    """Return the configuration with replacements for missing parts, and a note for each of them."""
    notes: list[str] = []
    config = loaded.config
    sections: dict[str, dict[str, Any]] = {}
    # The built-in tokenizer needs no file. Separators and templates may use tokens that bytes lack.
    assets = config.model.hf_assets_path
    tokenizer = config.model.tokenizer_path or assets
    if tokenizer not in BUILT_IN_TOKENIZERS and not os.path.exists(tokenizer):
        overrides = {**config.model.overrides, "vocab_size": _VOCAB_SIZE}
        sections["model"] = {
            "hf_assets_path": "bytes",
            "tokenizer_path": None,
            "overrides": overrides,
        }
        sections["data"] = {"separator": None, "chat_template": None, "turn_end": None}
        notes.append(
            f"substitute: bytes instead of the tokenizer {tokenizer}, which is not on this machine"
        )
    # Replace the training data, and with them the validation data.
    if not _has_data(config.training.dataset, config.training.dataset_path, config):
        name = config.training.dataset_path or config.training.dataset or "the mixture"
        dataset, path = _data_for(config, folder)
        sections["training"] = {"dataset": dataset, "dataset_path": path}
        sections["data"] = {**sections.get("data", {}), **_plain_rows(config)}
        notes.append(
            f"substitute: {dataset} instead of the data {name}, which are not on this machine"
        )
        if config.validation.enable:
            sections["validation"] = {"dataset": dataset, "dataset_path": path}
    elif config.validation.enable and not _has_data(
        config.validation.dataset, config.validation.dataset_path, config
    ):
        training = {
            "dataset": config.training.dataset,
            "dataset_path": config.training.dataset_path,
        }
        sections["validation"] = training
        notes.append(
            "substitute: the training data instead of the validation data, which are not on this machine"
        )
    return changed(loaded, sections, set(), ""), notes


def _has_data(dataset: str, path: str | None, config: Config) -> bool:
    """True if the data can be read without a network."""
    paths = [path]
    if config.data.sources:
        paths = [source.dataset_path for source in config.data.sources.values()]
    elif dataset in BUILT_IN_DATA:
        return True
    return all(one is not None and os.path.exists(one) for one in paths)


def _plain_rows(config: Config) -> dict[str, Any]:
    """Return the options of data whose rows have plain columns."""
    options: dict[str, Any] = {
        "sources": {},
        "stages": [],
        "template": {},
        "subset": None,
        "streaming": None,
    }
    if config.task.name in OF_NEXT_TOKENS:
        # A conversation needs a chat template, so it becomes text, but its documents stay apart.
        is_text = config.data.format == "text" and not config.data.sources
        packing = config.data.packing
        if not is_text and packing == "auto":
            packing = "first_fit"
        options |= {
            "format": "text",
            "text_field": Data().text_field,
            "packing": packing,
            "long_documents": "auto",
        }
    return options


def _data_for(config: Config, folder: Path) -> tuple[str, str | None]:
    """Return dataset and path of a replacement for the data of a task."""
    if config.task.name in OF_NEXT_TOKENS:
        return "python_stdlib", None
    path = folder / "rows.jsonl"
    path.write_text("".join(_row(config, number) for number in range(NUM_ROWS)), encoding="utf-8")
    return "jsonl", str(path)


def _row(config: Config, number: int) -> str:
    """Return a line with the columns of every task."""
    rng = random.Random(number)

    def text(most: int) -> str:
        return " ".join(rng.choices(_WORDS, k=rng.randint(1, most)))

    task = config.task
    label: Any = rng.randrange(task.num_labels)
    if task.name == "kto":
        label = bool(number % 2)
    elif task.labels:
        label = rng.choice(task.labels)
    row = {
        config.data.text_field: text(8),
        config.data.prompt_field: text(4),
        config.data.completion_field: f" {text(4)}",
        task.chosen_field: f" {text(4)}",
        task.rejected_field: f" {text(4)}",
        task.label_field: label,
    }
    if task.pair_field:
        row[task.pair_field] = text(8)
    return json.dumps(row) + "\n"
