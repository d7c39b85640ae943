"""BOS, EOS and separators of documents: the files of the tokenizer decide, and options override them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import bpe_folder, sentencepiece_bytes, tiktoken_bytes, with_post_processor

from shardtrain.config.schema import Data
from shardtrain.data.documents.encode import open_encoder
from shardtrain.data.tokenizers.ends import described, ends_of
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer, open_tokenizer
from shardtrain.utils.errors import ConfigError

STYLES = [None, "gpt2", "llama3", "bert"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def folder(path: Path, style: str | None, **config: Any) -> Path:
    return with_post_processor(bpe_folder(path, **{**NAMED, **config}), style)


def encode(tokenizer: Tokenizer, row: dict[str, str], **options: Any) -> list[int]:
    (document,) = open_encoder(tokenizer, Data(**options)).encode([row])
    return document.tokens.tolist()


def test_text_begins_and_ends_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    compared = 0
    for style, switch in product(STYLES, (None, True, False)):
        config = {} if switch is None else {"add_bos_token": switch}
        path = folder(tmp_path / f"{style}-{switch}", style, **config)
        reference_ids = transformers.AutoTokenizer.from_pretrained(path)("the cat").input_ids
        tokenizer = open_tokenizer(str(path))
        ours = [*tokenizer.prefix_ids, *tokenizer.encode("the cat").tolist(), *tokenizer.suffix_ids]
        assert ours == reference_ids, (style, switch)
        compared += 1

    assert compared == 12


def test_ignored_add_bos_token_in_a_file_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_tokenizer(str(folder(tmp_path / "agree", "llama3", add_bos_token=True)))
    assert not caplog.records

    path = folder(tmp_path / "differ", "gpt2", add_bos_token=True)
    open_tokenizer(str(path))
    notice = "the post-processor takes precedence, as in transformers, unless you set data.add_bos = true"
    assert notice in caplog.text


def test_documents_begin_and_end_as_the_tokenizer_specifies(tmp_path: Path) -> None:
    for style, prefix in ((None, []), ("gpt2", []), ("llama3", [0]), ("bert", [0])):
        tokenizer = open_tokenizer(str(folder(tmp_path / str(style), style)))
        text = tokenizer.encode("the cat").tolist()
        assert encode(tokenizer, {"text": "the cat"}) == [*prefix, *text, 1]

        pair = {"prompt": "the", "completion": " cat"}
        halves = [*tokenizer.encode("the").tolist(), *tokenizer.encode(" cat").tolist()]
        assert encode(tokenizer, pair, format="prompt_completion") == [*prefix, *halves, 1]


def test_options_override_the_tokenizer_and_are_reported(tmp_path: Path) -> None:
    without = open_tokenizer(str(folder(tmp_path / "gpt2", "gpt2")))
    with_bos = open_tokenizer(str(folder(tmp_path / "llama3", "llama3")))
    text = without.encode("the cat").tolist()
    row = {"text": "the cat"}

    assert encode(without, row, add_bos=True) == [0, *text, 1]
    assert encode(with_bos, row, add_bos=True) == [0, *text, 1]
    assert encode(with_bos, row, add_bos=False) == [*text, 1]
    assert encode(with_bos, row, add_eos=False) == [0, *text]
    assert encode(without, row, add_bos=False, add_eos=False) == text

    description = described(with_bos, Data())
    assert description == "documents begin with '<s>' and end with '</s>' (from the tokenizer)"

    assert described(with_bos, Data(add_bos=False, add_eos=False)) == (
        "documents begin with nothing added and end with nothing added"
        " (data.add_bos=false, data.add_eos=false)"
    )


def test_separator_follows_each_document(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(folder(tmp_path, "llama3")))
    text = tokenizer.encode("the cat").tolist()
    blank_line = tokenizer.encode("\n\n").tolist()
    row = {"text": "the cat"}

    assert encode(tokenizer, row, separator="\n\n") == [0, *text, 1, *blank_line]
    assert encode(tokenizer, row, separator="\n\n", add_eos=False) == [0, *text, *blank_line]
    assert encode(tokenizer, row, separator="</s>", add_eos=False) == [0, *text, 1]


def test_end_token_that_the_tokenizer_lacks_is_rejected(tmp_path: Path) -> None:
    bare = open_tokenizer(str(bpe_folder(tmp_path, (), bos_token=None, eos_token=None)))
    assert ends_of(bare, Data(add_bos=False, add_eos=False)).prefix == ()
    for option, kind in (("add_bos", "begins"), ("add_eos", "ends")):
        with pytest.raises(
            ConfigError, match=f"data.{option}=true requires .*a token that {kind} a text"
        ):
            ends_of(bare, Data(**{option: True}))


def test_tokenizers_without_a_post_processor_follow_add_bos_token(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    for name, content in (("piece", sentencepiece_bytes()), ("tiktoken", tiktoken_bytes())):
        for switch in (None, True, False):
            path = tmp_path / f"{name}-{switch}"
            path.mkdir()
            (path / "tokenizer.model").write_bytes(content)
            if switch is not None:
                (path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": switch}))
            tokenizer = open_tokenizer(str(path))
            # Llama's reference code, which wrote such files, begins texts with BOS
            assert tokenizer.prefix_ids == (() if switch is False else (tokenizer.bos_id,))


def test_tokenizers_with_different_beginnings_have_different_fingerprints(tmp_path: Path) -> None:
    of_tokenizers = set()
    for style in STYLES:
        path = folder(tmp_path / str(style), style)
        of_tokenizers.add(open_tokenizer(str(path)).fingerprint)
    assert len(of_tokenizers) == len(STYLES)

    tokenizer = open_tokenizer("bytes")
    of_encoders = set()
    for data in (Data(), Data(add_bos=False), Data(add_eos=False), Data(separator=";")):
        of_encoders.add(open_encoder(tokenizer, data).fingerprint)
    assert len(of_encoders) == 4
