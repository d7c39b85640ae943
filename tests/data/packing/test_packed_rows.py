"""Packed rows: their tokens and targets, with no token lost or learned twice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data.documents.encoded import Document
from shardtrain.data.packing.fitted import best_fit, first_fit, pack
from shardtrain.data.packing.packed_rows import PackedSequences, Packing
from shardtrain.data.packing.token_buffer import MemoryTokenBuffer
from shardtrain.ops.cross_entropy import IGNORE

KINDS = ("concat", "first_fit", "best_fit", "padded")
FITS = {"first_fit": first_fit, "best_fit": best_fit}


def documents_of(lengths, learned=None):
    """Documents with distinct tokens, which identify their position."""
    result = []
    token = 1
    for length in lengths:
        tokens = np.arange(token, token + length, dtype=np.int32)
        result.append(Document(tokens, None if learned is None else learned(tokens)))
        token += length
    return result


def rows_of(documents, packing):
    rows = pack(MemoryTokenBuffer(documents, vocab_size=60_000), packing)
    out = PackedSequences(rows.num_rows, packing)
    for row in range(rows.num_rows):
        rows.write(row, out, row)
    return rows, out


def test_three_documents_in_rows_of_four():
    _, out = rows_of(documents_of([3, 4, 2]), Packing(4, pad_id=0))
    assert out.tokens_BT.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert out.targets_BT.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert out.positions_BT.tolist() == [[0, 1, 2, 3]] * 2
    assert out.documents_BT is None


def test_masked_documents_restart_positions_and_have_no_target_in_another_document():
    _, out = rows_of(documents_of([3, 4, 2]), Packing(5, masked=True, pad_id=0))
    assert out.tokens_BT.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert out.targets_BT.tolist() == [[2, 3, IGNORE, 5, 6], [7, IGNORE, 9, IGNORE, IGNORE]]
    assert out.positions_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 1]]
    assert out.documents_BT.tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 2, 2]]


def test_first_fit_places_unsplit_documents_in_the_first_row_with_room():
    _, out = rows_of(documents_of([4, 5, 3]), Packing(6, kind="first_fit", masked=True, pad_id=0))
    # The second document has 4 targets, so the third with 2 fits next to it. The first gets its own
    # row.
    assert out.tokens_BT.tolist() == [[1, 2, 3, 0, 0, 0], [5, 6, 7, 8, 10, 11]]
    assert out.targets_BT.tolist() == [[2, 3, 4] + [IGNORE] * 3, [6, 7, 8, 9, 11, 12]]
    assert out.documents_BT.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]


def test_padded_row_has_one_document_and_learns_its_end_once():
    _, out = rows_of(documents_of([3, 1, 5]), Packing(4, kind="padded", masked=True, pad_id=5))
    assert out.tokens_BT.tolist() == [[1, 2, 5, 5], [5, 6, 7, 8]]
    assert out.targets_BT.tolist() == [[2, 3, IGNORE, IGNORE], [6, 7, 8, 9]]
    assert out.documents_BT is None, "causal attention needs no mask against later padding"


def test_masked_tokens_are_not_targets():
    _, out = rows_of(documents_of([4, 4], learned=lambda tokens: tokens % 2 == 0), Packing(7))
    assert out.targets_BT.tolist() == [[2, IGNORE, 4, IGNORE, 6, IGNORE, 8]]


@pytest.mark.parametrize(
    ("policy", "rows", "cut", "dropped"), [("split", 4, 0, 0), ("cut", 2, 1, 0), ("drop", 1, 0, 1)]
)
def test_long_document_is_split_cut_or_dropped(policy, rows, cut, dropped):
    packed, out = rows_of(documents_of([11, 4]), Packing(4, kind="padded", long_documents=policy))
    assert (packed.num_rows, packed.cut, packed.dropped) == (rows, cut, dropped)

    expected = {
        "split": [*range(2, 12), *range(13, 16)],
        "cut": [2, 3, 4, 5, 13, 14, 15],
        "drop": [13, 14, 15],
    }

    assert sorted(t for t in out.targets_BT.ravel().tolist() if t != IGNORE) == expected[policy]


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 17),
    st.sampled_from(KINDS),
    st.booleans(),
)
def test_every_token_is_the_target_of_exactly_one_row(lengths, seq_len, kind, masked):
    documents = documents_of(lengths)
    rows, out = rows_of(documents, Packing(seq_len, kind=kind, masked=masked))
    targets = [target for target in out.targets_BT.ravel().tolist() if target != IGNORE]

    # The tokens of all documents are different. The first token of a document follows another document,
    # which is masked or in another row. Only an unmasked concatenation predicts it, except for the very first.
    all_tokens: set[int] = set()
    first_tokens: set[int] = set()
    for document in documents:
        all_tokens |= set(document.tokens.tolist())
        first_tokens.add(int(document.tokens[0]))
    expected = all_tokens - (first_tokens if masked or kind != "concat" else {1})

    assert sorted(targets) == sorted(expected)
    assert rows.num_targets >= len(expected)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(1, 17),
    st.sampled_from(KINDS),
)
def test_target_is_the_next_token_of_the_same_document(lengths, seq_len, kind):
    documents = documents_of(lengths)
    document_of_token: dict[int, int] = {}
    for number, document in enumerate(documents):
        document_of_token |= dict.fromkeys(document.tokens.tolist(), number)
    _, out = rows_of(documents, Packing(seq_len, kind=kind, masked=True))
    for row, column in itertools.product(range(len(out.tokens_BT)), range(seq_len)):
        token = int(out.tokens_BT[row, column])
        target = int(out.targets_BT[row, column])
        if target != IGNORE:
            assert target == token + 1
            assert document_of_token[target] == document_of_token[token]
        if column == 0 or out.documents_BT is None:
            continue

        # Positions count within a document.
        is_same = out.documents_BT[row, column] == out.documents_BT[row, column - 1]
        expected_position = out.positions_BT[row, column - 1] + 1 if is_same else 0
        assert out.positions_BT[row, column] == expected_position
        if target != IGNORE and is_same and out.targets_BT[row, column - 1] != IGNORE:
            previous = int(out.tokens_BT[row, column - 1])
            assert document_of_token[token] == document_of_token[previous]


@pytest.mark.parametrize("kind", FITS)
@settings(max_examples=100)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_fitted_rows_never_exceed_the_capacity_and_waste_less_than_half(kind, lengths, capacity):
    rows = FITS[kind](np.array(lengths, dtype=np.int64), capacity)
    filled = np.bincount(rows, weights=lengths) if lengths else np.array([])
    assert (filled <= capacity).all()
    assert set(rows.tolist()) == set(range(len(filled))), "row numbers must have no gaps"
    # two rows that are at most half full would have been merged (Johnson 1973)
    assert int((filled <= capacity / 2).sum()) <= 1


def test_first_fit_uses_the_first_row_with_room():
    assert first_fit(np.array([5, 6, 4, 2]), 10).tolist() == [0, 1, 1, 0]


def test_best_fit_uses_the_fullest_row_with_room():
    # The rows of 7 and 6 have room for 3 and 4. A piece of 3 fills the row of 7, the piece of 1 the other.
    assert best_fit(np.array([6, 7, 3, 1]), 10).tolist() == [0, 1, 1, 0]
    assert best_fit(np.array([5, 6, 2, 3]), 10).tolist() == [0, 1, 0, 1]


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), max_size=80), st.integers(30, 60))
def test_best_fit_equals_its_definition(lengths, capacity):
    """Compare with a search through all rows for the one with the least sufficient room."""
    filled: list[int] = []
    pieces_of_row: list[list[int]] = []
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        candidates = [row for row in range(len(filled)) if filled[row] + lengths[piece] <= capacity]
        if not candidates:
            filled.append(0)
            pieces_of_row.append([])
            candidates = [len(filled) - 1]
        # max returns the first of several rows that are equally full
        fullest = max(candidates, key=lambda row: filled[row])
        filled[fullest] += lengths[piece]
        pieces_of_row[fullest].append(piece)
    expected = sorted(sorted(pieces) for pieces in pieces_of_row)

    rows = best_fit(np.array(lengths, dtype=np.int64), capacity)
    actual = [np.flatnonzero(rows == row).tolist() for row in range(len(filled))]

    assert actual == expected


@pytest.mark.parametrize(("num_documents", "limit"), [(8192, 0.001), (128, 0.03)])
def test_padding_of_log_normal_lengths_is_small(num_documents, limit):
    """Documents are packed in blocks: 8,192 documents for data in memory, 128 for streams."""
    lengths = np.random.default_rng(0).lognormal(np.log(300), 1.0, num_documents)
    lengths = lengths.clip(1, 2048).astype(np.int64)
    padding = {}
    for kind, fit in FITS.items():
        num_rows = int(fit(lengths, 2048).max()) + 1
        padding[kind] = 1 - lengths.sum() / (num_rows * 2048)

    assert 0 <= padding["best_fit"] <= padding["first_fit"] <= limit


@pytest.mark.parametrize("kind", FITS)
def test_a_piece_longer_than_a_row_is_an_error(kind):
    with pytest.raises(ValueError, match="a piece of 11 does not fit into a row of 10"):
        FITS[kind](np.array([11]), 10)


def test_buffer_stores_two_bytes_per_token_if_ids_fit():
    documents = documents_of([3, 2])
    assert MemoryTokenBuffer(documents, 2**16)._tokens.dtype == np.uint16
    assert MemoryTokenBuffer(documents, 2**16 + 1)._tokens.dtype == np.int32
    assert MemoryTokenBuffer(documents, 2**16).tokens(1, 4).dtype == np.int64
    assert (
        MemoryTokenBuffer(documents, 2**16).fingerprint
        != MemoryTokenBuffer(documents_of([2, 3]), 2**16).fingerprint
    )
