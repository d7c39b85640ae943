"""SentencePiece and tiktoken models: detected by content, texts round-trip, spans cover texts, bad files are named."""

from __future__ import annotations

import base64
import json
import multiprocessing
import pickle

import numpy as np
import patience
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import bpe_folder, sentencepiece_bytes, tiktoken_bytes

from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.utils.errors import ConfigError

SAMPLES = [
    "the cat",
    " the  cat\n\nHello",
    "naïve café 🦜",
    "",
    "\t\n ",
    "東京 a\u0301",
    "<|eot_id|> and </s>",
    "a\0b",
]
KINDS = ["bpe", "unigram", "tiktoken", "json", "bytes"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    path_of_kind = {"bytes": "bytes", "json": str(bpe_folder(folder / "json"))}
    for name, content in (
        ("bpe", sentencepiece_bytes("bpe")),
        ("unigram", sentencepiece_bytes("unigram")),
        ("tiktoken", tiktoken_bytes()),
    ):
        (folder / name).mkdir()
        (folder / name / "tokenizer.model").write_bytes(content)
        path_of_kind[name] = str(folder / name)
    return path_of_kind


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, paths):
    return open_tokenizer(paths[request.param])


def test_texts_round_trip(tokenizer):
    # the second to last sample spells out special tokens, which tokenizer.json encodes as such
    for text in SAMPLES[:-2] + SAMPLES[-1:]:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < tokenizer.vocab_size)


@settings(max_examples=60, derandomize=True)
@given(text=st.text(max_size=40))
def test_any_text_round_trips(paths, text):
    for kind in ("bpe", "tiktoken", "bytes"):
        tokenizer = open_tokenizer_once(paths[kind])
        ids = tokenizer.encode(text)
        if kind == "bpe" and "\u2581" in text:  # SentencePiece's space symbol is decoded as a space
            continue
        assert tokenizer.decode(ids) == text, kind

        ((ids_with_spans, spans),) = tokenizer.encode_spans([text])
        if not any(token in text for token in tokenizer.special_tokens.values()):
            assert ids_with_spans.tolist() == ids.tolist()
        assert spans.shape == (len(ids_with_spans), 2)
        assert spans.size == 0 or (spans.min() >= 0 and spans.max() <= len(text))


_opened: dict[str, object] = {}


def open_tokenizer_once(path):
    return _opened.setdefault(path, open_tokenizer(path))


def test_batch_encodes_like_single_texts(tokenizer):
    batch = tokenizer.encode_batch(SAMPLES)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in SAMPLES]
    assert all(ids.dtype == np.int32 for ids in batch)
    assert tokenizer.encode_batch([]) == [] == tokenizer.encode_spans([])


def test_spans_cover_every_character_in_order(tokenizer):
    for text in SAMPLES:
        ((ids, spans),) = tokenizer.encode_spans([text])
        assert ids.dtype == np.int32
        assert spans.dtype == np.int64
        assert spans.shape == (len(ids), 2)
        covered = set()
        for start, stop in spans.tolist():
            covered.update(range(start, stop))
        assert covered == set(range(len(text)))
        assert (np.diff(spans[:, 0]) >= 0).all()
        assert (np.diff(spans[:, 1]) >= 0).all()


def test_span_contains_the_text_of_its_token(paths):
    for kind in ("bpe", "tiktoken", "json"):
        tokenizer = open_tokenizer(paths[kind])
        text = "Hello the cat, 42"
        ((ids, spans),) = tokenizer.encode_spans([text])
        for i, (start, stop) in zip(ids.tolist(), spans.tolist(), strict=True):
            assert tokenizer.decode([i]).strip() == text[start:stop].strip()


def test_special_tokens_are_recognized_only_in_conversations(paths):
    tiktoken = open_tokenizer(paths["tiktoken"])
    piece = open_tokenizer(paths["bpe"])
    for tokenizer, end in ((tiktoken, "<|eot_id|>"), (piece, "</s>")):
        text = f"the cat{end}Hello"
        plain = tokenizer.encode(text)
        ((ids, spans),) = tokenizer.encode_spans([text])
        places = [i for i, number in enumerate(ids.tolist()) if number in tokenizer.special_ids]

        assert not set(plain.tolist()) & tokenizer.special_ids
        assert len(places) == 1
        assert spans[places[0]].tolist() == [7, 7 + len(end)]
        assert tokenizer.decode(plain) == text
        assert tokenizer.decode(ids, keep_special=True) == text
        assert tokenizer.decode(ids) == "the catHello"


