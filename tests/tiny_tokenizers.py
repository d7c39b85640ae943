"""Small tokenizers of each kind, trained on demand, with the special tokens and templates that a test needs."""

from __future__ import annotations

import base64
import io
import json
from functools import cache
from pathlib import Path

TEXTS = [
    "the cat sat on the mat, and the dog lay by the fire.",
    "Hello! How are you today?\nI am well, thank you.",
    'get_weather {"city": "Paris", "unit": "celsius"}',
    "naïve café 🦜 парадокс 東京",
    "def main():\n    return 42\n\n",
] * 4


@cache
def _bpe_json(special: tuple[str, ...]) -> str:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 80 + len(special),
        special_tokens=list(special),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    # GPT-2 and Llama 3 have the same post-processor.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer.to_str()


def bpe_folder(folder: Path, special: tuple[str, ...] = ("<s>", "</s>"), **config: object) -> Path:
    """Write a byte-level BPE tokenizer.json, and a tokenizer_config.json with ``config`` unless it is empty."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_bpe_json(special), encoding="utf-8")
    if config:
        content = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@cache
def sentencepiece_bytes(kind: str = "bpe") -> bytes:
    """Return a sentencepiece model with byte fallback."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        model_type=kind,
        vocab_size=360,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


def tiktoken_bytes() -> bytes:
    """Return a tiktoken file with all bytes and the merges of a few strings."""
    tokens = [bytes((i,)) for i in range(256)]
    for word in (b"the", b" the", b" cat", b"Hello", b"  ", b"\n\n", "é".encode(), b" mat"):
        tokens += [word[:end] for end in range(2, len(word) + 1) if word[:end] not in tokens]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def with_post_processor(
    folder: Path, style: str | None, bos: str = "<s>", eos: str = "</s>"
) -> Path:
    """Set the post-processor of a tokenizer.json to that of a style, or remove it if ``style`` is None.

    "gpt2" (Pythia, SmolLM2, Qwen2) adds no token, "llama3" adds bos before a text, and "bert" adds bos and eos.
    """
    import tokenizers
    from tokenizers import processors

    file = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    ids = [(text, tokenizer.token_to_id(text)) for text in (bos, eos)]
    byte_level = processors.ByteLevel(trim_offsets=True)
    with_bos = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=ids
    )
    with_both = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", pair=f"{bos} $A {eos} $B {eos}", special_tokens=ids
    )
    styles = {
        "gpt2": byte_level,
        "llama3": processors.Sequence([byte_level, with_bos]),
        "bert": with_both,
    }
    if style is not None:
        tokenizer.post_processor = styles[style]
    content = json.loads(tokenizer.to_str())
    if style is None:
        content["post_processor"] = None
    file.write_text(json.dumps(content), encoding="utf-8")
    return folder
