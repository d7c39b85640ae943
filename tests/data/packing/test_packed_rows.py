"""Rows of documents: which tokens they hold, and that none is lost or learned twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data.documents.encoded import Document
from shardtrain.data.packing.fitted import first_fit, pack
from shardtrain.data.packing.packed_rows import PackedSequences, Packing
from shardtrain.data.packing.token_buffer import MemoryTokenBuffer
from shardtrain.ops.cross_entropy import IGNORE

KINDS = ("concat", "first_fit", "padded")


def documents_of(lengths, learned=None):
    """Documents whose tokens are all different, so that a token says where it comes from."""
    result, token = [], 1
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


def test_three_documents_in_windows_of_four_are_these_arrays():
    _, out = rows_of(documents_of([3, 4, 2]), Packing(4, pad_id=0))
    assert out.tokens_BT.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert out.targets_BT.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert out.positions_BT.tolist() == [[0, 1, 2, 3]] * 2
    assert out.documents_BT is None


def test_masked_documents_have_positions_of_their_own_and_no_target_in_another():
    _, out = rows_of(documents_of([3, 4, 2]), Packing(5, masked=True, pad_id=0))
    assert out.tokens_BT.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]
    assert out.targets_BT.tolist() == [[2, 3, IGNORE, 5, 6], [7, IGNORE, 9, IGNORE, IGNORE]]
    assert out.positions_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 1]]
    assert out.documents_BT.tolist() == [[0, 0, 0, 1, 1], [0, 0, 1, 2, 2]]


def test_first_fit_puts_whole_documents_into_the_first_row_with_room():
    _, out = rows_of(documents_of([4, 5, 3]), Packing(6, kind="first_fit", masked=True, pad_id=0))
    # 4 targets of the second document leave room for the 2 of the third; the first has a row of its own
    assert out.tokens_BT.tolist() == [[1, 2, 3, 0, 0, 0], [5, 6, 7, 8, 10, 11]]
    assert out.targets_BT.tolist() == [[2, 3, 4] + [IGNORE] * 3, [6, 7, 8, 9, 11, 12]]
    assert out.documents_BT.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]


def test_a_padded_row_is_one_document_and_its_end_is_learned_once():
    _, out = rows_of(documents_of([3, 1, 5]), Packing(4, kind="padded", masked=True, pad_id=5))
    assert out.tokens_BT.tolist() == [[1, 2, 5, 5], [5, 6, 7, 8]]
    assert out.targets_BT.tolist() == [[2, 3, IGNORE, IGNORE], [6, 7, 8, 9]]
    assert out.documents_BT is None, "attention is causal, so what follows a document cannot reach it"


def test_what_is_not_to_be_learned_is_not_a_target():
    _, out = rows_of(documents_of([4, 4], learned=lambda tokens: tokens % 2 == 0), Packing(7))
    assert out.targets_BT.tolist() == [[2, IGNORE, 4, IGNORE, 6, IGNORE, 8]]


@pytest.mark.parametrize(
    ("policy", "rows", "cut", "dropped"), [("split", 4, 0, 0), ("cut", 2, 1, 0), ("drop", 1, 0, 1)]
)
def test_a_document_longer_than_a_row_is_split_cut_or_dropped(policy, rows, cut, dropped):
    packed, out = rows_of(documents_of([11, 4]), Packing(4, kind="padded", long_documents=policy))
    assert (packed.num_rows, packed.cut, packed.dropped) == (rows, cut, dropped)
    expected = {"split": [*range(2, 12), *range(13, 16)], "cut": [2, 3, 4, 5, 13, 14, 15], "drop": [13, 14, 15]}
    assert sorted(t for t in out.targets_BT.ravel().tolist() if t != IGNORE) == expected[policy]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 17), st.sampled_from(KINDS), st.booleans())
def test_every_token_is_the_target_of_exactly_one_row(lengths, seq_len, kind, masked):
    documents = documents_of(lengths)
    rows, out = rows_of(documents, Packing(seq_len, kind=kind, masked=masked))
    first_tokens = {int(document.tokens[0]) for document in documents}
    every = {int(token) for document in documents for token in document.tokens}
    # the first token of a document follows another document, which is masked or not in the row at all
    expected = every - (first_tokens if masked or kind != "concat" else {1})
    assert sorted(t for t in out.targets_BT.ravel().tolist() if t != IGNORE) == sorted(expected)
    assert rows.num_targets >= len(expected)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 17), st.sampled_from(KINDS))
def test_a_target_is_the_next_token_of_the_same_document(lengths, seq_len, kind):
    documents = documents_of(lengths)
    owner = {int(token): number for number, document in enumerate(documents) for token in document.tokens}
    _, out = rows_of(documents, Packing(seq_len, kind=kind, masked=True))
    for row in range(len(out.tokens_BT)):
        for column in range(seq_len):
            token, target = int(out.tokens_BT[row, column]), int(out.targets_BT[row, column])
            if target != IGNORE:
                assert target == token + 1
                assert owner[target] == owner[token]
            if column and out.documents_BT is not None:
                same = out.documents_BT[row, column] == out.documents_BT[row, column - 1]
                assert out.positions_BT[row, column] == (out.positions_BT[row, column - 1] + 1 if same else 0)
                if target != IGNORE and same and out.targets_BT[row, column - 1] != IGNORE:
                    assert owner[token] == owner[int(out.tokens_BT[row, column - 1])]


@settings(max_examples=100)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_first_fit_fills_no_row_beyond_its_capacity_and_wastes_less_than_half(lengths, capacity):
    rows = first_fit(np.array(lengths, dtype=np.int64), capacity)
    filled = np.bincount(rows, weights=lengths) if lengths else np.array([])
    assert (filled <= capacity).all()
    assert set(rows.tolist()) == set(range(len(filled))), "row numbers have no gap"
    # two rows that are both at most half full would have been one (Johnson 1973)
    assert int((filled <= capacity / 2).sum()) <= 1


def test_first_fit_takes_the_first_row_with_room():
    assert first_fit(np.array([5, 6, 4, 2]), 10).tolist() == [0, 1, 1, 0]
    with pytest.raises(ValueError, match="a piece of 11 does not fit into a row of 10"):
        first_fit(np.array([11]), 10)


def test_a_line_keeps_two_bytes_a_token_where_ids_allow():
    documents = documents_of([3, 2])
    assert MemoryTokenBuffer(documents, 2**16)._tokens.dtype == np.uint16
    assert MemoryTokenBuffer(documents, 2**16 + 1)._tokens.dtype == np.int32
    assert MemoryTokenBuffer(documents, 2**16).tokens(1, 4).dtype == np.int64
    assert MemoryTokenBuffer(documents, 2**16).fingerprint != MemoryTokenBuffer(documents_of([2, 3]), 2**16).fingerprint
