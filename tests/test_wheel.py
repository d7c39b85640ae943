"""The wheel: built from the files of this repository, installed into a new environment, used in an empty folder."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import patience
import pytest

import shardtrain

ROOT = Path(__file__).parents[1]
SOURCES = ("shardtrain", "configs", "pyproject.toml", "README.md", "LICENSE")
SMALL = (
    "--training.steps=2 --training.seq_len=32 --training.local_batch_size=1 --model.overrides.num_layers=1 "
    "--training.device=cpu --lr_scheduler.warmup_steps=1 --nproc=1 --metrics.sample_freq=2"
)
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NGPU", "CONFIG_FILE")}


def run(*words: str | Path, cwd: Path, seconds: float = 120) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=patience.seconds(seconds), check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not all(importlib.util.find_spec(name) for name in ("pip", "setuptools")):
        pytest.skip("building a wheel takes pip and setuptools")
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:  # a copy, because building leaves files beside the sources
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", *options, ".", cwd=folder, seconds=300)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.mark.nightly("a wheel is built", by="tests/test_repository.py::test_the_citation_names_this_version")
def test_the_wheel_has_this_version_and_every_file_of_the_package(wheel: Path) -> None:
    assert re.match(rf"shardtrain-{re.escape(shardtrain.__version__)}-py3-none-any", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    package = Path(shardtrain.__file__).parent
    tracked = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    tracked |= {f"shardtrain/presets/{path.name}" for path in (ROOT / "configs").iterdir()}
    wanted = {name for name in tracked if "__pycache__" not in name}
    assert not wanted - names and not any(name.startswith(("tests/", "docs/")) for name in names)


@pytest.mark.timeout(600)
@pytest.mark.nightly("a wheel is built", by="tests/test_repository.py::test_the_citation_names_this_version")
def test_the_first_commands_work_from_the_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    new = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", new, cwd=tmp_path)
    (packages,) = new.glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "--python", new / "bin/python", "install", "--quiet", "--no-deps", "--no-index",
        wheel, cwd=tmp_path)  # fmt: skip
    # what the package needs, from the environment of the tests; its own folder stands before them
    (packages / "needs.pth").write_text("\n".join([*site.getsitepackages(), *_beside()]) + "\n")
    command, here = new / "bin/shardtrain", tmp_path / "empty"
    here.mkdir()
    where = run(new / "bin/python", "-c", "import shardtrain; print(shardtrain.__file__)", cwd=here)
    assert Path(where.strip()).is_relative_to(new)
    assert run(command, "--version", cwd=here).strip() == f"shardtrain {shardtrain.__version__}"
    assert "0 errors" in run(command, "config", "check", "debug", cwd=here)
    run(command, "train", "debug", *SMALL.split(), cwd=here)
    assert run(command, "generate", "outputs", "--prompt", "def", "--max_new_tokens", "4", cwd=here)
    run(command, "report", "outputs", cwd=here)
    run(command, "export", "outputs", "--to", "hf_model", "--check", "weights", cwd=here)
    assert json.loads((here / "hf_model/config.json").read_text())["model_type"] == "llama"
    assert {"report.html", "outputs", "hf_model"} == {path.name for path in here.iterdir()}
    assert (here / "hf_model/tokenizer.json").stat().st_size > 10_000


def _beside() -> list[str]:
    """Folders of packages that the environment of the tests names in files of its own."""
    return [entry for entry in sys.path if entry.endswith("site-packages") and Path(entry).is_dir()]
