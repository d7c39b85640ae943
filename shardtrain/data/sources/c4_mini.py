"""The first 45,000 documents of C4: some minutes to download, and enough to see a small model learn."""

from __future__ import annotations

from shardtrain.data.sources import Request, Shards, Table, huggingface
from shardtrain.data.sources._hub import HubSet

HUB = HubSet("allenai/c4", split="train[:45000]", data_files="en/c4-train.00000-of-01024.json.gz")


def open_source(request: Request) -> Table | Shards:
    """Open it from the hub, or a local copy if ``request.path`` is set; see huggingface.open_source.

    Raises:
        ConfigError: also where streaming is asked for, as a part of a split cannot be streamed.
    """
    return huggingface.open_preset(request, HUB)
