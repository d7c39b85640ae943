"""Errors of the Hugging Face Hub and its libraries as one line without secrets."""

from __future__ import annotations

import re

from shardtrain.utils.redact import redact

_LONGEST = 300


def describe_error(error: BaseException) -> str:
    """Return the class and the text of an error, without secrets, cut to 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    text = without_secrets(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def without_secrets(text: str) -> str:
    """Redact tokens, and remove the query of addresses, which may contain a signature.

    >>> without_secrets("for url https://cdn.example/file?X-Amz-Signature=ab%2F12&Expires=5")
    'for url https://cdn.example/file'
    """
    return redact(re.sub(r"\?[\w.%-]+=[^\s'\":)]*", "", text))
