"""Custom sections, from the user's file that ``job.custom_config_module`` names.

The file is parsed and never run, so the saved configuration of somebody else's run stays data. It defines
a dataclass ``JobConfig`` as torchtitan's custom modules do. Each field of ``JobConfig`` is a section, and its
type is another dataclass of the file::

    @dataclass
    class Reward:
        scale: float = 1.0
        \"\"\"Factor of the reward.\"\"\"

    @dataclass
    class JobConfig:
        reward: Reward = field(default_factory=Reward)

If a section exists already, such as ``optimizer``, the fields are added to it, or change its defaults.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from shardtrain.config.coerce import PLAIN_KINDS, Unfit, coerce
from shardtrain.config.schema import Config
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem

OPTION = "job.custom_config_module"
ROOT = "JobConfig"
_DEFAULT_FACTORIES: dict[str, Any] = {"list": [], "dict": {}}
_RESERVED = ("job",)
"""Sections that cannot be extended, because ``job`` is read before the file is known."""


class _Invalid(Exception):
    """A definition in the file that is not accepted: the rule that it violates, and the fix."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule, fix)
        self.rule = rule
        self.fix = fix


def config_class(path: str, where: str = "") -> type[Config]:
    """Return ``Config`` with the sections that a file adds.

    Returns the same class for equal texts of a file at the same path.

    Args:
        path: a Python file.
        where: origin of the option, for errors.

    Raises:
        ConfigError: the file does not exist, cannot be parsed, or defines something that is not accepted.
    """
    if not path.endswith(".py") or not Path(path).is_file():
        fix = "name an existing Python file that defines the dataclass JobConfig: docs/extend.md"
        raise ConfigError(Problem(OPTION, path, "is not a Python file", fix, where))
    tree = own_file.read(Path(path), OPTION, path)
    try:
        return _build(path, hashlib.sha256(ast.dump(tree).encode()).hexdigest())
    except _Invalid as invalid:
        raise ConfigError(Problem(OPTION, path, invalid.rule, invalid.fix, where)) from None


@functools.lru_cache(maxsize=64)
def _build(path: str, digest: str) -> type[Config]:
    """Build the class of a file. ``digest`` makes the cache forget a file that has changed."""
    tree = own_file.read(Path(path), OPTION, path)
    # Only definitions at module level can be types of sections.
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if ROOT not in classes:
        raise _Invalid(
            f"does not define the class {ROOT}",
            f"define a dataclass {ROOT} whose fields are sections",
        )
    # A section with the name of an existing section extends it.
    existing = get_type_hints(Config)
    sections = []
    for name, annotation, _, _ in _fields(classes[ROOT]):
        class_name = annotation.id if isinstance(annotation, ast.Name) else ""
        if class_name not in classes:
            raise _Invalid(
                f"has {ROOT}.{name}, which is not a dataclass of this file",
                f"write {name}: SomeSection = field(default_factory=SomeSection)",
            )
        if name in _RESERVED or not name.isidentifier() or name.startswith("_"):
            raise _Invalid(
                f"defines the section [{name}], which cannot be changed", "choose another name"
            )
        section = _section(path, name, classes[class_name], existing.get(name))
        sections.append((name, section, field(default_factory=section)))
    # The file is parsed, not executed, so a repeated field is still visible here.
    names = [name for name, _, _ in sections]
    if len(set(names)) < len(names):
        raise _Invalid(f"defines a field of {ROOT} twice", "keep one")
    return make_dataclass(
        "Config",
        sections,
        bases=(Config,),
        namespace={"__reduce__": _reduce_with(path, "")},
        frozen=True,
    )


def _section(path: str, section: str, node: ast.ClassDef, base: type | None) -> type:
    """Return the dataclass of one section, derived from the package's section of the same name."""
    inherited = get_type_hints(base) if base is not None else {}
    definitions = []
    texts = {}
    for name, annotation, default_node, text in _fields(node):
        kind = _kind(annotation, f"{section}.{name}")
        # The package reads its own options, so their types must not change.
        if name in inherited and inherited[name] != kind:
            raise _Invalid(
                f"gives {section}.{name} another type than it has",
                "declare it as `shardtrain config help` does, or rename it",
            )
        default = _default(default_node, kind, f"{section}.{name}")
        definitions.append((name, kind, field(default_factory=functools.partial(_copy, default))))
        if text:
            texts[name] = text
    if not definitions:
        raise _Invalid(
            f"defines the section [{section}] without options", "add fields with types and defaults"
        )
    # Help text: the docstring of the class, or else that of the section that it extends.
    summary = ast.get_docstring(node)
    if not summary and base is not None:
        summary = base.__doc__
    if not summary:
        summary = f"Options of {Path(path).name}."
    namespace = {
        "__doc__": summary,
        "option_help": texts,
        "__reduce__": _reduce_with(path, section),
    }
    return make_dataclass(
        node.name,
        definitions,
        bases=(base,) if base is not None else (),
        namespace=namespace,
        frozen=True,
    )


