"""Laws of the house: nothing that opens a hole, nothing left undone, and a reading path that exists."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

import shardtrain

PACKAGE = Path(shardtrain.__file__).parent
TEXTS = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in sorted(TEXTS.items())}


# What one must read, whole files with docs and blanks, to follow a step: options, data, model on its mesh, loss,
# gradients, update, log line; of one dataset, whose place in a mixture is the position itself
STEP_PATH = [
    "train.py",
    "run.py",
    "phases.py",
    "state.py",
    "schedule.py",
    "seeding.py",
    "layout.py",
    "models/llama.py",
    "models/layers.py",
    "loss.py",
    "parallel/__init__.py",
    "distributed/runner.py",
    "distributed/mesh.py",
    "distributed/tensor_parallel.py",
    "distributed/fsdp.py",
    "distributed/grad_clip.py",
    "data/loader.py",
    "data/batch.py",
    "data/packing.py",
    "data/order.py",
    "data/feed.py",
    "data/token_buffer.py",
    "optim/build.py",
    "optim/adamw.py",
    "metrics/__init__.py",
    "metrics/meters.py",
    "config/schema.py",
    "config/derived.py",
]

# The same with all that happens before the first step, from the command line to opened data, in lines of code
READING_PATH = [
    "cli.py",
    "launch/local.py",
    "config/command_line.py",
    "config/load.py",
    "config/schema.py",
    "config/derived.py",
    "config/rules.py",
    "train.py",
    "run.py",
    "building.py",
    "phases.py",
    "state.py",
    "schedule.py",
    "seeding.py",
    "layout.py",
    "models/__init__.py",
    "models/llama3.py",
    "models/llama.py",
    "models/layers.py",
    "init.py",
    "loss.py",
    "shards.py",
    "tied.py",
    "parallel/__init__.py",
    "distributed/runner.py",
    "distributed/mesh.py",
    "distributed/tensor_parallel.py",
    "distributed/activation_checkpoint.py",
    "distributed/compile.py",
    "distributed/fsdp.py",
    "distributed/grad_clip.py",
    "distributed/process_group.py",
    "data/__init__.py",
    "data/loader.py",
    "data/batch.py",
    "data/packing.py",
    "data/order.py",
    "data/feed.py",
    "data/mix.py",
    "data/token_buffer.py",
    "data/build_dataset.py",
    "data/read_documents.py",
    "data/document.py",
    "data/encode.py",
    "data/sources/__init__.py",
    "data/sources/python_stdlib.py",
    "optim/__init__.py",
    "optim/build.py",
    "optim/adamw.py",
    "optim/param_groups.py",
    "metrics/__init__.py",
    "metrics/meters.py",
]


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


def lines_of_code(path: Path) -> int:
    """Lines without blank ones, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    texts = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    prose = {
        line
        for node in texts
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in empty]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - prose)


def test_the_reading_path_names_files_that_exist() -> None:
    """Its length is printed and not limited (pytest -s)."""
    missing = [name for name in (*READING_PATH, *STEP_PATH) if not (PACKAGE / name).is_file()]
    assert not missing, f"the reading path names files that are no more: {missing}"
    step = sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in STEP_PATH)
    code = {name: lines_of_code(PACKAGE / name) for name in READING_PATH}
    whole = sum(len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) for name in READING_PATH)
    print(f"\na step: {step} lines; whole path: {sum(code.values())} lines of code, {whole} with docs and blanks")


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
        refused = name.startswith("migrate/")
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
        return found if has_import else [*found, "no import of annotations"]

    assert offenders(silent) == {}
