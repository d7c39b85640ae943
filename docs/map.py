"""Write the first line of every file of the package into architecture.md: python docs/map.py [--check]."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "shardtrain"
PAGE = HERE / "architecture.md"
BEGIN, END = "<!-- map -->\n", "<!-- end of map -->"


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


def main() -> int:
    """Write the map, or with ``--check`` say whether it is up to date."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    whole = before + BEGIN + "\n" + rendered() + "\n" + END + rest.partition(END)[2]
    if "--check" in sys.argv[1:]:
        if whole == text:
            return 0
        print("docs/architecture.md is not up to date; run python docs/map.py", file=sys.stderr)
        return 1
    PAGE.write_text(whole, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
