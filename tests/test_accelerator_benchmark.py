"""benchmarks/accelerator.py, which is for GPUs, also runs on a CPU with tiny models."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import forked
import patience
import pytest
from tiers import cases

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
BENCHMARK = BENCHMARKS / "accelerator.py"
SESSION = BENCHMARKS / "gpu_session.sh"


PARTS = [
    "capabilities",
    "waits",
    "numbers",
    "speed",
    "experts",
    "checkpoint",
    "routes",
    "generation",
]


@pytest.mark.parametrize("part", cases(["memory"], nightly=PARTS))
def test_each_part_prints_rows(part):
    command = [sys.executable, str(BENCHMARK), "--part", part, "--device", "cpu", "--tiny"]
    done = forked.run(command, capture_output=True, text=True, timeout=patience.seconds(120))
    assert done.returncode == 0, done.stderr

    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows
    assert {row["part"] for row in rows} == {part}
    assert not [(row["case"], row["error"]) for row in rows if "error" in row]

    for row in rows:
        for name, value in row.items():
            assert not isinstance(value, float) or math.isfinite(value), (name, row)
        if part == "numbers":
            # On this machine, both sides of the comparison are the CPU.
            assert row["loss_difference"] == row["grad_norm_difference"] == 0.0


@pytest.mark.nightly(
    "the parts in new interpreters",
    by="tests/test_accelerator_benchmark.py::test_each_part_prints_rows",
)
def test_rows_are_stored_and_an_unknown_part_is_reported(tmp_path):
    command = [
        sys.executable,
        str(BENCHMARK),
        "--device",
        "cpu",
        "--tiny",
        "--results",
        str(tmp_path),
    ]
    done = forked.run(
        [*command, "--only", "capabilities"],
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
    )

    assert done.returncode == 0, done.stderr

    lines = (tmp_path / "accelerator-cpu.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["part"] for row in rows] == ["capabilities"]

    # The error about an unknown part lists the known parts.
    wrong = forked.run(
        [*command, "--only", "sped"], capture_output=True, text=True, timeout=patience.seconds(60)
    )

    assert wrong.returncode == 2
    assert "capabilities" in wrong.stderr


def test_the_session_of_a_gpu_names_parts_and_cases_that_exist():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import accelerator
    finally:
        sys.path.remove(str(BENCHMARKS))
    known = {"speed": accelerator.SPEED, "experts": accelerator.EXPERTS}
    known["options"] = accelerator.option_cases()
    parts = re.findall(r"^part (\w+)(?: --cases \"(.*)\")?$", SESSION.read_text(), re.MULTILINE)

    assert {name for name, _ in parts} == set(accelerator.PARTS)
    for name, texts in parts:
        for text in filter(None, texts.split(",")):
            assert text in known[name], f"{name} has no case {text!r}"


def test_a_wrong_argument_of_the_session_is_reported(tmp_path):
    done = subprocess.run(
        ["bash", str(SESSION), "--tny", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patience.seconds(30),
    )

    assert done.returncode == 2
    assert "usage" in done.stderr
