"""Each fact is written in one place: no table or constant is repeated, and plans import the constants of kernels."""

from __future__ import annotations

import ast
import functools
import importlib
import operator
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from shardtrain import facts
from shardtrain.facts import devices

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shardtrain"
FEWEST = 3
"""Elements of a table. Pairs coincide too often."""
LARGEST_COUNT = 16
"""Tables of numbers up to this are counts to try, such as powers of two, rather than facts."""
SHARED = 4
SHARE = 0.8
"""A literal that has so many elements, and this share, of a table in ``facts`` repeats it."""

LARGEST_AMBIGUOUS = 128
"""Numbers up to this occur in many roles."""
LARGEST_ROUND = 1000
"""Integers up to this count as round."""
SHORTEST_TEXT = 3
"""Texts up to this length, such as names of axes, are words rather than facts."""
UNITS = (1000, 3600)
"""Numbers that convert units."""
OTHER_ROLES = {("calibrate.py", 2**24): "bytes of a file, where kernels count elements"}
"""Numbers of plans that a kernel has in another role."""

DESCRIBES_ITSELF = ("models/", "hub_formats/", "compat/")
"""Each file describes one model family or one other system in full, so that it can be read without the others."""

ALLOWED: dict[tuple[str, ...], str] = {
    (
        "StepResult",
        "Trainer",
        "evaluate",
        "generate",
        "load_config",
        "load_model",
        "plan",
        "report",
        "verify",
    ): (
        "shardtrain/__init__.py lists the Python API without importing it, because api.py imports torch"
    ),
    ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree"): (
        "types of old names, reasons why tasks refuse an axis, and the axes of one task"
    ),
    ("optimizer", "lr_scheduler", "dataloader", "train_state"): (
        "the values of an option, and which options each value frees; the rules of values import no other rules"
    ),
    ("text", "prompt_completion", "chat"): "columns and a template for each value of data.format",
    (
        "pytorchjob",
        "trainjob",
        "jobset",
    ): "names of resources and labels for each value of launch.kubernetes.kind",
    ("none", "efa", "infiniband"): "environment variables for each value of launch.fabric",
    ("lora_a", "lora_b", "lora_magnitude"): "placements and PEFT's names of each factor",
    ("tensorwise", "rowwise", "rowwise_with_gw_hp"): "products for each recipe",
    ("mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated"): "the rule of scales for each recipe",
    ("productive", "checkpoint", "data", "validation", "compile", "start", "restart", "lost"): (
        "a letter for each bin, in the order of the bar on the screen"
    ),
    ("logs", "status", "stop"): "help and function of each verb about jobs",
    ("modules", "parameters", "saved"): "PEFT's name of each list of a LoRA specification",
    (
        "loss",
        "grad_norm",
        "tokens_per_second",
        "memory_gib",
    ): "a title for each curve on the screen",
    (
        "q",
        "k",
        "v",
        "out",
    ): "tensors that verify records in one file and compares in another, for one step each",
}
"""Tables that may be written twice, and why. Most hold other values for the same keys: a new key must be in both."""

INDEPENDENT = {
    "LOOK_SECONDS": "each loop has its own interval",
    "POLL_SECONDS": "each loop has its own interval",
    "WAIT_SECONDS": "each command has its own timeout",
    "END_SECONDS": "pdsh and ssh end differently",
    "MAX_BYTES": "each kind of file has its own limit",
    "BLOCK_BYTES": "each reader has its own buffer",
    "ROWS_AT_ONCE": "rows to tokenize, and rows to read from a file",
    "CLOSE": "each comparison has its own tolerance",
    "BAD_SHARE": "rates of devices, and rates of links",
    "BLOCK": "weights that share a scale, and positions of a cache",
}
"""Names of constants that have the same value in several files by coincidence, or for the given reason."""


