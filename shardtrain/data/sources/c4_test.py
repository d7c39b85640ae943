"""A few documents of C4 for tests. They are read from a clone of torchtitan or a path, and never downloaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardtrain.data import shared_opening
from shardtrain.data.sources import Request, Shards, Table, huggingface
from shardtrain.data.sources._hub import HubSet
from shardtrain.utils.errors import ConfigError, Problem

PLACES = ("tests/assets/c4_test", "test/assets/c4_test")
"""Where a clone of torchtitan contains them: since February 2025, and before."""


def open_source(request: Request) -> Table | Shards:
    """Open the local copy; see huggingface.open_source.

    Raises:
        ConfigError: see ``huggingface.open_preset``. Or no path is set, and the working directory is no
            clone of torchtitan.
    """

    def look() -> str | None:
        for place in PLACES:
            if Path(place).is_dir():
                return place
        return None

    path = request.path or shared_opening.once(PLACES[0], look)
    if not path:
        option = request.option.removesuffix("_path")
        rule = f"is a local dataset, which is not in ./{PLACES[0]}"
        fix = f'name its folder with {request.option}, or use "python_stdlib", which is on every machine'
        raise ConfigError(Problem(option, "c4_test", rule, fix))
    return huggingface.open_preset(replace(request, path=path), HubSet("c4_test", split="train"))
