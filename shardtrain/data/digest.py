"""Fingerprints of facts that determine the rows of a run."""

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
    """Return the ``digest`` of the sorted items of ``files`` and of at least one fact, without a text of
    all names in memory."""
    # The bytes are those of ``repr(([pairs...], *facts))``, fed piece by piece: fingerprints are saved, so
    # they stay.
    pairs = files.pairs() if isinstance(files, Marks) else iter(sorted(files.items()))
    digest_so_far = hashlib.sha256(b"([")
    comma = ""
    while texts := [repr(pair) for pair in islice(pairs, _PAIRS_AT_ONCE)]:
        digest_so_far.update(f"{comma}{', '.join(texts)}".encode())
        comma = ", "
    # The rest of the tuple's ``repr``: without the opening parenthesis and, for a single fact, without the
    # comma that ``repr`` adds.
    rest = repr(facts)[1:] if len(facts) > 1 else f"{facts[0]!r})"
    digest_so_far.update(f"], {rest}".encode())
    return digest_so_far.hexdigest()
