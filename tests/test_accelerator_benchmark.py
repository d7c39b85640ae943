"""benchmarks/accelerator.py, which is for GPUs, also runs on a CPU with tiny models."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import forked
import patience
import pytest
from tiers import cases

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "accelerator.py"


@pytest.mark.parametrize(
    "part", cases(["memory"], nightly=["capabilities", "waits", "numbers", "speed", "experts"])
)
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
            # compares a CPU with itself
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
    rows = [
        json.loads(line) for line in (tmp_path / "accelerator-cpu.jsonl").read_text().splitlines()
    ]
    assert [row["part"] for row in rows] == ["capabilities"]
    wrong = forked.run(
        [*command, "--only", "sped"], capture_output=True, text=True, timeout=patience.seconds(60)
    )
    assert wrong.returncode == 2
    assert "capabilities" in wrong.stderr
