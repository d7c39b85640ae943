"""A certificate compares an option that changes numbers, or states in one line that its small run has another value."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiers import cases
from tools.verify.certificate.conftest import DOCUMENTS, FIXTURES

from shardtrain import config
from shardtrain.config.changes import class_of
from shardtrain.config.load import value_of
from shardtrain.config.options import options
from shardtrain.config.schema import Config
from shardtrain.tools import verify
from shardtrain.tools.verify.certificate import small_run
from shardtrain.tools.verify.meshes import changed

ROOT = Path(__file__).parents[4]
SCHEDULE_FREE = ROOT / "examples/optimizers/schedule_free.py"
SAVED = ("--checkpoint.enable", "true")
VALIDATED = (
    *("--validation.enable", "true", "--validation.dataset", "jsonl"),
    *("--validation.dataset_path", str(FIXTURES / "documents.jsonl")),
)
LORA = ("--lora.enable", "true", "--lora.random_base", "true")
PREFERENCE = ("--task.name", "preference")
SOURCES = (
    *("--training.seq_len", "32", "--model.overrides.num_layers", "2"),
    *("--data.sources.a.dataset_path", str(FIXTURES / "documents.jsonl")),
    *("--data.sources.b.dataset_path", str(FIXTURES / "few.jsonl")),
)


class Cell(NamedTuple):
    """Options of a run, and the dimensions that must hold for it."""

    options: tuple[str, ...]
    dimensions: tuple[str, ...]
    meshes: tuple[str, ...] = ()
    data: tuple[str, ...] = DOCUMENTS


USUAL = ("task", "accumulation", "resume")
CELLS = {
    "label smoothing": Cell(("--training.label_smoothing", "0.1"), (*USUAL, "mesh")),
    "z-loss": Cell(("--training.z_loss_weight", "0.01"), (*USUAL, "mesh")),
    "NEFTune": Cell(("--training.neftune_noise_alpha", "5"), (*USUAL, "mesh", "recompute")),
    "NEFTune of packed documents": Cell(
        ("--training.neftune_noise_alpha", "5", "--data.packing", "first_fit"), ("packing",)
    ),
    "averages": Cell(("--training.ema_decay", "0.999", *SAVED), (*USUAL, "mesh", "offload")),
    "averages in validation": Cell(
        ("--training.ema_decay", "0.999", *VALIDATED, "--validation.use_ema", "true"),
        ("task", "validation"),
    ),
    "averages of optimizer states": Cell(
        (
            *("--training.ema_decay", "0.999", *SAVED),
            *("--parallelism.shard_optimizer_states", "true"),
            *("--parallelism.data_parallel_replicate_degree", "2"),
            *("--parallelism.data_parallel_shard_degree", "1"),
        ),
        ("task",),
        ("dp_replicate=2",),
    ),
    "weights of evaluation": Cell(
        ("--optimizer.name", str(SCHEDULE_FREE)), ("task", "accumulation", "resume")
    ),
    "batch ramp": Cell(
        (
            *("--training.batch_ramp", "[[0, 4], [10, 8]]", "--training.global_batch_size", "8"),
            *("--training.local_batch_size", "4"),
        ),
        ("task", "resume"),
    ),
    "sequence ramp": Cell(
        ("--training.sequence_ramp", "[[0, 16], [10, 32]]"), ("task", "resume", "mesh")
    ),
    "best fit": Cell(("--data.packing", "best_fit"), (*USUAL, "packing")),
    "multi-token prediction": Cell(
        ("--model.name", "deepseek_v3", "--model.overrides.num_nextn_predict_layers", "1"),
        (*USUAL, "mesh"),
        ("tp=2", "cp=2"),
    ),
    "multi-token prediction of packed documents": Cell(
        (
            *("--model.name", "deepseek_v3", "--model.overrides.num_nextn_predict_layers", "1"),
            *("--data.packing", "best_fit"),
        ),
        ("packing",),
    ),
    "experts and packed documents": Cell(
        ("--model.name", "deepseek_v3", "--data.packing", "best_fit"), ("packing",)
    ),
    "norms of queries and keys": Cell(("--model.name", "qwen3"), (*USUAL, "mesh")),
    "losses of data sources": Cell(
        ("--metrics.per_source_loss", "true"), ("task", "accumulation"), data=SOURCES
    ),
    "hinge": Cell((*PREFERENCE, "--task.loss_type", "hinge"), USUAL),
    "ipo": Cell((*PREFERENCE, "--task.loss_type", "ipo"), USUAL),
    "mean log-probabilities": Cell((*PREFERENCE, "--task.loss_type", "sigmoid_norm"), USUAL),
    "robust": Cell(
        (*PREFERENCE, "--task.loss_type", "robust", "--task.label_smoothing", "0.1"), USUAL
    ),
    "loss of the chosen answer": Cell((*PREFERENCE, "--task.nll_weight", "0.5"), USUAL),
    "no reference": Cell((*PREFERENCE, "--task.reference_free", "true"), USUAL),
    "simpo with a text loss": Cell(("--task.name", "simpo", "--task.nll_weight", "0.5"), USUAL),
    "the last batch": Cell(("--task.name", "orpo", "--training.last_batch", "keep"), USUAL),
    "decayed weights": Cell(("--optimizer.no_weight_decay", '["*norm*"]'), USUAL),
    "Muon": Cell(("--optimizer.name", "Muon"), USUAL),
    "states in 8 bits": Cell(("--optimizer.name", "AdamW8bit"), USUAL),
    "DoRA": Cell((*LORA, "--lora.use_dora", "true"), USUAL),
    "looped stages": Cell(
        (
            *("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
            *("--parallelism.pipeline_parallel_degree", "2", "--model.overrides.num_layers", "4"),
        ),
        ("task",),
        ("pp=2",),
        DOCUMENTS[:6],
    ),
}
"""Configurations with options that change numbers. All dimensions of a cell must hold."""
BY_DEFAULT = ("averages in validation",)


@pytest.mark.parametrize(
    "name", cases(BY_DEFAULT, [name for name in CELLS if name not in BY_DEFAULT])
)
def test_numbers_with_an_option_do_not_depend_on_how_they_are_run(name, check):
    cell = CELLS[name]
    for dimension in cell.dimensions:
        meshes = cell.meshes if dimension in ("task", "mesh") else ()
        result = check(dimension, *cell.options, meshes=meshes, data=cell.data)
        assert result.verdict == "holds", (dimension, result)


def notes_of(tmp_path: Path, *arguments: str) -> tuple[str, ...]:
    """Return the notes of a small run."""
    loaded = config.load(None, [*DOCUMENTS, *arguments])
    assert not config.check(loaded)
    return tuple(small_run.prepare(loaded, (), tmp_path, verify.small_copy).notes)


LINES = {
    ("--training.ema_decay", "0.999", *SAVED): "training.ema_decay: 0.999 -> 0.5",
    ("--training.device", "mps"): 'training.device: "mps" -> "cpu"',
    ("--training.spike_policy", "skip"): 'training.spike_policy: "skip" -> "off"',
    (
        "--training.dtype",
        "bfloat16",
        "--optimizer.bf16_stochastic_round",
        "true",
    ): "optimizer.bf16_stochastic_round: true -> false",
    CELLS["batch ramp"].options: (
        "training.batch_ramp: 4 sequences per step, 8 from step 10; "
        "all steps of the small run have one size"
    ),
    CELLS["sequence ramp"].options: (
        "training.sequence_ramp: 16 tokens per sequence, 32 from step 10; "
        "all steps of the small run have one size"
    ),
    ("--training.neftune_noise_alpha", "5"): (
        "packing: training.neftune_noise_alpha off, because its effect on a token depends on the row"
    ),
    ("--training.mixed_precision_param", "float16"): "precision: float16 -> float32",
}
"""Options that the small run changes, and the line that states it."""


@pytest.mark.parametrize("arguments", LINES, ids=lambda arguments: arguments[0])
def test_an_option_that_is_changed_has_a_line(arguments, tmp_path):
    line = LINES[arguments]
    notes = notes_of(tmp_path, *arguments)
    assert sum(line == note for note in notes) == 1, notes


def options_of_numbers() -> Iterator[str]:
    """Yield the names of training, task and optimizer options that change results."""
    for name in options(Config):
        if class_of(name) == "error" and name.startswith(("training.", "task.", "optimizer.")):
            yield name


SUMMARIZED = {
    "optimizer.eps": "optimizer: lr 0.01, eps 0.001",
    "optimizer.lr": "optimizer: lr 0.01",
    "training.global_batch_size": "3 steps of 8 sequences",
    "training.max_norm": "gradients clipped only in the last step",
    "training.mixed_precision_param": "float32",
}
"""Options that a note of several options describes, and a part of this note."""


def test_notes_are_about_options_that_exist():
    """The prefixes of options with notes of their own must not hide a renamed option."""
    names = tuple(options(Config))
    for prefix in small_run._NOTED:
        assert any(name.startswith(prefix) for name in names), prefix


@pytest.mark.parametrize("name", sorted(options_of_numbers()))
def test_the_small_run_keeps_an_option_or_names_it(name, tmp_path, monkeypatch):
    """Configuration rules are off, because many options require others, and the test is only about values."""
    monkeypatch.setattr(small_run.SmallRun, "checked", lambda self, _, loaded: loaded)
    loaded = config.load(None, [*DOCUMENTS])
    section, _, option = name.partition(".")
    other = other_value(value_of(loaded.config, name))
    loaded = changed(loaded, {section: {option: other}}, set(), "")
    run = small_run.prepare(loaded, (), tmp_path, verify.small_copy)
    is_kept = value_of(run.config, name) == other
    line = SUMMARIZED.get(name, f"{name}: ")

    assert is_kept or any(line in note for note in run.notes), run.notes


def other_value(value: Any) -> Any:
    """Return a value of the same type that differs from ``value``."""
    if value is None:
        return 0.25
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return "another value"
    return [[0, 8], [10, 16]] if value == [] else type(value)()
