"""Checkpoint options: impossible ones are rejected with a fix, and ineffective ones are noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtrain.config import load
from shardtrain.config.machine_rules import machine_notes
from shardtrain.config.rules import check, notes

ON = "[checkpoint]\nenable = true\n"
VALIDATION = '[validation]\nenable = true\ndataset = "text"\ndataset_path = "x"\n'


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'keep_best = "loss"',
            'checkpoint.keep_best="loss" must be validation.loss or validation.perplexity',
        ),
        ('keep_best = "validation.los"', 'did you mean "validation.loss"?'),
        ('keep_best = "validation.loss"', "requires validation.enable = true"),
        ("create_seed_checkpoint = true\nload_only = true", "checkpoint.load_only forbids it"),
        ('interval_type = "automatic"\ninterval = 5', "checkpoint.interval=5 has no effect with"),
        ("mean_time_to_failure_hours = 0.0", "must be above 0"),
        ("max_stall_seconds = -1.0", "must not be negative"),
        ("keep_every_n_steps = -1", "must not be negative"),
        ("hf_interval = -1", "must not be negative"),
        ("snapshot_interval = -1", "must not be negative"),
        ("snapshot_interval = 1\nload_step = 5", "checkpoint.load_step names another one"),
        ("snapshot_interval = 1\nload_only = true", "checkpoint.load_only forbids it"),
        (
            "last_save_in_hf = true\n[lora]\nenable = true\nrandom_base = true",
            "writes the weights of the full model",
        ),
        (
            "hf_interval = 5\nload_only = true",
            "checkpoint.hf_interval=5 saves, and checkpoint.load_only forbids it",
        ),
        (
            'last_save_in_hf = true\nfolder = "s3://bucket/run"',
            "an object store, which cannot rename",
        ),
        (
            "initial_load_in_hf = true",
            "neither checkpoint.initial_load_path nor model.hf_assets_path names one",
        ),
        (
            'initial_load_in_hf = true\ninitial_load_path = "x"\ninitial_load_model_only = false',
            "initial_load_model_only=false requires more",
        ),
        (
            "initial_load_in_hf_quantized = true",
            "has no effect without checkpoint.initial_load_in_hf",
        ),
    ],
)
def test_impossible_checkpoint_options_are_rejected(
    tmp_path: Path, text: str, message: str
) -> None:
    lines = [str(problem) for problem in check(load(written(tmp_path, ON + text)))]
    assert any(message in line for line in lines), lines


def test_snapshots_require_checkpoints(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, "[checkpoint]\nsnapshot_interval = 1"))
    lines = [str(problem) for problem in check(loaded)]
    assert any("snapshot_interval=1 requires checkpoints" in line for line in lines), lines


@pytest.mark.parametrize(
    "text",
    [
        ON
        + 'keep_best = "validation.perplexity"\nbest_mode = "max"\n'
        + VALIDATION
        + "patience = 3",
        ON
        + 'async_mode = "async"\non_save_error = "continue"\nmax_stall_seconds = 0.0\nkeep_every_n_steps = 1000',
        ON + 'interval_type = "automatic"\nmean_time_to_failure_hours = 7.9',
        ON + 'interval_type = "seconds"\ninterval = 600',
        ON + "create_seed_checkpoint = true",
        ON + "last_save_in_hf = true\nhf_interval = 100",
        ON + 'initial_load_in_hf = true\n[model]\nhf_assets_path = "x"',
    ],
)
def test_possible_checkpoint_options_have_no_notes(tmp_path: Path, text: str) -> None:
    loaded = load(written(tmp_path, text))
    assert [p for p in check(loaded) if "checkpoint." in str(p) or "patience" in str(p)] == []
    assert notes(loaded) == []


def test_pinned_memory_requires_cuda(tmp_path: Path) -> None:
    loaded = load(written(tmp_path, ON + 'async_mode = "async_with_pinned_mem"'))
    for device, refused in (("cpu", True), ("cuda", False), (None, False)):
        lines = [str(p) for p in machine_notes(loaded, None, device, None)]
        assert any('use "async"' in line for line in lines) == refused


def test_options_that_require_another_are_noted(tmp_path: Path) -> None:
    text = ON + 'max_stall_seconds = 5.0\nmean_time_to_failure_hours = 2.0\nbest_mode = "max"'
    lines = notes(load(written(tmp_path, text)))
    assert [line.partition(":")[0].removeprefix("checkpoint.") for line in lines] == [
        "max_stall_seconds",
        "mean_time_to_failure_hours",
        "best_mode",
    ]
