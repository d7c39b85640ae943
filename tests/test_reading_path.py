"""A training step executes few files, and their number only grows for a reason."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import forked
import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "reading_path.py"


def test_a_plain_step_executes_no_new_files_and_few_new_lines() -> None:
    done = forked.run([sys.executable, str(PROGRAM), "--compare"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


def test_growth_names_the_files_and_the_command() -> None:
    spec = importlib.util.spec_from_file_location("reading_path", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    growth = program.growth
    stored = {"train/trainer.py": 380, "models/llama.py": 120}

    assert growth(stored, {"train/trainer.py": 480, "models/llama.py": 120}) == ""
    assert growth(stored, {"train/trainer.py": 300}) == ""
    assert "101 more lines (train/trainer.py +101)" in growth(
        stored, stored | {"train/trainer.py": 481}
    )
    assert "new files: optim/muon.py" in growth(stored, stored | {"optim/muon.py": 10})
    assert "--update" in growth(stored, stored | {"optim/muon.py": 10})


@pytest.mark.nightly("it only reports the files of a run")
def test_files_that_a_step_executes_are_traced_and_printed() -> None:
    done = forked.run([sys.executable, str(PROGRAM), "--files"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    num_files = {
        title: int(files)
        for title, files in re.findall(r"^(\S.*?)\s{2,}(\d+)(?:\s+[\d,]+){3}$", done.stdout, re.M)
    }
    print(done.stdout[done.stdout.index("files  functions") - 34 :].partition("\n\n")[0])
    step = re.search(r"\nstep \([^\n]*\n(.*?)(?:\n\n|\Z)", done.stdout, re.S)

    assert step
    assert {"train/trainer.py", "distributed/grad_clip.py", "models/llama.py"} <= set(
        step[1].split()
    )
    # the first step includes everything of a later step except the watchdog and the log
    assert 20 <= num_files["a steady step"] < num_files["from the command to the first update"]
