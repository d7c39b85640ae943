"""Run shell scripts of this and other systems unchanged, with the Python program that they start run in a fork.

A stub in place of Python records its arguments and environment. A fork then runs the program, because importing torch
in a new interpreter takes seconds.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import patience

ROOT = Path(__file__).parents[1]
_RUN_VARIABLES = re.compile(
    r"(PET|SHARDTRAIN|SLURM|RUNAI|TORCH|TORCHELASTIC|MASTER|CONDA)_|(NGPU|LOG_RANK|RANK|WORLD_SIZE|CONFIG_FILE|"
    r"COMM_MODE|TRAIN_FILE|VIRTUAL_ENV|LOCAL_RANK)$"
)
SECONDS = 240


def environment(**names: str) -> dict[str, str]:
    """Return the environment of this machine without variables that describe a run, plus ``names``."""
    inherited = {
        name: value for name, value in os.environ.items() if not _RUN_VARIABLES.match(name)
    }
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **names,
    }


def command_of(folder: Path, line: str, **names: str) -> tuple[list[str], dict[str, str]]:
    """Run a command line in ``folder`` up to its ``python`` or ``torchrun``. Return their arguments and environment."""
    notes = folder / ".noted"
    (notes / "bin").mkdir(parents=True, exist_ok=True)
    (notes / "arguments").unlink(missing_ok=True)

    # Stubs that record their arguments and environment. Without -m, the stub runs the real Python.
    real = f'[ "$1" != -P ] || shift\n[ "$1" = -m ] || exec {shlex.quote(sys.executable)} "$@"'
    write = f"printf '%s\\n' \"$@\" > {notes}/arguments\nenv -0 > {notes}/environment\n"
    (notes / "bin/python").write_text(f"#!/bin/sh\n{real}\n{write}")
    (notes / "bin/torchrun").write_text(f"#!/bin/sh\n{write}")
    for name in ("python", "torchrun"):
        (notes / "bin" / name).chmod(0o755)

    variables = environment(**names)
    variables |= {"VIRTUAL_ENV": str(notes), "PATH": f"{notes}/bin:{variables['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
    )
    assert done.returncode == 0 and (notes / "arguments").exists(), done.stderr

    arguments = (notes / "arguments").read_text().splitlines()
    pairs = (notes / "environment").read_text().split("\0")
    return arguments, dict(pair.split("=", 1) for pair in pairs if pair)


def start(
    folder: Path, arguments: list[str], names: dict[str, str], **options: Any
) -> subprocess.Popen[str]:
    """Start ``python ARGUMENTS`` in a fork."""
    return forked.Popen([sys.executable, *arguments], cwd=folder, env=names, text=True, **options)


def run(folder: Path, line: str, **names: str) -> subprocess.CompletedProcess[str]:
    """Run a command line that starts the trainer, and wait for it."""
    arguments, variables = command_of(folder, line, **names)
    return run_words(folder, arguments, variables)


def run_words(
    folder: Path, arguments: list[str], names: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in a fork, and wait for it."""
    limit = patience.seconds(SECONDS)
    command = [sys.executable, *arguments]
    return forked.run(command, cwd=folder, env=names, capture_output=True, text=True, timeout=limit)
