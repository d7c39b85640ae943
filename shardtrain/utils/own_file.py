"""A file of Python that the user's configuration names: looked for by its text, and loaded as a module of its own.

A path in the user's own configuration is code that the user chose; a path inside an artefact is never loaded.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from shardtrain.utils.errors import ConfigError, Problem


def fault(path: str, names: Sequence[str], fix: str) -> tuple[str, str] | None:
    """What is wrong with a file as its text tells, and the fix; None where it may bind all ``names`` at its top."""
    if not Path(path).is_file():
        return "is not a file", f"give the path of an existing file, and {fix}"
    try:
        module = parse(path)
    except (SyntaxError, ValueError, OSError) as error:
        return f"cannot be read as Python ({error})", "correct the file"
    missing = [name for name in names if not any(binds(node, name) for node in ast.walk(module))]
    return (f"has no {' and no '.join(missing)}", fix) if missing else None


def parse(path: str | Path) -> ast.Module:
    """Return the syntax tree of a file; raises SyntaxError, ValueError or OSError if it cannot be read as Python."""
    return ast.parse(Path(path).read_bytes())  # with bytes, it accepts the same encodings as Python


def load(path: str, kind: str, option: str, names: Sequence[str], fix: str) -> ModuleType:
    """The module of a file, which holds all ``names``.

    Raises:
        ConfigError: when there is no such file, or it lacks one of them. What the file itself raises is not caught.
    """
    rule_and_fix = fault(path, names, fix)
    if rule_and_fix is not None:
        raise ConfigError(Problem(option, path, *rule_and_fix))
    module = run(path, kind, option)
    missing = [name for name in names if not callable(getattr(module, name, None))]
    if missing:
        raise ConfigError(Problem(option, path, f"has no {' and no '.join(missing)}", fix))
    return module


def load_function(path: str, kind: str, option: str, name: str, fix: str) -> Callable[..., Any]:
    """Return a function of a file, which must accept two positional arguments; raises ConfigError as ``load`` does."""
    function: Callable[..., Any] = getattr(load(path, kind, option, (name,), fix), name)
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if sum(kind in by_position for kind in kinds) < 2:
        raise ConfigError(Problem(option, path, f"has {name} that takes fewer than two arguments", fix))
    return function


def run(path: str | Path, kind: str, option: str) -> ModuleType:
    """The module of a file that is there, run under the name of its ``kind``: "model", "task", ...

    Raises:
        ConfigError: when the file ends the program. What else it raises is not caught.
    """
    # A prefix, so that no file can stand in for a package; and in sys.modules, where dataclasses look their module up.
    name = f"shardtrain_{kind}_file_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None and spec.loader is not None  # a .py path always has a loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        # Else a run would end here with the status of one that was trained.
        rule = f"ends the program when it is loaded (sys.exit({'' if error.code is None else repr(error.code)}))"
        fix = 'write that under `if __name__ == "__main__":`'
        raise ConfigError(Problem(option, str(path), rule, fix)) from None
    return module


class _FromSource(importlib.machinery.SourceFileLoader):
    """Runs the text that is there: cached bytecode of an equally long file of the same second would pass for it."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def binds(node: ast.AST, name: str) -> bool:
    """Whether a statement, wherever it is, may bind a name."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        return any((alias.asname or alias.name) in (name, "*") for alias in node.names)
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name == name
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
