"""Tokenizer in a tiktoken ``.model`` file, which contains tokens in base64 and their ranks. It uses Llama
3's split pattern and special tokens.

The format is described at https://github.com/openai/tiktoken, and Llama 3's additions in its model card and
its reference code.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardtrain.data.tokenizers import native_memory
from shardtrain.data.tokenizers.spans import character_spans
from shardtrain.data.tokenizers.split import Splitter
from shardtrain.data.tokenizers.threads import threads
from shardtrain.data.tokenizers.tokenizer_config import END_TOKENS, ends_facts, read_beside
from shardtrain.utils import libraries
from shardtrain.utils.errors import ConfigError, Problem

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NUM_SPECIAL = 256
_FIRST_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
)
_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,10})\r?")
# The file does not specify how to split a text. But these numbers of ranks belong to other tokenizers with
# other split patterns.
_OTHERS = {
    50256: "GPT-2",
    50257: "GPT-2",
    100256: "cl100k_base",
    151643: "Qwen",
    199998: "o200k_base",
}
# Longer texts are cut, because they would overflow the stack of the regular expressions. Llama 3's
# reference code cuts at the same positions.
_LONGEST_RUN = 25_000
_LONGEST_TEXT = 400_000
_LONG_RUN = re.compile(rf"\s{{{_LONGEST_RUN + 1},}}|\S{{{_LONGEST_RUN + 1},}}")


def looks_like(content: bytes) -> bool:
    """True if a file begins with a base64 token and a rank."""
    return _LINE.fullmatch(content.split(b"\n", 1)[0]) is not None


class TiktokenTokenizer:
    """Tiktoken's ranks with Llama 3's split pattern, and 256 special tokens after the last rank.

    Special tokens in a ``tokenizer_config.json`` next to it take precedence over those of Llama 3. As in
    Llama 3's reference code, a special token in a text is ordinary text,
    except in conversations (``encode_spans``).
    """

    def __init__(self, file: Path, content: bytes, option: str, spec: str) -> None:
        self.spec = spec
        self.option = option
        ranks = _read_ranks(file, content, option)
        beside = read_beside(file.parent, option)

        # Collect the special tokens: Llama 3's 256, some of which tokenizer_config.json may rename.
        num_ranks = len(ranks)
        reserved = [f"<|reserved_special_token_{i}|>" for i in range(5, _NUM_SPECIAL)]
        llama3_names = [*_FIRST_SPECIAL, *reserved][:_NUM_SPECIAL]
        names = dict(enumerate(llama3_names, start=num_ranks))
        for i, token in beside.added.items():
            if not num_ranks <= i < num_ranks + _NUM_SPECIAL:
                last = num_ranks + _NUM_SPECIAL - 1
                rule = (
                    f"has special tokens {num_ranks}..{last}, but tokenizer_config.json names {i}"
                )
                fix = "use files that belong together"
                raise ConfigError(Problem(option, str(file), rule, fix))
            names[i] = token.content
        specials = {text: i for i, text in names.items()}
        tiktoken = libraries.load("tiktoken", option, str(file), otherwise="use a tokenizer.json")

        native_memory.require_for_file(len(content))
        # Pass no special tokens to the library. It then treats them as ordinary text. In ``encode_spans``,
        # the splitter finds them.
        self._encoding = tiktoken.Encoding(
            file.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        self._tokens = sorted(ranks, key=ranks.__getitem__)
        self._lengths = np.array([len(token) for token in self._tokens], dtype=np.int64)
        self._splitter = Splitter(specials)
        self._texts = {i: text for text, i in specials.items()}
        self.vocab_size = len(ranks) + _NUM_SPECIAL
        ids = {}
        for name in END_TOKENS:
            ids[name] = beside.special_id(name, specials.get, specials, self.vocab_size, option)
        self.bos_id, self.eos_id, self.pad_id = ids.values()
        self.prefix_ids, self.suffix_ids = beside.ends(self.bos_id, self.eos_id)
        self.special_ids = frozenset(self._texts)
        texts = {name: self._texts[i] for name, i in ids.items() if i in self._texts}
        self.special_tokens: Mapping[str, str] = {**texts, **beside.named()}
        self.chat_template = beside.chat_template
        self.tool_template = beside.tool_template
        facts = (
            f"tiktoken llama3 {self.bos_id} {self.eos_id} {sorted(self._texts.items())}".encode()
        )
        facts += ends_facts(self.prefix_ids, self.suffix_ids, self.bos_id, self.eos_id)
        content_hash = hashlib.sha256(content).digest()
        self.fingerprint = hashlib.sha256(content_hash + facts).hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the ids of a text, without BOS and EOS."""
        native_memory.require_for_texts([text])
        ids: list[int] = []
        for part in _parts(text):
            ids += self._encoding.encode_ordinary(part)
        return np.array(ids, dtype=np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text."""
        # Encode the parts of all texts with one call, because the library's threads share the parts.
        flat: list[str] = []
        ends = []
        for text in texts:
            flat += _parts(text)
            ends.append(len(flat))
        encoded: list[list[int]] = []
        native_memory.require_for_texts(flat)
        if flat:
            encoded = self._encoding.encode_ordinary_batch(flat, num_threads=threads())
        results = []
        start = 0
        for end in ends:
            ids = itertools.chain.from_iterable(encoded[start:end])
            results.append(np.fromiter(ids, dtype=np.int32))
            start = end
        return results

    def encode_spans(
        self, texts: Sequence[str]
    ) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Return the ids of each text, and their character ranges.

        Special tokens that occur in a text as strings become their ids.
        """
        return [self._with_spans(text) for text in texts]

    def decode(
        self, ids: Sequence[int] | npt.NDArray[np.integer], keep_special: bool = False
    ) -> str:
        """Return the text of ids, with special tokens only if ``keep_special``.

        Bytes that are not UTF-8 become U+FFFD.


        Raises:
            ValueError: an id is not in 0..vocab_size-1.
        """
        parts: list[bytes] = []
        for i in (int(i) for i in ids):
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id outside 0..{self.vocab_size - 1}")
            if i < len(self._tokens):
                parts.append(self._tokens[i])
            elif keep_special:
                parts.append(self._texts.get(i, "").encode())
        return b"".join(parts).decode("utf-8", errors="replace")

    def _with_spans(self, text: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        ids = [np.zeros(0, dtype=np.int32)]
        spans = [np.zeros((0, 2), dtype=np.int64)]
        start = 0
        for piece, special in self._splitter.pieces(text):
            if special is None:
                piece_ids = self.encode(piece)
                ids.append(piece_ids)
                spans.append(character_spans(piece, self._lengths[piece_ids]) + start)
            else:
                ids.append(np.array([special], dtype=np.int32))
                spans.append(np.array([[start, start + len(piece)]], dtype=np.int64))
            start += len(piece)
        return np.concatenate(ids), np.concatenate(spans)


def _parts(text: str) -> Iterator[str]:
    """Yield parts of a text that are short enough for the library. Most texts have only one part.

    Texts are cut at the same positions as in Llama 3's reference code.
    """
    for start in range(0, len(text), _LONGEST_TEXT):
        part = text[start : start + _LONGEST_TEXT]
        done = 0
        for run in _LONG_RUN.finditer(part) if len(part) > _LONGEST_RUN else ():
            for cut in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
                yield part[done:cut]
                done = cut
        yield part[done:]


def _read_ranks(file: Path, content: bytes, option: str) -> dict[bytes, int]:
    """Return the tokens and their ranks.

    Raises:
        ConfigError: a line is wrong, or ranks do not count up from 0. The message names the line.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1], validate=True) if match else None
        except binascii.Error:
            token = None
        rule = ""
        if match is None or token is None:
            rule = "is not a base64 token and its rank"
        elif token in ranks:
            rule = "has a duplicate token"
        elif int(match[2]) != len(ranks):
            rule = f"has a rank other than {len(ranks)}"
        if rule or token is None:
            fix = "copy or download the file again"
            raise ConfigError(Problem(option, f"{file}:{number}", rule, fix))
        ranks[token] = len(ranks)

    # The file does not specify how to split texts. The number of ranks identifies other tokenizers.
    if len(ranks) in _OTHERS:
        raise ConfigError(
            Problem(
                option,
                str(file),
                rule=(
                    f"has {len(ranks)} ranks like {_OTHERS[len(ranks)]}, but only Llama 3's split pattern is supported"
                ),
                fix="use the tokenizer.json of that model",
            )
        )
    missing = [i for i in range(256) if bytes((i,)) not in ranks]
    if missing:
        raise ConfigError(
            Problem(
                option,
                str(file),
                rule=f"lacks a token for {len(missing)} of the 256 bytes, so it cannot encode some texts",
                fix="copy or download the file again",
            )
        )
    return ranks
