"""Sentences whose label depends on a single keyword, for tests of classification."""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from pathlib import Path
from typing import Any

from tiny import tiny_config

from shardtrain.config.schema import Config

LENGTH = 48
SHAPE = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_dim": 64,
    "dropout": 0.0,
}
_WORDS = ["the", "film", "plot", "is", "a", "long", "story", "of", "two", "cats"]
_TELLING = {0: ["bad", "dull"], 1: ["good", "fine"]}


def sentence(rng: random.Random, label: int) -> str:
    words = rng.choices(_WORDS, k=rng.randint(1, 6))
    words.insert(rng.randrange(len(words) + 1), rng.choice(_TELLING[label]))
    return " ".join(words)


def rows(count: int, seed: int = 0) -> list[tuple[str, int]]:
    rng = random.Random(seed)
    labels = [rng.randrange(2) for _ in range(count)]
    return [(sentence(rng, label), label) for label in labels]


@functools.cache
def file_of(count: int, seed: int = 0, labels: bool = True) -> str:
    """Return the path of a TSV file without a header: texts, with labels if ``labels`` is true."""
    path = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / f"rows-{count}"
    lines = (f"{text}\t{label}\n" if labels else f"{text}\n" for text, label in rows(count, seed))
    path.write_text("".join(lines))
    return str(path)


def config(train: int = 200, dev: int = 50, **sections: dict[str, Any]) -> Config:
    """Return the configuration of a tiny encoder on such files, with other options in ``sections``."""
    defaults: dict[str, dict[str, Any]] = {
        "model": {"name": "encoder", "overrides": SHAPE},
        "task": {"name": "classification", "label_field": "1"},
        "data": {"text_field": "0"},
        "training": {"dataset": "tsv", "dataset_path": file_of(train), "seq_len": LENGTH},
        "validation": {
            "enable": True,
            "dataset": "tsv",
            "dataset_path": file_of(dev, 1),
            "seq_len": LENGTH,
            "local_batch_size": 5,
        },
    }
    merged = {
        name: {**defaults.get(name, {}), **values}
        for name, values in {**defaults, **sections}.items()
    }
    base = tiny_config(**{name: values for name, values in merged.items() if name != "model"})
    return dataclasses.replace(base, model=dataclasses.replace(base.model, **merged["model"]))
