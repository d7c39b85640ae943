"""Print the first line of every file of the package, by room: python docs/map.py."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "shardtrain"


def phrase(path: Path) -> str:
    """The first sentence of a file's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    return first.replace("``", "`").removesuffix(".").replace("|", "\\|").replace("<", "&lt;")


def rooms() -> list[Path]:
    """The package and every package in it, the outer ones first, by name."""
    return sorted({path.parent for path in PACKAGE.rglob("*.py")})


def rendered() -> str:
    """The map: a heading per room, a line per file."""
    lines: list[str] = []
    for room in rooms():
        name = room.relative_to(PACKAGE.parent).as_posix()
        own = room / "__init__.py"
        lines += [f"### {name}/", "", f"{phrase(own)}." if own.exists() else "", ""]
        files = [path for path in sorted(room.glob("*.py")) if path != own]
        lines += [*(f"- `{path.name}`: {phrase(path)}" for path in files), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(rendered())
