"""Paths and names of the package that docs, docstrings and comments mention in backticks exist."""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardtrain.config.options import options

ROOT = Path(__file__).parents[1]
CHECKED = ("shardtrain/", "benchmarks/", "docs/", "examples/", "configs/", "README.md")
OTHER_SYSTEMS = ("docs/migrate/", "docs/migrate.md", "docs/CHANGELOG.md", "docs/decisions/")
"""Pages that name files of other systems or files as they were."""
INVENTED = {
    "my_model.py", "my_task.py", "my_tokenizer.py", "my_sink.py", "my_metric.py", "program.py", "file.py", "notes.md",
    # files of attackers, and of PyTorch, FMEngine and NCCL's documentation
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
    "dcp", "F", "nn", "Tensor", "DTensor",
}  # fmt: skip
"""First words of names of other libraries, under which prose and code know them."""
FILE_ENDINGS = (".txt", ".json", ".jsonl", ".bin", ".pkl", ".safetensors", ".gz")
EXAMPLES = {
    "patience.seconds", "patience.wait_for",  # of the tests
    "elasticPolicy.rdzvConf", "tokenizer.model", "model.resize_token_embeddings",  # of other systems
    "model.tokenizer", "model.model", "facts.guard.rewinds", "facts.replicas_compared",  # of objects and of a JSON file
    "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "attn.wq", "attention.wq", "X.weight", "X.weight_scale_inv",
    "optimizer.state.NAME.exp_avg", "optimizer.param_groups.NAME.lr", "lr_scheduler.last_epoch",  # names in checkpoints
    "weight.data.fill_", "q.new_zeros", "x.no_y", "x.y", "LAYOUT.tensor",  # code of a user
}  # fmt: skip
"""Dotted names that prose gives as examples."""


@functools.cache
def tracked() -> tuple[str, ...]:
    """Paths of tracked files that exist, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    paths = tuple(path for path in listed.split("\0") if path and (ROOT / path).exists())
    if not paths:
        pytest.skip("this is not a clone")
    return paths


@functools.cache
def endings() -> frozenset[str]:
    """Each tracked path and folder, by each of its ends: ``a/b/c.py``, ``b/c.py``, ``c.py``, ``a``, ``a/b``, ``b``."""
    all_endings = set()
    for path in tracked():
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            all_endings |= {"/".join(parts[start:end]) for start in range(end)}
    return frozenset(all_endings)


def prose(path: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of each line of Markdown, or of each comment and docstring of Python."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        # docstrings, those of attributes included
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), start=node.lineno)


def checked_prose() -> Iterator[tuple[str, str]]:
    """Yield a place (``file:line``) and its text."""
    for path in tracked():
        if path.startswith(CHECKED) and not path.startswith(OTHER_SYSTEMS) and path.endswith((".md", ".py")):
            for number, line in prose(path):
                yield f"{path}:{number}", line


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@functools.cache
def identifiers(path: str) -> set[str]:
    """Return every name in the code of a module, and the words of its strings other than docstrings."""
    names = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names |= {*name.split("."), other or ""}
            case ast.Constant(value=str(text)) if len(text) < 200:
                names |= set(re.findall(r"\w+", text))
    return names


@functools.cache
def known_names() -> frozenset[str]:
    """Return all names in the package's code, and of its options."""
    names = FOREIGN_NAMES | {part for name in options() for part in name.split(".")}
    for path in tracked():
        if path.startswith("shardtrain/") and path.endswith(".py"):
            names |= identifiers(path) | set(path.removesuffix(".py").split("/"))
    return frozenset(names)


