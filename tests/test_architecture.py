"""The architecture page names existing files, and lists every import between rooms."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from test_house import imports, room_of, trees

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_path_in_the_text_exists() -> None:
    paths = []
    for path in re.findall(r"`([a-z_0-9/]+/(?:[a-z_0-9]+\.py)?)`", PAGE):
        if "my_" not in path:  # such files do not exist: the reader writes them
            paths.append(path)
    assert len(paths) > 30

    # The page omits the leading "shardtrain/" of paths in the package.
    missing = []
    for path in paths:
        if not (ROOT / "shardtrain" / path).exists() and not (ROOT / path).exists():
            missing.append(path)
    assert not missing


def test_table_of_changes_names_existing_files_and_tests() -> None:
    table = PAGE.partition("\n## To change one thing\n")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15

    for row in rows:
        _, change, edited, tests, _ = row.split("|")
        files = re.findall(r"`([\w/]+(?:\.\w+|/))`", edited)
        runs = re.findall(r"`(tests/[\w/.]+)`", tests)
        assert files and runs, change
        assert all((ROOT / path).exists() for path in runs), row
        for path in files:
            base = ROOT if path.startswith("tests/") else ROOT / "shardtrain"
            assert (base / path.replace("NAME.py", "")).exists(), row


def texts(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the values of all string literals among the nodes."""
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def imported_by_name(tree: ast.Module) -> list[str]:
    """Return the modules of the package whose names a file passes to a function that imports them."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "_import", "_module"):
                names += [text for text in texts(node.args) if text.startswith("shardtrain.")]
    return names


def rooms_imported() -> dict[str, set[str]]:
    """Return the rooms that each room imports: at its top, in functions, for types, and by name."""
    rooms = defaultdict(set)
    for module, names in imports(with_types=True).items():
        rooms[room_of(module)].update(room_of(name) for name in names)
    for file, tree in trees().items():
        room = room_of(f"shardtrain.{file.partition('/')[0].removesuffix('.py')}")
        for name in imported_by_name(tree):
            rooms[room].add(room_of(name))
    # The commands of cli.py name modules relative to the package, like "tools.plan.plan_command:main".
    modules = imports().keys()
    for text in texts(ast.walk(trees()["cli.py"])):
        name = text.partition(":")[0]
        if "." in name and f"shardtrain.{name}" in modules:
            rooms["cli"].add(room_of(f"shardtrain.{name}"))
    return {room: names - {room, ""} for room, names in rooms.items()}


def test_the_table_of_rooms_lists_every_import() -> None:
    table = PAGE.partition("| Room | Holds | Imports |\n")[2].partition("\n\n")[0]
    listed = {}
    for row in table.splitlines()[1:]:
        _, room, _, names, _ = row.split("|")
        listed[re.sub(r"[`/ ]|\.py", "", room)] = set(re.findall(r"`(\w+)`", names))
    imported = {room: names for room, names in rooms_imported().items() if room}
    imported.pop("__main__", None)

    wrong = {}
    for room in imported.keys() | listed.keys():
        if listed.get(room) != imported.get(room):
            names_listed = sorted(listed.get(room, set()))
            names_imported = sorted(imported.get(room, set()))
            wrong[room] = f"lists {names_listed}, imports {names_imported}"
    assert wrong == {}, (
        "docs/architecture.md, Where things are: make the last column the rooms that are imported"
    )
