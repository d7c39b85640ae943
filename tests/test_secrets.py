"""Secrets in the environment appear in no file and no output of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import patience
import pytest
from tiny import text_file

CANARIES = {"HF_TOKEN": "hf_canary0123456789", "WANDB_API_KEY": "wandb-canary-9876543210"}


def shardtrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **CANARIES, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "shardtrain", *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patience.seconds(120)
    )


def assert_silent(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    for canary in CANARIES.values():
        assert canary not in done.stdout
        assert canary not in done.stderr
        for path in folder.rglob("*"):
            assert canary not in path.name
            assert not path.is_file() or canary.encode() not in path.read_bytes(), path


@pytest.mark.nightly(
    "with more sinks",
    by="tests/security/test_secret_canaries.py::test_run_with_all_sinks_writes_no_secret",
)
def test_a_run_writes_no_secret_anywhere(tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    options = {
        "job.dump_folder": folder, "training.dataset": "text", "training.dataset_path": text_file(),
        "training.device": "cpu", "training.local_batch_size": 1, "training.seq_len": 32, "training.steps": 4,
        "lr_scheduler.warmup_steps": 1, "metrics.log_freq": 1, "profiling.profile_freq": 4,
    }  # fmt: skip
    flags = [
        "--job.print_config",
        "--metrics.enable_tensorboard",
        "--checkpoint.enable",
        "--profiling.enable_profiling",
    ]
    overrides = [f"--{name}={value}" for name, value in options.items()]
    done = shardtrain("train", "--nproc", "2", *overrides, *flags)

    assert done.returncode == 0, done.stderr

    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert {".log", ".jsonl", ".toml", ".json", ".bin"} <= kinds
    assert "loss" in done.stderr
    assert "print_config = true" in done.stderr
    assert_silent(done, folder)


def test_an_error_that_quotes_a_secret_masks_it(tmp_path: Path) -> None:
    # Simulate a user who pastes a token instead of a path.
    secret = CANARIES["HF_TOKEN"]
    folder = tmp_path / "outputs"
    done = shardtrain(
        "train", "--job.dump_folder", str(folder), "--model.hf_assets_path", f"/no/{secret}"
    )

    assert done.returncode == 2, done.stderr
    assert "hf_assets_path" in done.stderr
    assert "***" in done.stderr
    assert_silent(done, tmp_path)
