"""Convert conversations to tokens: a chat template renders the text, and the assistant's turns are learned.

As in inference servers, BOS and EOS are not added to the rendered text. The template's ``{% generation %}``
marks show where the assistant's turns are. Without marks, ``turns.py`` renders parts of the conversation
and compares the results. A turn that cannot be found exactly is an error.
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

_PLACEHOLDER = "shardtrain-placeholder-of-a-turn"
_MARKUP = re.compile(r"[<\[◁][^<>\[\]◁▷]*[>\]▷]|(?:^|\s)/\w+")
"""Tags such as </think>, and commands such as /no_think. A template may write them differently."""
_UNSURE = (
    "the assistant's turn {} cannot be located in the output of the chat template; set data.chat_template to a version "
    "that marks the assistant's text with {{% generation %}} and {{% endgeneration %}} (TRL has versions of most "
    "published templates in its folder chat_templates)"
)


@dataclass(frozen=True)
class Written:
    """A rendered conversation, and the character ranges that are learned."""

    text: str
    spans: list[Span]
    exact: bool
    """True if the template itself marked the ranges.

    Otherwise a range may end with whitespace that is not part of the assistant's answer.
    """


def write(
    template: ChatTemplate,
    messages: Sequence[Message],
    variables: Variables = NO_VARIABLES,
    first_learned: int = 0,
) -> Written:
    """Render a conversation, and find the assistant's turns from message ``first_learned`` on.

    Raises:
        Unusable: the template fails or drops a text, nothing is learned, or a turn cannot be found.
    """
    if not any(message["role"] == "assistant" for message in messages[first_learned:]):
        raise Unusable("the conversation has no turn of the assistant")
    chat, text = _render(template, messages, variables, prompt=False)
    check_nothing_is_dropped(template, chat, variables, text)
    # Use the template's own marks if it has some. Otherwise search for the turns.
    if template.marks:
        return _marked(template, chat, variables, first_learned)
    turns = Turns(template, chat, variables, text)
    spans: list[Span] = []
    for i in range(first_learned, len(chat)):
        if chat[i]["role"] != "assistant":
            continue
        turn_spans = turns.spans(i)
        if not turn_spans:
            raise Unusable(_UNSURE.format(i + 1))
        spans += turn_spans
    return Written(text, spans, exact=False)


def _render(
    template: ChatTemplate, messages: Sequence[Message], variables: Variables, prompt: bool
) -> tuple[list[Message], str]:
    """Return the messages in the form that the template reads, and the rendered text."""
    if not template.reads_parts and any(map(_num_images, messages)):
        raise Unusable(
            "the chat template does not read images; set data.chat_template to one that does"
        )
    chat = list(messages) if template.reads_parts else [joined(message) for message in messages]
    text = template.render(chat, variables, prompt)
    # Some templates convert arguments to JSON themselves. They would write a JSON text as a quoted string.
    # Then pass objects instead.
    for function in called_functions(chat):
        arguments = function.get("arguments")
        if isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False) in text:
            chat = with_object_arguments(chat)
            return chat, template.render(chat, variables, prompt)
    return chat, text


def find_content_form(template: ChatTemplate) -> None:
    """Test if a template supports a message's content as a text, as a list of parts, or both.

    Sets ``template.reads_parts`` and ``template.content_as_parts``. Templates of vision-language models
    (SmolVLM, Idefics3) loop over the parts of a content. If the content is a str, they loop over its
    characters and write nothing. Templates that expect a str would write a list in Python's notation,
    with quotes.
    """
    texts = [f"{_PLACEHOLDER}-{number}-" for number in range(4)]
    parts = [{"type": "text", "text": text} for text in texts]
    # the contents of a question and its answer: as texts, as one part each, and as two parts each
    forms: list[tuple[Any, Any]] = [
        (texts[0] + texts[1], texts[2] + texts[3]),
        (parts[:1], parts[2:3]),
        (parts[:2], parts[2:]),
    ]
    # Render each form. A form is supported if all its texts are written, and not as a quoted Python string.
    is_read = []
    for question, answer in forms:
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        written = template.try_render(chat)
        in_chat = [text for text in texts if text in str(chat)]
        is_complete = all(text in written for text in in_chat)
        has_quotes = re.search(f"""['"]{_PLACEHOLDER}""", written)
        is_read.append(is_complete and not has_quotes)
    reads_text, reads_one_part, template.reads_parts = is_read
    template.content_as_parts = reads_one_part and not reads_text


def check_nothing_is_dropped(
    template: ChatTemplate, chat: Sequence[Message], variables: Variables, text: str
) -> None:
    """Check that ``text``, the rendered conversation, contains all texts of the conversation.

    These are the content of each turn, the tool calls, and the reasoning of the last turn. (Many templates
    drop the reasoning of earlier turns.) If the template drops a text, the model would be trained on an
    empty question or answer.

    There are two tests. The first test renders the conversation with unique placeholders instead of its
    texts, because a short text could also occur elsewhere. Its result depends only on the shape of the
    conversation, so each shape is rendered once. The second test searches ``text`` for the real texts,
    because a template may truncate them.

    Raises:
        Unusable: a text is missing. The message names its turn.
    """
    others = {name: value for name, value in variables.items() if name != "tools"}
    replaced, leaves = replace_texts(chat, arguments=True)
    # Check each shape of conversation once. Conversations have the same shape if their roles are the same
    # and the same turns have a non-empty text.
    has_text = {name: bool(leaf.value.strip()) for name, leaf in leaves.items()}
    roles = [(message["role"], _num_images(message)) for message in chat]
    shape = (
        bool(variables.get("tools")),
        json.dumps(others, sort_keys=True),
        *roles,
        *has_text.items(),
    )
    last = len(chat) - 1
    # A template may drop the reasoning of all turns except the last one.
    wanted = {}
    for name, leaf in leaves.items():
        if leaf.kind != "reasoning" or leaf.turn == last:
            wanted[name] = leaf
    if shape not in template.dropped:
        template.dropped[shape] = _find_dropped(template, replaced, variables, wanted)
    if reason := template.dropped[shape]:
        raise Unusable(f"the chat template drops {reason}; use a template that writes it")

    squeezed = _squeeze(text)
    for leaf in wanted.values():
        # Templates format arguments of tool calls in many ways, so their text is not searched.
        if leaf.kind == "argument":
            continue
        is_earlier = chat[leaf.turn]["role"] == "assistant" and leaf.turn < last
        if not _is_written(leaf.value, squeezed, only_end=is_earlier):
            raise Unusable(
                f"the chat template drops a part of {leaf.description}; use a template that writes it"
            )


def _num_images(message: Message) -> int:
    """Return the number of parts of a content that are images."""
    content = message.get("content")
    if not isinstance(content, list):
        return 0
    return sum(part.get("type") == "image" for part in content)


def _find_dropped(
    template: ChatTemplate, replaced: list[Message], variables: Variables, wanted: dict[str, Leaf]
) -> str:
    """Describe the first text that the template does not write, or return ""."""
    # If the template raises an error, ``text`` is "". It probably inspects the texts and rejects
    # placeholders, so this test is not possible.
    text = template.try_render(replaced, variables)
    if not text:
        return ""
    for name, leaf in wanted.items():
        if leaf.value.strip() and name not in text:
            return leaf.description
    return ""


def _is_written(value: str, squeezed: str, only_end: bool) -> bool:
    """True if the text ``squeezed`` (see ``_squeeze``) contains a value, apart from markup and whitespace.

    With ``only_end``, the part after the value's last markup is enough. This is for earlier answers, which
    may begin with reasoning that a template may drop.
    """
    # Templates write some results of tools as JSON.
    for form in (
        value,
        json.dumps(value, ensure_ascii=False),
    ):
        place = 0
        pieces = _MARKUP.split(form.strip('"'))
        if only_end:
            pieces = pieces[-1:]
        for piece in pieces:
            place = squeezed.find(_squeeze(piece), place)
            if place < 0:
                break
        else:
            return True
    return False


def _squeeze(text: str) -> str:
    """Remove whitespace and convert to lower case, for comparisons."""
    return "".join(text.casefold().split())


def _marked(
    template: ChatTemplate, chat: list[Message], variables: Variables, first_learned: int
) -> Written:
    """Render a conversation, and return the ranges that the template marks, except ranges in the prompt."""
    text, spans = template.render_marked(chat, variables)
    # Ignore marks inside the prompt. To find where the prompt ends, render it alone: with the generation
    # prompt, or without it if the completion begins with another role.
    if first_learned:
        given = chat[:first_learned]
        starts = (template.render(given, variables, prompt=prompt) for prompt in (True, False))
        before = next((len(start) for start in starts if text.startswith(start)), None)
        if before is None:
            raise Unusable(
                "the chat template renders the prompt differently when the completion follows"
            )
        spans = [span for span in spans if span[0] >= before]
    if not any(stop > start for start, stop in spans):
        raise Unusable(
            "the chat template's {% generation %} marks enclose nothing in this conversation"
        )
    return Written(text, spans, exact=True)


def with_turn_end(written: Written, end: str) -> Written:
    """Make the model learn the token ``end`` at the end of turns.

    ``end`` is appended to the last turn. It is not inserted after earlier turns, because prompts in
    generation do not contain it there.
    If the template itself has written it after an earlier turn, it is learned there too.
    """
    text = written.text
    spans = []
    for start, stop in written.spans:
        is_last_turn = not text[stop:].strip()
        if is_last_turn:
            text = text[:stop] + end + text[stop:]
        if text.startswith(end, stop):
            stop += len(end)
        spans.append((start, stop))
    return replace(written, text=text, spans=spans)


class Conversations:
    """Converts conversations to documents, with one tokenizer and its templates."""

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

    def write(
        self, messages: Sequence[Message], variables: Variables, first_learned: int = 0
    ) -> Written:
        """Render a conversation and find its learned turns; see the function ``write``."""
        self._unused.warn(messages)
        written = write(self._template_of(variables), messages, variables, first_learned)
        return with_turn_end(written, self._turn_end) if self._turn_end else written

    def prompt(self, messages: Sequence[Message], variables: Variables = NO_VARIABLES) -> Ids:
        """Return the tokens of a conversation with the generation prompt. Raises what ``prompt_text`` raises."""
        ids, _ = self._tokenizer.encode_spans([self.prompt_text(messages, variables)])[0]
        return ids

    def prompt_text(self, messages: Sequence[Message], variables: Variables = NO_VARIABLES) -> str:
        """Render a conversation with the generation prompt.

        Raises:
            Unusable: the template fails, or the conversation ends with the assistant's turn.
        """
        if messages[-1]["role"] == "assistant":
            raise Unusable(
                "the conversation ends with the assistant's turn, so there is nothing to generate"
            )
        template = self._template_of(variables)
        chat, text = _render(template, messages, variables, prompt=True)
        check_nothing_is_dropped(template, chat, variables, text)
        return text

    def turn_end(self) -> int | None:
        """Return the special token that ends an answer, from the template or ``data.turn_end``, or None."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
        text = self._template.try_render(chat)
        after_answer = ""
        if _PLACEHOLDER in text:
            after_answer = text.rpartition(_PLACEHOLDER)[2]
        ids, _ = self._tokenizer.encode_spans([after_answer + self._turn_end])[0]
        return next((token for token in ids.tolist() if token in self._tokenizer.special_ids), None)

    def _template_of(self, variables: Variables) -> ChatTemplate:
        if variables.get("tools") and self._tool_template is not None:
            return self._tool_template
        return self._template

    def documents(self, written: Sequence[Written]) -> list[Document]:
        """Tokenize conversations. Return documents with a mask of the learned tokens.

        The mask may be False everywhere.
        """
        if not self._logged_ending and self.turn_end() is None:
            self._logged_ending = True
            example = self._tokenizer.special_tokens.get("eos_token", "</s>")
            logger.warning(
                "the chat template ends the assistant's turn without a special token, so the model does not learn "
                f"where to stop; add one with data.turn_end, such as {example!r}"
            )
        if not written:
            return []
        encoded = self._tokenizer.encode_spans([conversation.text for conversation in written])
        documents = []
        for conversation, (tokens, spans) in zip(written, encoded, strict=True):
            documents.append(Document(tokens, self._learned(conversation, tokens, spans)))
        return documents

    def _learned(
        self, written: Written, tokens: npt.NDArray[np.int32], spans: Spans
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of the learned tokens. They have at least one character in a learned range."""
        learned = np.zeros(len(tokens), dtype=np.bool_)
        starts = spans[:, 0]
        stops = spans[:, 1]
        special = np.isin(tokens, self._special)
        text = written.text
        for start, stop in written.spans:
            # A token without characters, such as a space that the tokenizer has inserted, is learned if the
            # text after it is.
            is_empty_at_start = (stops == start) & (starts == start)
            inside = (starts < stop) & ((stops > start) | is_empty_at_start)
            special_inside = np.flatnonzero(inside & special)
            if not written.exact:
                # Do not learn whitespace after the end token, because generation stops at the end token.
                ends = len(special_inside) and not self._learn_separator
                if ends and not text[stops[special_inside[-1]] : stop].strip():
                    inside[special_inside[-1] + 1 :] = False
            elif not len(special_inside) and not self._logged_ending:
                # Use the template's own marks as they are, but warn if they exclude the end token of a turn.
                special_behind = np.flatnonzero(special & (starts >= stop))
                end = special_behind[0] if len(special_behind) else None
                if end is not None and not text[stop : starts[end]].strip():
                    self._logged_ending = True
                    logger.warning(
                        f"the chat template's {{% generation %}} marks exclude the end token "
                        f"{text[starts[end] : stops[end]]}, so the model does not learn to end a turn; include it"
                    )
            learned |= inside
        return learned
