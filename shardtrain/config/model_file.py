"""Read the fields and flavors of a model from the source of its file, without running it.

A model file has ``class Config``, a dataclass with literal defaults, and ``FLAVORS``, a literal
dict from the name of a flavor to the fields that it changes. Both can be imported from another file
(``from shardtrain.models.X import``).
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.config.options import nearest
from shardtrain.config.settings import Value
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem

MODELS_FOLDER = Path(__file__).parent.parent / "models"
NATIVE_MODELS = "shardtrain.models."
"""Start of the module names of the native models."""
_HAS_FLAVORS = re.compile(r"^(FLAVORS\b|from .* import .*\bFLAVORS\b)", re.MULTILINE)
_AS_IT_IS = 'use its Hugging Face folder: set model.name = "transformers" and model.hf_assets_path to the folder'
# Hint for torchtitan models that this package does not have.
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("qwen3_5", "kimi_k2"), _AS_IT_IS),
    **dict.fromkeys(
        ("vlm", "flux"), "images are not supported; write your own model file and task"
    ),
}


@dataclass(frozen=True)
class ModelFacts:
    """Fields and flavors of a model file.

    Attributes:
        path: The file.
        fields: Type and default of each field of Config. The default is None if
            it is missing or not a literal.
        flavors: Fields that each flavor changes.
    """

    path: Path
    fields: Mapping[str, tuple[str, Any]]
    flavors: Mapping[str, Mapping[str, Any]]


def model_path(name: str) -> Path:
    """Return the file of ``model.name``: the user's file if the name ends in .py, else a file of this package."""
    if name.endswith(".py"):
        return Path(name)
    return MODELS_FOLDER / f"{name}.py"


def model_names() -> list[str]:
    """Return the models of this package: the files in the models folder that define or import FLAVORS."""
    files = sorted(MODELS_FOLDER.glob("*.py"))
    return [file.stem for file in files if _HAS_FLAVORS.search(file.read_text(encoding="utf-8"))]


def read_model_file(name: str) -> ModelFacts:
    """Read the file of the model ``name``. Raise ConfigError if it does not exist or lacks Config or FLAVORS."""
    path = model_path(name)
    if not path.is_file():
        raise ConfigError(_no_file(name))
    module = _parse(path, name)
    cls = _definition(module, "Config", name)
    flavors = _definition(module, "FLAVORS", name)
    if cls is None:
        raise _incomplete(
            name, "must define a class Config", "add a dataclass Config with the model's sizes"
        )
    if flavors is None:
        raise _incomplete(name, "must define FLAVORS", "add FLAVORS = {name: {field: value}}")
    return ModelFacts(path, _fields(*cls, name), _flavors(flavors[1], name))


