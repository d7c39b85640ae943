"""Render the page of all options. Run as a module, write docs/options.md and configs/shardtrain.schema.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_origin

from shardtrain.config.json_schema import FILE, json_schema_text
from shardtrain.config.options import Option, default_text, kind_text, options, options_of, sections
from shardtrain.facts.lr_schedules import SCHEDULES
from shardtrain.facts.lr_schedules import options_of as options_of_schedule

PAGE = Path("docs") / "options.md"
SCHEMA = Path("configs") / FILE
_SCHEDULES_HEAD = """
Schedules of `lr_scheduler.name`. Each reads the options in the second column and `total_steps`; a further option is an
error. The learning rate is `optimizer.lr` times the share that a schedule returns.

| Schedule | Options | Share of the peak rate |
|---|---|---|
"""
_HEAD = """# Options

Every option of a run, as `[section]` and `key` in a TOML file or `--section.key VALUE` on the command line. The command
line beats the file, and the file beats the default. This page is generated: `python -m shardtrain.config.options_page`.
"""


def options_page() -> str:
    """Return the page as Markdown, with a table of option, type, default and help per section."""
    parts = [_HEAD]
    for section, cls in sections().items():
        inside = []
        for name, option in options().items():
            if name.rpartition(".")[0] == section:
                inside.append(option)
        if inside:
            parts.append(_section(f"[{section}]", cls, inside))
        if section == "lr_scheduler":
            parts[-1] += _SCHEDULES_HEAD + "".join(_schedule_row(name) for name in SCHEDULES)
        for option in inside:
            if option.entry:
                # TOML writes a table of tables as [section.NAME], and a list of tables as [[section]].
                heading = f"[[{option.name}]]"
                if get_origin(option.kind) is dict:
                    heading = f"[{option.name}.NAME]"
                entries = list(options_of(option.name, option.entry).values())
                parts.append(_section(heading, option.entry, entries))
    return "\n".join(parts)


def _section(title: str, cls: type, inside: Sequence[Option]) -> str:
    intro = " ".join((cls.__doc__ or "").split())
    rows = []
    for option in inside:
        key = option.name.rpartition(".")[2]
        kind = _cell(kind_text(option.kind))
        default = default_text(option.default)
        if default != "unset":
            default = f"`{default}`"
        rows.append(f"| `{key}` | {kind} | {_cell(default)} | {_cell(option.help)} |")
    table = ["| Option | Type | Default | Meaning |", "|---|---|---|---|", *rows]
    heading = f"## {title}"
    # A dataclass without a docstring has its signature instead.
    if not intro.startswith(f"{cls.__name__}("):
        heading += f"\n\n{intro}\n"
    return "\n".join([heading, *table]) + "\n"


def _schedule_row(name: str) -> str:
    schedule = SCHEDULES[name]
    options_read = ", ".join(f"`{option}`" for option in options_of_schedule(schedule))
    return f"| `{name}` | {options_read} | {_cell(' '.join((schedule.__doc__ or '').split()))} |\n"


def _cell(text: str) -> str:
    """Escape the characters that end a cell of a Markdown table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(options_page(), encoding="utf-8")
    SCHEMA.write_text(json_schema_text(), encoding="utf-8")
