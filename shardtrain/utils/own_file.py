"""Python files that the user names: a model, a task, a dataset, a sink, ... The only code that parses or imports them.

A path in the user's own configuration or command line is code that the user chose. A path or a name
inside an artefact (a checkpoint, a Hugging Face folder) must never reach ``load`` or ``run``.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ConfigError, Problem

MAX_BYTES = 2**24


@dataclass(frozen=True)
class FileKind:
    """One kind of user file: its name, the names that it must define, and the fix if it does not.

    A required name in upper case is a constant. Any other must be callable, and those in ``classes`` must
    be classes.
    """

    name: str
    required: tuple[str, ...]
    fix: str
    classes: tuple[str, ...] = ()

    def missing_in(self, module: ModuleType) -> list[str]:
        """Return the required names that an imported module lacks."""
        missing = []
        for name in self.required:
            if not self._is_defined(getattr(module, name, None), name):
                missing.append(name)
        return missing

    def _is_defined(self, value: object, name: str) -> bool:
        if name in self.classes:
            return isinstance(value, type)
        # A constant must have a value, and any other name must be callable.
        if name.isupper():
            return value is not None
        return callable(value)

    def lacks(self, missing: list[str]) -> tuple[str, str]:
        """Return the rule and the fix of an error about missing names."""
        return f"has no {' and no '.join(missing)}", self.fix


_MODEL_PARTS = ("Config", "Model", "LAYOUT", "FLAVORS", "initial")
MODEL = FileKind(
    "model",
    _MODEL_PARTS,
    f"define it in the file, as shardtrain/models/llama3.py does: {', '.join(_MODEL_PARTS)}",
)
TASK = FileKind(
    "task",
    ("Task",),
    "define a class Task(RowTask), as shardtrain/tasks/classification.py does",
    classes=("Task",),
)
DATASET = FileKind(
    "dataset",
    ("open_source",),
    "define open_source(request), as shardtrain/data/sources/text.py does",
)
TOKENIZER = FileKind(
    "tokenizer",
    ("Tokenizer",),
    "define a class Tokenizer with encode, decode and vocab_size, as docs/extend.md shows",
)
SINK = FileKind(
    "sink",
    ("Sink",),
    "define a class Sink with write, validation and close, as docs/extend.md shows",
)
OPTIMIZER = FileKind(
    "optimizer",
    ("build",),
    "define build(param_groups, options): docs/extend.md",
)
SCHEDULE = FileKind(
    "schedule",
    ("factor",),
    "define factor(step, total_steps), with options of [lr_scheduler] as further parameters",
)
TOKEN_METRIC = FileKind(
    "metric",
    ("measure",),
    "define measure(logits, targets) that returns a value for each token: docs/extend.md",
)
PLATFORM = FileKind(
    "platform",
    ("render", "submit"),
    "define render(job, launch) and submit(text, job, launch), as docs/extend.md shows",
)


def fault(path: str, kind: FileKind) -> tuple[str, str] | None:
    """Parse a file. Return the rule that it violates and the fix, or None.

    The file is not run, so a required name counts as defined if any statement may bind it.
    """
    if not Path(path).is_file():
        return "is not a file", f"give the path of an existing file, and {kind.fix}"
    try:
        tree = parse(path)
    except (SyntaxError, ValueError, OSError) as error:
        return _unreadable(error)
    nodes = list(ast.walk(tree))
    missing = [name for name in kind.required if not any(binds(node, name) for node in nodes)]
    return kind.lacks(missing) if missing else None


def parse(path: str | Path) -> ast.Module:
    """Return the syntax tree of a file; raises SyntaxError, ValueError or OSError if it cannot be read as Python."""
    content = bounded_reads.read_all(path, MAX_BYTES)
    try:
        return ast.parse(content)  # with bytes, it accepts the same encodings as Python
    # For very deep expressions, the parser raises these instead of SyntaxError.
    except (MemoryError, RecursionError) as error:
        raise SyntaxError("an expression is nested too deeply") from error


def read(path: Path, option: str, value: str) -> ast.Module:
    """Return the syntax tree of a file; raises ConfigError about ``option=value`` if it cannot be read as Python."""
    try:
        return parse(path)
    except (SyntaxError, ValueError, OSError) as error:
        raise ConfigError(Problem(option, value, *_unreadable(error))) from error


def _unreadable(error: Exception) -> tuple[str, str]:
    return f"cannot be read as Python ({error})", "correct the file"


def load(path: str, kind: FileKind, option: str) -> ModuleType:
    """Import a file and return its module, which defines all names that its kind requires.

    Raises:
        ConfigError: the file does not exist, lacks one of the names, or ends the program. Other exceptions
            that the file raises are not caught.
    """
    # Parse the file first, so a wrong file is reported without running it.
    problem = fault(path, kind)
    if problem is not None:
        raise ConfigError(Problem(option, path, *problem))
    module = run(path, kind, option)
    # Parsing cannot see what a name is bound to.
    missing = kind.missing_in(module)
    if missing:
        raise ConfigError(Problem(option, path, *kind.lacks(missing)))
    return module


def load_function(path: str, kind: FileKind, option: str) -> Callable[..., Any]:
    """Return the one function of a file, which must accept two positional arguments; raises ConfigError as ``load``."""
    (name,) = kind.required
    function: Callable[..., Any] = getattr(load(path, kind, option), name)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # Keyword-only parameters do not count: the caller passes values by position.
    parameters = inspect.signature(function).parameters.values()
    if sum(parameter.kind in by_position for parameter in parameters) < 2:
        raise ConfigError(
            Problem(
                option,
                path,
                rule=f"has {name} that takes fewer than two arguments",
                fix=kind.fix,
            )
        )
    return function


def run(path: str | Path, kind: FileKind, option: str) -> ModuleType:
    """Import an existing file under a name that contains its kind, without checking what it defines.

    Raises:
        ConfigError: the file ends the program. Other exceptions that it raises are not caught.
    """
    # With a prefix, no file can replace a package. Dataclasses look their module up in sys.modules
    name = f"{_prefix(kind)}{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None and spec.loader is not None  # a .py path always has a loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        # Otherwise a run would end here with the exit status of a completed one
        code = "" if error.code is None else repr(error.code)
        raise ConfigError(
            Problem(
                option,
                str(path),
                rule=f"ends the program when it is loaded (sys.exit({code}))",
                fix='write that under `if __name__ == "__main__":`',
            )
        ) from None
    return module


def is_from(module: ModuleType, kind: FileKind) -> bool:
    """True if a module is a user's file of this kind, not one of this package."""
    return module.__name__.startswith(_prefix(kind))


def _prefix(kind: FileKind) -> str:
    return f"shardtrain_{kind.name}_file_"


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compiles the current text. Cached bytecode would also match another file of equal length and second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def binds(node: ast.AST, name: str) -> bool:
    """True if a statement may bind a name, in whatever scope it is."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        return any((alias.asname or alias.name) in (name, "*") for alias in node.names)
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name == name
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
