"""Only a run on a CPU imports the modules of ``ops/cpu`` and ``distributed/cpu``.

``tests/distributed/test_pretended_accelerator.py`` shows it on steps of training; this file reads imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shardtrain

PACKAGE = Path(shardtrain.__file__).parent
FOLDERS = ("shardtrain.ops.cpu", "shardtrain.distributed.cpu")
PROGRAMS = ("tools/", "api.py")
"""Programs next to the trainer, which choose kernels of a CPU themselves."""


def imports_at_top(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported when a file is imported: not inside functions and not for types only."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_no_module_outside_of_the_cpu_folders_imports_them_at_its_top() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if "/cpu/" in name or name.startswith(PROGRAMS):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{name}: {module}" for module in imports_at_top(tree) if module.startswith(FOLDERS)]
    assert not found, "import these inside the function that runs on a CPU: " + ", ".join(found)