def shape(facts: ModelFacts, flavor: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every field: its default, replaced by the flavor, and then by the overrides.

    Raises:
        KeyError: the flavor does not exist.
    """
    # Overrides take precedence over the flavor, and the flavor over the defaults.
    defaults = {name: default for name, (_, default) in facts.fields.items()}
    sizes = {**defaults, **facts.flavors[flavor], **overrides}
    for name, value in overrides.items():
        is_integer = facts.fields.get(name, ("",))[0].startswith("int")
        # As in other options, 1e3 is a valid integer.
        if is_integer and isinstance(value, float) and value.is_integer():
            sizes[name] = int(value)
    return sizes


def _no_file(name: str) -> Problem:
    """Return the problem of an unknown model name, with a fix for the name that the user probably meant."""
    # Try the likely meanings of the name, the most specific first.
    if name.endswith(".py"):
        return Problem("model.name", name, "is not a file", "give the path of a model file")
    if name in _ELSEWHERE:
        return Problem(
            "model.name",
            name,
            rule="is a model of torchtitan's that is not among these",
            fix=_ELSEWHERE[name],
        )
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return Problem(
            "model.name",
            name,
            rule="is neither a model nor a folder",
            fix=f"get one of the hub with `shardtrain data download --repo_id {name} --all`, and name its folder",
        )
    names = model_names()
    # The name may be misspelled.
    near = nearest(name, names)
    known = "the models folder is empty"
    if names:
        known = f"models are {', '.join(names)}; transformers is any architecture of that library: docs/models.md"
    return Problem(
        "model.name",
        name,
        rule="is not a model",
        fix=f"did you mean {near}? {known}" if near else known,
    )


def _incomplete(name: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem("model.name", name, rule, fix))


def _parse(path: Path, name: str) -> ast.Module:
    status = path.stat()
    return _parsed(path, name, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=64)
def _parsed(path: Path, name: str, mtime_ns: int, size_bytes: int) -> ast.Module:
    """Parse a file, cached because many rules read it. Its modification time and size are part of the cache key."""
    return own_file.read(path, "model.name", name)


def _definition(
    module: ast.Module,
    wanted: str,
    name: str,
    follow: bool = True,
) -> tuple[ast.Module, ast.AST] | None:
    """Find the class or value assigned to the name ``wanted`` at module level.
    Follow one import from a model file.
    """
    for node in module.body:
        # Accept class Config, FLAVORS = ..., FLAVORS: dict = ..., and from
        # shardtrain.models.X import FLAVORS.
        if isinstance(node, ast.ClassDef) and node.name == wanted:
            return module, node
        targets: Sequence[ast.expr | None] = [getattr(node, "target", None)]
        if isinstance(node, ast.Assign):
            targets = node.targets
        is_assigned = any(isinstance(item, ast.Name) and item.id == wanted for item in targets)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_assigned:
            return module, node.value
        if not follow or not isinstance(node, ast.ImportFrom):
            continue
        # Follow only imports of this package, whose files are known without importing anything.
        imported_module = node.module or ""
        if not imported_module.startswith(NATIVE_MODELS):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == wanted:
                path = MODELS_FOLDER / f"{imported_module.removeprefix(NATIVE_MODELS)}.py"
                if path.is_file():
                    return _definition(_parse(path, name), alias.name, name, follow=False)
    return None


def _fields(module: ast.Module, cls: ast.AST, name: str) -> dict[str, tuple[str, Any]]:
    """Return the type and default of the annotated fields of a dataclass.
    Fields of base classes come first.
    """
    fields: dict[str, tuple[str, Any]] = {}
    if not isinstance(cls, ast.ClassDef):
        return fields
    # Fields of a subclass replace those of its bases.
    for base in cls.bases:
        inherited = None
        if isinstance(base, ast.Name):
            inherited = _definition(module, base.id, name)
        if inherited is not None:
            fields |= _fields(*inherited, name)
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = (ast.unparse(node.annotation), _literal(node.value))
    return fields


def _literal(node: ast.expr | None) -> Value:
    """Return the value of a literal, or of a sum, difference or product of numbers.
    None for other expressions.
    """
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    # ``literal_eval`` does not evaluate arithmetic such as 4 * 1024.
    except ValueError:
        pass
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left = _literal(node.left)
        right = _literal(node.right)
        if isinstance(left, int | float) and isinstance(right, int | float):
            return _ARITHMETIC[type(node.op)](left, right)
    return None


_ARITHMETIC: dict[type, Any] = {
    ast.Mult: lambda a, b: a * b,
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
}


def _flavors(node: ast.AST, name: str) -> dict[str, dict[str, Any]]:
    """Read FLAVORS: a dict from names to fields, written as ``{...}``, ``dict(...)`` or ``Config(...)``."""
    flavors: dict[str, dict[str, Any]] = {}
    if not isinstance(node, ast.Dict):
        raise _incomplete(
            name,
            "has a FLAVORS that is not a literal dict",
            "write FLAVORS = {name: {field: value}}",
        )
    for key, value in zip(node.keys, node.values, strict=True):
        flavor = _literal(key)
        # The value is a dict literal, or a call with keywords.
        pairs: list[tuple[Any, ast.expr]] = []
        if isinstance(value, ast.Dict):
            pairs = [(_literal(k), v) for k, v in zip(value.keys, value.values, strict=True)]
        elif isinstance(value, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in value.keywords]
        if not isinstance(flavor, str) or not isinstance(value, ast.Dict | ast.Call):
            raise _incomplete(
                name,
                "has a FLAVORS that is not a literal dict",
                "write FLAVORS = {name: {field: value}}",
            )
        flavors[flavor] = {field: _literal(item) for field, item in pairs}
    return flavors
