"""The architecture page names existing files, and lists every import between rooms."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from test_house import imports, room_of, trees

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_path_in_the_text_exists() -> None:
    paths = [path for path in re.findall(r"`([a-z_0-9/]+/(?:[a-z_0-9]+\.py)?)`", PAGE) if "my_" not in path]
    assert len(paths) > 30
    missing = [path for path in paths if not ((ROOT / "shardtrain" / path).exists() or (ROOT / path).exists())]
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
        assert all((ROOT / "shardtrain" / path.replace("NAME.py", "")).exists() for path in files), row


def rooms_imported() -> dict[str, set[str]]:
    """Return the rooms that each room imports: at its top, in functions, for types, and by name."""
    rooms = defaultdict(set)
    for module, names in imports(with_types=True).items():
        rooms[room_of(module)] |= {room_of(name) for name in names}
    for file, tree in trees().items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func).rpartition(".")[2] not in ("import_module", "_import", "_module"):
                continue
            for argument in call.args:
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("shardtrain."):
                    rooms[room_of(f"shardtrain.{file.partition('/')[0].removesuffix('.py')}")].add(
                        room_of(argument.value)
                    )
    # The verbs of cli.py name their modules below the package as text: "tools.plan.plan_command".
    modules = imports().keys()
    for node in ast.walk(trees()["cli.py"]):
        text = node.value.partition(":")[0] if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if "." in text and f"shardtrain.{text}" in modules:
            rooms["cli"].add(room_of(f"shardtrain.{text}"))
    return {room: names - {room, ""} for room, names in rooms.items()}


def test_the_table_of_rooms_lists_every_import() -> None:
    table = PAGE.partition("| Room | Holds | Imports |\n")[2].partition("\n\n")[0]
    listed = {}
    for row in table.splitlines()[1:]:
        _, room, _, names, _ = row.split("|")
        listed[re.sub(r"[`/ ]|\.py", "", room)] = set(re.findall(r"`(\w+)`", names))
    graph = {room: names for room, names in rooms_imported().items() if room and room != "__main__"}
    wrong = {
        room: f"lists {sorted(listed.get(room, set()))}, imports {sorted(graph.get(room, set()))}"
        for room in graph.keys() | listed.keys()
        if listed.get(room) != graph.get(room)
    }
    assert wrong == {}, "docs/architecture.md, Where things are: make the last column the rooms that are imported"
