"""Chat templates: Jinja in a sandbox, with what Hugging Face's templates expect and nothing that changes by the day."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from shardtrain.data.chat.jinja_sandbox import MAX_CHARACTERS, Work, bounded, deep_size, sandbox
from shardtrain.data.chat.messages import NO_VARIABLES, Message
from shardtrain.data.documents.columns import Unusable
from shardtrain.utils import libraries
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

Span = tuple[int, int]

FIXED_DATE = datetime(2024, 7, 26)
"""What ``strftime_now`` tells. The clock would give other tokens every day; this is the date that Llama 3's own
template falls back to."""

# Noncharacters of Unicode, which no text has: they mark the {% generation %} blocks and are taken out again.
_OPEN = "\ufdd0"
_CLOSE = "\ufdd1"
_SAFE_JINJA = (3, 1, 6)  # older ones have known ways out of the sandbox
_LONGEST_REASON = 200


class ChatTemplate:
    """A compiled template. What it writes depends on its arguments alone.

    Rendering is bounded: see ``jinja_sandbox.py``.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str], file: str | None = None) -> None:
        """``file`` is the value of data.chat_template; None for a tokenizer's own template."""
        self.marks = False
        """Whether the template marks what the assistant says with {% generation %}."""
        self.reads_parts = False
        """True if the template reads a content that is a list of parts. Set by ``chat.find_content_form``."""
        self.content_as_parts = False
        """True to pass each content as ``[{"type": "text", "text": ...}]``, for templates that read only this form."""
        self.dropped: dict[tuple[Any, ...], str] = {}
        """By shape of conversation: what the template drops of it, or "". See ``chat.check_nothing_is_dropped``."""
        self._special_tokens = dict(special_tokens)
        self._marking = False
        self._work = Work()
        self._logged_date = False
        self._template = self._compile(text, file)

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES, prompt: bool = False
    ) -> str:
        """Render a conversation. ``prompt`` adds what the assistant's answer follows.

        ``variables`` are the tools and further variables of the row, see ``messages.template_variables``.

        Raises:
            Unusable: when the template refuses the conversation or fails on it.
        """
        return self._write(messages, variables, prompt)

    def try_render(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES, prompt: bool = False
    ) -> str:
        """Render a conversation, or return "" if the template refuses it: some reject half a conversation."""
        try:
            return self._write(messages, variables, prompt)
        except Unusable:
            return ""

    def render_marked(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES
    ) -> tuple[str, list[Span]]:
        """Text of a conversation, and the characters of its {% generation %} blocks.

        Raises:
            Unusable: as ``render``, and when the template works on what it has marked, so that the place is unsure.
        """
        # Rendered twice, without marks and with them: they are taken out again, and must have changed nothing else.
        plain = self._write(messages, variables, prompt=False)
        if _OPEN in plain or _CLOSE in plain:
            raise Unusable("has the noncharacter U+FDD0 or U+FDD1, by which the assistant's turns are marked")
        self._marking = True
        try:
            marked = self._write(messages, variables, prompt=False)
        finally:
            self._marking = False
        unmarked, spans = _take_out(marked)
        if unmarked != plain:
            raise Unusable(
                "the chat template changes what its {% generation %} marks enclose, so their place is unsure"
            )
        return plain, spans

    def _write(self, messages: Sequence[Message], variables: Mapping[str, Any], prompt: bool) -> str:
        # Written piece by piece, so that one that would fill the memory is stopped on the way.
        self._work.begin()
        pieces: list[str] = []
        size = 0
        chat = [_with_parts(message) for message in messages] if self.content_as_parts else list(messages)
        defaults = {**self._special_tokens, "tools": None, "documents": None}
        try:
            for piece in self._template.generate(
                {**defaults, **variables, "messages": chat, "add_generation_prompt": prompt}
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise Unusable(f"the chat template writes more than {MAX_CHARACTERS} characters")
        except (Unusable, MemoryError):
            raise
        except Exception as error:  # a template can fail in any way that Python code can
            lines = str(error).strip().splitlines()
            reason = lines[0][:_LONGEST_REASON] if lines else type(error).__name__
            raise Unusable(f"the chat template refuses the conversation: {reason}") from error
        return "".join(pieces)

    def _compile(self, text: str, file: str | None) -> Any:
        option = "data.chat_template"
        jinja2 = libraries.load("jinja2", option)
        loopcontrols = libraries.load("jinja2.ext", option).loopcontrols
        # The sandbox is only as good as Jinja's own.
        version = importlib.metadata.version("jinja2")
        if tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < _SAFE_JINJA:
            rule = f"needs jinja2 3.1.6, whose sandbox holds; here is {version}"
            raise ConfigError(Problem(option, None, rule, "pip install -U jinja2"))

        # What templates of Hugging Face's expect beside Jinja's own words, each with its work counted.
        environment = sandbox(self._work, _generation_tag(self), loopcontrols)
        environment.filters["tojson"] = bounded(_tojson, self._work, 4)
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "range": self._range,
        }
        try:
            return environment.from_string(text)
        except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError, MemoryError) as error:
            where = "it nests too deeply"
            if isinstance(error, jinja2.TemplateSyntaxError):
                where = f"line {error.lineno}: {error.message}"
            elif isinstance(error, SyntaxError):  # Python's own, of the code that Jinja makes of a template
                where = str(error.msg)
            rule = f"is not a Jinja template ({where})"
            if file is None:
                rule = f"is not set, and the tokenizer's own is not a Jinja template ({where})"
            raise ConfigError(Problem(option, file, rule, "correct the template")) from error

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._work.count(len(numbers))
        return numbers

    def _strftime_now(self, form: str) -> str:
        if not self._logged_date:
            self._logged_date = True
            day = FIXED_DATE.date().isoformat()
            logger.warning(f"the chat template asks for the date; it gets {day}, so that tokens stay the same")
        return FIXED_DATE.strftime(form)


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _generation_tag(template: ChatTemplate) -> Any:
    """The extension of Jinja that reads ``{% generation %}`` ... ``{% endgeneration %}``: what the assistant says."""
    import jinja2
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - an attribute of jinja2's own class

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            template.marks = True
            return jinja2.nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

        def _enclose(self, caller: Any) -> str:
            text = str(caller())
            return f"{_OPEN}{text}{_CLOSE}" if template._marking else text

    return Generation


def _take_out(marked: str) -> tuple[str, list[Span]]:
    """Text without the marks, and the characters between them; a mark within a mark counts as its outer one."""
    spans: list[Span] = []
    pieces: list[str] = []
    # ``place`` is where the text without marks has come to, ``start`` where the outermost mark began.
    place = depth = start = 0
    for part in re.split(f"([{_OPEN}{_CLOSE}])", marked):
        if part == _OPEN:
            if depth == 0:
                start = place
            depth += 1
        elif part == _CLOSE:
            depth -= 1
            if depth == 0:
                spans.append((start, place))
        else:
            pieces.append(part)
            place += len(part)
    return "".join(pieces), spans


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: characters as they are, and nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    deep_size(message)  # the exception is written as text, and bounds nothing
    raise ValueError(message)
