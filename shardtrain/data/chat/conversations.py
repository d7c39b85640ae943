"""Conversations to tokens: a chat template writes the text, and what the assistant says in it is learned.

Nothing is added to what the template writes: no bos and no eos, as where the model is served. What the assistant says
is found by the template's own ``{% generation %}`` marks where it has them, and else by comparing what the template
writes for parts of the conversation (``turns.py``). A turn that cannot be found exactly is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardtrain.data.chat.chat_template import ChatTemplate, Span
from shardtrain.data.chat.messages import (
    NO_VARIABLES,
    Message,
    Variables,
    called_functions,
    joined,
    with_object_arguments,
)
from shardtrain.data.chat.turns import Leaf, Turns, replace_texts
from shardtrain.data.documents.columns import UNUSED_KEYS, Unusable, UnusedNames
from shardtrain.data.documents.encoded import Document
from shardtrain.data.tokenizers.open_tokenizer import Ids, Spans, Tokenizer
from shardtrain.utils.log import logger

_STAND_IN = "shardtrain-stands-in-for-a-turn"
_MARKUP = re.compile(r"[<\[◁][^<>\[\]◁▷]*[>\]▷]|(?:^|\s)/\w+")
"""Tags such as </think>, and commands such as /no_think. A template may write them in another form."""
_UNSURE = (
    "the assistant's turn {} cannot be told apart in what the chat template writes; set data.chat_template to a "
    "version that marks what the assistant says with {{% generation %}} and {{% endgeneration %}}: TRL has one of most "
    "published templates in its folder chat_templates"
)


@dataclass(frozen=True)
class Written:
    """A conversation as text, and the characters of it that are learned."""

    text: str
    spans: list[Span]
    exact: bool
    """Whether the template itself marked the spans; others may end in spaces that nobody says."""


def write(
    template: ChatTemplate,
    messages: Sequence[Message],
    variables: Variables = NO_VARIABLES,
    first_learned: int = 0,
) -> Written:
    """Text of a conversation, with the assistant's turns from message ``first_learned`` on.

    Raises:
        Unusable: when the template fails or drops a text, nothing is learned, or a turn cannot be found.
    """
    if not any(message["role"] == "assistant" for message in messages[first_learned:]):
        raise Unusable("the conversation has no turn of the assistant")
    chat, text = _render(template, messages, variables, prompt=False)
    check_nothing_is_dropped(template, chat, variables, text)
    # A template that marks what the assistant says is believed; in all others its turns are searched for.
    if template.marks:
        return _marked(template, chat, variables, first_learned)
    turns = Turns(template, chat, variables, text)
    spans: list[Span] = []
    for i in range(first_learned, len(chat)):
        if chat[i]["role"] == "assistant":
            found = turns.spans(i)
            if not found:
                raise Unusable(_UNSURE.format(i + 1))
            spans += found
    return Written(text, spans, exact=False)


def _render(
    template: ChatTemplate, messages: Sequence[Message], variables: Variables, prompt: bool
) -> tuple[list[Message], str]:
    """Text of a conversation, and the messages as the template wants them."""
    chat = list(messages) if template.reads_parts else [joined(message) for message in messages]
    text = template.render(chat, variables, prompt)
    arguments = [function.get("arguments") for function in called_functions(chat)]
    if any(isinstance(one, str) and json.dumps(one, ensure_ascii=False) in text for one in arguments):
        # the template writes arguments as JSON itself, and would write a text in quotes
        chat = with_object_arguments(chat)
        text = template.render(chat, variables, prompt)
    return chat, text


def find_content_form(template: ChatTemplate) -> None:
    """Find out whether a template reads contents as texts, as lists of parts, or both.

    Templates of vision-language models (SmolVLM, Idefics3) loop over the parts of a content. Over a str they loop as
    well, letter by letter, and write nothing. Other templates write a list as Python does, in quotes.
    """
    texts = [f"{_STAND_IN}-{number}-" for number in range(4)]
    parts = [{"type": "text", "text": text} for text in texts]
    forms: list[tuple[Any, Any]] = [
        ("".join(texts[:2]), "".join(texts[2:])),
        (parts[:1], parts[2:3]),
        (parts[:2], parts[2:]),
    ]
    is_read = []
    for question, answer in forms:
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        written = template.try_render(chat)
        is_whole = all(text in written for text in texts if text in str(chat))
        is_read.append(is_whole and not re.search(f"""['"]{_STAND_IN}""", written))
    reads_text, reads_one_part, template.reads_parts = is_read
    template.content_as_parts = reads_one_part and not reads_text


def check_nothing_is_dropped(template: ChatTemplate, chat: Sequence[Message], variables: Variables, text: str) -> None:
    """Reject a conversation if the template drops a content, a tool call or the last turn's reasoning in ``text``.

    The model would be trained on an empty question, or learn only the ends of its turns. Stand-ins replace the texts,
    because a short text may occur in the conversation for other reasons. The answer depends on the shape of the
    conversation, so each shape is rendered once. Then the texts themselves are searched in ``text``, because a template
    may cut some of them. Reasoning of earlier turns may be dropped: many templates do so.

    Raises:
        Unusable: names the turn.
    """
    others = {name: value for name, value in variables.items() if name != "tools"}
    replaced, leaves = replace_texts(chat, arguments=True)
    shape = (
        bool(variables.get("tools")),
        json.dumps(others, sort_keys=True),
        *(message["role"] for message in chat),
        *((name, bool(leaf.value.strip())) for name, leaf in leaves.items()),
    )
    last = len(chat) - 1
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.kind != "reasoning" or leaf.turn == last}
    if shape not in template.dropped:
        template.dropped[shape] = _find_dropped(template, replaced, variables, wanted)
    if reason := template.dropped[shape]:
        raise Unusable(f"the chat template drops {reason}; use one that writes it")

    squeezed = _squeeze(text)
    for leaf in wanted.values():
        is_earlier = chat[leaf.turn]["role"] == "assistant" and leaf.turn < last
        if leaf.kind != "argument" and not _is_written(leaf.value, squeezed, only_end=is_earlier):
            raise Unusable(f"the chat template drops a part of {leaf.description}; use one that writes it")


