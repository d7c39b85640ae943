"""Complete runs of the presets from the command line, with different overrides: ``pytest -m integration``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import forked
import patience
import pytest
import torch
from tiers import cases

ROOT = Path(__file__).parents[1]
SMALL = (
    "--training.steps 4 --training.seq_len 64 --training.local_batch_size 2 --metrics.log_freq 1 --training.device cpu"
    " --model.hf_assets_path bytes --metrics.sample_freq 0"
)
SAVE = "--checkpoint.enable --checkpoint.interval 2"
WEIGHTS_ONLY = "--checkpoint.enable --checkpoint.last_save_model_only --checkpoint.export_dtype"

RUNS = {
    "default": ("debug", "--nproc 2"),
    "one process": ("debug", "--nproc 1"),
    "compile": ("debug", "--nproc 2 --compile.enable --model.overrides.num_layers 2"),
    "tp 2": ("debug", "--nproc 2 --parallelism.tensor_parallel_degree 2"),
    "pp 2": ("debug", "--nproc 2 --parallelism.pipeline_parallel_degree 2"),
    "cp 2": ("debug", "--nproc 2 --parallelism.context_parallel_degree 2"),
    "muon": ("debug", "--nproc 2 --optimizer.name Muon"),
    "experts, ep 2": ("debug_moe", "--nproc 2 --parallelism.expert_parallel_degree 2"),
    "a window, cp 2": (
        "debug_mistral",
        "--nproc 2 --parallelism.context_parallel_degree 2 --model.overrides.sliding_window 24",
    ),
    "weights only, float32": ("debug", f"--nproc 2 {WEIGHTS_ONLY} float32"),
    "weights only, bfloat16": ("debug", f"--nproc 2 {WEIGHTS_ONLY} bfloat16"),
}


def train(preset: str, overrides: str, folder: Path) -> list[dict[str, float]]:
    """Train with a preset and overrides, to the last step. Return the records of metrics.jsonl."""
    command = [sys.executable, "-m", "shardtrain", "train", f"configs/{preset}.toml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("NGPU", "RANK", "WORLD_SIZE", "LOG_RANK"):
        environment.pop(name, None)
    done = forked.run(
        [*command, *SMALL.split(), *overrides.split(), "--job.dump_folder", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience.seconds(200),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


FIRST = ("one process",)


@pytest.mark.integration
@pytest.mark.parametrize("name", cases(FIRST, nightly=[name for name in RUNS if name not in FIRST]))
def test_preset_trains_with_overrides(name: str, tmp_path: Path) -> None:
    preset, overrides = RUNS[name]
    records = train(preset, overrides, tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[-1]["loss"] < records[0]["loss"]
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == 0
    if "last_save_model_only" in overrides:
        check_weights(tmp_path, overrides.split()[-1])


def check_weights(folder: Path, dtype: str) -> None:
    """Convert the weights-only save to a safetensors file, and check its dtype."""
    from safetensors.torch import load_file

    from shardtrain.checkpoint import weights_file

    weights_file.write(folder / "checkpoint" / "step-4", folder / "weights.safetensors")
    weights = load_file(folder / "weights.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {getattr(torch, dtype)}
    assert not any(name.startswith(("model.", "optimizer.")) for name in weights)


@pytest.mark.integration
@pytest.mark.nightly("four complete runs; test_resume.py tests the same with forked ranks")
def test_run_resumes_on_another_mesh(tmp_path: Path) -> None:
    train("debug", f"--nproc 2 {SAVE}", tmp_path / "two")
    straight = train(
        "debug", f"--nproc 2 {SAVE} --training.global_batch_size 4", tmp_path / "straight"
    )
    records = train("debug", f"--nproc 2 {SAVE} --checkpoint.load_step 2", tmp_path / "two")

    assert [record["step"] for record in records] == [1, 2, 3, 4]

    moved = train(
        "debug",
        f"--nproc 1 {SAVE} --checkpoint.load_step 2 --training.global_batch_size 4 "
        "--parallelism.data_parallel_shard_degree 1",
        tmp_path / "straight",
    )

    for record, expected in zip(moved[2:], straight[2:], strict=True):
        # AdamW with a small eps amplifies rounding errors in four steps
        assert abs(record["loss"] - expected["loss"]) < 1e-3
