"""Tasks whose rows are texts: what they share between the files and a batch."""

from __future__ import annotations

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
    """A task that needs a tokenizer: the one that the config names."""

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that the config names."""
        return tokenizer_of(self.config)

    @property
    def vocab(self) -> int:  # type: ignore[override]
        """Ids of the tokenizer."""
        return int(self.tokenizer.vocab_size)


@dataclass(frozen=True)
class Example:
    """One row: its tokens with bos and eos, and a number, as that of its label; IGNORE where it has none."""

    tokens: npt.NDArray[np.int32]
    label: int


class ExampleTask(TextTask):
    """Rows are examples: one text or several, one after the other, each ended by eos, cut at seq_len with
    eos kept.

    A subclass has ``_read``, which finds a row's texts and number.
    """

    labels: list[str]

    @cached_property
    def _ends(self) -> Ends:
        return ends_of(self.tokenizer, self.config.data)

    def read_rows(self, split: str) -> _files.FileRows[Example]:
        """Read the files of a split; raises what ``_files.read`` does."""
        section, _ = _files.section_of(self.config, split)
        rows: _files.FileRows[Example] = _files.read(self.config, split, partial(self.encode, split=split))
        task = self.config.task
        facts = (self.tokenizer.fingerprint, section.seq_len, self.labels, task.label_field, task.pair_field)
        content = (part for row in rows for part in (row.tokens.tobytes(), row.label))
        rows.fingerprint = digest(*facts, digest(*content))

        num_tokens = sum(len(row.tokens) for row in rows)
        cut = sum(len(row.tokens) == section.seq_len for row in rows)
        logger.info(described(self.tokenizer, self.config.data))
        logger.info(f"{split}: {len(rows)} rows of {num_tokens} tokens, {cut} as long as seq_len")
        return rows

    def lengths(self, row: Example) -> list[int]:
        """Return the token count of the row's single sequence, which contains all of its texts."""
        return [len(row.tokens)]

    def shown(self, row: Example) -> list[ShownText]:
        """Its text, and what is to be found of it: nothing of the text itself is learned."""
        name = self.labels[row.label] if self.labels and row.label != IGNORE else "text"
        return [ShownText(name, row.tokens.tolist(), None)]

    def encode(self, rows: Sequence[Mapping[str, Any] | BadRow], split: str) -> Iterator[Example | BadRow]:
        """Tokenize the texts of rows. Yield an Example or a BadRow for each."""
        section, _ = _files.section_of(self.config, split)
        labelled = self.is_labelled(split)

        def encode(found: list[tuple[list[str], int]]) -> Iterator[Example | BadRow]:
            batch = iter(self.tokenizer.encode_batch([text for texts, _ in found for text in texts]))
            for texts, number in found:
                yield self._example([next(batch) for _ in texts], number, section.seq_len)

        return around_bad_rows([attempt(partial(self._read, labelled), row) for row in rows], encode)

    def _read(self, labelled: bool, row: Mapping[str, Any]) -> tuple[list[str], int] | BadRow:
        """Return the texts of a row and its number. ``labelled`` is false if its label is to be predicted."""
        raise self._lacks("_read")

    def _example(self, texts: list[Any], label: int, seq_len: int) -> Example | BadRow:
        ends = self._ends
        tokens = list(ends.prefix)
        for ids in texts:  # each text ends in eos
            tokens += [*ids.tolist(), *ends.suffix]
        if not tokens:
            return BadRow("the text is empty, and the tokenizer has neither bos nor eos to stand for it")
        if len(tokens) > seq_len:
            tokens = [*tokens[: seq_len - len(ends.suffix)], *ends.suffix]
        return Example(np.array(tokens, dtype=np.int32), label)
