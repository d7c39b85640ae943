"""Prepared shards: a folder made by ``shardtrain data prepare``, which contains tokens instead of rows."""

from __future__ import annotations

from shardtrain.data.packing.token_buffer import TokenBuffer
from shardtrain.data.prepared.shards import ShardTokenBuffer, check_tokenizer
from shardtrain.data.sources import Request
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer
from shardtrain.utils.errors import ConfigError, Problem


def open_line(request: Request, tokenizer: Tokenizer) -> TokenBuffer:
    """Open the documents of a prepared folder. A module with this function has no ``open_source``.

    Raises:
        ConfigError: no folder is named, it is incomplete, or it was prepared with another tokenizer.
    """
    if request.path is None:
        raise ConfigError(
            Problem(
                request.option,
                None,
                rule='is not set, and the dataset "tokens" requires it',
                fix='name a folder made by "shardtrain data prepare"',
            )
        )
    line = ShardTokenBuffer(request.path, request.option)
    check_tokenizer(line, tokenizer)
    return line
