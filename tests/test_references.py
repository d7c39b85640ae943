"""Paths and names of the package that docs, docstrings and comments mention in backticks exist."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardtrain.config.options import options

ROOT = Path(__file__).parents[1]
CHECKED = ("shardtrain/", "benchmarks/", "docs/", "examples/", "configs/", "README.md")
OTHER_SYSTEMS = ("docs/migrate/", "docs/migrate.md", "docs/CHANGELOG.md", "docs/decisions/")
"""Pages that name files of other systems or files as they were."""
INVENTED = {
    "my_model.py", "my_task.py", "my_tokenizer.py", "my_sink.py", "my_metric.py", "program.py", "file.py", "notes.md",
    # examples of attacks, and files of PyTorch, FMEngine and NCCL
    "json.py", "torch.py", "scripts/conversions/llama/from_hf.py", "doc/PERFORMANCE.md",
}  # fmt: skip
"""Files of examples and of other systems."""
FOREIGN_NAMES = {
    "conversion_mapping", "weight_scale_inv", "consolidated", "varlen", "rdzvConf", "elasticPolicy", "wait_for", "exp2",
    "resize_token_embeddings", "rand_like", "clip_grad_norm_",
}  # fmt: skip
"""Names of other libraries, which the package does not use."""
LIBRARIES = {
    "torch", "transformers", "datasets", "safetensors", "torchao", "numpy", "yaml", "sys", "pathlib", "str", "net",
    "dcp", "pyarrow", "F", "nn", "Tensor", "DTensor",
}  # fmt: skip
"""First parts of dotted names from other libraries, as prose and code import or abbreviate them."""
FILE_ENDINGS = (".txt", ".json", ".jsonl", ".bin", ".pkl", ".safetensors", ".gz")
EXAMPLES = {
    "patience.seconds", "patience.wait_for",  # helpers of the tests
    "chat_template.jinja", "Module.__setattr__", "critic.shardtrain",  # from the hub, PyTorch and verl
    "elasticPolicy.rdzvConf", "tokenizer.model", "model.resize_token_embeddings",  # from other systems
    "model.tokenizer", "model.model", "facts.guard.rewinds", "facts.replicas_compared",  # attributes, JSON keys
    "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "attn.wq", "attention.wq", "X.weight", "X.weight_scale_inv",
    "optimizer.state.NAME.exp_avg", "optimizer.param_groups.NAME.lr", "lr_scheduler.last_epoch",  # names in checkpoints
    "weight.data.fill_", "q.new_zeros", "x.no_y", "x.y", "LAYOUT.tensor", "LAYOUT.recurrence",  # code of users
}  # fmt: skip
"""Dotted names that are only examples in prose."""


@functools.cache
def tracked() -> tuple[str, ...]:
    """Paths of tracked files that exist, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    paths = tuple(path for path in listed.split("\0") if path and (ROOT / path).exists())
    if not paths:
        pytest.skip("this is not a clone")
    return paths


@functools.cache
def endings() -> frozenset[str]:
    """Every suffix of the tracked files and folders: ``a/b/c.py``, ``b/c.py``, ``c.py``, ``a/b``, ``a``, ``b``."""
    all_endings = set()
    for path in tracked():
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            all_endings |= {"/".join(parts[start:end]) for start in range(end)}
    return frozenset(all_endings)


def suspects(pattern_of: Callable[[str], str], is_known: Callable[[str], bool]) -> list[str]:
    """Return ``place: name`` for each name in prose that is not known.

    Args:
        pattern_of: Returns the regular expression of names in a file with this ending.
        is_known: True if a name exists.

    Finding comments and docstrings is slow. A file is therefore split only if any of its lines has an unknown name.
    """
    unknown_names = []
    for path in tracked():
        is_checked = path.startswith(CHECKED) and not path.startswith(OTHER_SYSTEMS)
        if not is_checked or not path.endswith((".md", ".py")):
            continue
        pattern = re.compile(pattern_of(path.rpartition(".")[2]))

        def unknown(line: str, pattern: re.Pattern[str] = pattern) -> list[str]:
            return [name for name in pattern.findall(line) if not is_known(name)]

        text = (ROOT / path).read_text(encoding="utf-8")
        if any(unknown(line) for line in text.splitlines()):
            for number, line in prose(path, text):
                unknown_names += [f"{path}:{number}: {name}" for name in unknown(line)]
    return unknown_names


def prose(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each line of Markdown, or of each comment and docstring of Python."""
    if path.endswith(".md"):
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        # docstrings, those of attributes included
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from enumerate(node.value.value.splitlines(), start=node.lineno)


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@functools.cache
def identifiers(path: str) -> set[str]:
    """Return every name in the code of a module, and each word in its strings of less than 200 characters."""
    names = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                names.add(name)
            case (
                ast.Name(id=name)
                | ast.Attribute(attr=name)
                | ast.arg(arg=name)
                | ast.keyword(arg=str(name))
            ):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names |= {*name.split("."), other or ""}
            case ast.Constant(value=str(text)) if len(text) < 200:
                names |= set(re.findall(r"\w+", text))
    return names


@functools.cache
def known_names() -> frozenset[str]:
    """Return all names in the package's code, and of its options."""
    names = set(FOREIGN_NAMES)
    for option in options():
        names |= set(option.split("."))
    for path in tracked():
        if path.startswith("shardtrain/") and path.endswith(".py"):
            names |= identifiers(path)
            names |= set(path.removesuffix(".py").split("/"))
    return frozenset(names)


@functools.cache
def package_texts() -> dict[str, str]:
    """Map each tracked module of the package to its text."""
    modules = [
        path for path in tracked() if path.startswith("shardtrain/") and path.endswith(".py")
    ]
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in modules}


