"""C4, the cleaned Common Crawl of 2019, with 365 million documents. It is streamed.

It is English, unless data.subset names another language.
"""

from __future__ import annotations

from shardtrain.data.sources import Request, Shards, Table, huggingface
from shardtrain.data.sources._hub import HubSet

HUB = HubSet("allenai/c4", subset="en", streaming=True)


def open_source(request: Request) -> Table | Shards:
    """Open it from the hub, or a local copy if ``request.path`` is set; see huggingface.open_source."""
    return huggingface.open_preset(request, HUB)
