"""Laws of encoders: which tokens a row gives, which of them are learned, and why a row gives none."""

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
BOS, EOS = 256, 257


def encode(row, source=None, tokenizer=BYTES, **options):
    (found,) = open_encoder(tokenizer, Data(**options), source).encode([row])
    return found


def ids(text):
    return list(text.encode())


def test_a_text_is_between_bos_and_eos_and_all_of_it_is_learned():
    document = encode({"text": "aé", "id": 3})
    assert document.tokens.tolist() == [BOS, *ids("aé"), EOS]
    assert document.tokens.dtype == np.int32 and document.learned is None


def test_a_tokenizer_without_ends_adds_none(tmp_path):
    tokenizer = open_tokenizer(str(bpe_folder(tmp_path, (), bos_token=None, eos_token=None)))
    document = encode({"text": "the cat"}, tokenizer=tokenizer)
    assert document.tokens.tolist() == tokenizer.encode("the cat").tolist()


def test_a_dotted_path_reaches_into_objects_but_a_column_of_that_name_comes_first():
    row = {"meta": {"body": {"text": "deep"}}, "a.b": "dotted", "a": {"b": "nested"}}
    assert encode(row, text_field="meta.body.text").tokens.tolist() == [BOS, *ids("deep"), EOS]
    assert encode(row, text_field="a.b").tokens.tolist() == [BOS, *ids("dotted"), EOS]


def test_a_source_s_own_format_and_column_count_first():
    row = {"text": "x", "body": "y", "prompt": "p", "completion": "c"}
    assert encode(row, DataSource(text_field="body")).tokens.tolist() == [BOS, *ids("y"), EOS]
    assert encode(row, DataSource(format="prompt_completion")).tokens.tolist() == [BOS, *ids("pc"), EOS]
    assert encode(row, DataSource(format="text"), format="prompt_completion").tokens.tolist() == [BOS, *ids("x"), EOS]


