"""Find the assistant's turns in the text that a chat template renders, if the template does not mark them.

Two methods are tried for each turn:

1. Growth: render the conversation up to and including the turn, and again without the turn. If the longer
   text begins with the shorter text, the rest is the turn.
2. Placeholders: render the conversation with a unique placeholder instead of each text. This shows the
   gaps, which are the template's own text between two messages. A gap contains the end of one turn and the
   beginning of the next. To divide the gap, compare it with the text that the template writes after the
   last message of a shorter conversation.

The second method also finds turns that a template renders differently if later turns follow, such as thinking
blocks, or an end token only after the last turn. It also finds a turn with several parts, such as a tool
call, the tool's result, and the content.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import NamedTuple

from shardtrain.data.chat.chat_template import ChatTemplate, Span
from shardtrain.data.chat.messages import REASONING, Message, Variables, called_functions

_PLACEHOLDER = "shardtrain-placeholder-"
_PLACEHOLDERS = re.compile(f"({_PLACEHOLDER}[a-z]+-[0-9]+-(?:[0-9]+-)?)")
_PLAIN = {"role": "assistant", "content": f"{_PLACEHOLDER}plain-0-"}
_PIECES = re.compile(r"(<[^<>]*>|\s)")
"""Special tokens such as <|im_end|>, and whitespace. A gap is divided only between such pieces."""


class Leaf(NamedTuple):
    """A text in a message that a placeholder replaces."""

    turn: int
    kind: str
    value: str

    @property
    def description(self) -> str:
        """Description of the text for error messages."""
        kinds = {"call": "the tool call", "argument": "an argument of the tool calls"}
        return f"{kinds.get(self.kind, f'the {self.kind}')} of turn {self.turn + 1}"


class _Place(NamedTuple):
    """Where a message's text is in the rendered conversation: the characters ``[start, stop)``."""

    placeholder: str
    turn: int
    kind: str
    start: int
    stop: int


def replace_texts(
    chat: Sequence[Message], arguments: bool = False
) -> tuple[list[Message], dict[str, Leaf]]:
    """Replace the content, the reasoning and the names of called tools in each message by placeholders.

    Each part of a content gets a separate placeholder, and so do a thinking block and the answer after it. If
    ``arguments`` is True, arguments of tool calls are replaced too.

    Returns:
        A copy of the conversation, and a mapping from each placeholder to the text that it replaces.
    """
    leaves: dict[str, Leaf] = {}

    def add_placeholder(turn: int, kind: str, value: str) -> str:
        name = f"{_PLACEHOLDER}{kind}-{turn}-{len(leaves)}-"
        leaves[name] = Leaf(turn, kind, value)
        return name

    replaced: list[Message] = []
    for turn, message in enumerate(chat):
        message = copy.deepcopy(message)
        parts = message.get("content", "")
        content = parts if isinstance(parts, str) else ""
        thinking = _split_thinking(content) if message["role"] == "assistant" else None
        if thinking:
            # Keep the whitespace around thought and answer, because templates may split the content there. An
            # answer that consists of whitespace is replaced entirely.
            opening, thought, answer = thinking
            reasoning = add_placeholder(turn, "reasoning", thought.strip())
            thought = thought.replace(thought.strip(), reasoning, 1)
            answer = answer.replace(
                answer.strip() or answer, add_placeholder(turn, "content", answer), 1
            )
            message["content"] = f"{opening}<think>{thought}</think>{answer}"
        elif isinstance(parts, list):
            for part in parts:
                # an image has no text
                if "text" in part:
                    part["text"] = add_placeholder(turn, "content", part["text"])
        elif content.strip() or "tool_calls" not in message:
            message["content"] = add_placeholder(turn, "content", content)
        # Replace reasoning in a separate field, and tool calls.
        if message.get("reasoning_content"):
            message |= dict.fromkeys(
                REASONING, add_placeholder(turn, "reasoning", message["reasoning_content"])
            )
        for function in called_functions([message]):
            function["name"] = add_placeholder(turn, "call", function["name"])
            given = function.get("arguments") if arguments else None
            if isinstance(given, str):
                function["arguments"] = add_placeholder(turn, "argument", given)
            elif isinstance(given, dict):
                replaced_arguments = {}
                for key, value in given.items():
                    replaced_arguments[key] = add_placeholder(turn, "argument", str(value))
                function["arguments"] = replaced_arguments
        replaced.append(message)
    return replaced, leaves


