"""Encoders: the tokens of a row, which of them are learned, and the reason for a bad row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import bpe_folder

from shardtrain.config.schema import Data, DataSource
from shardtrain.data.documents.columns import Unusable, column
from shardtrain.data.documents.encode import open_encoder
from shardtrain.data.documents.encoded import Document
from shardtrain.data.sources import BadRow
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.utils.errors import ConfigError

BYTES = open_tokenizer("bytes")
BOS = 256
EOS = 257


def encode(row, source=None, tokenizer=BYTES, **options):
    (result,) = open_encoder(tokenizer, Data(**options), source).encode([row])
    return result


def ids(text):
    return list(text.encode())


def test_text_gets_bos_and_eos_and_is_learned_entirely():
    document = encode({"text": "aé", "id": 3})
    assert document.tokens.tolist() == [BOS, *ids("aé"), EOS]
    assert document.tokens.dtype == np.int32
    assert document.learned is None


def test_tokenizer_without_bos_and_eos_adds_none(tmp_path):
    tokenizer = open_tokenizer(str(bpe_folder(tmp_path, (), bos_token=None, eos_token=None)))
    document = encode({"text": "the cat"}, tokenizer=tokenizer)
    assert document.tokens.tolist() == tokenizer.encode("the cat").tolist()


def test_dotted_path_reads_nested_objects_unless_a_column_has_that_name():
    row = {"meta": {"body": {"text": "deep"}}, "a.b": "dotted", "a": {"b": "nested"}}
    assert encode(row, text_field="meta.body.text").tokens.tolist() == [BOS, *ids("deep"), EOS]
    assert encode(row, text_field="a.b").tokens.tolist() == [BOS, *ids("dotted"), EOS]


def test_format_and_column_of_a_source_take_precedence():
    row = {"text": "x", "body": "y", "prompt": "p", "completion": "c"}
    assert encode(row, DataSource(text_field="body")).tokens.tolist() == [BOS, *ids("y"), EOS]
    assert encode(row, DataSource(format="prompt_completion")).tokens.tolist() == [
        BOS,
        *ids("pc"),
        EOS,
    ]
    assert encode(row, DataSource(format="text"), format="prompt_completion").tokens.tolist() == [
        BOS,
        *ids("x"),
        EOS,
    ]


BAD_TEXTS = {
    "missing": ({"body": "x", "id": 1}, "has no column 'text'; its columns are body, id"),
    "no columns": ({}, "has no column 'text'; its columns are none"),
    "null": ({"text": None}, "column 'text' holds null, not a text"),
    "number": ({"text": 3.5}, "column 'text' holds a number, not a text"),
    "truth": ({"text": True}, "column 'text' holds a truth value, not a text"),
    "list": ({"text": ["x"]}, "column 'text' holds a list, not a text"),
    "object": ({"text": {"a": 1}}, "column 'text' holds an object, not a text"),
    "bytes": ({"text": b"x"}, "column 'text' holds a bytes, not a text"),
    "surrogate": (
        {"text": "a\ud800"},
        "column 'text' has a lone surrogate, which is not a character",
    ),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_rows_without_text_are_bad_with_a_reason(name):
    row, reason = BAD_TEXTS[name]
    assert encode(row) == BadRow(reason)


def test_empty_text_is_harmless():
    assert encode({"text": ""}) == BadRow("the text is empty", harmless=True)


def test_long_lists_of_columns_are_shortened():
    with pytest.raises(Unusable) as caught:
        column({f"column-{i}-{'x' * 1000}": i for i in range(1000)}, "text")
    assert "and 988 more" in caught.value.reason
    assert len(caught.value.reason) < 700


def test_completion_is_learned_and_its_prompt_is_not():
    document = encode({"prompt": "2+2=", "completion": "4"}, format="prompt_completion")
    assert document.tokens.tolist() == [BOS, *ids("2+2=4"), EOS]
    assert document.learned.tolist() == [False] * 5 + [True, True]

    fields = {"prompt_field": "q.text", "completion_field": "a"}
    nested = encode({"q": {"text": "2+2="}, "a": "4"}, format="prompt_completion", **fields)
    assert nested.tokens.tolist() == document.tokens.tolist()


def test_no_token_spans_prompt_and_completion(tmp_path):
    tokenizer = open_tokenizer(str(bpe_folder(tmp_path)))
    document = encode(
        {"prompt": "t", "completion": "he"}, tokenizer=tokenizer, format="prompt_completion"
    )
    learned = document.tokens[document.learned]

    assert tokenizer.decode(learned) == "he"
    assert learned[-1] == tokenizer.eos_id
    assert tokenizer.decode(document.tokens[~document.learned]) == "t"
    assert len(tokenizer.encode("the")) == 1  # the joined text would be a single token


@settings(max_examples=50, derandomize=True)
@given(prompt=st.text(max_size=20), completion=st.text(min_size=1, max_size=20))
def test_any_prompt_and_completion_round_trip(prompt, completion):
    document = encode({"prompt": prompt, "completion": completion}, format="prompt_completion")
    assert BYTES.decode(document.tokens[document.learned]) == completion
    assert BYTES.decode(document.tokens[~document.learned]) == prompt
    assert len(document.learned) == len(document.tokens)


@pytest.mark.parametrize(
    ("prompt", "completion", "add_eos", "learned"),
    [
        ("x", "", None, [EOS]),
        ("", "", None, [EOS]),
        ("x", "", False, None),
        ("x", " ", False, ids(" ")),
    ],
)
def test_end_token_of_an_empty_completion_is_learned(prompt, completion, add_eos, learned):
    result = encode(
        {"prompt": prompt, "completion": completion}, format="prompt_completion", add_eos=add_eos
    )
    if learned is None:
        assert result == BadRow(
            "the completion has no token to learn, and no end token", harmless=True
        )
    else:
        assert result.tokens.tolist() == [BOS, *ids(prompt), *learned]
        assert result.tokens[result.learned].tolist() == learned


BAD_PAIRS = {
    "prompt": ({"completion": "x"}, "has no column 'prompt'; its columns are completion", False),
    "completion": ({"prompt": "x"}, "has no column 'completion'; its columns are prompt", False),
    "null": ({"prompt": None, "completion": "x"}, "column 'prompt' holds null, not a text", False),
    "number": (
        {"prompt": "x", "completion": 4},
        "column 'completion' holds a number, not a text",
        False,
    ),
    "mixed": (
        {"prompt": [], "completion": "x"},
        "the prompt is a list and the completion is a text; both must be",
        False,
    ),
}


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_invalid_pairs_are_bad_rows_with_a_reason(name):
    row, reason, harmless = BAD_PAIRS[name]
    result = encode(row, format="prompt_completion")
    assert isinstance(result, BadRow)
    assert result.reason.startswith(reason)
    assert result.harmless is harmless


TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}OPEN{{ m.content + '.' }}CLOSE"
    "{% else %}{{ m.content + '.' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = TEMPLATE.replace("OPEN", "").replace("CLOSE", "")
MARKED = TEMPLATE.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}")
SHOT = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_only_the_completion_of_a_messages_prompt_is_learned(tmp_path, template):
    pytest.importorskip("jinja2")
    (tmp_path / "chat.jinja").write_text(template)
    row = {
        "prompt": [*SHOT, {"role": "user", "content": "2"}],
        "completion": [{"role": "assistant", "content": "two"}],
    }
    options = {"format": "prompt_completion", "chat_template": str(tmp_path / "chat.jinja")}
    document = encode(row, **options)

    assert BYTES.decode(document.tokens) == "<user>1.<assistant>one.<user>2.<assistant>two."
    assert BYTES.decode(document.tokens[document.learned]) == "two."

    # In a batch with text rows and a bad row, the row has the same tokens.
    results = open_encoder(BYTES, Data(**options)).encode(
        [{"prompt": "a", "completion": "b"}, row, {"prompt": "c"}]
    )

    assert [type(result) for result in results] == [Document, Document, BadRow]
    assert results[1].tokens.tolist() == document.tokens.tolist()


def test_messages_prompt_requires_a_chat_template():
    row = {"prompt": SHOT[:1], "completion": SHOT[1:]}
    with pytest.raises(ConfigError, match=r"data.chat_template is not set"):
        encode(row, format="prompt_completion")


@pytest.mark.parametrize("form", ["text", "prompt_completion"])
def test_batched_rows_encode_like_single_rows(form):
    rows = [{"text": f"row {i}", "prompt": "p" * i, "completion": "c" * (i % 3)} for i in range(7)]
    rows += [
        {},
        {"text": None, "prompt": None, "completion": "x"},
        {"text": "", "prompt": "", "completion": ""},
    ]
    encoder = open_encoder(BYTES, Data(format=form))
    for row, document in zip(rows, encoder.encode(rows), strict=True):
        (alone,) = encoder.encode([row])
        if isinstance(alone, BadRow):
            assert document == alone
        else:
            assert document.tokens.tolist() == alone.tokens.tolist()

    assert encoder.encode([]) == []


def test_fingerprint_covers_every_option_that_changes_documents(tmp_path):
    pytest.importorskip("jinja2")
    for name, text in (("a", PLAIN), ("b", MARKED)):
        (tmp_path / name).write_text(text)
    chat = {"format": "chat"}
    variants = [
        Data(),
        Data(text_field="body"),
        Data(format="prompt_completion"),
        Data(format="prompt_completion", prompt_field="q"),
        Data(**chat, chat_template=str(tmp_path / "a")),
        Data(**chat, chat_template=str(tmp_path / "b")),
        Data(**chat, chat_template=str(tmp_path / "a"), messages_field="talk"),
    ]
    fingerprints = [open_encoder(BYTES, data).fingerprint for data in variants]
    other_tokenizer = open_tokenizer(str(bpe_folder(tmp_path / "t")))
    fingerprints.append(open_encoder(other_tokenizer, Data()).fingerprint)

    assert len(set(fingerprints)) == len(fingerprints)
    assert all(len(fingerprint) == 64 for fingerprint in fingerprints)
    # Packing does not change documents.
    assert open_encoder(BYTES, Data(packing="padded")).fingerprint == fingerprints[0]
