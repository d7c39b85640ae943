"""Tokenizers round-trip text, return ids in range, and report broken files by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data.tokenizers.open_tokenizer import ByteTokenizer, open_tokenizer
from shardtrain.utils.errors import ConfigError

TEXT = "the cat sat on the mat"


@pytest.fixture
def folder(tmp_path):
    """Folder with a small word-level tokenizer with the usual names of BOS and EOS."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {token: i for i, token in enumerate(["[UNK]", *sorted(set(TEXT.split()))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@settings(max_examples=50, derandomize=True)
@given(st.text())
def test_bytes_round_trip_any_text(text):
    tokenizer = open_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos_id, *ids.tolist(), tokenizer.eos_id]) == text


def test_bytes_has_258_ids_with_bos_and_eos():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.decode([195]) == "�"
    assert tokenizer.encode("\ud800").tolist() == [ord("?")]


@pytest.mark.parametrize("bad", [-1, 258])
def test_bytes_rejects_ids_out_of_range(bad):
    with pytest.raises(ValueError, match="outside"):
        ByteTokenizer().decode([97, bad])


def test_folder_and_its_file_open_the_same_tokenizer(folder):
    by_folder = open_tokenizer(str(folder))
    by_file = open_tokenizer(str(folder / "tokenizer.json"))
    assert by_folder.fingerprint == by_file.fingerprint != ByteTokenizer.fingerprint
    assert by_folder.vocab_size == 9
    assert (by_folder.bos_id, by_folder.eos_id) == (6, 7)


def test_truncation_and_padding_saved_in_the_file_are_ignored(folder):
    tokenizer = open_tokenizer(str(folder))
    ids = tokenizer.encode(TEXT)
    assert len(ids) == 6
    assert tokenizer.decode(ids) == TEXT


def test_tokenizer_config_decides_bos_and_eos(folder):
    before = open_tokenizer(str(folder)).fingerprint
    config = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(str(folder))

    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 8)
    assert tokenizer.fingerprint != before


def test_end_token_without_an_id_is_rejected(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<absent>"}))
    with pytest.raises(ConfigError, match=r"model.hf_assets_path names the eos_token '<absent>'"):
        open_tokenizer(str(folder))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_tokenizer_config_is_named(folder, content):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config.json"):
        open_tokenizer(str(folder))


def test_broken_or_missing_file_is_reported_with_option_and_path(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r'model.hf_assets_path=".*" contains no tokenizer.json or tokenizer.model; .*"bytes"',
    ):
        open_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"model.tokenizer_path=.*nowhere"):
        open_tokenizer(str(tmp_path / "nowhere"), option="model.tokenizer_path")

    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"is neither a tokenizer\.json nor"):
        open_tokenizer(str(tmp_path / "tokenizer.model"))

    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        open_tokenizer(str(tmp_path))
