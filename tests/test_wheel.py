"""The wheel builds from this repository, installs into a new environment, and works in an empty folder."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import installed_wheel
import pytest

import shardtrain

ROOT = Path(__file__).parents[1]
SMALL = (
    "--training.steps=2 --training.seq_len=32 --training.local_batch_size=1 --model.overrides.num_layers=1 "
    "--training.device=cpu --lr_scheduler.warmup_steps=1 --nproc=1 --metrics.sample_freq=2"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_wheel.build(tmp_path_factory.mktemp("source"))


@pytest.mark.nightly(
    "a wheel is built", by="tests/test_repository.py::test_citation_has_this_version"
)
def test_wheel_has_this_version_and_every_file_of_the_package(wheel: Path) -> None:
    assert re.match(rf"shardtrain-{re.escape(shardtrain.__version__)}-py3-none-any", wheel.name)
    names = set(zipfile.ZipFile(wheel).namelist())
    package = Path(shardtrain.__file__).parent
    tracked = {
        path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()
    }
    tracked |= {
        f"shardtrain/presets/{path.name}" for path in (ROOT / "configs").iterdir() if path.is_file()
    }
    wanted = {name for name in tracked if "__pycache__" not in name}

    assert not wanted - names
    assert not any(name.startswith(("tests/", "docs/")) for name in names)


@pytest.mark.timeout(600)
@pytest.mark.nightly(
    "a wheel is built", by="tests/test_repository.py::test_citation_has_this_version"
)
def test_first_commands_work_from_the_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    programs = installed_wheel.install(wheel, tmp_path)
    command = programs / "shardtrain"
    folder = tmp_path / "empty"
    folder.mkdir()

    def run(*arguments: str | Path) -> str:
        return installed_wheel.run(*arguments, cwd=folder)

    location = run(programs / "python", "-c", "import shardtrain; print(shardtrain.__file__)")

    assert Path(location.strip()).is_relative_to(programs.parent)
    assert run(command, "--version").strip() == f"shardtrain {shardtrain.__version__}"
    assert "0 errors" in run(command, "config", "check", "debug")

    run(command, "train", "debug", *SMALL.split())
    assert run(command, "generate", "outputs", "--prompt", "def", "--max_new_tokens", "4")
    run(command, "report", "outputs")
    run(command, "export", "outputs", "--to", "hf_model", "--check", "weights")
    assert json.loads((folder / "hf_model/config.json").read_text())["model_type"] == "llama"
    assert {"report.html", "outputs", "hf_model"} == {path.name for path in folder.iterdir()}
    assert (folder / "hf_model/tokenizer.json").stat().st_size > 10_000


@pytest.mark.timeout(900)
@pytest.mark.nightly(
    "a wheel is built", by="tests/test_repository.py::test_citation_has_this_version"
)
def test_a_tool_installed_by_uv_trains_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    programs = installed_wheel.install_as_tool(wheel, tmp_path)
    folder = tmp_path / "empty"
    folder.mkdir()
    installed_wheel.run(programs / "shardtrain", "train", "debug", *SMALL.split(), cwd=folder)
    assert (folder / "outputs" / "metrics.jsonl").stat().st_size > 0
