"""Find the test files that run against the core only, and prepare a clone with an installed core.

A file is excluded if it, or a helper that it imports, imports a part outside the core or runs a verb of such a part.
Tests need no marker for this.
"""

from __future__ import annotations

import ast
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

from tiers import share_of

import shardtrain
from shardtrain import cli

TESTS = Path(__file__).parent
ROOMS = (
    "checkpoint", "config", "data", "distributed", "hf", "lora", "metrics", "models", "ops", "optim",
    "resilience", "tasks", "train", "utils",
)  # fmt: skip
"""Folders of tests of the core. Those of ``launch`` are about platforms, and those of ``facts`` compare all files."""
BEYOND = ("tools", "compat", "launch/platforms")
"""Folders of the package that the core lacks."""
MISSING = (*(f"shardtrain.{folder.replace('/', '.')}" for folder in BEYOND), "shardtrain.api")
"""Modules that cannot be imported without these folders."""
VERBS = {
    name
    for name, verb in cli.VERBS.items()
    if isinstance(verb.target, str) and verb.target.startswith("tools.")
}
VERBS |= {"checkpoint", "launch", "test"}
"""Verbs that need rooms outside the core. The last three name functions that import these rooms."""


def files() -> dict[Path, str]:
    """Map each test file of the core's rooms to the part it needs that the core lacks, or to ""."""
    return {
        path: missing_part(path)
        for room in ROOMS
        for path in sorted((TESTS / room).rglob("test_*.py"))
    }


def share(number: int, count: int) -> list[Path]:
    """Return the files of one of several shares that need only the core, relative to the clone."""
    runnable = [path.relative_to(TESTS.parent) for path, missing in files().items() if not missing]
    return [path for path in runnable if share_of(path.as_posix(), count) == number]


@functools.cache
def missing_part(path: Path) -> str:
    """Return the first import or verb of a file, or of its helpers in ``tests``, that the core lacks. Or return ""."""
    imported = set(imported_names(path))
    for name in sorted(imported):
        if any(name == module or name.startswith(f"{module}.") for module in MISSING):
            return name
        helper = TESTS / f"{name.partition('.')[0]}.py"
        if helper.is_file() and helper != path and (missing := missing_part(helper)):
            return missing
    runs_verbs = not imported.isdisjoint({"shardtrain.cli", "shardtrain.cli.main"})
    return next(
        (f"the verb {verb}" for verb in first_words(path) if runs_verbs and verb in VERBS), ""
    )


def first_words(path: Path) -> Iterator[str]:
    """Yield the first element of each list literal that starts with a constant: it may be a verb."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Constant):
            yield str(node.elts[0].value)


def imported_names(path: Path) -> Iterator[str]:
    """Yield imported modules and names, and strings that name a module, as in tests that patch it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            for alias in node.names:
                is_api = node.module == "shardtrain" and alias.name in shardtrain.__all__
                yield f"{node.module}.{'api' if is_api else alias.name}"
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "shardtrain"
        ):
            yield "shardtrain.api" if node.attr in shardtrain.__all__ else f"shardtrain.{node.attr}"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(MISSING)
        ):
            yield node.value


def copy_clone(folder: Path, package: Path) -> None:
    """Copy the clone without its package, and link ``package`` there, so that no test finds the complete package."""
    ignored = shutil.ignore_patterns("__pycache__", ".*", "shardtrain")
    shutil.copytree(TESTS.parent, folder, symlinks=True, ignore=ignored)
    (folder / "shardtrain").symlink_to(package)
