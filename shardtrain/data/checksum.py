"""Order hash: one number for all rows that a run has consumed, to prove that two runs saw the same data.

Each row is hashed with its position in the order, its sample id, its tokens and its targets. The hashes are
summed modulo 2^64. A sum does not depend on how rows are divided over ranks and steps. It does depend on the
order of rows, because the positions are hashed too.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardtrain.data.batch import Batch

_PARTS = 4
_BITS = 16
_MODULUS = 2**64


def hash_rows(batch: Batch, first_position: int) -> int:
    """Return the sum of the hashes of a batch's rows, which start at ``first_position``.

    Padding rows do not count.
    """
    total = 0
    tokens = batch.tokens_BT.numpy().astype("<i4")
    targets = batch.targets_BT.numpy().astype("<i4")
    # The dtypes above and below are little-endian with a fixed size,
    # so the hash is the same on every machine.
    for row, sample in enumerate(batch.sample_ids_B.tolist()):
        if sample < 0:
            continue
        key = np.array([first_position + row, sample], dtype="<i8").tobytes()
        digest = hashlib.blake2b(key, digest_size=8)
        digest.update(tokens[row].data)
        digest.update(targets[row].data)
        total += int.from_bytes(digest.digest(), "little")
    return total % _MODULUS


def hash_numbers(sample_ids: list[int], first_position: int) -> int:
    """Return the sum of the hashes of positions and sample ids.

    This is for rows whose contents need no hash, because a fingerprint covers them.
    """
    total = 0
    for row, sample in enumerate(sample_ids):
        if sample >= 0:
            key = np.array([first_position + row, sample], dtype="<i8").tobytes()
            total += int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return total % _MODULUS


def split(number: int) -> list[float]:
    """Split a hash into parts of 16 bits. Sums of such parts over many ranks are exact in float64."""
    mask = 2**_BITS - 1
    return [float((number >> (_BITS * part)) & mask) for part in range(_PARTS)]


def join(parts: list[float]) -> int:
    """Convert the sums of parts back to a hash. A sum may exceed 16 bits.

    >>> join([a + b for a, b in zip(split(2**64 - 1), split(2))])
    1
    """
    joined = 0
    for number, value in enumerate(parts):
        joined += int(value) << (_BITS * number)
    return joined % _MODULUS
