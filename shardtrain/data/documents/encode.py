"""Convert rows to documents: tokenize texts, prompts with completions, or conversations, in batches."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.config.schema import Data, DataSource
from shardtrain.data.chat.chat_template import FIXED_DATE, ChatTemplate
from shardtrain.data.chat.conversations import Conversations, Written
from shardtrain.data.chat.messages import conversation, messages_of, template_variables
from shardtrain.data.documents.bad_rows import around_bad_rows, attempt
from shardtrain.data.documents.columns import (
    UNUSED_COLUMNS,
    Unusable,
    UnusedNames,
    column,
    kind,
    text,
)
from shardtrain.data.documents.continuation import encode_pairs, starts_with
from shardtrain.data.documents.encoded import Document, Encoder
from shardtrain.data.documents.row_template import TemplatedEncoder, template_of
from shardtrain.data.sources import BadRow
from shardtrain.data.tokenizers.ends import Ends, ends_of
from shardtrain.data.tokenizers.open_tokenizer import Ids, Tokenizer
from shardtrain.data.tokenizers.tokenizer_config import read_text
from shardtrain.utils.errors import ConfigError, Problem

_VERSION = 1
"""Part of every fingerprint. Increase it when the tokens of a row change, to invalidate prepared data."""
_Pair = tuple[str, str] | Written
"""Prompt and completion as texts, or rendered as a conversation."""
HAS_BEGINNING = "already begins with the beginning-of-text token, so none is added"
HAS_END = "already ends with the end-of-text token, so none is added"
SHARED_TOKEN = "a token would span the prompt and the completion, so they are tokenized separately"


def open_encoder(tokenizer: Tokenizer, data: Data, source: DataSource | None = None) -> Encoder:
    """Open the encoder of a dataset. Options of ``source`` take precedence over ``data``.

    Raises:
        ConfigError: a chat template is needed, but does not exist or cannot be used.
    """
    form = data.format
    text_field = data.text_field
    if source is not None:
        form = source.format or form
        text_field = source.text_field or text_field
    encoder: Encoder
    if form == "text":
        encoder = TextEncoder(tokenizer, text_field, data)
    elif form == "prompt_completion":
        encoder = PromptEncoder(tokenizer, data)
    else:
        encoder = ChatEncoder(tokenizer, data)
    template = template_of(data, source, form)
    if template is None:
        return encoder
    return TemplatedEncoder(encoder, template)


class TextEncoder:
    """Encodes a row that is one text. Adds the tokens that begin and end a document (see ``ends``)."""

    def __init__(self, tokenizer: Tokenizer, text_field: str, data: Data) -> None:
        self.tokenizer = tokenizer
        self._field = text_field
        self._ends = _DocumentEnds(ends_of(tokenizer, data))
        facts = [
            text_field,
            *_option_facts(self._ends.ends, data),
            *self._ends.fingerprint_facts(tokenizer),
        ]
        self.fingerprint = _fingerprint("text", tokenizer, *facts)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | BadRow]:
        """Tokenize rows. Return one document per row, or the reason why it has none."""
        # A bad row must not stop the other rows of the batch, so errors become results.
        texts = [attempt(self._text, row) for row in rows]
        return list(around_bad_rows(texts, self._documents))

    def _text(self, row: Mapping[str, Any]) -> str | BadRow:
        return text(row, self._field) or BadRow("the text is empty", harmless=True)

    def _documents(self, texts: Sequence[str]) -> Iterator[Document | BadRow]:
        for ids in self.tokenizer.encode_batch(texts):
            if len(ids):
                yield self._ends.document(ids)
            else:
                yield BadRow("the text has no tokens", harmless=True)


class PromptEncoder:
    """Encodes a row with a prompt and a completion as one document: BOS, prompt, completion, EOS.

    Only the completion and EOS are learned. As in TRL, EOS is learned even after an empty completion. No
    token contains characters of both prompt and completion (see ``continuation``). If both are lists of
    messages, they form one conversation, and the assistant's turns in the completion are learned.
    """

    def __init__(self, tokenizer: Tokenizer, data: Data) -> None:
        self.tokenizer = tokenizer
        self._data = data
        self._unused = UnusedNames("column", UNUSED_COLUMNS)
        self._ends = _DocumentEnds(ends_of(tokenizer, data))
        template = ""
        if data.chat_template or tokenizer.chat_template:
            template = _template_facts(tokenizer, data)
        fields = (data.prompt_field, data.completion_field, data.tools_field, template)
        option_facts = _option_facts(self._ends.ends, data)
        # The last two facts distinguish the data from those of older versions, which tokenized continuations
        # and empty completions differently.
        facts = (*fields, *option_facts, "continued", "empty")
        self.fingerprint = _fingerprint("prompt_completion", tokenizer, *facts)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | BadRow]:
        """Tokenize rows. Return one document per row, or the reason why it has none."""
        self._unused.warn(rows)
        pairs = [attempt(self._pair, row) for row in rows]
        return list(around_bad_rows(pairs, self._documents))  # type: ignore[arg-type]  # mypy joins the two kinds

    def _pair(self, row: Mapping[str, Any]) -> _Pair:
        """Return prompt and completion of a row as texts, or as a rendered conversation."""
        data = self._data
        prompt = column(row, data.prompt_field)
        completion = column(row, data.completion_field)
        # Either both are lists of messages, or both are texts.
        if isinstance(prompt, list | tuple) or isinstance(completion, list | tuple):
            if type(prompt) is not type(completion):
                raise Unusable(
                    f"the prompt is {kind(prompt)} and the completion is {kind(completion)}; both must be texts, or "
                    "both lists of messages"
                )
            before = messages_of(prompt, data.prompt_field)
            after = messages_of(completion, data.completion_field)
            variables = template_variables(row, data.tools_field)
            return self._conversations.write(
                [*before, *after], variables, first_learned=len(before)
            )
        return text(row, data.prompt_field), text(row, data.completion_field)

    def _documents(self, pairs: Sequence[_Pair]) -> Iterator[Document | BadRow]:
        """Return one document, or a BadRow, per pair."""
        # Tokenize all texts together, and all conversations together, because this is faster. Both keep the
        # order of the rows.
        texts = [pair for pair in pairs if isinstance(pair, tuple)]
        encoded = iter(encode_pairs(self.tokenizer, texts))
        written = [pair for pair in pairs if isinstance(pair, Written)]
        chats: Iterator[Document] = iter([])
        # Without conversations, do not open the template, which may not exist.
        if written:
            chats = iter(self._conversations.documents(written))
        for pair in pairs:
            if isinstance(pair, Written):
                yield _with_targets(next(chats))
            else:
                yield self._document(*next(encoded))

    def _document(self, prompt: Ids, completion: Ids, would_share_token: bool) -> Document | BadRow:
        """Return the document of a prompt and a completion. Only the completion is learned."""
        tokens = np.concatenate((prompt, completion))
        document = self._ends.document(tokens, len(prompt))
        if would_share_token:
            notes = (*document.notes, SHARED_TOKEN)
            document = dataclasses.replace(document, notes=notes)
        # The first token of a document is never a target, because nothing precedes it.
        if document.learned is not None and document.learned[1:].any():
            return document
        return BadRow("the completion has no token to learn, and no end token", harmless=True)

    @cached_property
    def _conversations(self) -> Conversations:
        # Open the template only for the first conversation, because rows of texts need none.
        return open_conversations(self.tokenizer, self._data)


class ChatEncoder:
    """Encodes a row that is a conversation. The assistant's turns are learned, including tool calls."""

    def __init__(self, tokenizer: Tokenizer, data: Data) -> None:
        self.tokenizer = tokenizer
        self._data = data
        self._unused = UnusedNames("column", UNUSED_COLUMNS)
        self._conversations = open_conversations(tokenizer, data)
        fields = (data.messages_field, data.tools_field, _template_facts(tokenizer, data))
        self.fingerprint = _fingerprint("chat", tokenizer, *fields)

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | BadRow]:
        """Tokenize rows. Return one document per row, or the reason why it has none."""
        self._unused.warn(rows)
        written = [attempt(self._write, row) for row in rows]
        documents = around_bad_rows(written, self._conversations.documents)
        results: list[Document | BadRow] = []
        for document in documents:
            if not isinstance(document, BadRow):
                document = _with_targets(document)
            results.append(document)
        return results

    def _write(self, row: Mapping[str, Any]) -> Written:
        chat, variables = conversation(row, self._data.messages_field, self._data.tools_field)
        return self._conversations.write(chat, variables)


