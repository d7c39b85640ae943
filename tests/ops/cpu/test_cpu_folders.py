"""Only a run on a CPU imports the modules of ``ops/cpu`` and ``distributed/cpu``.

``tests/distributed/test_pretended_accelerator.py`` checks training steps; this file checks import statements.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import shardtrain

PACKAGE = Path(shardtrain.__file__).parent
FOLDERS = ("shardtrain.ops.cpu", "shardtrain.distributed.cpu")
PROGRAMS = ("tools/", "api.py")
"""Programs next to the trainer, which choose CPU kernels themselves."""


def imports_at_top(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a file imports at import time, except imports for type checking."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "_TYPE_CHECKING",
        ):
            yield from imports_at_top(ast.Module(node.orelse, []))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_at_top(node)


SOURCE = """
import a
if TYPE_CHECKING:
    import of_types
elif True:
    from b import c
try:
    import d
except ImportError:
    import e
finally:
    import f
with suppress(ImportError):
    import g
class Class:
    import h
    def method(self):
        import of_method
def function():
    import of_function
for _ in range(1):
    if not TYPE_CHECKING:
        import i
"""


def test_imports_inside_blocks_are_found() -> None:
    assert sorted(imports_at_top(ast.parse(SOURCE))) == ["a", "b.c", "d", "e", "f", "g", "h", "i"]


def test_modules_outside_the_cpu_folders_do_not_import_them_at_module_level() -> None:
    imports = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if "/cpu/" in name or name.startswith(PROGRAMS):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports += [
            f"{name}: {module}" for module in imports_at_top(tree) if module.startswith(FOLDERS)
        ]

    assert not imports, "import these inside the function that runs on a CPU: " + ", ".join(imports)
