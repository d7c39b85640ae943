"""A finished run is compared with its plan. A run out of memory prints changes that need less memory."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import forked
import patience
import pytest
from tiers import cases

from shardtrain import config
from shardtrain.tools.plan import after_run, hardware, planning
from shardtrain.train import trainer
from shardtrain.utils import limits


def shares(lines: list[str]) -> list[float]:
    """Return the planned memory of each suggested change, divided by that of the configuration."""
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    shares_of_lines = []
    for line in lines:
        match = re.search(r": ([\d.]+) (\w+) planned instead of ([\d.]+) (\w+)$", line)
        if match:
            changed, changed_unit, original, original_unit = match.groups()
            changed_bytes = float(changed) * units[changed_unit]
            original_bytes = float(original) * units[original_unit]
            shares_of_lines.append(changed_bytes / original_bytes)
    return shares_of_lines


@pytest.mark.parametrize(
    ("name", "world_size"), [("llama3_8b", 8), ("llama3_405b", 512), ("debug_moe", 8)]
)
def test_each_suggested_change_saves_at_least_a_tenth(name: str, world_size: int) -> None:
    run_config = config.load(name).config
    title, *lines = after_run.after_out_of_memory(run_config, world_size, is_cpu=False)

    assert "docs/plan.md" in title
    assert 1 <= len(lines) == len(shares(lines)) <= 3
    for share in shares(lines):
        assert share < 0.91, "0.9, plus rounding in the output"


def test_without_a_plan_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "lighter", lambda *_: 1 / 0)
    assert after_run.after_out_of_memory(config.load("debug").config, 1, is_cpu=True) == []


@pytest.mark.parametrize(("memory_mib", "changes"), [(0, 3), (2**20, 0), (60, 3), (38, 2), (20, 0)])
def test_only_sufficient_changes_are_suggested(memory_mib: int, changes: int) -> None:
    """The plan of a single rank needs 51 MiB. With the changes, it needs 37, 41 and 37 MiB."""
    options = [
        "--training.seq_len=64",
        "--training.local_batch_size=4",
        "--model.hf_assets_path=bytes",
    ]
    run_config = config.load("debug", options).config
    lines = after_run.after_out_of_memory(
        run_config, 1, is_cpu=True, memory_bytes=memory_mib * 2**20
    )

    assert len(lines[1:]) == changes, lines


@pytest.mark.parametrize("ranks", cases([2], nightly=[1]))
def test_a_run_out_of_memory_ends_with_7_and_suggestions(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError("can't allocate memory")

    monkeypatch.setattr(trainer, "_steps", no_memory)
    # Just above the planned memory: 2 x 38 MiB on two ranks, 51 MiB on one.
    memory = (
        {"total": 90 * 2**20, "available": 2**20}
        if ranks == 2
        else {"total": 60 * 2**20, "available": 2**20}
    )
    monkeypatch.setattr(limits, "host_memory", lambda: memory)
    monkeypatch.setattr(limits, "cgroup_memory", lambda: (0, 0))
    command = [
        sys.executable,
        "-m",
        "shardtrain",
        "train",
        "debug",
        f"--nproc={ranks}",
        "--training.seq_len=64",
    ]
    command += [
        "--training.local_batch_size=4",
        "--model.hf_assets_path=bytes",
        f"--job.dump_folder={tmp_path}",
    ]
    result = forked.run(command, capture_output=True, text=True, timeout=patience.seconds(120))

    assert result.returncode == 7, result.stderr

    lines = result.stderr.splitlines()
    title = next(
        number
        for number, line in enumerate(lines)
        if line.startswith("each of these changes needs less memory")
    )

    assert any(line.startswith("error[7]: ") for line in lines[:title])
    assert 1 <= len(shares(lines[title + 1 :])) <= 3


def finished(folder: Path, tps: float, memory_gib: float, steps: int = 10) -> Path:
    """Write the files of an 8B run on 8 devices. The first half of its steps is slow."""
    rows = [
        {
            "step": step,
            "loss": 3.0,
            "tps": tps / 9 if step <= steps // 2 else tps,
            "memory_gib": memory_gib,
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.resolved.toml").write_text(
        (Path(__file__).parents[3] / "configs/llama3_8b.toml").read_text()
    )
    return folder


def test_planned_and_measured_values_are_compared_and_large_differences_warn(
    tmp_path: Path,
) -> None:
    plan = planning.make(config.load("llama3_8b").config, 8, hardware.find("h100"))
    gib = plan.fullest.peak / 2**30
    run = finished(tmp_path, 1.1 * plan.tps, 0.5 * gib)
    speed, memory = after_run.beside_measured(run, 8, "NVIDIA H100 80GB HBM3")

    assert speed.endswith("(+10%)")
    assert not speed.startswith("warning")
    assert memory == (
        f"warning: peak memory in GiB: planned {gib:.1f}, measured {0.5 * gib:.1f} (-50%): more than 15% off"
    )

    # ``shardtrain report`` reads this file.
    comparison = json.loads((run / "planned.json").read_text())
    assert comparison["peak memory in GiB"] == pytest.approx([gib, 0.5 * gib])


def test_a_difference_in_a_small_run_is_no_warning(tmp_path: Path) -> None:
    """In small runs, host time and kernel workspaces dominate. A plan contains neither, so no warning is due."""
    run = finished(tmp_path, 4e4, 0.2)
    (run / "config.resolved.toml").write_text(
        '[model]\nflavor = "2.6M"\n[training]\nlocal_batch_size = 4\nseq_len = 256\n'
    )
    lines = after_run.beside_measured(run, 1, "NVIDIA H200")

    assert len(lines) == 2, lines
    assert not any(line.startswith("warning") for line in lines), lines
    assert "depends on the host" in lines[0]
    assert "within the accuracy of a plan" in lines[1]


def test_unknown_devices_and_short_runs_are_not_compared(tmp_path: Path) -> None:
    assert after_run.beside_measured(finished(tmp_path, 1.0, 1.0), 8, "Some New Accelerator") == []
    assert (
        after_run.beside_measured(finished(tmp_path, 1.0, 1.0, steps=4), 8, "NVIDIA H100 80GB HBM3")
        == []
    )
    assert after_run.beside_measured(tmp_path / "gone", 8, "NVIDIA H100 80GB HBM3") == []