class _DocumentEnds:
    """Adds the tokens that begin and end a document, unless the text already has them."""

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        self._prefix = np.array(ends.prefix, dtype=np.int32)
        self._suffix = np.array(ends.suffix, dtype=np.int32)
        self._separator = np.array(ends.separator, dtype=np.int32)

    def document(self, tokens: Ids, num_prompt: int | None = None) -> Document:
        """Return a document of ``tokens`` between the tokens that begin and end a document.

        If ``num_prompt`` is set, the first ``num_prompt`` tokens are not learned.
        Otherwise all tokens are learned.
        """
        notes = []
        # The text of a row may already contain these tokens. Do not add them twice.
        prefix = self._prefix
        if len(prefix) and starts_with(tokens, prefix):
            prefix = prefix[:0]
            notes.append(HAS_BEGINNING)
        suffix = self._suffix
        has_room = 0 < len(suffix) <= len(tokens)
        if has_room and (tokens[-len(suffix) :] == suffix).all():
            suffix = suffix[:0]
            notes.append(HAS_END)
        full = np.concatenate((prefix, tokens, suffix, self._separator))
        learned = None
        if num_prompt is not None:
            learned = np.arange(len(full)) >= len(prefix) + num_prompt
        return Document(full, learned, tuple(notes))

    def fingerprint_facts(self, tokenizer: Tokenizer) -> list[str]:
        """Return the facts for a fingerprint.

        The list has a fact if a text could contain the tokens that begin or end a document. Otherwise it is
        empty. The fingerprint is then the same as in versions that did not recognize such texts.
        """
        ids = [*self.ends.prefix, *self.ends.suffix]
        if not ids:
            return []
        # Tokenize the texts of these tokens, as if a dataset contained them.
        names = tokenizer.decode(ids, keep_special=True)
        ids_of_names = tokenizer.encode(names).tolist()
        if set(ids_of_names) & set(ids):
            return ["ends once"]
        return []