def _fields(node: ast.ClassDef) -> list[tuple[str, ast.expr, ast.expr | None, str]]:
    """Return name, annotation, default and docstring of each annotated field of a class."""
    fields = []
    # The docstring of a field is the statement below it. The last statement has none.
    following = [*node.body[1:], ast.Pass()]
    for statement, below in zip(node.body, following, strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = " ".join(str(below.value.value).split())
        # Annotations may be strings, as with a forward reference.
        annotation = statement.annotation
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = _parsed_annotation(annotation)
        fields.append((statement.target.id, annotation, statement.value, text))
    return fields


def _kind(node: ast.expr, option: str) -> Any:
    """Return the type of an annotation: bool, int, float, str, list, dict, Literal, or one of them or None."""
    if isinstance(node, ast.Name) and node.id in PLAIN_KINDS:
        return PLAIN_KINDS[node.id]
    # The annotation is only parsed, so recognize each supported way to write a type.
    if isinstance(node, ast.BinOp) and ast.unparse(node).endswith(" | None"):
        return _kind(node.left, option) | None
    if isinstance(node, ast.Subscript):
        generic = ast.unparse(node.value).rpartition(".")[2].lower()
        if generic == "optional":
            return _kind(node.slice, option) | None
        if generic == "literal" and _is_literal(node.slice):
            return Literal[ast.literal_eval(node.slice)]
        if generic == "list" and isinstance(node.slice, ast.Name):
            return list[_kind(node.slice, option)]  # type: ignore[misc]
        if generic == "dict" and isinstance(node.slice, ast.Tuple):
            value_type = node.slice.elts[-1]
            if isinstance(value_type, ast.Name):
                return dict[str, _kind(value_type, option)]  # type: ignore[misc]
    raise _Invalid(
        f"declares {option} as {ast.unparse(node)}, which is not supported",
        "use bool, int, float, str, list[...], dict[str, ...], Literal[...], or one of these | None",
    )


def _parsed_annotation(node: ast.Constant) -> ast.expr:
    """Return the expression of an annotation that is written as a string, or the string if it is invalid."""
    try:
        return ast.parse(str(node.value), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return node


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _default(node: ast.expr | None, kind: Any, option: str) -> Any:
    """Return the default of a field as a value of its type. It must be a literal, because nothing is run."""
    value_node = node
    # field(default=1) and field(default_factory=lambda: [1]) contain the value.
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "field":
        arguments = {keyword.arg: keyword.value for keyword in node.keywords}
        value_node = arguments.get("default", arguments.get("default_factory"))
        if isinstance(value_node, ast.Name) and value_node.id in _DEFAULT_FACTORIES:
            return _copy(_DEFAULT_FACTORIES[value_node.id])
        if isinstance(value_node, ast.Lambda):
            value_node = value_node.body
    fix = f"write {option.rpartition('.')[2]}: TYPE = VALUE, with a literal"
    if value_node is None:
        raise _Invalid(f"declares {option} without a default", fix)
    if not _is_literal(value_node):
        raise _Invalid(f"has a default of {option} that is not a literal", fix)
    value = ast.literal_eval(value_node)
    if value is None and type(None) in get_args(kind):
        return None
    try:
        return coerce(value, kind)
    except Unfit as unfit:
        raise _Invalid(f"has a default of {option} that {unfit.rule}", unfit.fix) from None


def _copy(default: Any) -> Any:
    """Return a default that its owner may change."""
    if isinstance(default, list):
        return list(default)
    return dict(default) if isinstance(default, dict) else default


def _reduce_with(path: str, section: str) -> Any:
    """Return a ``__reduce__`` method: pickle cannot find a class that is not in a module by its name."""

    def __reduce__(self: Any) -> tuple[Any, ...]:
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return _restore, (path, section, values)

    return __reduce__


def _restore(path: str, section: str, values: Mapping[str, Any]) -> Any:
    """Build a pickled configuration or section again."""
    cls: type = config_class(path)
    if section:
        cls = get_type_hints(cls)[section]
    return cls(**values)
