"""Alpaca: 52,002 instructions with answers, whose column "text" has both in one prompt."""

from __future__ import annotations

from shardtrain.data.sources import Request, Shards, Table, huggingface
from shardtrain.data.sources._hub import HubSet

HUB = HubSet("tatsu-lab/alpaca")


def open_source(request: Request) -> Table | Shards:
    """Open it from the hub, or a local copy where ``request.path`` is set; see huggingface.open_source."""
    return huggingface.open_preset(request, HUB)