def _split_thinking(content: str) -> tuple[str, str, str] | None:
    """Split a content into the whitespace before its thinking block, the thought, and the answer after it.

    None if the content does not begin with a thinking block, or if the block is empty.
    """
    before, closing, answer = content.partition("</think>")
    whitespace, _, thought = before.partition("<think>")
    has_block = closing and thought.strip() and not whitespace.strip()
    if not has_block:
        return None
    return whitespace, thought, answer


class Turns:
    """Finds the turns of one conversation in its rendered text."""

    def __init__(
        self, template: ChatTemplate, chat: list[Message], variables: Variables, text: str
    ) -> None:
        self._template = template
        self._chat = chat
        self._variables = variables
        self._text = text
        self._places: list[_Place] | None = None
        self._replaced: list[Message] = []
        self._header = ""
        """The generation prompt."""

    def spans(self, turn: int) -> list[Span]:
        """Return the character ranges of an assistant's turn, without its generation prompt. [] if unknown."""
        grown = self._by_growth(turn)
        return [grown] if grown else self._by_placeholders(turn)

    def _by_growth(self, turn: int) -> Span | None:
        """Return the text range that the turn adds. None if the turn also changes the text before it."""
        before = self._chat[:turn]
        prompt = self._rendered(before, prompt=True)
        grown = self._rendered(self._chat[: turn + 1])
        is_growth = self._text.startswith(grown) and grown.startswith(prompt)
        if not is_growth or not len(grown) > len(prompt) > 0:
            return None
        span = (len(prompt), len(grown))
        # If the template has no generation prompt, the added text may begin with the speaker's name, which
        # must not be learned. So render a placeholder as the answer, and test that it follows the prompt
        # directly. The real answer cannot be used, because it could begin with the name.
        plain = self._rendered([*before, _PLAIN])
        follows_prompt = plain.startswith(prompt) and plain[len(prompt) :].lstrip().startswith(
            _PLACEHOLDER
        )
        if follows_prompt:
            return span
        has_generation_prompt = prompt != self._rendered(before)
        return span if has_generation_prompt else None

    def _by_placeholders(self, turn: int) -> list[Span]:
        if self._places is None:
            self._replaced, leaves = replace_texts(self._chat)
            self._places = _align(self._rendered(self._replaced), leaves, self._chat, self._text)
            # The header is the text that a generation prompt adds before the first answer.
            roles = [message["role"] for message in self._chat]
            before_answer = self._replaced[: roles.index("assistant")]
            with_prompt = self._rendered(before_answer, prompt=True)
            without_prompt = self._rendered(before_answer)
            self._header = with_prompt[_common(with_prompt, without_prompt) :]
        # Go through the places with the place before and the place after each.
        neighbours = [None, *self._places, None]
        spans: list[Span] = []
        for before, place, after in zip(neighbours, self._places, neighbours[2:], strict=False):
            if place.turn != turn:
                continue
            # Join neighbouring parts of the same turn to one span.
            stop = place.stop
            if not (after and after.turn == turn):
                stop = self._stop(place, after)
            if before and before.turn == turn:
                start, _ = spans.pop()
            else:
                start = self._start(before, place, is_first=not spans)
            if start < 0 or stop < 0:
                return []
            spans.append((start, stop))
        return spans

    def _start(self, before: _Place | None, place: _Place, is_first: bool) -> int:
        """Return the offset at which a part of a turn starts, after the generation prompt. -1 if unknown."""
        begin = 0 if before is None else before.stop
        gap = self._text[begin : place.start]
        prompt = self._tail(before, place.turn, prompt=True)
        if is_first and self._header and prompt is not None:
            shared = _common(gap, prompt)
            # Some templates write a generation prompt only before some answers.
            if gap.startswith(self._header, shared):
                shared += len(self._header)
            if shared or not prompt:
                return begin + shared
        if is_first and prompt and gap.startswith(prompt) and gap[len(prompt) :].isspace():
            # The template writes nothing but whitespace between the prompt and the answer.
            return begin + len(prompt)
        if place.kind == "content":
            return place.start
        # The turn begins with a thinking block or a tool call. Its header is the text that the template would
        # write before a plain answer at this position.
        header = self._tail(before, place.turn, more=[_PLAIN])
        return begin + len(header) if header and gap.startswith(header) else -1

    def _stop(self, place: _Place, after: _Place | None) -> int:
        """Return the offset at which a part of a turn stops, after the text that ends the turn. -1 if unknown."""
        if after is None:
            return len(self._text)
        gap = self._text[place.stop : after.start]
        ending = self._tail(place, place.turn + 1)
        shared = _common(gap, ending or "")
        if not shared and ending and gap:
            # The last turn of a conversation may end differently from earlier turns. Earlier turns may end
            # like earlier messages of another role, so try their endings.
            last_of_role = {}
            for other in self._places or []:
                if other.turn < place.turn and other.kind == "content":
                    last_of_role[self._chat[other.turn]["role"]] = other
            for other in last_of_role.values():
                shared = _common(gap, self._tail(other, other.turn + 1) or "")
                if shared:
                    break
        is_known = shared or ending == "" or gap in ("", self._header)
        return place.stop + shared if is_known else -1

    def _tail(
        self,
        place: _Place | None,
        num_turns: int,
        prompt: bool = False,
        more: Sequence[Message] = (),
    ) -> str | None:
        """Return the template's own text after a place in a shorter conversation, up to the next placeholder.

        Without a place, return the text before the first placeholder.
        None if the place's text does not occur.

        Args:
            place: a message's text.
            num_turns: number of turns of the shorter conversation.
            prompt: True to append the generation prompt.
            more: further messages of the shorter conversation.
        """
        text = self._rendered([*self._replaced[:num_turns], *more], prompt)
        rest = text
        if place:
            _, placeholder, rest = text.partition(place.placeholder)
            if not placeholder:
                return None
            # The template may write the name of a called tool twice.
            rest = rest.replace(place.placeholder, self._text[place.start : place.stop])
        elif not text:
            return None
        return _PLACEHOLDERS.split(rest)[0]

    def _rendered(self, chat: list[Message], prompt: bool = False) -> str:
        return self._template.try_render(chat, self._variables, prompt)


