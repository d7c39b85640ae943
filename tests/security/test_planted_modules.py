"""Modules in the current directory are never imported, for every way to start the program and every child process.

The tests plant files with the names of PyTorch, related packages, optional libraries, and all modules of the standard
library that Python does not import on its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import installed_wheel
import patience
import pytest
from tiers import cases

from shardtrain.utils import python_child

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
LIBRARIES = {
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "yaml",
    "rich",
    "huggingface_hub",
    "wandb",
    "transformers",
}
# Python's own `-m` imports these from the current directory, before it looks for the package
OF_PYTHON = "import runpy, sys; print(*{name.partition('.')[0] for name in sys.modules})"
TRAIN = "--training.steps 1 --training.seq_len 32 --job.dump_folder out"
CUT = "--nproc 2 --parallelism.tensor_parallel_degree 2"
MODEL = "--model.name model.py --model.flavor small --model.overrides.vocab_size 2048"
WORKERS = "--training.dataloader.num_workers 1"
COMMAND = [str(BIN / "shardtrain")]
MODULE = [sys.executable, "-m", "shardtrain"]
TORCHRUN = [
    str(BIN / "torchrun"),
    "--nproc-per-node=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=127.0.0.1:0",
    "-m",
]
STARTS = {
    "help": [*COMMAND, "--help"],
    "check": [*MODULE, "config", "check", "debug"],
    "launch dry run": [*MODULE, "launch", "local", "debug", "--dry-run"],
    "launch": [*MODULE, *f"launch local debug {TRAIN}".split()],
    "one rank": [sys.executable, "-m", "shardtrain.train", *f"debug {TRAIN} --nproc 1".split()],
    "ranks and workers": [*MODULE, *f"train debug {TRAIN} {WORKERS} --nproc 2".split()],
    "check of a model file": [*COMMAND, *f"train debug {TRAIN} {MODEL} {CUT}".split()],
    "check of a model file under -m": [*MODULE, *f"train debug {TRAIN} {MODEL} {CUT}".split()],
    "script": [str(ROOT / "run_train.sh"), *f"{TRAIN} --nproc 1".split()],
    "main.py": [sys.executable, str(ROOT / "main.py"), "--help"],
    "train.py": [sys.executable, str(ROOT / "train.py"), *f"debug {TRAIN} --nproc 1".split()],
    "torchrun": [*TORCHRUN, *f"shardtrain.train debug {TRAIN}".split()],
    "torchrun of FMEngine": [
        sys.executable,
        "-m",
        "shardtrain.compat.fmengine",
        "torchrun",
        "--help",
    ],
    "agent of several nodes": [
        *MODULE,
        *f"train debug {TRAIN} --nproc 1 --nnodes 1 --node_rank 0 --rdzv_endpoint 127.0.0.1:29597".split(),
    ],
    "verify": [*MODULE, "verify", "model.py", "--mesh", "tp=2", "--steps", "1"],
    "child": python_child.command("shardtrain", "config", "check", "debug"),
}
BY_DEFAULT = ["help", "check", "launch dry run", "ranks and workers", "child"]
VERBS = (
    "plan debug", "data check debug", "checkpoint ls out", "checkpoint verify out/checkpoint/step-1",
    "generate --from out --prompt x --max_new_tokens 2", "export out --to exported", "goodput out", "report out",
    "profile --help", "watch --help", "runs", "test --help", "evaluate --from out --data text=text.txt",
    "replay 1 out", "doctor debug --nproc 1", "init new.toml", "completion bash", "import --help", "merge --help",
)  # fmt: skip


def plant(folder: Path) -> None:
    """Write modules that record their name in the file ``imported`` and end the process."""
    command = [sys.executable, "-I", "-c", OF_PYTHON]
    of_python = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    for name in (sys.stdlib_module_names | LIBRARIES) - set(of_python):
        text = f"open({str(folder / 'imported')!r}, 'a').write('{name} ')\nraise SystemExit(99)\n"
        (folder / f"{name}.py").write_text(text)
    (folder / "model.py").write_text((ROOT / "tests/tools/verify/sound_model.py").read_text())
    (folder / "text.txt").write_text("a text\n" * 100)


def expect_none_imported(folder: Path, command: Sequence[str], **variables: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience.seconds(240),
        check=False,
    )
    imported = folder / "imported"
    assert not imported.exists(), f"{command}: {imported.read_text()}"
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "name", cases(BY_DEFAULT, nightly=[name for name in STARTS if name not in BY_DEFAULT])
)
def test_no_module_of_the_current_directory_is_imported(name: str, tmp_path: Path) -> None:
    plant(tmp_path)
    expect_none_imported(tmp_path, STARTS[name])


@pytest.mark.nightly(
    "most verbs import torch",
    by="tests/security/test_planted_modules.py::test_no_module_of_the_current_directory_is_imported",
)
def test_no_verb_imports_a_module_of_the_current_directory(tmp_path: Path) -> None:
    plant(tmp_path)
    for command in (f"train debug {TRAIN} --nproc 1 --checkpoint.enable true", *VERBS):
        expect_none_imported(tmp_path, [*MODULE, *command.split()])


@pytest.mark.parametrize(
    "command",
    cases(
        ["config check debug"], nightly=[f"train debug {TRAIN} {MODEL} {CUT}", "data check debug"]
    ),
)
def test_clone_without_installation_ignores_modules_next_to_it(
    command: str, tmp_path: Path
) -> None:
    plant(tmp_path)
    for name in sys.stdlib_module_names | LIBRARIES:
        # the clone's folder is last on the path, so only modules that exist nowhere else would be imported
        if importlib.util.find_spec(name) is None:
            (tmp_path / f"{name}.py").unlink()
    (tmp_path / "shardtrain").symlink_to(ROOT / "shardtrain")
    libraries = importlib.util.find_spec("torch").submodule_search_locations[0]
    python = Path(sys.executable).resolve()
    module = [str(python), "-m", "shardtrain"]
    expect_none_imported(
        tmp_path, [*module, *command.split()], PYTHONPATH=str(Path(libraries).parent)
    )


def test_installation_imports_no_module_of_the_current_directory(tmp_path: Path) -> None:
    """The script creates an environment. Then pip fails, because there is no index."""
    plant(tmp_path)
    variables = {
        "SHARDTRAIN_VENV": str(tmp_path / "venv"),
        "PYTHON": sys.executable,
        "PIP_NO_INDEX": "1",
    }
    environment = dict(os.environ)
    environment.pop("VIRTUAL_ENV", None)
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [str(ROOT / "run_train.sh")],
        cwd=tmp_path,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=patience.seconds(240),
        check=False,
    )

    assert "pip could not install" in done.stderr, done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()


@pytest.mark.nightly(
    "it installs the package",
    by="tests/security/test_planted_modules.py::test_no_module_of_the_current_directory_is_imported",
)
def test_editable_installation_imports_no_module_of_the_current_directory(tmp_path: Path) -> None:
    """setuptools puts the name ``__editable__...`` on the path. Python opened it as a relative folder."""
    sources = tmp_path / "sources"
    sources.mkdir()
    installed_wheel.copy_sources(sources)
    installed = tmp_path / "installed"
    options = (*installed_wheel.OFFLINE, "--quiet", "--target", installed, "--editable", sources)
    pip = (sys.executable, "-P", "-m", "pip", "install")
    installed_wheel.run(*pip, *options, cwd=sources, seconds=300)
    (listing,) = installed.glob("__editable__*.pth")
    (entry,) = listing.read_text().splitlines()

    assert entry == str(sources)

    # plant modules where the relative entry that setuptools adds to the path would lead
    folder = tmp_path / "folder"
    planted = folder / f"{listing.stem}.finder.__path_hook__"
    planted.mkdir(parents=True)
    plant(planted)
    (planted / "absent_elsewhere.py").write_text("")
    start = f"import site; site.addsitedir({str(installed)!r})"
    code = (
        f"{start}; import importlib.util as u, shardtrain; print(u.find_spec('absent_elsewhere'))"
    )

    assert installed_wheel.run(sys.executable, "-I", "-S", "-c", code, cwd=folder).strip() == "None"
    assert not (planted / "imported").exists()


def test_spawned_worker_imports_no_module_of_the_current_directory(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    plant(planted)
    script = tmp_path / "script.py"
    script.write_text(
        "from types import SimpleNamespace\n"
        "from shardtrain.config.schema import DataLoaderOptions\n"
        "from shardtrain.data import workers\n"
        "if __name__ == '__main__':\n"
        "    workers.sys = SimpleNamespace(platform='darwin')\n"
        "    assert next(workers.in_order(range(5), DataLoaderOptions(num_workers=1))) == 0\n"
    )
    expect_none_imported(planted, [sys.executable, str(script)])


def test_only_python_child_starts_python() -> None:
    started = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "shardtrain").rglob("*.py")
        if re.search(
            r"[\[(]sys\.executable, (\"|SAFE)|entrypoint=sys\.executable", path.read_text()
        )
    }
    pdsh = "shardtrain/launch/platforms/pdsh.py"  # starts a single file in isolated mode (-I)

    assert started == {"shardtrain/utils/python_child.py", pdsh}
