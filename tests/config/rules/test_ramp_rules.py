"""Invalid ramps are rejected with the option, the rule and the fix, before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtrain import config
from shardtrain.config import ramps
from shardtrain.config.machine_rules import mesh_notes

BATCH = "--training.batch_ramp"
LENGTH = "--training.sequence_ramp"
TINY = """
[model]
overrides = {vocab_size = 512, dim = 64, num_layers = 8, num_heads = 4, num_kv_heads = 2, head_dim = 16, ffn_dim = 128}
[training]
local_batch_size = 4
seq_len = 64
mixed_precision_param = "float32"
[parallelism]
data_parallel_shard_degree = 2
"""

WRONG: dict[str, list[str]] = {
    "must be a list of lists; write it as TOML: '[[0, 32], [1000, 64]]'": [BATCH, "0:32,1000:64"],
    "must be an integer": [BATCH, '[[0, "a"]]'],
    "must have pairs of a step and a size; write [[0, 32], [1000, 64]]": [BATCH, "[[0, 8], [4]]"],
    "must begin at step 0": [BATCH, "[[1, 8], [4, 16]]"],
    "must have increasing steps": [BATCH, "[[0, 8], [0, 16]]"],
    "must have increasing sizes of at least 1": [BATCH, "[[0, 16], [4, 8]]"],
    "must have numbers up to": [BATCH, "[[0, 8], [4, 8000000000000]]"],
    "has 12, 20, which must be multiples of 8 (local_batch_size 4 times 2 data-parallel ranks)": [
        BATCH,
        "[[0, 12], [4, 20], [6, 24]]",
    ],
    "must be 16, the last size of training.batch_ramp": [
        BATCH,
        "[[0, 8], [4, 16]]",
        "--training.global_batch_size",
        "8",
    ],
    "must end with training.seq_len 64": [LENGTH, "[[0, 16], [4, 32]]"],
    "has 24, 48, which must divide training.seq_len 64; use 4, 8, 16, 32 or 64": [
        LENGTH,
        "[[0, 24], [4, 48], [5, 64]]",
    ],
    "has 2, which must be multiples of 4 (context_parallel_degree 2, and two chunks": [
        LENGTH,
        "[[0, 2], [4, 64]]",
        "--parallelism.context_parallel_degree",
        "2",
    ],
    "is not supported with training.neftune_noise_alpha": [
        LENGTH,
        "[[0, 16], [4, 64]]",
        "--training.neftune_noise_alpha",
        "5",
    ],
    "makes 4 micro-batches of the 4 sequences of a step, fewer than the 8 stages": [
        BATCH,
        "[[0, 8], [4, 16]]",
        "--parallelism.pipeline_parallel_degree",
        "8",
    ],
    "changes the number of micro-batches, which pipeline_parallel_schedule_csv fixes": [
        BATCH,
        "[[0, 8], [4, 16]]",
        "--parallelism.pipeline_parallel_degree",
        "2",
        "--parallelism.pipeline_parallel_schedule",
        "PipelineScheduleMulti",
        "--parallelism.pipeline_parallel_layers_per_stage",
        "3",
        "--parallelism.pipeline_parallel_schedule_csv",
        "schedule.csv",
    ],
}
ROWS = "[[0, 16], [4, 64]]"
OF_ROWS: dict[str, list[str]] = {
    'requires a task of packed texts, which task.name="reward" is not': [LENGTH, ROWS],
    "requires steps of equal size, and training.batch_ramp changes the size": [
        BATCH,
        "[[0, 8], [4, 16]]",
        "--training.last_batch",
        "keep",
    ],
}


def problems(tmp_path: Path, arguments: list[str]) -> list[str]:
    path = tmp_path / "run.toml"
    path.write_text(TINY)
    try:
        return [str(problem) for problem in config.check(config.load(path, arguments))]
    except config.ConfigError as error:
        return [str(error)]


@pytest.mark.parametrize("message", WRONG)
def test_wrong_ramp_is_one_line_with_the_rule(tmp_path: Path, message: str) -> None:
    (problem,) = problems(tmp_path, WRONG[message])
    assert message in problem
    assert "\n" not in problem


@pytest.mark.parametrize("message", OF_ROWS)
def test_ramp_that_does_not_fit_a_task_of_rows_is_rejected(tmp_path: Path, message: str) -> None:
    lines = problems(tmp_path, ["--task.name", "reward", *OF_ROWS[message]])
    assert any(message in line for line in lines), lines


def test_number_of_ranks_must_divide_all_sizes(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TINY.replace("data_parallel_shard_degree = 2", ""))
    loaded = config.load(path, [BATCH, "[[0, 8], [4, 20], [6, 28], [9, 64]]"])
    notes = [str(note) for note in mesh_notes(loaded, world_size=4)]

    assert any("has 8, 20, 28, which must be multiples of 16" in note for note in notes)


def test_ramp_beyond_the_last_step_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TINY)
    loaded = config.load(path, [BATCH, "[[0, 8], [40, 16]]", "--training.steps", "40"])

    assert not config.check(loaded)

    text = "training.batch_ramp: the run ends after 40 steps, before step 40 of the ramp"
    assert text in config.notes(loaded)


def test_names_of_other_trainers_suggest_the_ramps(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, ["--training.rampup_batch_size", "8"])
    assert "set training.batch_ramp to pairs" in problem


def test_options_read_the_same_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TINY.replace("seq_len = 64", "seq_len = 64\nbatch_ramp = [[0, 8], [4, 16]]"))
    from_file = config.load(path).config.training
    path.write_text(TINY)
    from_line = config.load(path, [BATCH, "[[0, 8], [4, 16]]"]).config.training

    assert from_file == from_line
    assert ramps.batch_sizes(from_file) == [8, 16]