BAD_TEXTS = {
    "missing": ({"body": "x", "id": 1}, "has no column 'text'; its columns are body, id"),
    "no columns": ({}, "has no column 'text'; its columns are none"),
    "null": ({"text": None}, "column 'text' holds null, not a text"),
    "number": ({"text": 3.5}, "column 'text' holds a number, not a text"),
    "truth": ({"text": True}, "column 'text' holds a truth value, not a text"),
    "list": ({"text": ["x"]}, "column 'text' holds a list, not a text"),
    "object": ({"text": {"a": 1}}, "column 'text' holds an object, not a text"),
    "bytes": ({"text": b"x"}, "column 'text' holds a bytes, not a text"),
    "surrogate": ({"text": "a\ud800"}, "column 'text' has a lone surrogate, which is not a character"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_rows_without_a_text_are_bad_with_a_reason(name):
    row, reason = BAD_TEXTS[name]
    assert encode(row) == BadRow(reason)


def test_an_empty_text_is_harmless():
    assert encode({"text": ""}) == BadRow("the text is empty", harmless=True)


def test_names_of_columns_are_reported_within_bounds():
    with pytest.raises(Unusable) as caught:
        column({f"column-{i}-{'x' * 1000}": i for i in range(1000)}, "text")
    assert "and 988 more" in caught.value.reason and len(caught.value.reason) < 700


def test_a_completion_is_learned_and_its_prompt_is_not():
    document = encode({"prompt": "2+2=", "completion": "4"}, format="prompt_completion")
    assert document.tokens.tolist() == [BOS, *ids("2+2=4"), EOS]
    assert document.learned.tolist() == [False] * 5 + [True, True]
    own = {"prompt_field": "q.text", "completion_field": "a"}
    found = encode({"q": {"text": "2+2="}, "a": "4"}, format="prompt_completion", **own)
    assert found.tokens.tolist() == document.tokens.tolist()


def test_the_boundary_is_exact_where_a_token_could_span_it(tmp_path):
    tokenizer = open_tokenizer(str(bpe_folder(tmp_path)))
    document = encode({"prompt": "t", "completion": "he"}, tokenizer=tokenizer, format="prompt_completion")
    learned = document.tokens[document.learned]
    assert tokenizer.decode(learned) == "he" and learned[-1] == tokenizer.eos_id
    assert tokenizer.decode(document.tokens[~document.learned]) == "t"
    assert len(tokenizer.encode("the")) == 1  # in one piece it would be a single token


@settings(max_examples=50, derandomize=True)
@given(prompt=st.text(max_size=20), completion=st.text(min_size=1, max_size=20))
def test_any_prompt_and_completion_come_back(prompt, completion):
    document = encode({"prompt": prompt, "completion": completion}, format="prompt_completion")
    assert BYTES.decode(document.tokens[document.learned]) == completion
    assert BYTES.decode(document.tokens[~document.learned]) == prompt
    assert len(document.learned) == len(document.tokens)


@pytest.mark.parametrize(
    ("prompt", "completion", "add_eos", "learned"),
    [("x", "", None, [EOS]), ("", "", None, [EOS]), ("x", "", False, None), ("x", " ", False, ids(" "))],
)
def test_the_end_of_an_empty_completion_is_learned(prompt, completion, add_eos, learned):
    found = encode({"prompt": prompt, "completion": completion}, format="prompt_completion", add_eos=add_eos)
    if learned is None:
        assert found == BadRow("the completion has no token to learn, and no end token", harmless=True)
    else:
        assert found.tokens.tolist() == [BOS, *ids(prompt), *learned]
        assert found.tokens[found.learned].tolist() == learned


BAD_PAIRS = {
    "prompt": ({"completion": "x"}, "has no column 'prompt'; its columns are completion", False),
    "completion": ({"prompt": "x"}, "has no column 'completion'; its columns are prompt", False),
    "null": ({"prompt": None, "completion": "x"}, "column 'prompt' holds null, not a text", False),
    "number": ({"prompt": "x", "completion": 4}, "column 'completion' holds a number, not a text", False),
    "mixed": ({"prompt": [], "completion": "x"}, "the prompt is a list and the completion a text; both must be", False),
}


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_bad_pairs_are_bad_rows_with_a_reason(name):
    row, reason, harmless = BAD_PAIRS[name]
    found = encode(row, format="prompt_completion")
    assert isinstance(found, BadRow) and found.reason.startswith(reason) and found.harmless is harmless


TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'assistant' %}OPEN{{ m.content + '.' }}CLOSE"
    "{% else %}{{ m.content + '.' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = TEMPLATE.replace("OPEN", "").replace("CLOSE", "")
MARKED = TEMPLATE.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}")
SHOT = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_of_a_prompt_of_messages_the_completion_alone_is_learned(tmp_path, template):
    pytest.importorskip("jinja2")
    (tmp_path / "chat.jinja").write_text(template)
    row = {"prompt": [*SHOT, {"role": "user", "content": "2"}], "completion": [{"role": "assistant", "content": "two"}]}
    options = {"format": "prompt_completion", "chat_template": str(tmp_path / "chat.jinja")}
    document = encode(row, **options)
    assert BYTES.decode(document.tokens) == "<user>1.<assistant>one.<user>2.<assistant>two."
    assert BYTES.decode(document.tokens[document.learned]) == "two."
    both = open_encoder(BYTES, Data(**options)).encode([{"prompt": "a", "completion": "b"}, row, {"prompt": "c"}])
    assert [type(one) for one in both] == [Document, Document, BadRow]
    assert both[1].tokens.tolist() == document.tokens.tolist()


def test_a_prompt_of_messages_needs_a_chat_template():
    row = {"prompt": SHOT[:1], "completion": SHOT[1:]}
    with pytest.raises(ConfigError, match=r"data.chat_template is not set"):
        encode(row, format="prompt_completion")


@pytest.mark.parametrize("form", ["text", "prompt_completion"])
def test_many_rows_at_once_are_each_as_alone(form):
    rows = [{"text": f"row {i}", "prompt": "p" * i, "completion": "c" * (i % 3)} for i in range(7)]
    rows += [{}, {"text": None, "prompt": None, "completion": "x"}, {"text": "", "prompt": "", "completion": ""}]
    encoder = open_encoder(BYTES, Data(format=form))
    for row, found in zip(rows, encoder.encode(rows), strict=True):
        (alone,) = encoder.encode([row])
        if isinstance(alone, BadRow):
            assert found == alone
        else:
            assert found.tokens.tolist() == alone.tokens.tolist()
    assert encoder.encode([]) == []


def test_what_decides_the_documents_decides_the_fingerprint(tmp_path):
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
    prints = [open_encoder(BYTES, data).fingerprint for data in variants]
    prints.append(open_encoder(open_tokenizer(str(bpe_folder(tmp_path / "t"))), Data()).fingerprint)
    assert len(set(prints)) == len(prints) and all(len(one) == 64 for one in prints)
    assert open_encoder(BYTES, Data(packing="padded")).fingerprint == prints[0]