REPEATS_FACTS = {
    (
        "tests/data/sources/test_source_jsonl.py",
        "file_kinds.COMPRESSIONS",
    ): "a function that compresses for each",
}
"""Files that may repeat a table of facts, and why."""


class Table(NamedTuple):
    """A collection that is written out in a file."""

    file: str
    line: int
    elements: frozenset[Any]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def test_no_table_is_written_twice() -> None:
    tables_by_elements = defaultdict(list)
    for table in tables(PACKAGE):
        if not table.file.startswith(DESCRIBES_ITSELF):
            tables_by_elements[table.elements].append(table)
    repeated = {}
    for elements, places in tables_by_elements.items():
        if len({place.file for place in places}) > 1:
            repeated[elements] = places

    # An exception that is no longer needed must be removed.
    for elements in map(frozenset, ALLOWED):
        assert elements in repeated, (
            f"{sorted(elements)} is no longer written twice: remove it from ALLOWED"
        )
        del repeated[elements]

    problems = []
    for elements, places in repeated.items():
        problems.append(f"{sorted(elements)} in {', '.join(map(str, places))}")
    assert problems == []


def test_nothing_repeats_a_table_of_facts() -> None:
    known = fact_tables()
    repeats = []
    for folder in ("shardtrain", "benchmarks", "docs", "tests"):
        for table in tables(ROOT / folder):
            if folder == "shardtrain" and table.file.startswith("facts/"):
                continue
            name = repeated_fact(table, known, nearly=folder == "shardtrain")
            if name and (f"{folder}/{table.file}", name) not in REPEATS_FACTS:
                repeats.append(f"{folder}/{table.file}:{table.line} repeats {name}")

    assert repeats == []


def test_no_constant_is_written_twice() -> None:
    """A constant counts as repeated if another has the same name and value.

    For strings and numbers that are not round, an equal value is enough.
    """
    places = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for name, value in named_constants(path):
            if file.startswith(DESCRIBES_ITSELF) or is_short(value):
                continue
            places[name, value].add(file)
            if isinstance(value, str | bytes) or not is_round(value):
                places["", value].add(file)
    repeated = {key: files for key, files in places.items() if len(files) > 1}

    # An exception that is no longer needed must be removed.
    unused = INDEPENDENT.keys() - {name for name, _ in repeated}
    assert not unused, f"{sorted(unused)} are no longer written twice: remove them from INDEPENDENT"

    problems = []
    for (name, value), files in repeated.items():
        if name not in INDEPENDENT:
            problems.append(f"{name} = {value!r} in {sorted(files)}")
    assert problems == []