def _align(skeleton: str, leaves: dict[str, Leaf], chat: list[Message], text: str) -> list[_Place]:
    """Find the messages' texts in the rendered conversation ``text``.

    ``skeleton`` is the conversation rendered with placeholders. Return [] if ``text`` does not contain the
    same fixed texts. A template may strip the assistant's texts or drop their beginning. It may change all
    other texts in any way.
    """
    # The skeleton is fixed text, placeholder, fixed text, placeholder, ..., fixed text.
    first, *rest = _PLACEHOLDERS.split(skeleton)
    names = rest[::2]
    places: list[_Place] = []
    place = len(first)
    if not text.startswith(first):
        return []
    for number, (name, fixed) in enumerate(zip(names, rest[1::2], strict=True)):
        turn, kind, value = leaves[name]
        is_last = number == len(names) - 1
        # Find the end of the value. The last value ends at the fixed text at the end of ``text``. Any other
        # value ends after one of its known forms, or else at the next occurrence of the fixed text.
        forms = (value, value.strip(), value.lstrip(), value.rstrip())
        lengths = [len(form) for form in forms if text.startswith(form + fixed, place)]
        stop = -1
        if is_last:
            if text.endswith(fixed):
                stop = len(text) - len(fixed)
        elif lengths:
            stop = place + lengths[0]
        elif fixed:
            stop = text.find(fixed, place)
        is_changed = chat[turn]["role"] == "assistant" and text[place:stop].strip() not in value
        if stop < place or is_changed:
            return []
        # The name of a tool is written again with its result.
        if kind != "call" or name not in names[:number]:
            places.append(_Place(name, turn, kind, place, stop))
        place = stop + len(fixed)
    return places


def _common(gap: str, reference: str) -> int:
    """Return the length of the longest common prefix of two texts that ends between pieces (see ``_PIECES``)."""
    if gap.startswith(reference):
        return len(reference)
    length = 0
    for piece, other in zip(_PIECES.split(gap), _PIECES.split(reference), strict=False):
        if piece != other:
            break
        length += len(piece)
    return length
