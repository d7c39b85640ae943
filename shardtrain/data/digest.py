"""Fingerprints of everything that determines the rows of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import islice

from shardtrain.data.sources._data_files import Marks

_PAIRS_AT_ONCE = 4096


def digest(*facts: object) -> str:
    """Return the SHA-256, in hex, of facts with distinct ``repr``."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def digest_of_files(files: Mapping[str, str], *facts: object) -> str:
    """Return ``digest(sorted items of files, *facts)`` for at least one fact.

    Names are processed in blocks, to save memory.
    """
    # Hash the text of ``repr(([pairs...], *facts))`` piece by piece. Do not change this text, because
    # checkpoints contain fingerprints.
    pairs = files.pairs() if isinstance(files, Marks) else iter(sorted(files.items()))
    digest_so_far = hashlib.sha256(b"([")
    comma = ""
    while texts := [repr(pair) for pair in islice(pairs, _PAIRS_AT_ONCE)]:
        digest_so_far.update(f"{comma}{', '.join(texts)}".encode())
        comma = ", "
    # Add the rest of this text, which is the ``repr`` of the facts without the opening parenthesis. For a
    # single fact, also omit the comma that ``repr`` writes in a tuple with one element.
    rest = repr(facts)[1:] if len(facts) > 1 else f"{facts[0]!r})"
    digest_so_far.update(f"], {rest}".encode())
    return digest_so_far.hexdigest()
