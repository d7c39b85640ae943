"""Rules for all files of the package: no unsafe calls, no unfinished code, no import cycles."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import shardtrain

PACKAGE = Path(shardtrain.__file__).parent
TEXTS = {
    path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
    for path in PACKAGE.rglob("*.py")
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in sorted(TEXTS.items())}


def offenders(rule: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return the files that break a rule, with their violations.

    One test checks all files, because a parametrized test for each of hundreds of files would take a minute.
    """
    assert len(trees()) > 300, "the files of the package were not found"
    violations = {name: rule(name) for name in trees()}
    return {name: lines for name, lines in violations.items() if lines}


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Return the calls in a file, each with its dotted name as written."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def keyword(call: ast.Call, name: str) -> object:
    """Return the constant value of a keyword argument, or None."""
    for argument in call.keywords:
        if argument.arg == name and isinstance(argument.value, ast.Constant):
            return argument.value.value
    return None


def test_no_unfinished_code() -> None:
    assert (
        offenders(
            lambda name: re.findall(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b", TEXTS[name])
        )
        == {}
    )


def test_no_path_of_a_machine() -> None:
    """No file contains a path below a home directory, this checkout or a mount point."""
    folders = "|".join(
        [re.escape(str(PACKAGE.parent)), "/home", "/root", "/Users", "/mnt", r"C:\\\\"]
    )
    assert offenders(lambda name: re.findall(rf"[\"'`\s](?:{folders})/\S*", TEXTS[name])) == {}


def runs_code(name: str, call: ast.Call) -> bool:
    """True if a call could run code contained in data, or a shell command."""
    return (
        name in ("eval", "exec", "os.system", "os.popen")
        or re.fullmatch(r"(?:pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib)\.\w+", name)
        is not None
        or keyword(call, "shell") is True
        or keyword(call, "trust_remote_code") is not None
        or keyword(call, "allow_pickle") is True
        or (name == "torch.load" and keyword(call, "weights_only") is not True)
        or name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load")
    )


def test_opening_data_never_runs_code() -> None:
    def unsafe(name: str) -> list[str]:
        lines = [
            ast.unparse(call) for called, call in calls(trees()[name]) if runs_code(called, call)
        ]
        # Readers of other systems' configurations name this option, because they refuse it.
        is_migration = name.startswith("compat/migrate/")
        if "trust_remote_code" in TEXTS[name] and not is_migration:
            lines.append("trust_remote_code")
        return lines

    assert offenders(unsafe) == {}


def test_calls_that_could_run_code_are_detected() -> None:
    wrong = [
        "eval(x)",
        "pickle.loads(x)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "yaml.load(x)",
    ]
    wrong += [
        "run(x, shell=True)",
        "numpy.load(x, allow_pickle=True)",
        "load(x, trust_remote_code=False)",
    ]
    right = [
        "torch.load(x, weights_only=True)",
        "yaml.safe_load(x)",
        "json.loads(x)",
        "run(x, shell=False)",
    ]
    for text in wrong + right:
        [(name, call)] = calls(ast.parse(text))
        assert runs_code(name, call) == (text in wrong), text


def test_no_pickle_is_imported() -> None:
    def pickles(name: str) -> list[str]:
        nodes = list(ast.walk(trees()[name]))
        imported = {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        imported |= {
            node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module
        }
        return sorted(imported & {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})

    assert offenders(pickles) == {}


def test_every_file_has_a_module_docstring() -> None:
    def missing(name: str) -> list[str]:
        lines = []
        if len(ast.get_docstring(trees()[name]) or "") <= 20:
            lines.append("no docstring")
        # __init__.py removes the current directory from the path before its first import
        needs_annotations = functions(trees()[name]) and name != "__init__.py"
        if needs_annotations and "from __future__ import annotations" not in TEXTS[name]:
            lines.append("no import of annotations")
        return lines

    assert offenders(missing) == {}


def methods(tree: ast.AST) -> list[tuple[ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef]]:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(owner, node) for owner in classes for node in owner.body if isinstance(node, kinds)]


def test_public_methods_without_base_are_documented() -> None:
    """An override needs no docstring, because the base class documents the method."""
    all_methods = [method for tree in trees().values() for method in methods(tree)]
    documented_names = {node.name for _, node in all_methods if ast.get_docstring(node)}
    classes = {owner.name for owner, _ in all_methods}

    def needs_docstring(owner: ast.ClassDef, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        if node.name.startswith("_") or owner.name.startswith("_") or node.name in documented_names:
            return False
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        if "setter" in decorators or "overload" in decorators:
            return False
        # With a base class from a library, the method may be an override of the library's method.
        return all(ast.unparse(base) in classes for base in owner.bases)

    def undocumented(name: str) -> list[str]:
        return [
            f"{owner.name}.{node.name}"
            for owner, node in methods(trees()[name])
            if needs_docstring(owner, node)
        ]

    assert offenders(undocumented) == {}


def imports(with_types: bool = False) -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, at the top level or in a function.

    ``with_types`` includes imports under TYPE_CHECKING.
    """
    imported_names: dict[str, set[str]] = {}
    for name, tree in trees().items():
        path = f"shardtrain/{name}".removesuffix(".py").removesuffix("/__init__")
        nodes = set(ast.walk(tree))
        if not with_types:
            for node in ast.walk(tree):
                if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                    nodes -= set(ast.walk(node))
        names = set()
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        imported_names[path.replace("/", ".")] = names
    # The package itself imports names from shardtrain.api lazily, on first access, so it makes no cycle.
    imported_names["shardtrain"] = set()

    def module_of(name: str) -> str:
        return name if name in imported_names else name.rpartition(".")[0]

    graph = {
        module: {module_of(name) for name in names} for module, names in imported_names.items()
    }
    return {module: modules & graph.keys() - {module} for module, modules in graph.items()}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules in import cycles and those that import them. Empty if there are no cycles."""
    while leaves := [module for module, names in graph.items() if not names]:
        graph = {module: names.difference(leaves) for module, names in graph.items() if names}
    return sorted(graph)


def test_no_import_cycles() -> None:
    assert sum(map(len, imports().values())) > 2000, "the imports were not found"
    assert cycle(imports()) == []


def test_cycles_are_detected() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def room_of(module: str) -> str:
    """Return the package or file directly below ``shardtrain``. Empty for ``shardtrain`` itself."""
    return module.partition(".")[2].partition(".")[0]


def rooms_that_import_each_other(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    pairs = {(room_of(module), room_of(name)) for module, names in graph.items() for name in names}
    return sorted(
        (first, second) for first, second in pairs if first < second and (second, first) in pairs
    )


def test_no_two_rooms_import_each_other() -> None:
    """Imports in functions and under TYPE_CHECKING count too."""
    graph = imports(with_types=True)
    assert len({room_of(module) for module in graph}) > 20, "the rooms were not found"
    assert rooms_that_import_each_other(graph) == []


def test_no_import_cycles_within_a_room() -> None:
    """Imports in functions and under TYPE_CHECKING count too."""
    graph = imports(with_types=True)
    for room in sorted({room_of(module) for module in graph}):
        imports_of_room = {}
        for module, names in graph.items():
            if room_of(module) == room:
                imports_of_room[module] = {name for name in names if room_of(name) == room}
        assert cycle(imports_of_room) == []


def test_rooms_that_import_each_other_are_detected() -> None:
    graph = {
        "shardtrain.a.x": {"shardtrain.b.y"},
        "shardtrain.b.z": {"shardtrain.a.x"},
        "shardtrain.b.y": set(),
    }

    assert rooms_that_import_each_other(graph) == [("a", "b")]


def test_no_docstring_only_points_elsewhere() -> None:
    """Reject docstrings such as "See Base.method": an override needs none, or one about its differences."""
    assert offenders(lambda name: re.findall(r'^ +"""See .*$', TEXTS[name], re.M)) == {}


def test_no_variable_is_called_here() -> None:
    """Reject ``here`` as a variable name. Use a name of the value, such as ``world`` or ``rows``."""

    def uses(name: str) -> list[str]:
        nodes = ast.walk(trees()[name])
        return [
            ast.unparse(node)
            for node in nodes
            if getattr(node, "id", getattr(node, "arg", "")) == "here"
        ]

    assert offenders(uses) == {}
