"""Read and encode prompts, and write predictions. All other fields of a row are preserved byte for byte."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardtrain.config.schema import Data
from shardtrain.data.chat.conversations import Conversations
from shardtrain.data.chat.messages import NO_VARIABLES, Variables, messages_of, template_variables
from shardtrain.data.documents.columns import Unusable, column, text
from shardtrain.data.tokenizers.ends import ends_of
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer
from shardtrain.utils import atomic_io, bounded_reads, checked_json, storage_errors
from shardtrain.utils.errors import ConfigError, DataError, Problem


@dataclass(frozen=True)
class PromptRow:
    """One line of a file of prompts.

    Attributes:
        place: File and line number, for messages.
        line: JSON object as read from the file.
    """

    place: str
    line: str
    values: Mapping[str, Any]

    def with_prediction(self, field: str, prediction: str) -> str:
        """Return the original JSON object with one more field."""
        # Insert before the closing brace. Serializing the values again would change numbers, spaces and
        # escapes.
        start = self.line[:-1].rstrip()
        if self.values:
            start += ", "
        value = json.dumps(prediction, ensure_ascii=False)
        return f"{start}{json.dumps(field)}: {value}}}"


def read_rows(path: Path, field: str, prediction_field: str) -> list[PromptRow]:
    """Return the rows of a JSONL file. Empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read.
        DataError: a line is not an object, lacks ``field``, or already has ``prediction_field``. The message
            names the file and line.
    """
    try:
        with open(path, "rb", opener=atomic_io.without_waiting) as file:
            rows = []
            for number, data in enumerate(file, start=1):
                if data.strip():
                    rows.append(read_row(data, f"{path}:{number}", field, prediction_field))
    except OSError as error:
        raise bounded_reads.unreadable("--input", path, error, "name a file") from error
    if not rows:
        raise DataError(
            f"{path} has no rows; each line must be a JSON object with the field {field!r}"
        )
    return rows


def read_row(data: bytes, place: str, field: str, prediction_field: str) -> PromptRow:
    """Parse one line of JSON. Raise DataError if it has no prompt. The message begins with ``place``."""
    try:
        line = data.decode("utf-8-sig").strip()
        checked_json.check_memory(line, checked_json.ROW_MEMORY_BYTES)
        values = json.loads(line)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: the line is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: the line is not JSON ({str(error)[:100]})") from None
    if not isinstance(values, dict):
        raise DataError(
            f"{place}: the line is not a JSON object; write one object per line, with the field {field!r}"
        )
    try:
        value = column(values, field)
        if not isinstance(value, list):
            text(values, field)
    except Unusable as error:
        raise DataError(f"{place}: {error.reason}") from None
    if prediction_field in values:
        raise DataError(
            f"{place}: already has the field {prediction_field!r}; choose another with --prediction_field",
        )
    return PromptRow(place, line, values)


class GenerationPrompts:
    """Encodes prompts: texts begin with BOS as in training, conversations use the chat template."""

    def __init__(
        self, tokenizer: Tokenizer, data: Data, conversations: Conversations | None
    ) -> None:
        self._tokenizer = tokenizer
        self._conversations = conversations
        self._ends = ends_of(tokenizer, replace(data, add_eos=None, separator=None))

    def row(self, row: PromptRow, field: str, tools_field: str) -> list[int]:
        """Return the tokens of a row's prompt. Raise DataError with the row's place if it is unusable."""
        try:
            value = column(row.values, field)
            if self._conversations is None:
                return self.value(value, field)
            return self.value(value, field, template_variables(row.values, tools_field))
        except Unusable as error:
            raise DataError(f"{row.place}: {error.reason}") from None

    def value(self, value: Any, field: str, variables: Variables = NO_VARIABLES) -> list[int]:
        """Return the tokens of a text.

        With a chat template, ``value`` is a user message or a list of messages.
        """
        if self._conversations is not None:
            messages = [{"role": "user", "content": value}]
            if not isinstance(value, str):
                messages = messages_of(value, field)
            ids = self._conversations.prompt(messages, variables).tolist()
        elif isinstance(value, str):
            ids = self._ends.begin(self._tokenizer.encode(value).tolist())
            # The model needs at least one token.
            if not ids and self._tokenizer.bos_id is not None:
                ids = [self._tokenizer.bos_id]
        else:
            raise Unusable(
                f"column {field!r} has a list of messages, which requires a chat template: add --chat",
            )
        if not ids:
            raise Unusable("the prompt is empty, and the tokenizer has no token that begins a text")
        return ids


def check_output(path: Path | None) -> None:
    """Raise ConfigError if the output exists or cannot be written. None is stdout."""
    if path is None:
        return
    if path.exists():
        raise ConfigError(Problem("--output", str(path), "exists", "name another file"))
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(
            Problem(
                "--output",
                str(path),
                rule="is in a folder that does not exist or is not writable",
                fix="create the folder",
            )
        )


def write_rows(
    path: Path, rows: Sequence[PromptRow], predictions: Sequence[str], field: str
) -> None:
    """Write all rows with their predictions atomically."""
    lines = []
    for row, prediction in zip(rows, predictions, strict=True):
        lines.append(row.with_prediction(field, prediction) + "\n")
    try:
        atomic_io.write(path, "".join(lines), durable=True)
    except OSError as error:
        raise storage_errors.cannot("write", path, error, "choose another folder") from error
