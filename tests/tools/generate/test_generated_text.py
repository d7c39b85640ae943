"""Generated text ends at the requested stop, and its streamed pieces join to the full text."""

from __future__ import annotations

import pytest
from tiny_tokenizers import bpe_folder, sentencepiece_bytes, tiktoken_bytes

from shardtrain.data.tokenizers.open_tokenizer import ByteTokenizer, open_tokenizer
from shardtrain.tools.generate.generated_text import Printer, Text

SENTENCES = [
    "the cat sat on the mat, naïve café 🦜 парадокс 東京.",
    "  def main():\n    return 42\n\n",
    "日本",
]


@pytest.fixture(scope="module", params=["bytes", "bpe", "sentencepiece", "tiktoken"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "bpe":
        pytest.importorskip("tokenizers")
        return open_tokenizer(str(bpe_folder(folder)))
    pytest.importorskip(request.param)
    content = sentencepiece_bytes() if request.param == "sentencepiece" else tiktoken_bytes()
    (folder / "tokenizer.model").write_bytes(content)
    return open_tokenizer(str(folder))


def printed(text, new):
    """Return the text streamed until the row ends, and its tokens."""
    printer = Printer(text)
    pieces = []
    for count in range(1, len(new) + 1):
        pieces.append(printer.more(new[:count]))
        if text.has_ended(new[:count]):
            break
    return "".join(pieces) + printer.rest(new[:count]), new[:count]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_text_split_anywhere_continues_at_the_split(tokenizer, sentence):
    ids = tokenizer.encode(sentence).tolist()
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut])
        if "\ufffd" in before or tokenizer.decode(ids) != sentence:
            continue
        text = Text(tokenizer, ids[:cut], frozenset())
        assert before + text.of(ids[cut:]) == sentence


@pytest.mark.parametrize("sentence", SENTENCES)
def test_pieces_join_to_the_text(tokenizer, sentence):
    ids = tokenizer.encode(sentence).tolist()
    text = Text(tokenizer, tokenizer.encode("Hello").tolist(), frozenset())
    streamed, new = printed(text, ids)
    assert new == ids
    assert streamed == text.of(ids)


@pytest.mark.parametrize("stop", ["mat", "東京", ", na", "."])
def test_a_stop_text_ends_the_row_and_is_never_printed(tokenizer, stop):
    ids = tokenizer.encode(SENTENCES[0]).tolist()
    text = Text(tokenizer, tokenizer.encode("Hello ").tolist(), frozenset(), ["zebra", stop])
    streamed, new = printed(text, ids)

    assert stop not in streamed
    assert text.of(new) == streamed
    assert streamed.strip() == SENTENCES[0].partition(stop)[0].strip()


def test_the_token_that_ends_a_row_has_no_text():
    text = Text(ByteTokenizer(), [256], frozenset({257, 10}))
    assert text.of([104, 105, 257]) == "hi"
    assert text.of([104, 105, 10]) == "hi"
    assert text.of([104, 105]) == "hi"


def test_half_a_character_is_not_printed():
    printer = Printer(Text(ByteTokenizer(), [256], frozenset()))
    assert [printer.more(list("é!".encode())[:n]) for n in (1, 2, 3)] == ["", "é", "!"]
