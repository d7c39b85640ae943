"""First fit in order of falling length: which row each piece goes into (Johnson 1973)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def first_fit(lengths: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """Row of each piece, such that the lengths in a row add up to at most ``capacity``.

    Pieces are taken from long to short (equal ones in their order), and each goes into the first row with room. Rows
    are numbered in the order of their earliest piece. A tree of the most room in each half finds the row in log time.

    Raises:
        ValueError: when a length is above the capacity.
    """
    count = len(lengths)
    if count == 0:
        return np.array([], dtype=np.int64)
    if int(lengths.max()) > capacity:
        raise ValueError(f"a piece of {int(lengths.max())} does not fit into a row of {capacity}")
    leaves = 1 << (count - 1).bit_length()
    room = [capacity] * (2 * leaves)  # room[1] is the root; row i is the leaf leaves + i
    rows = np.empty(count, dtype=np.int64)
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        rows[piece] = node - leaves
        room[node] -= length
        while node > 1:
            node //= 2
            left = room[2 * node]
            right = room[2 * node + 1]
            most = left if left > right else right
            if room[node] == most:
                break
            room[node] = most
    # rows are full from the first on, so their numbers have no gap; renumbered by their earliest piece
    _, first_piece, inverse = np.unique(rows, return_index=True, return_inverse=True)
    rank = np.empty(len(first_piece), dtype=np.int64)
    rank[np.argsort(first_piece)] = np.arange(len(first_piece))
    return rank[inverse]
