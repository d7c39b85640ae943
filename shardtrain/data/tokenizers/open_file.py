"""Which kind of tokenizer a file holds, by its content: that of the tokenizers library, sentencepiece, or tiktoken."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import TYPE_CHECKING

from shardtrain.data.tokenizers.json_file import JsonTokenizer
from shardtrain.data.tokenizers.sentencepiece_model import SentencePieceTokenizer
from shardtrain.data.tokenizers.tiktoken_model import TiktokenTokenizer, looks_like

if TYPE_CHECKING:
    from shardtrain.data.tokenizers.open_tokenizer import Tokenizer


def open_content(file: Path, content: bytes, option: str, path: str) -> Tokenizer:
    """Open a tokenizer whose file has been read, in this process. Raises as ``tokenizer.open_tokenizer``."""
    content = content.removeprefix(codecs.BOM_UTF8)
    if file.suffix == ".json" or content[:1] == b"{":
        return JsonTokenizer(file, content, option, path)
    if looks_like(content):
        return TiktokenTokenizer(file, content, option, path)
    return SentencePieceTokenizer(file, content, option, path)
