"""A public class name finds one class of the package, and a file name one module."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "shardtrain"
MODEL_FAMILIES = {"Config", "Model", "Block", "Attention", "FeedForward", "Experts"}
"""Each file in models/ has the same shape by design, so that families can be compared side by side."""
SECTIONS = "config/schema/"
"""A class of an options section is named after the section, like the object that the section configures."""
NOT_YET_UNIQUE = ("data/", "ops/", "distributed/")
"""Classes that are defined only in these rooms may still share a name with each other."""


def test_a_public_class_name_finds_one_class() -> None:
    files = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(SECTIONS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(name)
    colliding = {
        name: places
        for name, places in files.items()
        if len(places) > 1
        and name not in MODEL_FAMILIES
        and not all(place.startswith(NOT_YET_UNIQUE) for place in places)
    }
    assert colliding == {}


def test_a_file_name_finds_one_module() -> None:
    """``__init__`` and ``__main__`` are Python's own names."""
    folders = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            folders[path.name].append(path.parent.relative_to(PACKAGE).as_posix())
    assert {name: places for name, places in folders.items() if len(places) > 1} == {}
