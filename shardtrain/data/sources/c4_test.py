"""A few documents of C4 for tests, as torchtitan ships them in tests/assets/c4_test: a local copy, never downloaded."""

from __future__ import annotations

from shardtrain.data.sources import Request, Shards, Table, huggingface
from shardtrain.errors import ConfigError, Problem


def open_source(request: Request) -> Table | Shards:
    """Open the local copy; see huggingface.open_source.

    Raises:
        ConfigError: also when no path is set.
    """
    if not request.path:
        rule, fix = 'is not set, and the dataset "c4_test" is a local one', "name the folder, or use c4_mini"
        raise ConfigError(Problem(request.option, None, rule, fix))
    return huggingface.open_local(request)
