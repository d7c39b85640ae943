"""Prompt and completion are tokenized as the joined text, for each kind of tokenizer and row format."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import tokenizers
import tokenizers_of_kinds
from tiny import tiny_config
from tokenizers import normalizers

from shardtrain.config.schema import Data
from shardtrain.data.documents.continuation import encode_pairs
from shardtrain.data.documents.encode import (
    HAS_BEGINNING,
    HAS_END,
    SHARED_TOKEN,
    PromptEncoder,
    TextEncoder,
)
from shardtrain.data.documents.encoded import Document
from shardtrain.data.tokenizers.open_tokenizer import ByteTokenizer, open_tokenizer
from shardtrain.tasks import open_task

PAIRS = {
    "no space": ("Q: what?\nA:", "two words"),
    "space in the completion": ("Q: what?\nA:", " two words"),
    "space in the prompt": ("Q: what?\nA: ", "two words"),
    "new line": ("def main\n", "return x"),
    "indented": ("def main\n", " return x"),
    "within one word": ("hel", "lo world"),
    "two spaces": ("A: ", " two"),
    "empty prompt": ("", "two words"),
    "non-ASCII letters": ("Antwort: grö", "ßer als 7!"),
}


@pytest.mark.parametrize("kind", tokenizers_of_kinds.KINDS)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_tokens_decode_to_the_prompt_and_the_completion(kind: str, pair: tuple[str, str]) -> None:
    tokenizer = tokenizers_of_kinds.open_kind(kind)
    prompt, completion = pair
    ((prompt_ids, completion_ids, shared),) = encode_pairs(tokenizer, [pair])
    joined = tokenizer.encode(prompt + completion)
    ids = np.concatenate((prompt_ids, completion_ids))

    assert prompt_ids.tolist() == tokenizer.encode(prompt).tolist(), (
        "the prompt must have the tokens it has in generation"
    )
    assert tokenizer.decode(ids) == tokenizer.decode(joined)
    assert shared is (joined[: len(prompt_ids)].tolist() != prompt_ids.tolist())

    # A token across the boundary is split there. Only pairs without such a token encode like the
    # joined text.
    if not shared:
        assert ids.tolist() == joined.tolist()


SEAMS = {
    # normalizer or added token: a pair whose joined text has other characters or tokens than its
    # halves
    "a normalizer that composes characters": (True, ("gro", "\u0308\u00dfer")),
    "a token for the joined text only": (False, ("hello", "world")),
}


@pytest.mark.parametrize(
    "kind", [kind for kind in tokenizers_of_kinds.KINDS if kind != "sentencepiece"]
)
@pytest.mark.parametrize(("has_nfc", "pair"), SEAMS.values(), ids=SEAMS.keys())
def test_no_space_is_inserted_if_joining_changes_characters(kind, has_nfc, pair, tmp_path) -> None:
    file = tokenizers_of_kinds.write(kind, tmp_path) / "tokenizer.json"
    changed = tokenizers.Tokenizer.from_file(str(file))
    if has_nfc:
        others = [changed.normalizer] if changed.normalizer else []
        changed.normalizer = normalizers.Sequence([normalizers.NFC(), *others])
    else:
        changed.add_tokens([tokenizers.AddedToken("hello", single_word=True, normalized=False)])
    changed.save(str(file))
    tokenizer = open_tokenizer(str(tmp_path))
    ((prompt_ids, completion_ids, shared),) = encode_pairs(tokenizer, [pair])
    text = tokenizer.decode(np.concatenate((prompt_ids, completion_ids)), keep_special=True)

    assert shared
    assert text.strip().replace("<unk>", "\u0308") == "".join(pair)


def test_word_split_by_the_end_of_the_prompt_is_noted() -> None:
    tokenizer = tokenizers_of_kinds.open_kind("metaspace_first")
    encoder = PromptEncoder(tokenizer, Data(format="prompt_completion"))
    rows = [{"prompt": "hel", "completion": "lo world"}, {"prompt": "A:", "completion": " two"}]
    split, plain = encoder.encode(rows)

    assert isinstance(split, Document)
    assert isinstance(plain, Document)
    assert SHARED_TOKEN in split.notes
    assert plain.notes == ()
    assert split.learned is not None
    assert tokenizer.decode(split.tokens[split.learned]) == "lo world"


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "preference": ("preference", {"prompt": "Q:\nA:", "chosen": "two words", "rejected": "x"}),
    "preference without a prompt": (
        "preference",
        {"chosen": "Q:\nA: two words", "rejected": "Q:\nA: x"},
    ),
    "orpo": ("orpo", {"prompt": "Q:\nA:", "chosen": "two words", "rejected": "x"}),
}


@pytest.mark.parametrize("kind", tokenizers_of_kinds.KINDS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_both_answers_of_a_preference_pair_continue_the_prompt(
    kind: str, form: tuple[str, dict[str, Any]], tmp_path
) -> None:
    name, row = form
    folder = tokenizers_of_kinds.write(kind, tmp_path / kind)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    base = tiny_config()
    training = dataclasses.replace(
        base.training, dataset="jsonl", dataset_path=str(path), seq_len=64
    )
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, hf_assets_path=str(folder)),
        task=dataclasses.replace(base.task, name=name),
        training=training,
    )
    task = open_task(config)
    (pair,) = task.read_rows("train")  # type: ignore[attr-defined]
    tokenizer = task.tokenizer  # type: ignore[attr-defined]

    # Each answer has the tokens of the prompt and the answer as one text.
    prompt = row.get("prompt", "")
    for side, column in ((pair.chosen, "chosen"), (pair.rejected, "rejected")):
        joined = tokenizer.encode(prompt + row[column])
        assert tokenizer.decode(side.all_tokens) == tokenizer.decode(joined)


ENDS = {
    # name: (text of a row, logged notes). BOS and EOS occur once each, even if the text spells
    # them.
    "nothing spelled": ("two words", ()),
    "the end": ("two words</s>", (HAS_END,)),
    "the beginning": ("<s>two words", (HAS_BEGINNING,)),
    "both": ("<s>two words</s>", (HAS_BEGINNING, HAS_END)),
}


@pytest.mark.parametrize(("text", "notes"), ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("kind", ["byte_level", "metaspace_first", "prepend_normalizer"])
@pytest.mark.parametrize("form", ["text", "prompt_completion"])
def test_bos_and_eos_written_in_a_row_are_not_added_again(
    kind: str, form: str, text: str, notes: tuple[str, ...]
) -> None:
    tokenizer = tokenizers_of_kinds.open_kind(kind, with_bos=True)
    if form == "text":
        (document,) = TextEncoder(tokenizer, "text", Data()).encode([{"text": text}])
    else:
        cut = text.index(" ")
        row = {"prompt": text[:cut], "completion": text[cut:]}
        (document,) = PromptEncoder(tokenizer, Data()).encode([row])

    assert isinstance(document, Document)

    bos = tokenizer.bos_id
    eos = tokenizer.eos_id
    tokens = document.tokens.tolist()

    assert (tokens[0], tokens[-1]) == (bos, eos)
    assert tokens.count(bos) == tokens.count(eos) == 1
    assert tuple(note for note in document.notes if note != SHARED_TOKEN) == notes

    # The end of the completion is learned.
    if form == "prompt_completion":
        assert document.learned is not None
        assert document.learned[-1]


def test_fingerprint_is_unchanged_for_tokenizers_without_bos_and_eos_in_text() -> None:
    """A run of an earlier version must be able to resume, because its tokens are unchanged."""
    by_bytes = TextEncoder(ByteTokenizer(), "text", Data()).fingerprint
    assert by_bytes == "07f07c09622ce8c5a2f5978b9738fae4871bfd677d6a80594009a86141c3836c"
