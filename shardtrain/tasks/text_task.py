"""Base classes of tasks whose rows are texts: tokenizing, truncation and fingerprints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain.data.build_dataset import tokenizer_of
from shardtrain.data.digest import digest
from shardtrain.data.documents.bad_rows import around_bad_rows, attempt
from shardtrain.data.sources import BadRow
from shardtrain.data.tokenizers.ends import Ends, described, ends_of
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks import _files
from shardtrain.tasks.task import RowTask, ShownText
from shardtrain.utils.log import logger


class TextTask(RowTask):
    """Base of tasks with a tokenizer."""

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the config."""
        return tokenizer_of(self.config)

    @property
    def vocab(self) -> int:  # type: ignore[override]
        """Vocabulary size of the tokenizer."""
        return int(self.tokenizer.vocab_size)


@dataclass(frozen=True)
class Example:
    """A tokenized row.

    Attributes:
        tokens: token ids, with BOS and EOS.
        label: a number such as the label. IGNORE if the row has no label.
    """

    tokens: npt.NDArray[np.int32]
    label: int


class ExampleTask(TextTask):
    """Base of tasks whose rows are examples.

    An example is one or more texts, each followed by EOS. Texts are truncated to leave room for EOS in seq_len.

    A subclass defines ``_read``, which returns the texts and the number of a row.
    """

    labels: list[str]

    @cached_property
    def _ends(self) -> Ends:
        return ends_of(self.tokenizer, self.config.data)

    def read_rows(self, split: str) -> _files.FileRows[Example]:
        """Read the files of a split. Raises what ``_files.read`` raises."""
        section, _ = _files.section_of(self.config, split)
        encode = partial(self.encode, split=split)
        rows: _files.FileRows[Example] = _files.read(self.config, split, encode)
        task = self.config.task
        # Options and tokens that determine the rows of the same files.
        facts = (
            self.tokenizer.fingerprint,
            section.seq_len,
            self.labels,
            task.label_field,
            task.pair_field,
        )
        # The tokens themselves also cover the content of the files.
        content: list[Any] = []
        for row in rows:
            content += [row.tokens.tobytes(), row.label]
        rows.fingerprint = digest(*facts, digest(*content))

        num_tokens = sum(len(row.tokens) for row in rows)
        num_full = sum(len(row.tokens) == section.seq_len for row in rows)
        logger.info(described(self.tokenizer, self.config.data))
        logger.info(
            f"{split}: {len(rows)} rows, {num_tokens} tokens; {num_full} rows fill seq_len or were truncated to it"
        )
        return rows

    def lengths(self, row: Example) -> list[int]:
        """Return the token count of the row's single sequence, which contains all of its texts."""
        return [len(row.tokens)]

    def shown(self, row: Example) -> list[ShownText]:
        """Return the text under the name of its label. It has no loss mask, because only the label is
        learned.
        """
        has_label = self.labels and row.label != IGNORE
        name = self.labels[row.label] if has_label else "text"
        return [ShownText(name, row.tokens.tolist(), None)]

    def encode(
        self, rows: Sequence[Mapping[str, Any] | BadRow], split: str
    ) -> Iterator[Example | BadRow]:
        """Tokenize the texts of rows. Yield an Example or a BadRow for each."""
        section, _ = _files.section_of(self.config, split)
        labelled = self.is_labelled(split)

        def tokenize(good_rows: list[tuple[list[str], int]]) -> Iterator[Example | BadRow]:
            # tokenize the texts of all rows together
            all_texts: list[str] = []
            for texts, _ in good_rows:
                all_texts += texts
            # One call for all texts, because a tokenizer may use several threads.
            all_ids = iter(self.tokenizer.encode_batch(all_texts))
            for texts, number in good_rows:
                ids_of_texts = list(itertools.islice(all_ids, len(texts)))
                yield self._example(ids_of_texts, number, section.seq_len)

        read = partial(self._read, labelled)
        read_rows = [attempt(read, row) for row in rows]
        return around_bad_rows(read_rows, tokenize)

    def _read(self, labelled: bool, row: Mapping[str, Any]) -> tuple[list[str], int] | BadRow:
        """Return the texts of a row and its number. ``labelled`` is False if the row may lack a label."""
        raise self._lacks("_read")

    def _example(self, texts: list[Any], label: int, seq_len: int) -> Example | BadRow:
        """Join the ids of texts with BOS and EOS, truncated to ``seq_len``."""
        ends = self._ends
        tokens = list(ends.prefix)
        for ids in texts:
            tokens += [*ids.tolist(), *ends.suffix]
        if not tokens:
            return BadRow(
                "the text is empty, and the tokenizer has neither BOS nor EOS, so the row has no token"
            )
        # EOS tells the model where a text ends, so it replaces the last tokens instead of being cut.
        if len(tokens) > seq_len:
            num_kept = seq_len - len(ends.suffix)
            tokens = [*tokens[:num_kept], *ends.suffix]
        return Example(np.array(tokens, dtype=np.int32), label)
