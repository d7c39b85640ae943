"""From text to batches: open sources, tokenize, pack rows, order them, and read this rank's part of a step.

Names are imported on first use, because tools for tokenizers and sources must not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardtrain.data.batch import IGNORE, Batch
    from shardtrain.data.filler import mark_filler
    from shardtrain.data.loader import DataLoader, sources_of_rows
    from shardtrain.data.open_loader import open_dataloader
    from shardtrain.data.tokenizers.open_tokenizer import Tokenizer, open_tokenizer
    from shardtrain.data.workers import death_of_worker

__all__ = [
    "IGNORE",
    "Batch",
    "DataLoader",
    "Tokenizer",
    "death_of_worker",
    "mark_filler",
    "open_dataloader",
    "open_tokenizer",
    "sources_of_rows",
]

_HOMES = {
    "IGNORE": "batch",
    "Batch": "batch",
    "mark_filler": "filler",
    "DataLoader": "loader",
    "sources_of_rows": "loader",
    "death_of_worker": "workers",
    "open_dataloader": "open_loader",
    "Tokenizer": "tokenizers.open_tokenizer",
    "open_tokenizer": "tokenizers.open_tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
