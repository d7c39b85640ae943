"""OpenWebText: 8 million web pages, 38 GiB of text. It is downloaded unless data.streaming is set."""

from __future__ import annotations

from shardtrain.data.sources import Request, Shards, Table, huggingface
from shardtrain.data.sources._hub import HubSet

HUB = HubSet("Skylion007/openwebtext")


def open_source(request: Request) -> Table | Shards:
    """Open it from the hub, or a local copy if ``request.path`` is set; see huggingface.open_source."""
    return huggingface.open_preset(request, HUB)
