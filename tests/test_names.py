"""A public class name finds one class of the package, and a file name one module."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "shardtrain"
MODEL_FAMILIES = {"Config", "Model"}
"""Each file in models/ defines both, so that a family is found by its file name."""
SECTIONS = "config/schema/"
"""A class of an options section is named after the section, like the object that the section configures."""


def test_a_public_class_name_finds_one_class() -> None:
    files = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(SECTIONS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                is_of_a_family = name.startswith("models/") and node.name in MODEL_FAMILIES
                files[node.name].append("models/" if is_of_a_family else name)

    assert {name: places for name, places in files.items() if len(set(places)) > 1} == {}


def test_a_file_name_finds_one_module() -> None:
    """Only ``__init__.py`` and ``__main__.py``, whose names Python requires, may occur more than once."""
    folders = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            folders[path.name].append(path.parent.relative_to(PACKAGE).as_posix())
    assert {name: places for name, places in folders.items() if len(places) > 1} == {}
