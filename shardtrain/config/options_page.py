"""Render the page of all options from the schema; run as a module, it writes docs/options.md."""

from __future__ import annotations

from pathlib import Path

from shardtrain.config.options import default_text, kind_text, options, sections

PAGE = Path("docs") / "options.md"
_HEAD = """# Options

Every option of a run, as `[section]` and `key` in a TOML file or `--section.key VALUE` on the command line. The command
line beats the file, and the file beats the default. This page is generated: `python -m shardtrain.config.options_page`.
"""


def options_page() -> str:
    """Return the page as Markdown: a table per section with option, type, default and help."""
    parts = [_HEAD]
    for section, cls in sections().items():
        inside = [option for name, option in options().items() if name.rpartition(".")[0] == section]
        if not inside:
            continue
        intro = " ".join((cls.__doc__ or "").split())
        rows = [
            f"| `{option.name.rpartition('.')[2]}` | {_cell(kind_text(option.kind))} "
            f"| {_cell(_code(default_text(option.default)))} | {_cell(option.help)} |"
            for option in inside
        ]
        table = ["| Option | Type | Default | Meaning |", "|---|---|---|---|", *rows]
        text = f"\n{intro}\n" if not intro.startswith(f"{cls.__name__}(") else ""
        parts.append("\n".join([f"## [{section}]{chr(10) if text else ''}{text}", *table]) + "\n")
    return "\n".join(parts)


def _code(text: str) -> str:
    return text if text == "unset" else f"`{text}`"


def _cell(text: str) -> str:
    """Escape what would end a cell of a Markdown table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(options_page(), encoding="utf-8")
