"""Chat templates: Jinja in a sandbox, with the functions that Hugging Face's templates expect."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from shardtrain.data.chat.jinja_sandbox import (
    COMPILE_ERRORS,
    MAX_CHARACTERS,
    Work,
    bounded,
    deep_size,
    sandbox,
    why_not_compiled,
)
from shardtrain.data.chat.messages import NO_VARIABLES, Message
from shardtrain.data.documents.columns import Unusable
from shardtrain.utils import libraries
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

Span = tuple[int, int]

FIXED_DATE = datetime(2024, 7, 26)
"""Date that ``strftime_now`` returns, which is the default date of Llama 3's template.

The real date would change the tokens every day.
"""
# Marks around {% generation %} blocks, which are removed again later. They are noncharacters of Unicode,
# which do not occur in texts.
_OPEN = "\ufdd0"
_CLOSE = "\ufdd1"
# Templates can break out of the sandbox of older versions.
_SAFE_JINJA = (3, 1, 6)
_MAX_REASON_LENGTH = 200


class ChatTemplate:
    """A compiled template. Its output depends only on its arguments.

    The work of rendering is limited: see ``jinja_sandbox.py``.
    """

    def __init__(
        self, text: str, special_tokens: Mapping[str, str], file: str | None = None
    ) -> None:
        """Compile the template.

        Args:
            text: the Jinja template.
            special_tokens: the tokenizer's special tokens, which the template may use as variables.
            file: value of data.chat_template. None for the tokenizer's own template.
        """
        self.marks = False
        """True if the template encloses the assistant's text in {% generation %} blocks."""
        self.reads_parts = False
        """True if a message's content may be a list of parts. ``conversations.find_content_form`` sets it."""
        self.content_as_parts = False
        """True if the template supports only contents of the form ``[{"type": "text", "text": ...}]``."""
        self.dropped: dict[tuple[Any, ...], str] = {}
        """Cache of ``conversations.check_nothing_is_dropped``.

        Maps the shape of a conversation to a description of the text that the template drops, or to "".
        """
        self._special_tokens = dict(special_tokens)
        self._marking = False
        self._work = Work()
        self._logged_date = False
        self._template = self._compile(text, file)

    def render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = NO_VARIABLES,
        prompt: bool = False,
    ) -> str:
        """Render a conversation.

        Args:
            messages: the conversation.
            variables: the tools and other variables of the row, see ``messages.template_variables``.
            prompt: True to append the generation prompt.

        Raises:
            Unusable: the template rejects the conversation or fails.
        """
        return self._write(messages, variables, prompt)

    def try_render(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] = NO_VARIABLES,
        prompt: bool = False,
    ) -> str:
        """Render a conversation. Return "" if the template rejects it. Some templates reject half a conversation."""
        try:
            return self._write(messages, variables, prompt)
        except Unusable:
            return ""

    def render_marked(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES
    ) -> tuple[str, list[Span]]:
        """Render a conversation. Return its text, and the character ranges of its {% generation %} blocks.

        Raises:
            Unusable: see ``render``. Or the template changes the text after it has marked it, so the range is
                unknown.
        """
        # Render the conversation without marks and with marks.
        # Both texts must be the same apart from the marks.
        plain = self._write(messages, variables, prompt=False)
        if _OPEN in plain or _CLOSE in plain:
            raise Unusable(
                "the conversation contains the noncharacter U+FDD0 or U+FDD1, which is used internally to mark turns"
            )
        self._marking = True
        try:
            marked = self._write(messages, variables, prompt=False)
        finally:
            self._marking = False
        unmarked, spans = _remove_marks(marked)
        if unmarked != plain:
            raise Unusable(
                "the chat template changes the text inside its {% generation %} marks, so its position is unknown"
            )
        return plain, spans

    def _write(
        self, messages: Sequence[Message], variables: Mapping[str, Any], prompt: bool
    ) -> str:
        # Generate piece by piece, to stop the template before it fills the memory.
        self._work.begin()
        pieces: list[str] = []
        size = 0
        chat = list(messages)
        if self.content_as_parts:
            chat = [_with_parts(message) for message in messages]
        defaults = {**self._special_tokens, "tools": None, "documents": None}
        context = {**defaults, **variables, "messages": chat, "add_generation_prompt": prompt}
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARACTERS:
                    raise Unusable(
                        f"the chat template writes more than {MAX_CHARACTERS} characters"
                    )
        except (Unusable, MemoryError):
            raise
        # A template can raise any Python exception.
        except Exception as error:
            lines = str(error).strip().splitlines()
            reason = lines[0][:_MAX_REASON_LENGTH] if lines else type(error).__name__
            raise Unusable(f"the chat template refuses the conversation: {reason}") from error
        return "".join(pieces)

    def _compile(self, text: str, file: str | None) -> Any:
        option = "data.chat_template"
        jinja2 = libraries.load("jinja2", option)
        loopcontrols = libraries.load("jinja2.ext", option).loopcontrols
        # This sandbox is only safe if Jinja's own sandbox is safe.
        version = importlib.metadata.version("jinja2")
        if tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < _SAFE_JINJA:
            raise ConfigError(
                Problem(
                    option,
                    None,
                    rule=(
                        "requires jinja2 3.1.6 or newer, which fixes security problems of its sandbox; "
                        f"version {version} is installed"
                    ),
                    fix="pip install -U jinja2",
                )
            )

        # Add the functions that Hugging Face's templates expect in addition to Jinja's, and count their work.
        environment = sandbox(self._work, _generation_tag(self), loopcontrols)
        environment.filters["tojson"] = bounded(_tojson, self._work, 4)
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": self._strftime_now,
            "range": self._range,
        }
        try:
            return environment.from_string(text)
        except (jinja2.TemplateSyntaxError, *COMPILE_ERRORS) as error:
            where = why_not_compiled(error)
            if isinstance(error, jinja2.TemplateSyntaxError):
                where = f"line {error.lineno}: {error.message}"
            rule = f"is not a Jinja template ({where})"
            if file is None:
                rule = f"is not set, and the tokenizer's own template is not valid Jinja ({where})"
            raise ConfigError(Problem(option, file, rule, "correct the template")) from error

    def _range(self, *bounds: int) -> range:
        numbers = range(*bounds)
        self._work.count(len(numbers))
        return numbers

    def _strftime_now(self, form: str) -> str:
        if not self._logged_date:
            self._logged_date = True
            day = FIXED_DATE.date().isoformat()
            logger.warning(
                f"the chat template uses the current date; it gets {day}, to keep tokens reproducible"
            )
        return FIXED_DATE.strftime(form)


def _with_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts. A text becomes a list with one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _generation_tag(template: ChatTemplate) -> Any:
    """Return the Jinja extension that implements ``{% generation %}`` ... ``{% endgeneration %}`` blocks."""
    import jinja2
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - an attribute of jinja2's own class

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            template.marks = True
            return jinja2.nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(
                line
            )

        def _enclose(self, caller: Any) -> str:
            text = str(caller())
            return f"{_OPEN}{text}{_CLOSE}" if template._marking else text

    return Generation


def _remove_marks(marked: str) -> tuple[str, list[Span]]:
    """Remove the marks. Return the text, and the character ranges that were marked.

    For nested marks, return the range of the outermost mark.
    """
    spans: list[Span] = []
    pieces: list[str] = []
    # ``place`` is the length of the text so far, without marks. ``start`` is where the outermost mark opened.
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
    """Convert to JSON as templates expect it: without escapes for non-ASCII characters or HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    # Limit the size of the message here, because it is converted to text outside the sandbox.
    deep_size(message)
    raise ValueError(message)