def _find_dropped(
    template: ChatTemplate, replaced: list[Message], variables: Variables, wanted: dict[str, Leaf]
) -> str:
    """Describe the first text that the template does not write, or return ""."""
    # A template that raises on the stand-ins renders as "". It inspects the names of calls or the contents, so assume
    # that it also writes them.
    text = template.try_render(replaced, variables)
    missing = (leaf for name, leaf in wanted.items() if text and leaf.value.strip() and name not in text)
    return next((leaf.description for leaf in missing), "")


def _is_written(value: str, squeezed: str, only_end: bool) -> bool:
    """True if a squeezed text contains a value, markup and spaces aside. ``only_end``: what follows its last markup.

    A template may drop the beginning of an earlier answer, where the reasoning is.
    """
    for form in (value, json.dumps(value, ensure_ascii=False)):  # templates write some results of tools as JSON
        place = 0
        for piece in _MARKUP.split(form.strip('"'))[-1 if only_end else 0 :]:
            place = squeezed.find(_squeeze(piece), place)
            if place < 0:
                break
        else:
            return True
    return False


def _squeeze(text: str) -> str:
    """Remove spaces and case."""
    return "".join(text.casefold().split())


def _marked(template: ChatTemplate, chat: list[Message], variables: Variables, first_learned: int) -> Written:
    text, spans = template.render_marked(chat, variables)
    # Of a prompt and its completion the marks within the prompt do not count. The prompt is what the template writes of
    # it alone, with the words that an answer follows or, where the completion begins with another turn, without.
    if first_learned:
        given = chat[:first_learned]
        starts = (template.render(given, variables, prompt=prompt) for prompt in (True, False))
        before = next((len(start) for start in starts if text.startswith(start)), None)
        if before is None:
            raise Unusable("the chat template writes the prompt in another way once its completion is there")
        spans = [span for span in spans if span[0] >= before]
    if not any(stop > start for start, stop in spans):
        raise Unusable("the chat template's {% generation %} marks enclose nothing in this conversation")
    return Written(text, spans, exact=True)


def with_turn_end(written: Written, end: str) -> Written:
    """Let the assistant learn ``end`` after each turn: it is appended to the last turn, and must follow other turns.

    Text is not inserted after earlier turns, because the prompts of generation have none there.
    """
    text = written.text
    spans = []
    for start, stop in written.spans:
        if not text[stop:].strip():
            text = text[:stop] + end + text[stop:]
        spans.append((start, stop + len(end) if text.startswith(end, stop) else stop))
    return replace(written, text=text, spans=spans)


