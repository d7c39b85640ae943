"""Nothing that opens data can run code: no pickle, no eval, no loader that guesses, in the package or beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shardtrain

ROOT = Path(shardtrain.__file__).parents[1]
PACKAGE = sorted((ROOT / "shardtrain").rglob("*.py"))
BESIDE = [*sorted((ROOT / "benchmarks").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle", "code"}
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
    ("shardtrain/utils/own_file.py", "exec_module"): "files that options of the user's own configuration name",
    ("shardtrain/utils/python_child.py", "exec_module"): "this package, which a new process loads from where it lies",
    ("benchmarks/checkpoint_safety.py", "dcp.load"): "measures plain DCP beside ours, on files that it just wrote",
    ("tests/checkpoint/test_folder.py", "torch.load"): "reads what it wrote, as users of exported weights do",
    ("tests/compat/test_layer_files.py", "torch.load"): "reads what the export wrote, as FMEngine does",
    ("tests/compat/migrate/test_torchtitan_runs.py", "torch.load"): "reads what dcp_to_torch wrote, as its users do",
    ("tests/ops/test_init_weights.py", "all_gather_object"): "compares what its own ranks drew",
    ("tests/hostile_files.py", "pickle"): "writes the attacks",
    ("tests/dcp_folders.py", "dcp.load"): "PyTorch's own load is the reference, of files that the tests have written",
    ("benchmarks/peers/timed.py", "runpy.run_path"): "runs the program of a peer that the command line names",
    ("tests/forked.py", "runpy.run_path"): "runs programs of the tests' own, as an interpreter that is given one",
}
"""Every use that there is, and why: there is no other."""


def uses(path: Path) -> set[str]:
    """What a file imports or calls of the above."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} if (node.module or "").partition(".")[0] in MODULES else set()
            found |= {alias.name for alias in node.names if alias.name in METHODS}
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found |= {name} & CALLS
            found |= {name.rpartition(".")[2]} & METHODS
            found |= {"allow_pickle" for keyword in node.keywords if keyword.arg == "allow_pickle"}
            found |= {"weights_only" for keyword in node.keywords if keyword.arg == "weights_only"}
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def folders(files: list[Path]) -> list[Path]:
    """A case for each, and not for each file: a thousand take longer to begin than to run."""
    return list(dict.fromkeys(path.parent for path in files))


@pytest.mark.parametrize("folder", folders(PACKAGE), ids=name_of)
def test_the_package_unpickles_and_evaluates_nothing(folder: Path) -> None:
    found = [(name_of(path), use) for path in PACKAGE if path.parent == folder for use in uses(path)]
    assert [one for one in found if one not in ALLOWED] == []


# a test may compile the text of an example or pickle a tokenizer; what it may not do is load a file in such a way
@pytest.mark.parametrize("folder", folders(BESIDE), ids=name_of)
def test_benchmarks_and_tests_load_no_file_so(folder: Path) -> None:
    loaders = CALLS - {"eval", "exec", "compile", "__import__", "np.load", "numpy.load"}
    refused = loaders | METHODS - {"exec_module"} | {"allow_pickle"}
    found = [(name_of(path), use) for path in BESIDE if path.parent == folder for use in uses(path) & refused]
    assert [one for one in found if one not in ALLOWED] == []


def test_the_list_of_exceptions_holds_no_more_than_there_is() -> None:
    left = [(name, use) for name, use in ALLOWED if (ROOT / name).exists() and use not in uses(ROOT / name)]
    assert not left


def test_checkpoints_of_other_programs_have_one_reader_that_no_load_falls_back_to() -> None:
    """Old weights are read on request. An export reads their types, which are not loaded."""
    texts = {name_of(path): path.read_text(encoding="utf-8") for path in PACKAGE}
    on_request = "with BinWeights(folder) if legacy_bin else open_weights("
    assert (
        texts["shardtrain/hf/importing.py"].count("BinWeights(")
        == 2
        == texts["shardtrain/hf/importing.py"].count(on_request)
    )
    readers = {name for name in texts if "BinWeights(" in texts[name].replace("class BinWeights(", "")}
    assert readers == {"shardtrain/hf/importing.py", "shardtrain/hf/source.py"}
    text = "".join(texts.values())
    assert "weights_only=" not in text and "FileSystemReader" not in text
    # PyTorch's writer is used, and never its reader: what torch.distributed.checkpoint wrote is read as data
    writer = ast.parse(texts["shardtrain/tools/dcp/writing.py"])
    imported = [ast.unparse(node) for node in ast.walk(writer) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [line for line in imported if "distributed.checkpoint" in line] == [
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter",
        "from torch.distributed.checkpoint.planner import WriteItem, WriteItemType",
    ]
    assert {
        ast.unparse(n) for n in ast.walk(writer) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "dcp"
    } == {
        "dcp.save",
        "dcp.api",
    }
    others = [name for name, text in texts.items() if "import torch.distributed.checkpoint" in text]
    assert others == ["shardtrain/tools/dcp/writing.py"]
