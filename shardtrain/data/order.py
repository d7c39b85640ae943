"""The order of samples, as a pure function of position, number of samples and seed.

No list is shuffled or stored. With n samples, position p is slot p % n of epoch p // n. A permutation maps
the slot to a sample, and its keys depend on the seed and the epoch. The permutation is a balanced Feistel
network (Luby and Rackoff, 1988) over the smallest even number of bits that can represent n. It is applied
repeatedly until the value is below n (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). The keys are SHA-256 hashes, so the order does not depend on the random generator of a
library. Never change the order, because checkpoints contain only a position.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt

MAX_SAMPLES = 2**62
"""Maximum number of samples in an epoch, and maximum position. Sums of two such numbers fit into int64."""
# With ideal round functions, 4 rounds would be enough. These round functions are simpler, so use twice as
# many, which costs microseconds per batch.
_ROUNDS = 8
# With fewer bits, the network could form only few of the possible permutations. For few samples, the
# additional cycle walking is cheap.
_MIN_BITS = 6

_UInts = npt.NDArray[np.uint64]


def sample_at(position: npt.ArrayLike, num_samples: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the samples at the given positions of an endless, shuffled pass over ``num_samples`` samples.

    Every epoch visits each sample once, each time in a different order. ``position`` is a non-negative
    integer or an array of non-negative integers. The result has its shape.
    Memory and time depend only on the number of positions.

    Raises:
        ValueError: ``num_samples`` is not in 1..2**62 or a position is not in 0..2**62.

    >>> sorted(sample_at(range(5), 5, seed=0).tolist())
    [0, 1, 2, 3, 4]
    """
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise ValueError(f"num_samples={num_samples} must be in 1..2**62")
    positions = np.asarray(position, dtype=np.int64)
    if positions.size and not (int(positions.min()) >= 0 and int(positions.max()) <= MAX_SAMPLES):
        raise ValueError("positions must be in 0..2**62")
    if num_samples == 1:
        return np.zeros_like(positions)

    # Look up the keys of each position's epoch, (rounds, positions). A batch contains only one or two
    # epochs, so compute the keys once per epoch.
    epochs, slots = np.divmod(positions.ravel(), num_samples)
    distinct, which = np.unique(epochs, return_inverse=True)
    keys_of_epochs = [_keys(seed, int(epoch)) for epoch in distinct]
    epoch_keys = np.array(keys_of_epochs, dtype=np.uint64).reshape(-1, _ROUNDS)
    keys = epoch_keys.T[:, which]

    # The network permutes 0..2^bits-1. Apply it again to values that are not in 0..n-1, until all are. This
    # terminates, because the cycle of the permutation leads back to the slot, which is below n.
    bits = max(_MIN_BITS, (num_samples - 1).bit_length())
    half_bits = (bits + 1) // 2
    values = _feistel(slots.astype(np.uint64), half_bits, keys)
    outside = values >= np.uint64(num_samples)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys[:, outside])
        outside = values >= np.uint64(num_samples)
    return values.astype(np.int64).reshape(positions.shape)


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    """Return the round keys of an epoch."""
    pool = b""
    for part in range(2):
        text = f"shardtrain order {seed} {epoch} {part}"
        pool += hashlib.sha256(text.encode()).digest()
    # Each round key is a little-endian number of 8 bytes.
    return struct.unpack(f"<{_ROUNDS}Q", pool[: 8 * _ROUNDS])


def _feistel(values: _UInts, half_bits: int, keys: _UInts) -> _UInts:
    """Apply the network once to values of 2 * half_bits bits. It is a bijection for any round function."""
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left = values >> shift
    right = values & mask
    for key in keys:
        # splitmix64's finalizer (Steele, Lea and Flood, 2014); uint64 arithmetic is modulo 2**64
        mixed = right ^ key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        left, right = right, left ^ (mixed & mask)
    return (left << shift) | right
