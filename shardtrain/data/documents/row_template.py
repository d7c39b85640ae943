"""``data.template``: compute the columns that a format needs from the columns of a table.

Each entry has the name of a new column and a Jinja template that computes it from the existing columns. The
template runs in the sandbox of chat templates. With ``data.format = "chat"``, the entries system, user and
assistant are the turns of a conversation. Columns in a template must exist and contain a text or a number. A
missing column is always an error, because an empty text would train the model on a wrong row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardtrain.config.schema import Data, DataSource
from shardtrain.config.schema.data_options import ROLES
from shardtrain.data import sources
from shardtrain.data.chat.jinja_sandbox import (
    COMPILE_ERRORS,
    MAX_CHARACTERS,
    Work,
    sandbox,
    why_not_compiled,
)
from shardtrain.data.documents.bad_rows import around_bad_rows, attempt
from shardtrain.data.documents.columns import MAX_NAMES, Unusable, check_text, kind
from shardtrain.data.documents.encoded import Document, Encoder
from shardtrain.data.sources import BadRow
from shardtrain.utils import libraries
from shardtrain.utils.errors import ConfigError, Problem


class RowTemplate:
    """Compiled templates, one for each new column, or for each role of a conversation.

    Errors name ``option``. With ``keeps``, a template does not overwrite a column or a conversation that
    the row already has. The templates of presets use this.
    """

    def __init__(
        self,
        entries: Mapping[str, str],
        form: str,
        messages_field: str,
        option: str = "data.template",
        keeps: bool = False,
    ) -> None:
        self.option = option
        self._form = form
        self._messages_field = messages_field
        self._keeps = keeps
        self._work = Work()
        self.facts = json.dumps([sorted(entries.items()), form, messages_field, keeps])
        self._templates = {
            name: self._compile(name, text, option) for name, text in entries.items()
        }

    def row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row with the new columns.

        Raises:
            Unusable: a column that a template uses is missing or has the wrong type, or a template fails.
        """
        if self._form != "chat":
            columns = {}
            for name, template in self._templates.items():
                if not self._keeps or row.get(name) is None:
                    columns[name] = self._write(name, template, row)
            return {**row, **columns}
        if self._keeps and (row.get(self._messages_field) or row.get("conversations")):
            return row
        messages = []
        for role in ROLES:
            if role not in self._templates:
                continue
            text = self._write(role, self._templates[role], row)
            # Omit an empty system message.
            if text or role != "system":
                messages.append({"role": role, "content": text})
        return {**row, self._messages_field: messages}

    def _write(self, name: str, template: Any, row: Mapping[str, Any]) -> str:
        """Render one template. Raise Unusable if it fails."""
        import jinja2

        self._work.begin()
        try:
            text = template.render({str(key): value for key, value in row.items()})
        except jinja2.UndefinedError as error:
            names = [str(key)[:40] for key in row]
            columns = ", ".join(names[:MAX_NAMES])
            if len(names) > MAX_NAMES:
                columns += ", ..."
            raise Unusable(
                f"the template of {name!r} uses a column that does not exist: {error}; the columns are {columns}"
            ) from error
        except (Unusable, MemoryError):
            raise
        # A template can raise any Python exception.
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise Unusable(f"the template of {name!r} fails: {lines[0][:200]}") from error
        if len(text) > MAX_CHARACTERS:
            raise Unusable(f"the template of {name!r} writes more than {MAX_CHARACTERS} characters")
        return check_text(str(text), f"the output of the template of {name!r}")

    def _compile(self, name: str, text: str, option: str) -> Any:
        jinja2 = libraries.load("jinja2", option)
        environment = sandbox(self._work)
        environment.undefined = jinja2.StrictUndefined
        # Keep a newline at the end, because it may belong to a prompt.
        environment.keep_trailing_newline = True
        environment.finalize = _finalize
        try:
            return environment.from_string(text)
        except (jinja2.TemplateSyntaxError, *COMPILE_ERRORS) as error:
            where = why_not_compiled(error)
            if isinstance(error, jinja2.TemplateSyntaxError):
                where = str(error.message)
            raise ConfigError(
                Problem(
                    f"{option}.{name}",
                    text,
                    rule=f"is not a Jinja template ({where})",
                    fix="write columns like {{ question }}",
                )
            ) from error


class TemplatedEncoder:
    """An encoder that first completes rows with a template."""

    def __init__(self, encoder: Encoder, template: RowTemplate) -> None:
        self.tokenizer = encoder.tokenizer
        self.option = template.option
        facts = json.dumps([encoder.fingerprint, template.facts])
        self.fingerprint = hashlib.sha256(facts.encode()).hexdigest()
        self._encoder = encoder
        self._template = template

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | BadRow]:
        """Complete and tokenize rows. Return one document per row, or the reason why it has none."""
        completed = [attempt(self._template.row, row) for row in rows]
        return list(around_bad_rows(completed, self._encoder.encode))


def template_of(data: Data, source: DataSource | None, form: str) -> RowTemplate | None:
    """Return the template for a source: its own template, ``data.template``, or the template of its preset.

    None without any of them.

    Raises:
        ConfigError: an entry is not a valid Jinja template.
    """
    if source is not None and source.template:
        return RowTemplate(source.template, form, data.messages_field, "data.sources.NAME.template")
    if data.template:
        return RowTemplate(data.template, form, data.messages_field, "data.template")

    # Use the template of a preset such as alpaca. A preset is a module of this package for one dataset.
    if source is None or source.dataset not in sources.names():
        return None
    entries = getattr(sources.find(source.dataset), "TEMPLATES", {}).get(form)
    if not entries:
        return None
    if form != "chat":
        # The options determine the names of the new columns.
        fields = {
            "text": source.text_field or data.text_field,
            "prompt": data.prompt_field,
            "completion": data.completion_field,
        }
        entries = {fields[name]: text for name, text in entries.items()}
    return RowTemplate(
        entries, form, data.messages_field, f"the template of {source.dataset}", keeps=True
    )


def _finalize(value: Any) -> Any:
    """Return the value of an expression if it is a text or a number. Raise Unusable for other types."""
    import jinja2

    if isinstance(value, str | int | float | jinja2.Undefined) and not isinstance(value, bool):
        # Return undefined values too, because Jinja raises an error when it writes them.
        return value
    raise Unusable(
        f"a template writes {kind(value)}; write a text or a number, or test the column with {{% if %}}"
    )