def _with_targets(document: Document) -> Document | BadRow:
    """Return the document, or a BadRow if none of its tokens is learned. The first token is never a target."""
    if document.learned is None or document.learned[1:].any():
        return document
    return BadRow("the conversation has no token that counts in the loss")


def _option_facts(ends: Ends, data: Data) -> list[str]:
    """Return the facts for a fingerprint about options that set the ends of documents.

    Empty without such options, because the tokenizer's fingerprint covers its own ends.
    """
    is_set = data.add_bos is not None or data.add_eos is not None or data.separator is not None
    if not is_set:
        return []
    return [f"ends {ends.prefix} {ends.suffix} {ends.separator}"]


def end_tokens(tokenizer: Tokenizer, data: Data, has_conversations: bool) -> list[int]:
    """Return the special tokens that end a document or a turn in training. The tokenizer's EOS comes first."""
    ends = [tokenizer.eos_id, *ends_of(tokenizer, data).after[:1]]
    if has_conversations:
        template, _ = _templates(tokenizer, data)
        if template is not None:
            ends.append(open_conversations(tokenizer, data).turn_end())
    # The same token often ends documents and turns.
    distinct = dict.fromkeys(ends)
    return [token for token in distinct if token in tokenizer.special_ids]


def open_conversations(tokenizer: Tokenizer, data: Data) -> Conversations:
    """Open the template of ``data.chat_template``, or the tokenizer's own.

    Raises:
        ConfigError: there is no template, or it cannot be used.
    """
    template, tool_template = _templates(tokenizer, data)
    if template is None:
        raise ConfigError(
            Problem(
                "data.chat_template",
                None,
                rule="is not set, and the tokenizer has no chat template",
                fix="name the file of a Jinja template, or use the tokenizer of a chat model",
            )
        )
    special = tokenizer.special_tokens
    compiled = ChatTemplate(template, special, data.chat_template)
    tools = None
    if tool_template is not None:
        tools = ChatTemplate(tool_template, special)
    has_marks = compiled.marks or (tools is not None and tools.marks)
    if data.learn_turn_separator and has_marks:
        raise ConfigError(
            Problem(
                "data.learn_turn_separator",
                True,
                rule="has no effect, because the chat template marks the learned text with {% generation %}",
                fix="move the line end into the marks, or remove the option",
            )
        )
    conversations = Conversations(
        tokenizer, compiled, tools, data.learn_turn_separator, data.turn_end or ""
    )
    # The end must be a single special token, and the template must not already end turns with one.
    if data.turn_end is not None:
        encoded, *_ = tokenizer.encode_spans([data.turn_end])[0]
        ids = encoded.tolist()
        if len(ids) != 1 or ids[0] not in tokenizer.special_ids:
            raise ConfigError(
                Problem(
                    "data.turn_end",
                    data.turn_end,
                    rule=f"is not a special token of the tokenizer {tokenizer.spec}",
                    fix="name a special token, such as its end token",
                )
            )
        written = Conversations(tokenizer, compiled, tools).turn_end()
        if written is not None:
            end = tokenizer.decode([written], keep_special=True)
            raise ConfigError(
                Problem(
                    "data.turn_end",
                    data.turn_end,
                    rule=f"has no effect, because the chat template already ends a turn with {end!r}",
                    fix="remove it",
                )
            )
    return conversations


def _templates(tokenizer: Tokenizer, data: Data) -> tuple[str | None, str | None]:
    """Return the chat template, and the template for conversations with tools if there is a separate one."""
    if data.chat_template is None:
        return tokenizer.chat_template, tokenizer.tool_template
    file = Path(data.chat_template)
    if not file.is_file():
        raise ConfigError(
            Problem(
                "data.chat_template",
                data.chat_template,
                rule="is not a file",
                fix="name the file of a Jinja template",
            )
        )
    return read_text(file, "data.chat_template"), None


def _template_facts(tokenizer: Tokenizer, data: Data) -> str:
    """Return the properties of the chat template that are part of a fingerprint, as JSON."""
    special = sorted(tokenizer.special_tokens.items())
    options = []
    if data.learn_turn_separator:
        options.append("separator")
    if data.turn_end:
        options.append(data.turn_end)
    return json.dumps([*_templates(tokenizer, data), special, FIXED_DATE.isoformat(), *options])


def _fingerprint(form: str, tokenizer: Tokenizer, *facts: str) -> str:
    text = json.dumps([_VERSION, form, tokenizer.fingerprint, *facts])
    return hashlib.sha256(text.encode()).hexdigest()