def named_constants(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name, without leading underscores, and the value of each number or string constant of a module."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            value = number_of(statement.value)
            if isinstance(statement.value, ast.Constant) and isinstance(
                statement.value.value, str | bytes
            ):
                value = statement.value.value
            if value is not None:
                yield statement.targets[0].id.lstrip("_"), value


def is_short(value: Any) -> bool:
    """True for values that are too common to be a fact."""
    return (
        len(value) <= SHORTEST_TEXT
        if isinstance(value, str | bytes)
        else is_count(value) and isinstance(value, int)
    )


def is_round(number: float) -> bool:
    """True for small numbers, fractions, powers of two and numbers with one digit other than zero."""
    if not isinstance(number, int) or number <= LARGEST_ROUND or number in UNITS:
        return True
    is_power_of_two = number & (number - 1) == 0 or number & (number + 1) == 0
    return is_power_of_two or len(str(number).rstrip("0")) == 1


def repeated_fact(table: Table, known: dict[str, frozenset[str]], nearly: bool) -> str:
    """Return the table of facts that a literal repeats, or nearly repeats, or an empty text."""
    for name, elements in known.items():
        shared = len(elements & table.elements)
        is_near = nearly and shared >= SHARED and shared >= SHARE * len(elements)
        if table.elements == elements or is_near:
            return name
    return ""


def fact_tables() -> dict[str, frozenset[str]]:
    """Return the elements of each public table of strings in ``facts``. The elements of a dict are its keys."""
    elements_of_tables = {}
    for module in modules_of(facts):
        module_name = module.__name__.rpartition(".")[2]
        for name, value in vars(module).items():
            is_public_constant = name.isupper() and not name.startswith("_")
            if not is_public_constant or not isinstance(value, dict | tuple | list | frozenset):
                continue
            elements = frozenset(value)
            has_only_texts = all(isinstance(element, str) for element in elements)
            if len(elements) >= FEWEST and has_only_texts:
                elements_of_tables[f"{module_name}.{name}"] = elements
    elements_of_tables["devices.names()"] = frozenset(devices.names())
    return elements_of_tables


def modules_of(package: ModuleType) -> list[ModuleType]:
    names = [
        module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    ]
    return [importlib.import_module(name) for name in names]


@functools.cache
def tables(folder: Path) -> list[Table]:
    return list(find_tables(folder))


def find_tables(folder: Path) -> Iterator[Table]:
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, elements in literals(tree):
            if len(elements) >= FEWEST and not all(is_count(element) for element in elements):
                yield Table(path.relative_to(folder).as_posix(), line, elements)


def literals(tree: ast.Module) -> Iterator[tuple[int, frozenset[Any]]]:
    """Yield the line and elements of each collection of constants. The elements of a dict are its keys.

    A dict inside a function with computed values is a record rather than a table.
    """
    nodes_at_top = {id(node) for statement in tree.body for node in at_top(statement)}
    for node in ast.walk(tree):
        elements: list[ast.expr | None] = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            elements = [*node.elts]
        elif isinstance(node, ast.Dict):
            has_constant_values = all(isinstance(value, ast.Constant) for value in node.values)
            if has_constant_values or id(node) in nodes_at_top:
                elements = [*node.keys]

        constants = [element.value for element in elements if isinstance(element, ast.Constant)]
        if not elements or len(constants) < len(elements):
            continue
        if all(isinstance(value, str | int | float) for value in constants):
            yield node.lineno, frozenset(constants)


def at_top(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement outside of functions."""
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.stmt):
                yield from at_top(child)
            else:
                yield from ast.walk(child)


def is_count(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST_COUNT


def test_plans_import_the_constants_of_kernels() -> None:
    """A plan that copied the size at which a kernel changes would be wrong as soon as the kernel is tuned."""
    kernels = {}
    for folder in ("ops", "optim"):
        for file, name, value in named_numbers(PACKAGE / folder):
            if value > LARGEST_AMBIGUOUS and value not in UNITS:
                kernels[value] = f"{folder}/{file}:{name}"

    copied = []
    for path in sorted((PACKAGE / "tools" / "plan").glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # A keyword argument such as maxsize=256 is the size of a cache, and no copy.
        arguments = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.expr) or id(node) in arguments:
                continue
            value = number_of(node)
            if value in kernels and (path.name, value) not in OTHER_ROLES:
                place = f"tools/plan/{path.name}:{node.lineno}"
                copied.append(f"{place} writes {value}, as {kernels[value]}")

    assert copied == []


def named_numbers(folder: Path) -> Iterator[tuple[str, str, float]]:
    """Yield the file, name and value of each numeric module-level constant in a folder."""
    for path in sorted(folder.rglob("*.py")):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                value = number_of(statement.value)
                if value is not None:
                    yield path.name, statement.targets[0].id, value


def number_of(node: ast.expr) -> float | None:
    """Return the value of a number, or of a shift, power or product of numbers."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    operators = {ast.LShift: operator.lshift, ast.Pow: operator.pow, ast.Mult: operator.mul}
    if isinstance(node, ast.BinOp) and type(node.op) in operators:
        left_number = number_of(node.left)
        right_number = number_of(node.right)
        if left_number is not None and right_number is not None:
            return operators[type(node.op)](left_number, right_number)
    return None
