"""From text to batches: source, tokenizer, rows, order, and this rank's share of each step."""

from __future__ import annotations

from shardtrain.data.batch import IGNORE, Batch
from shardtrain.data.loader import Stream, open_stream, steps_for_epochs
from shardtrain.data.tokenizer import Tokenizer, open_tokenizer

__all__ = ["IGNORE", "Batch", "Stream", "Tokenizer", "open_stream", "open_tokenizer", "steps_for_epochs"]