class Conversations:
    """Conversations to documents, by one tokenizer and its templates."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        tool_template: ChatTemplate | None = None,
        learn_separator: bool = False,
        turn_end: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._tool_template = tool_template
        self._learn_separator = learn_separator
        self._turn_end = turn_end
        for one in (template, tool_template):
            if one is not None:
                find_content_form(one)
        self._special = np.array(sorted(tokenizer.special_ids), dtype=np.int32)
        self._logged_ending = False
        self._unused = UnusedNames("key of messages", UNUSED_KEYS)

    def write(self, messages: Sequence[Message], variables: Variables, first_learned: int = 0) -> Written:
        """Render a conversation and find its learned turns; see the function ``write``."""
        self._unused.warn(messages)
        written = write(self._template_of(variables), messages, variables, first_learned)
        return with_turn_end(written, self._turn_end) if self._turn_end else written

    def prompt(self, messages: Sequence[Message], variables: Variables = NO_VARIABLES) -> Ids:
        """Tokens of a conversation up to the words that an answer of the assistant follows.

        Raises:
            Unusable: when the template fails, or nothing is left to answer.
        """
        if messages[-1]["role"] == "assistant":
            raise Unusable("the conversation ends with the assistant's turn, which leaves nothing to answer")
        template = self._template_of(variables)
        chat, text = _render(template, messages, variables, prompt=True)
        check_nothing_is_dropped(template, chat, variables, text)
        return self._tokenizer.encode_spans([text])[0][0]

    def turn_end(self) -> int | None:
        """Return the special token that ends an answer, by the template or by ``data.turn_end``; None without one."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _STAND_IN}]
        text = self._template.try_render(chat)
        after = (text.rpartition(_STAND_IN)[2] if _STAND_IN in text else "") + self._turn_end
        tokens = self._tokenizer.encode_spans([after])[0][0].tolist()
        return next((token for token in tokens if token in self._tokenizer.special_ids), None)

    def _template_of(self, variables: Variables) -> ChatTemplate:
        return self._tool_template if variables.get("tools") and self._tool_template is not None else self._template

    def documents(self, written: Sequence[Written]) -> list[Document]:
        """Tokens of conversations, and which are learned; one without a learned token has a mask of nothing."""
        if not self._logged_ending and self.turn_end() is None:
            self._logged_ending = True
            example = self._tokenizer.special_tokens.get("eos_token", "</s>")
            logger.warning(
                "the chat template ends a turn of the assistant with no special token, so the model does not learn "
                f"where to stop; add one with data.turn_end, such as {example!r}"
            )
        encoded = self._tokenizer.encode_spans([one.text for one in written]) if written else []
        return [
            Document(tokens, self._learned(one, tokens, spans))
            for one, (tokens, spans) in zip(written, encoded, strict=True)
        ]

    def _learned(self, written: Written, tokens: npt.NDArray[np.int32], spans: Spans) -> npt.NDArray[np.bool_]:
        """Tokens that have a character within a learned span."""
        learned = np.zeros(len(tokens), dtype=np.bool_)
        starts = spans[:, 0]
        stops = spans[:, 1]
        special = np.isin(tokens, self._special)
        text = written.text
        for start, stop in written.spans:
            # A token without characters of its own, such as a space put in front, goes with what follows it.
            inside = (starts < stop) & ((stops > start) | ((stops == start) & (starts == start)))
            special_inside = np.flatnonzero(inside & special)
            if not written.exact:
                # A template may write a line end after the token that ends a turn. Generation stops before it.
                ends = len(special_inside) and not self._learn_separator
                if ends and not text[stops[special_inside[-1]] : stop].strip():
                    inside[special_inside[-1] + 1 :] = False
            elif not len(special_inside) and not self._logged_ending:
                # The template's own marks are kept to; a warning says where they leave out the token that ends a turn.
                special_behind = np.flatnonzero(special & (starts >= stop))
                end = special_behind[0] if len(special_behind) else None
                if end is not None and not text[stop : starts[end]].strip():
                    self._logged_ending = True
                    logger.warning(
                        f"the chat template's {{% generation %}} marks leave out the {text[starts[end] : stops[end]]} "
                        "that ends a turn, so that the model does not learn to end one; put it within the marks"
                    )
            learned |= inside
        return learned