def test_tokenizer_json_keeps_special_tokens_on_request(paths):
    tokenizer = open_tokenizer(paths["json"])
    ids = tokenizer.encode("<s>the cat</s>")
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, keep_special=True) == "<s>the cat</s>"
    assert tokenizer.special_ids == {tokenizer.bos_id, tokenizer.eos_id}


def test_sentencepiece_ids_match_the_library(paths):
    sentencepiece = pytest.importorskip("sentencepiece")
    reference = sentencepiece.SentencePieceProcessor(model_file=paths["bpe"] + "/tokenizer.model")
    tokenizer = open_tokenizer(paths["bpe"])

    for text in SAMPLES:
        assert tokenizer.encode(text).tolist() == reference.encode(text)
    assert tokenizer.vocab_size == reference.get_piece_size()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, None)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_tiktoken_has_the_special_tokens_of_llama_3(paths):
    tokenizer = open_tokenizer(paths["tiktoken"])
    ranks = len(tiktoken_bytes().splitlines())
    assert tokenizer.vocab_size == ranks + 256
    assert (tokenizer.bos_id, tokenizer.eos_id) == (ranks, ranks + 1)

    names = {
        "<|start_header_id|>": 6,
        "<|end_header_id|>": 7,
        "<|reserved_special_token_4|>": 8,
        "<|eot_id|>": 9,
    }
    names |= {"<|reserved_special_token_0|>": 2, "<|reserved_special_token_5|>": 10}
    names["<|reserved_special_token_250|>"] = 255
    for text, place in names.items():
        ((ids, _),) = tokenizer.encode_spans([text])
        assert ids.tolist() == [ranks + place], text


def test_tiktoken_ids_match_the_library_and_long_runs_are_split_as_in_llama_3(paths):
    tokenizer = open_tokenizer(paths["tiktoken"])
    reference = tokenizer._encoding
    for text in SAMPLES:
        assert tokenizer.encode(text).tolist() == reference.encode_ordinary(text)

    for sign in (" ", "a"):
        long = f"the{sign * 60_000} cat"
        # long runs are encoded in pieces, because tiktoken's regular expressions fail on a few
        # 100,000 spaces
        ids = tokenizer.encode(long)
        assert tokenizer.decode(ids) == long
    spaces = tokenizer.encode(" " * 60_000).tolist()

    assert spaces == 2 * reference.encode_ordinary(" " * 25_000) + reference.encode_ordinary(
        " " * 10_000
    )
    assert tokenizer.decode(tokenizer.encode(" " * 500_000)) == " " * 500_000