@functools.cache
def modules_by_name() -> dict[str, list[str]]:
    """Map the name of each module, package and class to the files that define it."""
    files_by_name: dict[str, list[str]] = {}
    for path, text in package_texts().items():
        folder, _, file = path.removesuffix(".py").rpartition("/")
        files_by_name.setdefault(
            folder.rpartition("/")[2] if file == "__init__" else file, []
        ).append(path)
        for name in re.findall(r"^ *class (\w+)", text, re.M):
            files_by_name.setdefault(name, []).append(path)
    return files_by_name


@functools.cache
def dotted_code(path: str) -> frozenset[str]:
    """Return each dotted name in the code of a module, with its dotted suffixes: ``a.b.c`` and ``b.c``."""
    dotted_names = set()
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if names:
            if isinstance(node, ast.Name):
                names.insert(0, node.id)
            dotted_names |= {".".join(names[start:]) for start in range(len(names) - 1)}
    return frozenset(dotted_names)


def is_defined(dotted: str) -> bool:
    """True if ``a.b`` is an option, a name in a module or class ``a``, or a dotted name in the code."""
    if any(f".{dotted}." in f".{name}." or dotted.startswith(f"{name}.") for name in options()):
        return True
    first, *others = dotted.split(".")
    for path in modules_by_name().get(first, ()):
        if (
            others[0] in identifiers(path)
            or f"{path.rpartition('/')[0]}/{others[0]}.py" in package_texts()
        ):
            return True
    # Only modules whose text has the name are parsed, because parsing all takes long
    return any(
        dotted in text and dotted in dotted_code(path) for path, text in package_texts().items()
    )


def leads_to_a_name(dotted: str) -> bool:
    """True if ``shardtrain.a.b.name`` is a package, a module, or a name in the code of one."""
    folder = ""
    _ = ""
    rest = dotted
    while rest:
        first, _, others = rest.partition(".")
        if (ROOT / folder / first).is_dir():
            folder = f"{folder}{first}/"
            rest = others
            continue
        module = f"{folder}{first}.py"
        if (ROOT / module).is_file():
            return not others or others.partition(".")[0] in identifiers(module)
        return (ROOT / f"{folder}__init__.py").is_file() and first in identifiers(
            f"{folder}__init__.py"
        )
    return True


def test_files_that_prose_names_exist() -> None:
    patterns = {
        "py": r"(?<![\w./*{<$~-])(?:\./)?(\.?\w[\w./-]*\.(?:py|sh))\b",
        "md": r"`(?:python3? )?(?:\./)?(\.?\w[\w./-]*\.(?:py|sh|md))(?::\d+|::\w+)?`",
    }

    def exists(name: str) -> bool:
        return name in endings() or name in INVENTED or name.endswith("/NAME.py")

    assert suspects(patterns.__getitem__, exists) == []


def test_dotted_names_in_prose_exist() -> None:
    @functools.cache
    def exists(quoted: str) -> bool:
        dotted = quoted.partition("(")[0].strip()
        if (
            not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", dotted)
            or dotted in endings()
            or dotted.endswith(FILE_ENDINGS)
            or dotted.partition(".")[0] in LIBRARIES
            or dotted in EXAMPLES | INVENTED
        ):
            return True
        return leads_to_a_name(dotted) if dotted.startswith("shardtrain.") else is_defined(dotted)

    assert suspects(lambda _: "`+([^`]+)`+", exists) == []


def test_programs_next_to_the_package_import_names_that_exist() -> None:
    """No test imports these programs, so an import of a renamed module would go unnoticed."""
    missing = []
    folders = ("benchmarks/", "examples/", "docs/", "scripts/", "cli/")
    for path in tracked():
        if not path.endswith(".py") or not path.startswith(folders):
            continue
        for node in ast.walk(tree_of(path)):
            imports = []
            if isinstance(node, ast.ImportFrom):
                imports = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                imports = [alias.name for alias in node.names]
            for name in imports:
                is_ours = name.partition(".")[0] == "shardtrain"
                if is_ours and not leads_to_a_name(name):
                    missing.append(f"{path}:{node.lineno}: {name}")

    assert missing == []


def test_a_stale_name_is_found() -> None:
    assert is_defined("attention_scores.with_sinks")
    assert not is_defined("scores.with_sinks")
    assert is_defined("training.steps")
    assert not is_defined("training.gone")
    assert leads_to_a_name("shardtrain.config.options.options")
    assert leads_to_a_name("shardtrain.layout")
    assert not leads_to_a_name("shardtrain.config.options.gone")
    assert not leads_to_a_name("shardtrain.gone.options")
    assert "config/options.py" in endings()
    assert "options/config.py" not in endings()
