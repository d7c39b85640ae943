"""Build the wheel and install it into a new environment, for tests of the package without a clone."""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import patience
import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCES = ("shardtrain", "configs", "pyproject.toml", "README.md", "LICENSE")
OFFLINE = ("--no-deps", "--no-build-isolation", "--no-index")
CLONE_VARIABLES = (
    "PYTHONPATH",
    "NGPU",
    "CONFIG_FILE",
    "LOG_RANK",
    "COMM_MODE",
    "SHARDTRAIN_VENV",
    "VIRTUAL_ENV",
)


def environment_variables() -> dict[str, str]:
    """Return the environment without variables that refer to a clone or change the number of ranks."""
    inherited = {name: value for name, value in os.environ.items() if name not in CLONE_VARIABLES}
    return {**inherited, "OMP_NUM_THREADS": "1"}


def run(
    *command: str | Path,
    cwd: Path,
    seconds: float = 120,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Run a command and return its standard output. Fail the test if the command fails.

    ``variables`` are added to the environment.
    """
    done = subprocess.run(
        [str(argument) for argument in command],
        cwd=cwd,
        env={**environment_variables(), **(variables or {})},
        capture_output=True,
        text=True,
        timeout=patience.seconds(seconds),
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def build(folder: Path, without: Sequence[str] = ()) -> Path:
    """Build the wheel from a copy of the sources, because a build leaves files next to them. Return its path.

    ``without`` are folders of the package to omit.
    """
    copy_sources(folder)
    for name in without:
        shutil.rmtree(folder / "shardtrain" / name)
    options = (*OFFLINE, "--wheel-dir", "dist")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", *options, ".", cwd=folder, seconds=300)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def copy_sources(folder: Path) -> None:
    """Copy all files from which the package is built. Skip the test if it cannot be built here."""
    if not all(importlib.util.find_spec(name) for name in ("pip", "setuptools")):
        pytest.skip("building a wheel requires pip and setuptools")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                folder / name,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        else:
            shutil.copy(ROOT / name, folder)


def install_as_tool(wheel: Path, folder: Path) -> Path:
    """Install the wheel and its dependencies with ``uv tool install``. Return the folder of its commands.

    PyTorch has the version of the tests' environment. uv does not read pip's settings, so a folder of wheels
    that pip uses is passed on.
    """
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={torch.__version__}\n")
    options = ["--constraints", constraints]
    pip = (sys.executable, "-m", "pip", "config", "list")
    for line in run(*pip, cwd=folder).splitlines():
        name, _, value = line.partition("=")
        if name.endswith(".find-links"):
            options += ["--find-links", value.strip("'")]
    run(
        *(sys.executable, "-m", "uv", "tool", "install", "--no-python-downloads"),
        *("--cache-dir", folder / "cache", "--python", sys.executable),
        *options,
        wheel,
        cwd=folder,
        seconds=600,
        variables={"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")},
    )
    return folder / "bin"


def install(wheel: Path, folder: Path) -> Path:
    """Create a virtual environment in ``folder`` with only the wheel installed. Return its ``bin`` folder.

    The wheel's dependencies are those of the tests' environment, found through a .pth file, so nothing is downloaded.
    """
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin/python")
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = environment.glob("lib/python*/site-packages")
    named_by_pth_files = [
        entry for entry in sys.path if entry.endswith("site-packages") and Path(entry).is_dir()
    ]
    (packages / "dependencies.pth").write_text(
        "\n".join([*site.getsitepackages(), *named_by_pth_files]) + "\n"
    )
    return environment / "bin"
