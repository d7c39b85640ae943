"""The validation split of C4: 364,608 English documents, streamed."""

from __future__ import annotations

from dataclasses import replace

from shardtrain.data.sources import Request, Shards, Table, c4, huggingface


def open_source(request: Request) -> Table | Shards:
    """Open it from the hub, or a local copy if ``request.path`` is set; see huggingface.open_source."""
    return huggingface.open_preset(request, replace(c4.HUB, split="validation"))
