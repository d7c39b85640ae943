"""Documents to rows: all documents in one line of tokens, cut into windows, so that no target is lost or repeated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardtrain.data.tokenizer import Tokenizer
from shardtrain.errors import DataError, Problem


@dataclass(frozen=True)
class Packed:
    """A line of tokens seen as rows of ``seq_len`` inputs and as many targets.

    Row i holds tokens ``i * seq_len`` to ``(i + 1) * seq_len`` inclusive: its last token is the target of its last
    input, and the first input of row i + 1. Every token but the first is thus the target of one row, and what remains
    after the last whole row (fewer than ``seq_len`` targets) is left out.

    ``tokens`` is 1-D of any integer type; ``option`` names the option behind ``seq_len`` in errors.

    Raises:
        DataError: when the tokens do not fill one row.
    """

    tokens: npt.NDArray[np.integer]
    seq_len: int
    option: str = "training.seq_len"

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            targets = max(0, len(self.tokens) - 1)
            rule = f"is longer than the whole dataset, which has {targets} target tokens"
            fix = f"use {targets} or less, or more data" if targets else "use more data"
            raise DataError(str(Problem(self.option, self.seq_len, rule, fix)))

    @property
    def num_samples(self) -> int:
        """Whole rows."""
        return (len(self.tokens) - 1) // self.seq_len

    def rows(self, sample_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Windows of the given samples, [B, seq_len + 1]: inputs are ``[:, :-1]`` and targets ``[:, 1:]``.

        Raises:
            IndexError: when a sample is not in 0..num_samples-1.
        """
        if sample_ids.size and not (int(sample_ids.min()) >= 0 and int(sample_ids.max()) < self.num_samples):
            raise IndexError(f"sample outside 0..{self.num_samples - 1}")
        index = sample_ids[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return self.tokens[index].astype(np.int64)


def concatenate(documents: Iterable[str], tokenizer: Tokenizer) -> npt.NDArray[np.integer]:
    """Tokens of all documents in a row, each between the tokenizer's bos and eos where it has them.

    The result is uint16 when the vocabulary allows it and int32 otherwise: half the memory for most small ones.
    """
    dtype = np.dtype("<u2") if tokenizer.vocab_size <= 2**16 else np.dtype("<i4")
    bos: npt.NDArray[np.integer] = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype)
    eos: npt.NDArray[np.integer] = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype)
    pieces: list[npt.NDArray[np.integer]] = []
    for document in documents:
        pieces += [bos, tokenizer.encode(document).astype(dtype), eos]
    return np.concatenate(pieces) if pieces else np.array([], dtype)
