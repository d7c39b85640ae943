"""Laws of benchmarks/accelerator.py: what is to be run where there is a GPU runs on a CPU, with tiny models."""

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


@pytest.mark.parametrize("part", cases(["memory"], nightly=["capabilities", "waits", "numbers", "speed", "experts"]))
def test_each_part_gives_rows(part):
    command = [sys.executable, str(BENCHMARK), "--part", part, "--device", "cpu", "--tiny"]
    done = forked.run(command, capture_output=True, text=True, timeout=patience.seconds(120))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows and {row["part"] for row in rows} == {part}
    assert not [(row["case"], row["error"]) for row in rows if "error" in row]
    for row in rows:
        for name, value in row.items():
            assert not isinstance(value, float) or math.isfinite(value), (name, row)
        if part == "numbers":
            assert row["loss_difference"] == row["grad_norm_difference"] == 0.0  # a CPU and itself


@pytest.mark.nightly(
    "the parts in new interpreters", by="tests/test_accelerator_benchmark.py::test_each_part_gives_rows"
)
def test_rows_are_kept_and_a_part_that_fails_says_why(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--device", "cpu", "--tiny", "--results", str(tmp_path)]
    done = forked.run(
        [*command, "--only", "capabilities"], capture_output=True, text=True, timeout=patience.seconds(120)
    )
    assert done.returncode == 0, done.stderr
    kept = [json.loads(line) for line in (tmp_path / "accelerator-cpu.jsonl").read_text().splitlines()]
    assert [row["part"] for row in kept] == ["capabilities"]
    wrong = forked.run([*command, "--only", "sped"], capture_output=True, text=True, timeout=patience.seconds(60))
    assert wrong.returncode == 2 and "capabilities" in wrong.stderr
