"""Small tokenizers that differ in the prefix they add to a text, trained on a few sentences."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from shardtrain.data.tokenizers.open_tokenizer import Tokenizer as OpenedTokenizer
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer

TEXTS = [
    "Q: what? A: two words return x def main hello world",
    "two words\nfor each word return\n x y z",
    "The answer is 42. Antwort: größer als 7!\n",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]
KINDS = (
    "byte_level",
    "byte_level_prefix_space",
    "metaspace_first",
    "metaspace_always",
    "prepend_normalizer",
    "sentencepiece",
)
"""prepend_normalizer is the form of Llama 2's tokenizer.json, with merges across word boundaries. sentencepiece is a
BPE model file with its default dummy prefix."""


def write(kind: str, folder: Path, with_bos: bool = False) -> Path:
    """Write a tokenizer with ``<s>`` and ``</s>`` to a folder. With ``with_bos``, it adds ``<s>`` before texts."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "sentencepiece":
        import sentencepiece

        sentences = [line for text in TEXTS for line in text.splitlines()]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_prefix=str(folder / "tokenizer"), vocab_size=330,
            model_type="bpe", byte_fallback=True, minloglevel=2, character_coverage=1.0, hard_vocab_limit=False,
        )  # fmt: skip
        (folder / "tokenizer.vocab").unlink()
        return folder
    tokenizer = Tokenizer(
        models.BPE(
            unk_token=None if kind.startswith("byte_level") else "<unk>", byte_fallback=False
        )
    )
    alphabet = sorted(set("".join(TEXTS)) | set("▁|.>\n0"))
    if kind.startswith("byte_level"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=kind == "byte_level_prefix_space"
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind == "prepend_normalizer":
        replace = normalizers.Replace(" ", "▁")
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        strip = decoders.Strip(content=" ", left=1, right=0)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), strip])
    else:
        scheme = kind.removeprefix("metaspace_")
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
        tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def open_kind(kind: str, with_bos: bool = False) -> OpenedTokenizer:
    """Write a tokenizer of a kind to a temporary folder, and open it."""
    folder = tempfile.mkdtemp(prefix="shardtrain-tests-tokenizer-")
    return open_tokenizer(str(write(kind, Path(folder) / kind, with_bos)))
