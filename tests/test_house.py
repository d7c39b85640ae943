"""Rules for all files of the package: nothing that opens a hole, nothing left undone, no import circles."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import shardtrain

PACKAGE = Path(shardtrain.__file__).parent
TEXTS = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in sorted(TEXTS.items())}


def offenders(law: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Every file that breaks a law, with what breaks it: a test for each of hundreds of files would take a minute."""
    assert len(trees()) > 300, "the files of the package were not found"
    return {name: broken for name in trees() if (broken := law(name))}


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Each call of a file with its dotted name as written."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def keyword(call: ast.Call, name: str) -> object:
    return next(
        (ast.literal_eval(k.value) for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None
    )


def test_nothing_is_left_undone() -> None:
    assert offenders(lambda name: re.findall(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b", TEXTS[name])) == {}


def test_no_file_knows_a_machine() -> None:
    """A path below a home, a checkout or a temporary folder is somebody's machine."""
    folders = "|".join([re.escape(str(PACKAGE.parent)), "/home", "/root", "/Users", "/mnt", r"C:\\\\"])
    assert offenders(lambda name: re.findall(rf"[\"'`\s](?:{folders})/\S*", TEXTS[name])) == {}


def runs_code(name: str, call: ast.Call) -> bool:
    """Whether a call could run code that data carry, or a command that a shell reads."""
    return (
        name in ("eval", "exec", "os.system", "os.popen")
        or re.fullmatch(r"(?:pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib)\.\w+", name) is not None
        or keyword(call, "shell") is True
        or keyword(call, "trust_remote_code") is not None
        or keyword(call, "allow_pickle") is True
        or (name == "torch.load" and keyword(call, "weights_only") is not True)
        or name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load")
    )


def test_opening_data_never_runs_code() -> None:
    def found(name: str) -> list[str]:
        # the readers of other systems' files know it as a key that they refuse
        refused = name.startswith("compat/migrate/")
        named = ["trust_remote_code"] if "trust_remote_code" in TEXTS[name] and not refused else []
        return named + [ast.unparse(call) for called, call in calls(trees()[name]) if runs_code(called, call)]

    assert offenders(found) == {}


def test_calls_that_could_run_code_are_found() -> None:
    wrong = ["eval(x)", "pickle.loads(x)", "torch.load(x)", "torch.load(x, weights_only=False)", "yaml.load(x)"]
    wrong += ["run(x, shell=True)", "numpy.load(x, allow_pickle=True)", "load(x, trust_remote_code=False)"]
    right = ["torch.load(x, weights_only=True)", "yaml.safe_load(x)", "json.loads(x)", "run(x, shell=False)"]
    for text in wrong + right:
        [(name, call)] = calls(ast.parse(text))
        assert runs_code(name, call) == (text in wrong), text


def test_no_pickle_is_imported() -> None:
    def pickles(name: str) -> list[str]:
        nodes = list(ast.walk(trees()[name]))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        return sorted(imported & {"pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"})

    assert offenders(pickles) == {}


def test_every_file_says_what_it_is_for() -> None:
    def silent(name: str) -> list[str]:
        found = ["no docstring"] if len(ast.get_docstring(trees()[name]) or "") <= 20 else []
        has_import = "from __future__ import annotations" in TEXTS[name] or not functions(trees()[name])
        has_import |= name == "__init__.py"  # it imports nothing before it has left out the current directory
        return found if has_import else [*found, "no import of annotations"]

    assert offenders(silent) == {}


def methods(tree: ast.AST) -> list[tuple[ast.ClassDef, ast.FunctionDef | ast.AsyncFunctionDef]]:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(owner, node) for owner in classes for node in owner.body if isinstance(node, kinds)]


def test_public_methods_are_documented_where_they_do_not_override() -> None:
    """An override says by its name what it is: some other class documents the method."""
    described = {
        (owner.name, node.name) for tree in trees().values() for owner, node in methods(tree) if ast.get_docstring(node)
    }
    names = {name for _, name in described}
    classes = {owner.name for tree in trees().values() for owner, _ in methods(tree)}

    def silent(name: str) -> list[str]:
        return [
            f"{owner.name}.{node.name}"
            for owner, node in methods(trees()[name])
            if not node.name.startswith("_")
            and not owner.name.startswith("_")
            and not ast.get_docstring(node)
            and not any("setter" in ast.unparse(one) or "overload" in ast.unparse(one) for one in node.decorator_list)
            and node.name not in names
            and all(ast.unparse(base) in classes for base in owner.bases)  # else it may override a library's
        ]

    assert offenders(silent) == {}


def imports(with_types: bool = False) -> dict[str, set[str]]:
    """The modules of the package that each module imports, at its top or in a function.

    ``with_types`` includes imports under TYPE_CHECKING.
    """
    found: dict[str, set[str]] = {}
    for name, tree in trees().items():
        module = f"shardtrain/{name}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        ifs = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ]
        types = {inner for node in ifs for inner in ast.walk(node)}
        froms = [
            node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (with_types or node not in types)
        ]
        found[module] = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
    found["shardtrain"] = set()  # its names are those of shardtrain.api, which are imported when they are asked for

    def module_of(name: str) -> str:
        return name if name in found else name.rpartition(".")[0]

    return {module: {module_of(name) for name in names} & found.keys() - {module} for module, names in found.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty where there are none."""
    while leaves := [module for module, names in graph.items() if not names]:
        graph = {module: names.difference(leaves) for module, names in graph.items() if names}
    return sorted(graph)  # those in circles, and those that import them


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert sum(map(len, imports().values())) > 2000, "the imports were not found"
    assert circle(imports()) == []


def test_circles_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def room_of(module: str) -> str:
    """The package or file directly below ``shardtrain``; empty for ``shardtrain`` itself."""
    return module.partition(".")[2].partition(".")[0]


def rooms_that_import_each_other(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    pairs = {(room_of(module), room_of(name)) for module, names in graph.items() for name in names}
    return sorted((one, other) for one, other in pairs if one < other and (other, one) in pairs)


def test_no_two_rooms_import_each_other() -> None:
    """Imports in functions and under TYPE_CHECKING count too."""
    graph = imports(with_types=True)
    assert len({room_of(module) for module in graph}) > 20, "the rooms were not found"
    assert rooms_that_import_each_other(graph) == []


def test_no_modules_of_a_room_import_each_other_in_a_circle() -> None:
    """Imports in functions and under TYPE_CHECKING count too."""
    graph = imports(with_types=True)
    for room in sorted({room_of(module) for module in graph}):
        inside = {module: {n for n in names if room_of(n) == room} for module, names in graph.items()}
        assert circle({module: names for module, names in inside.items() if room_of(module) == room}) == []


def test_rooms_that_import_each_other_are_found() -> None:
    graph = {"shardtrain.a.x": {"shardtrain.b.y"}, "shardtrain.b.z": {"shardtrain.a.x"}, "shardtrain.b.y": set()}
    assert rooms_that_import_each_other(graph) == [("a", "b")]


def test_no_docstring_only_points_elsewhere() -> None:
    """An override needs none, and says with one what is particular to it."""
    assert offenders(lambda name: re.findall(r'^ +"""See .*$', TEXTS[name], re.M)) == {}


def test_no_variable_is_called_here() -> None:
    """It says where and not what: a rank is a ``world`` or has a ``context``, a part of a tensor is ``rows``."""

    def found(name: str) -> list[str]:
        nodes = ast.walk(trees()[name])
        return [ast.unparse(node) for node in nodes if getattr(node, "id", getattr(node, "arg", "")) == "here"]

    assert offenders(found) == {}