def test_special_tokens_of_the_folder_override_those_of_tiktoken(paths, tmp_path):
    ranks = len(tiktoken_bytes().splitlines())
    added = {str(ranks + 4): {"content": "<|finetune_right_pad_id|>", "special": True}}
    config = {"added_tokens_decoder": added, "eos_token": "<|eot_id|>"}
    (tmp_path / "tokenizer.model").write_bytes(tiktoken_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(str(tmp_path))

    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (ranks + 4, ranks + 9, ranks)
    assert tokenizer.fingerprint != open_tokenizer(paths["tiktoken"]).fingerprint

    # An id below the special tokens belongs to the vocabulary, so the file must not define it.
    config["added_tokens_decoder"] = {"7": {"content": "<|x|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="names 7"):
        open_tokenizer(str(tmp_path))


def test_added_tokens_of_a_sentencepiece_model_follow_its_vocabulary(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_bytes())
    pieces = open_tokenizer(str(tmp_path)).vocab_size
    added = {
        str(pieces): {"content": "<|im_end|>", "special": True},
        str(pieces + 1): {"content": "<tab>"},
    }
    config = {"added_tokens_decoder": added, "eos_token": "<|im_end|>", "pad_token": "<tab>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(str(tmp_path))

    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (
        pieces + 2,
        pieces,
        pieces + 1,
    )

    # an added token that is not special is recognized in every text
    ids = tokenizer.encode("the<tab> cat")
    assert pieces + 1 in ids
    assert tokenizer.decode(ids, keep_special=True) == "the<tab> cat"

    ((ids, spans),) = tokenizer.encode_spans(["the cat<|im_end|>"])
    assert ids[-1] == pieces
    assert spans[-1].tolist() == [7, 17]

    config["added_tokens_decoder"] = {"5": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"has the piece .* at id 5"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [-1, 10**6, 1.5, True])
def test_special_ids_out_of_range_are_rejected(tmp_path, key, value):
    folder = bpe_folder(tmp_path, **{key: value})
    with pytest.raises(ConfigError, match=rf"{key}=.* is not in 0\.\.\d+") as caught:
        open_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


def test_special_ids_in_the_folder_are_used(tmp_path):
    folder = bpe_folder(tmp_path, pad_token_id=3)
    assert open_tokenizer(str(folder)).pad_id == 3


def test_chat_templates_are_found_in_each_file(tmp_path):
    folder = bpe_folder(tmp_path / "none")
    assert open_tokenizer(str(folder)).chat_template is None

    folder = bpe_folder(tmp_path / "text", chat_template="a")
    tokenizer = open_tokenizer(str(folder))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("a", None)

    # chat_template.jinja overrides the field in tokenizer_config.json.
    (folder / "chat_template.jinja").write_text("b")
    assert open_tokenizer(str(folder)).chat_template == "b"

    named = [{"name": "default", "template": "c"}, {"name": "tool_use", "template": "d"}]
    folder = bpe_folder(tmp_path / "named", chat_template=named)
    tokenizer = open_tokenizer(str(folder))
    assert (tokenizer.chat_template, tokenizer.tool_template) == ("c", "d")

    for wrong in (3, ["x"], [{"name": "default"}], [{"name": "default", "template": 4}]):
        folder = bpe_folder(tmp_path / "wrong", chat_template=wrong)
        with pytest.raises(ConfigError, match=r"tokenizer_config.json.*chat_template"):
            open_tokenizer(str(folder))


def line(token: bytes, rank: object) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


BROKEN = {
    "empty": (b"", "is empty"),
    "noise": (
        b"\xff\xfe\x00garbage",
        "is neither a tokenizer.json nor tiktoken's ranks nor a sentencepiece model",
    ),
    "cut": (None, "is neither a tokenizer.json nor"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "Git LFS pointer"),
    "rank": (line(b"a", 0) + line(b"b", 5), r"tokenizer.model:2.* has a rank other than 1"),
    "twice": (line(b"a", 0) + line(b"a", 1), r"tokenizer.model:2.* has a duplicate token"),
    "base64": (line(b"a", 0) + b"YQ=Q 1\n", r"tokenizer.model:2.* is not a base64 token"),
    "words": (line(b"a", 0) + b"hello\n", r"tokenizer.model:2.* is not a base64 token"),
    "bytes": (line(b"a", 0), "lacks a token for 255 of the 256 bytes"),
    "json": (b'{"model": 1}', "cannot be read as a tokenizer"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_model_is_reported_in_one_line(tmp_path, name):
    content, message = BROKEN[name]
    file = tmp_path / "tokenizer.model"
    file.write_bytes(sentencepiece_bytes()[:50] if content is None else content)

    with pytest.raises(ConfigError, match=message) as caught:
        open_tokenizer(str(tmp_path), option="model.tokenizer_path")
    assert "model.tokenizer_path" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ranks_of_another_model_are_rejected(tmp_path):
    tokens = [bytes((i,)) for i in range(256)] + [i.to_bytes(3, "big") for i in range(50257 - 256)]
    (tmp_path / "gpt2.tiktoken").write_bytes(
        b"".join(line(token, rank) for rank, token in enumerate(tokens))
    )

    with pytest.raises(ConfigError, match=r"has 50257 ranks like GPT-2"):
        open_tokenizer(str(tmp_path / "gpt2.tiktoken"))


def test_folder_instead_of_the_file_is_rejected(tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer.json.*is not a regular file"):
        open_tokenizer(str(tmp_path))


def test_ids_outside_the_vocabulary_have_no_text(paths):
    for kind in ("bpe", "tiktoken"):
        tokenizer = open_tokenizer(paths[kind])
        for wrong in (-1, tokenizer.vocab_size):
            with pytest.raises(ValueError, match="outside"):
                tokenizer.decode([wrong])


def test_tokenizer_can_be_sent_to_another_process(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.spec == tokenizer.spec
    assert copy.encode(SAMPLES[1]).tolist() == tokenizer.encode(SAMPLES[1]).tolist()


def test_tokenizer_works_on_both_sides_of_a_fork(tokenizer, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    expected = [ids.tolist() for ids in tokenizer.encode_batch(SAMPLES)]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(
        target=lambda: queue.put([ids.tolist() for ids in tokenizer.encode_batch(SAMPLES)])
    )
    child.start()

    assert queue.get(timeout=patience.seconds(60)) == expected

    child.join(patience.seconds(60))
    assert [ids.tolist() for ids in tokenizer.encode_batch(SAMPLES)] == expected


def test_changed_file_cannot_be_reopened_in_another_process(tmp_path):
    folder = bpe_folder(tmp_path)
    parcel = pickle.dumps(open_tokenizer(str(folder)))
    bpe_folder(tmp_path, ("<s>", "</s>", "<pad>"))

    with pytest.raises(ConfigError, match="has changed while it was in use"):
        pickle.loads(parcel)