@functools.cache
def modules_by_name() -> dict[str, list[str]]:
    """Map the name of each module, package and class to the files that define it."""
    files_by_name: dict[str, list[str]] = {}
    for path in tracked():
        if not path.startswith("shardtrain/") or not path.endswith(".py"):
            continue
        folder, _, file = path.removesuffix(".py").rpartition("/")
        files_by_name.setdefault(folder.rpartition("/")[2] if file == "__init__" else file, []).append(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                files_by_name.setdefault(node.name, []).append(path)
    return files_by_name


@functools.cache
def dotted_code() -> frozenset[str]:
    """Return each dotted name in the code of the package, by each of its ends: ``a.b.c`` and ``b.c``."""
    dotted_names = set()
    for path in tracked():
        if not path.startswith("shardtrain/") or not path.endswith(".py"):
            continue
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
    """True if ``a.b`` is an option, a name in a module or class ``a``, or written so in the code."""
    if dotted in dotted_code() or any(
        f".{dotted}." in f".{name}." or dotted.startswith(f"{name}.") for name in options()
    ):
        return True
    first, *others = dotted.split(".")
    if first in modules_by_name():
        return any(
            others[0] in identifiers(path) or f"{path.rpartition('/')[0]}/{others[0]}.py" in tracked()
            for path in modules_by_name()[first]
        )
    return False


def leads_to_a_name(dotted: str) -> bool:
    """True if ``shardtrain.a.b.name`` is a package, a module, or a name in the code of one."""
    folder, _, rest = "", "", dotted
    while rest:
        first, _, others = rest.partition(".")
        if (ROOT / folder / first).is_dir():
            folder, rest = f"{folder}{first}/", others
            continue
        module = f"{folder}{first}.py"
        if (ROOT / module).is_file():
            return not others or others.partition(".")[0] in identifiers(module)
        return (ROOT / f"{folder}__init__.py").is_file() and first in identifiers(f"{folder}__init__.py")
    return True


def test_files_that_prose_names_exist() -> None:
    in_code = r"(?<![\w./*{<$~-])(?:\./)?(\.?\w[\w./-]*\.(?:py|sh))\b"
    in_pages = r"`(?:python3? )?(?:\./)?(\.?\w[\w./-]*\.(?:py|sh|md))(?::\d+|::\w+)?`"
    missing = []
    for place, line in checked_prose():
        pattern = in_pages if place.partition(":")[0].endswith(".md") else in_code
        for name in re.findall(pattern, line):
            if name not in endings() and name not in INVENTED and not name.endswith("/NAME.py"):
                missing.append(f"{place}: {name}")
    assert missing == []


def test_dotted_names_in_prose_exist() -> None:
    missing = []
    for place, line in checked_prose():
        for quoted in re.findall(r"`+([^`]+)`+", line):
            dotted = quoted.partition("(")[0].strip()
            if (
                not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", dotted)
                or dotted in endings()
                or dotted.endswith(FILE_ENDINGS)
                or dotted.partition(".")[0] in LIBRARIES
                or dotted in EXAMPLES | INVENTED
            ):
                continue
            if dotted.startswith("shardtrain."):
                exists = dotted in endings() or leads_to_a_name(dotted)
            else:
                exists = is_defined(dotted)
            if not exists:
                missing.append(f"{place}: {dotted}")
    assert missing == []


def test_programs_next_to_the_package_import_names_that_exist() -> None:
    """No test imports benchmarks, examples and the programs of docs, so they could keep the old name of a module."""
    missing = []
    for path in tracked():
        if not path.endswith(".py") or not path.startswith(("benchmarks/", "examples/", "docs/", "scripts/", "cli/")):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardtrain":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "shardtrain"]
            else:
                continue
            missing += [f"{path}:{node.lineno}: {name}" for name in names if not leads_to_a_name(name)]
    assert missing == []


def test_a_stale_name_is_found() -> None:
    assert is_defined("attention_scores.with_sinks") and not is_defined("scores.with_sinks")
    assert is_defined("training.steps") and not is_defined("training.gone")
    assert leads_to_a_name("shardtrain.config.options.options")
    assert leads_to_a_name("shardtrain.layout")
    assert not leads_to_a_name("shardtrain.config.options.gone")
    assert not leads_to_a_name("shardtrain.gone.options")
    assert "config/options.py" in endings() and "options/config.py" not in endings()
