"""The first 45,000 documents of C4. They download in minutes, and are enough to see a small model learn."""

from __future__ import annotations

from shardtrain.data.sources import Request, Shards, Table, huggingface
from shardtrain.data.sources._hub import HubSet

HUB = HubSet("allenai/c4", split="train[:45000]", data_files="en/c4-train.00000-of-01024.json.gz")


def open_source(request: Request) -> Table | Shards:
    """Open it from the hub, or a local copy if ``request.path`` is set; see huggingface.open_source.

    Raises:
        ConfigError: see ``huggingface.open_preset``. Or streaming is requested, which is not supported for
            part of a split.
    """
    return huggingface.open_preset(request, HUB)
