"""Laws of packing: documents between bos and eos, windows that share one token, no target lost or repeated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data.pack import Packed, concatenate
from shardtrain.data.tokenizer import ByteTokenizer
from shardtrain.errors import DataError

BOS, EOS = 256, 257


class WideTokenizer(ByteTokenizer):
    vocab_size = 100_000
    bos_id = None


def test_three_documents_pack_into_these_rows():
    tokens = concatenate(["ab", "", "cde"], ByteTokenizer())
    assert tokens.tolist() == [BOS, 97, 98, EOS, BOS, EOS, BOS, 99, 100, 101, EOS]
    packed = Packed(tokens, seq_len=3)
    assert packed.num_samples == 3  # 10 targets: three rows of 3, and one target left out
    rows = packed.rows(np.arange(3))
    assert rows[:, :-1].tolist() == [[BOS, 97, 98], [EOS, BOS, EOS], [BOS, 99, 100]]
    assert rows[:, 1:].tolist() == [[97, 98, EOS], [BOS, EOS, BOS], [99, 100, 101]]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(length=st.integers(2, 200), seq_len=st.integers(1, 40))
def test_every_token_but_the_first_is_the_target_of_one_row(length, seq_len):
    if length - 1 < seq_len:
        with pytest.raises(DataError):
            Packed(np.arange(length), seq_len)
        return
    packed = Packed(np.arange(length), seq_len)
    rows = packed.rows(np.arange(packed.num_samples))
    targets = rows[:, 1:].ravel()
    assert targets.tolist() == list(range(1, packed.num_samples * seq_len + 1))
    assert length - 1 - len(targets) < seq_len
    assert (rows[:, :-1] + 1 == rows[:, 1:]).all()


def test_rows_are_int64_whatever_the_tokens_are():
    assert Packed(np.array([1, 65535, 3], np.uint16), 2).rows(np.array([0])).tolist() == [[1, 65535, 3]]
    assert Packed(np.array([1, 65535, 3], np.uint16), 2).rows(np.array([0])).dtype == np.int64


@pytest.mark.parametrize("sample", [-1, 3])
def test_a_sample_outside_the_data_is_refused(sample):
    with pytest.raises(IndexError):
        Packed(np.arange(10), 3).rows(np.array([sample]))


def test_data_shorter_than_one_row_names_the_option_and_what_would_fit():
    with pytest.raises(DataError, match=r"training.seq_len=8 .* 7 target tokens; use 7 or less"):
        Packed(np.arange(8), 8)
    with pytest.raises(DataError, match="use more data"):
        Packed(np.array([], np.int64), 8)


def test_small_vocabularies_take_two_bytes_and_missing_ends_add_nothing():
    assert concatenate(["a"], ByteTokenizer()).dtype == np.uint16
    wide = concatenate(["a", "b"], WideTokenizer())
    assert wide.dtype == np.int32
    assert wide.tolist() == [97, EOS, 98, EOS]
    assert concatenate([], ByteTokenizer()).tolist() == []
