"""Opening data never runs code: no pickle, eval or unsafe loader in the package, benchmarks and tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import shardtrain

ROOT = Path(shardtrain.__file__).parents[1]
PACKAGE = sorted((ROOT / "shardtrain").rglob("*.py"))
OTHER_FILES = [
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    *sorted((ROOT / "tests").rglob("*.py")),
]

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
    "code",
}
CALLS = {
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "torch.load", "torch.jit.load", "torch.hub.load", "np.load", "numpy.load", "runpy.run_path",
    "dcp.load", "importlib.reload",
}  # fmt: skip
# collectives and queues that pickle what they send
METHODS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "rpc_sync", "rpc_async", "init_rpc", "exec_module",
}  # fmt: skip

ALLOWED = {
    (
        "shardtrain/utils/own_file.py",
        "exec_module",
    ): "runs files that the user's configuration names",
    ("shardtrain/utils/python_child.py", "exec_module"): "loads this package in a new process",
    (
        "benchmarks/checkpoint_safety.py",
        "dcp.load",
    ): "measures plain DCP on files that it just wrote",
    (
        "tests/checkpoint/test_folder.py",
        "torch.load",
    ): "reads its own files, like users of exported weights",
    ("tests/compat/test_layer_files.py", "torch.load"): "reads exported files, like FMEngine",
    (
        "tests/compat/migrate/test_torchtitan_runs.py",
        "torch.load",
    ): "reads output of dcp_to_torch, like its users",
    ("tests/ops/test_init_weights.py", "all_gather_object"): "compares values of its own ranks",
    ("tests/hostile_files.py", "pickle"): "writes the attacks",
    (
        "tests/dcp_folders.py",
        "dcp.load",
    ): "uses PyTorch's load as a reference, on files of the tests",
    (
        "benchmarks/peers/timed.py",
        "runpy.run_path",
    ): "runs the peer program that the command line names",
    ("tests/forked.py", "runpy.run_path"): "runs programs of the tests, like an interpreter",
}
"""All uses, with their reasons."""


def uses(path: Path) -> set[str]:
    """Return the unsafe modules that a file imports, and the unsafe functions and arguments that it uses."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom):
            if node.module and node.module.partition(".")[0] in MODULES:
                names.add(node.module)
            names |= {alias.name for alias in node.names if alias.name in METHODS}
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            names |= {name} & CALLS
            names |= {name.rpartition(".")[2]} & METHODS
            keywords = {keyword.arg for keyword in node.keywords}
            names |= keywords & {"allow_pickle", "weights_only"}
    return names


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def folders(files: list[Path]) -> list[Path]:
    """Return the folders of files. One test case per file would be slow, because each case has a startup cost."""
    return list(dict.fromkeys(path.parent for path in files))


@pytest.mark.parametrize("folder", folders(PACKAGE), ids=name_of)
def test_package_does_not_unpickle_or_evaluate(folder: Path) -> None:
    refused_uses = []
    for path in PACKAGE:
        if path.parent == folder:
            refused_uses += [(name_of(path), use) for use in uses(path)]
    assert [use for use in refused_uses if use not in ALLOWED] == []


# a test may compile the text of an example or pickle a tokenizer, but not load a file unsafely
@pytest.mark.parametrize("folder", folders(OTHER_FILES), ids=name_of)
def test_benchmarks_and_tests_load_no_file_unsafely(folder: Path) -> None:
    loaders = CALLS - {"eval", "exec", "compile", "__import__", "np.load", "numpy.load"}
    refused = loaders | METHODS - {"exec_module"} | {"allow_pickle"}
    refused_uses = []
    for path in OTHER_FILES:
        if path.parent == folder:
            refused_uses += [(name_of(path), use) for use in uses(path) & refused]
    assert [use for use in refused_uses if use not in ALLOWED] == []


def test_list_of_exceptions_is_current() -> None:
    obsolete = [
        (name, use)
        for name, use in ALLOWED
        if (ROOT / name).exists() and use not in uses(ROOT / name)
    ]

    assert not obsolete


def test_only_explicit_requests_use_the_reader_of_bin_weights() -> None:
    """No load falls back to the reader of pickled weights. An export uses it to read only their dtypes."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in PACKAGE}
    on_request = "if legacy_bin:\n        return BinWeights(folder)\n"
    importing = texts["shardtrain/hf/importing.py"]

    assert importing.count("BinWeights(") == importing.count(on_request) == 1

    readers = {
        name for name in texts if "BinWeights(" in texts[name].replace("class BinWeights(", "")
    }
    assert readers == {"shardtrain/hf/importing.py", "shardtrain/hf/source.py"}

    text = "".join(texts.values())
    assert "weights_only=" not in text
    assert "FileSystemReader" not in text

    # the package uses PyTorch's DCP writer, but never its reader, which unpickles
    writer = ast.parse(texts["shardtrain/tools/dcp/writing.py"])
    imported = []
    for node in ast.walk(writer):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported.append(ast.unparse(node))

    assert [line for line in imported if "distributed.checkpoint" in line] == [
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter",
        "from torch.distributed.checkpoint.planner import WriteItem, WriteItemType",
    ]

    attributes = [ast.unparse(node) for node in ast.walk(writer) if isinstance(node, ast.Attribute)]
    assert {name for name in attributes if re.fullmatch(r"dcp\.\w+", name)} == {
        "dcp.save",
        "dcp.api",
    }

    others = [name for name, text in texts.items() if "import torch.distributed.checkpoint" in text]
    assert others == ["shardtrain/tools/dcp/writing.py"]
