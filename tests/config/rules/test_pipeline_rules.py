"""Impossible pipelines and context splits are rejected before any process starts, with the nearest valid values."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtrain import config
from shardtrain.config import stages
from shardtrain.config.schema import Parallelism

TINY = """
[model]
overrides = {vocab_size = 512, dim = 64, num_layers = 8, num_heads = 4, num_kv_heads = 2, head_dim = 16, ffn_dim = 128}
[training]
local_batch_size = 8
seq_len = 64
mixed_precision_param = "float32"
[parallelism]
"""

# parallelism table, more arguments -> option and texts of the only problem
WRONG: list[tuple[str, list[str], list[str]]] = [
    ("pipeline_parallel_degree = 16", [], ["pipeline_parallel_degree=16", "exceeds the 8 layers"]),
    (
        'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\n'
        "pipeline_parallel_layers_per_stage = 5",
        [],
        [
            "pipeline_parallel_layers_per_stage=5",
            "requires at least two per rank",
            "4 stages or more",
        ],
    ),
    (
        "pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 2",
        [],
        ["makes 5 stages, which 2 pipeline ranks", "2, 4 or 6 stages"],
    ),
    (
        "pipeline_parallel_degree = 2\npipeline_parallel_layers_per_stage = 3",
        [],
        ["makes 4 stages, and 1F1B requires one per rank (2)", "Interleaved1F1B"],
    ),
    (
        'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"\n'
        "pipeline_parallel_layers_per_stage = 5",
        [],
        ["makes 2 stages, and ZBVZeroBubble requires two per rank (4)"],
    ),
    (
        "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 8",
        [],
        [
            "pipeline_parallel_microbatch_size=8",
            "makes 1 micro-batches of the 8",
            "fewer than the 2 stages",
        ],
    ),
    (
        'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"',
        ["--training.local_batch_size", "7"],
        ["makes 7 micro-batches, which do not fill rounds of 2", "6 or 8"],
    ),
    (
        'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "DualPipeV"',
        ["--compile.enable"],
        ['pipeline_parallel_schedule="DualPipeV"', "torch.compile returns wrong gradients", "1F1B"],
    ),
    (
        'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "PipelineScheduleMulti"',
        [],
        ["requires a CSV file with the schedule", "pipeline_parallel_schedule_csv"],
    ),
    (
        'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "2F2B"',
        [],
        ["pipeline_parallel_schedule", "2F2B"],
    ),
    (
        'pipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["embed"], ["layers.0"], ["norm", "head"]]',
        [],
        ["makes 3 stages, which 2 pipeline ranks cannot divide"],
    ),
    (
        'context_parallel_degree = 2\ncontext_parallel_load_balancer = "ptrr"',
        [],
        ['context_parallel_load_balancer="ptrr"', '"headtail" or "none"'],
    ),
    (
        'context_parallel_degree = 4\ncontext_parallel_method = "ulysses"',
        [],
        ["context_parallel_degree=4", "the 2 KV heads", "use 1 or 2"],
    ),
    (
        'context_parallel_degree = 2\ntensor_parallel_degree = 2\ncontext_parallel_method = "ulysses"',
        [],
        ["the 2 KV heads, split 2 ways by tensor_parallel_degree,"],
    ),
    ("context_parallel_degree = 3", [], ["training.seq_len=64", "multiple of 6", "60 or 66"]),
]


@pytest.mark.parametrize(("table", "arguments", "texts"), WRONG)
def test_an_impossible_split_is_one_problem_with_a_fix(
    tmp_path: Path, table: str, arguments: list[str], texts: list[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TINY + table + "\n")
    problems = [str(problem) for problem in config.check(config.load(file, arguments))]

    assert len(problems) == 1, problems
    for text in texts:
        assert text in problems[0]


@pytest.mark.parametrize(
    "schedule", [name for name in stages.SCHEDULES if name not in stages.FROM_CSV]
)
def test_every_schedule_has_a_config_that_checks(tmp_path: Path, schedule: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        TINY + f'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "{schedule.lower()}"\n'
    )

    assert config.check(config.load(file)) == []


@pytest.mark.parametrize("schedule", stages.SCHEDULES)
def test_only_schedules_that_pytorch_cannot_run_reject_fewer_micro_batches_than_stages(
    tmp_path: Path, schedule: str
) -> None:
    """In PyTorch, single-stage schedules and DualPipeV raise an error. Other schedules leave ranks idle."""
    file = tmp_path / "run.toml"
    file.write_text(
        TINY + f'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "{schedule}"\n'
    )
    loaded = config.load(file, ["--training.local_batch_size", "1"])
    rejected = any("micro-batches" in problem.rule for problem in config.check(loaded))

    assert rejected == (schedule in (*stages.SINGLE, "DualPipeV"))
    assert any("ranks are idle for most of a step" in note for note in config.notes(loaded))


def test_too_few_micro_batches_are_found_once_the_ranks_are_known(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TINY + "pipeline_parallel_degree = 4\n")
    loaded = config.load(
        file, ["--training.local_batch_size", "1", "--training.global_batch_size", "8"]
    )

    assert config.check(loaded) == []
    assert config.machine_notes(loaded, world_size=4) == []

    # With 16 ranks, 4 stages leave 4 data-parallel ranks, each with 2 sequences of the 8.
    problems = [str(problem) for problem in config.machine_notes(loaded, world_size=16)]
    assert len(problems) == 1
    assert (
        "makes 2 micro-batches of the 2 sequences of a step, fewer than the 4 stages" in problems[0]
    )


@pytest.mark.parametrize("layers", range(1, 40))
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_stages_hold_every_layer_once_in_order(layers: int, degree: int) -> None:
    for ends in (0, 1):
        parallelism = Parallelism(
            pipeline_parallel_degree=degree,
            pipeline_parallel_first_stage_less_layers=ends,
            pipeline_parallel_last_stage_less_layers=ends,
        )
        ranges = stages.layers_per_stage(parallelism, layers)
        sizes = [len(part) for part in ranges]
        if not all(sizes):
            continue  # a rule refuses more stages than layers
        assert [layer for part in ranges for layer in part] == list(range(layers))

        # The embedding and the head count as ``ends`` layers of their stages.
        loads = list(sizes)
        loads[0] += ends
        loads[-1] += ends
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("schedule", stages.SCHEDULES)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_ranks_hold_every_stage_once(schedule: str, degree: int) -> None:
    count = degree if schedule in stages.SINGLE else 2 * degree
    assigned = [
        stage
        for rank in range(degree)
        for stage in stages.stages_of_rank(schedule, rank, degree, count)
    ]

    assert sorted(assigned) == list(range(count))


def test_an_ineffective_overlap_is_noted(tmp_path: Path) -> None:
    option = "pipeline_parallel_expert_parallel_overlap"
    file = tmp_path / "run.toml"
    file.write_text(TINY + f"pipeline_parallel_degree = 2\n{option} = true\n")

    assert any(
        option in note and "without effect" in note for note in config.notes(config.load(file))
    )

    file.write_text(TINY + "pipeline_parallel_degree = 2\n")
    assert not any(option in note for note in config.notes(config.load(file)))


FILES = {
    "0F0,0F1,0B0,0B1\n": "has 1 rows, and there are 2 pipeline ranks",
    "0F0,0X0\n1F0,1B0\n": "contains '0X0', which is not an action",
    "0F0,0F1,0B0,0B1\n0F0,0F1,0B0,0B1\n": "has 0F0 in the row of rank 1, which holds the stages 1",
    "0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n": "lacks backward of micro-batch 1 of stage 1",
    "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1I1\n": "lacks backward of micro-batch 1 of stage 1",
    "0F0,0F1,0B0,0B0,0B1\n1F0,1B0,1F1,1B1\n": "has 0B0 as well as 0B0, which would count it twice",
    "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1B0,1F1,1B1\n": "has 1B0 as well as 1I0, which would count it twice",
    # PyTorch would silently use the loss of micro-batch 1 as that of 0, with wrong gradients.
    "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n": "has forward of micro-batch 0 of the last stage (1) after that of a later",
    "0F0,0F1,0B0,0B1\n1F0,1F1,1W0,1I0,1B1\n": "has rank 0 wait indefinitely: 0B0 requires 1B0 or 1I0",
    "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n": "has rank 0 wait indefinitely: 0B0 requires 1B0 or 1I0",
    "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n": "has forward of micro-batch 2, and a step has 2",
}


@pytest.mark.parametrize("text", FILES)
def test_an_invalid_schedule_file_is_rejected(text: str, tmp_path: Path) -> None:
    assert FILES[text] in problem_of_file(text, tmp_path)


def test_a_compiled_model_only_accepts_schedules_without_split_backward(tmp_path: Path) -> None:
    full_backward = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    split_backward = "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,(1W0;1B1)OVERLAP_F_B\n"
    assert problem_of_file(full_backward, tmp_path, "--compile.enable") == ""
    assert problem_of_file(split_backward, tmp_path) == ""
    assert "torch.compile returns wrong gradients" in problem_of_file(
        split_backward, tmp_path, "--compile.enable"
    )


def problem_of_file(text: str, folder: Path, *more: str) -> str:
    """Return the problems of a schedule file for two ranks with one stage each and two micro-batches."""
    file = folder / "run.toml"
    schedule = folder / "schedule.csv"
    file.write_text(TINY.replace("local_batch_size = 8", "local_batch_size = 2"))
    schedule.write_text(text)
    options = {
        "pipeline_parallel_degree": "2",
        "data_parallel_shard_degree": "1",
        "pipeline_parallel_schedule": "PipelineScheduleMulti",
        "pipeline_parallel_schedule_csv": str(schedule),
        "pipeline_parallel_layers_per_stage": "5",  # the first and last module count as one layer each
    }
    arguments = [
        argument for name, value in options.items() for argument in (f"--parallelism.{name}", value)
    ]
    return "\n".join(
        str(problem) for problem in config.check(config.load(file, [*arguments, *more]))
    )


def test_the_cost_of_recomputation_with_a_split_backward_is_reported() -> None:
    split = [
        "--parallelism.pipeline_parallel_degree",
        "2",
        "--parallelism.pipeline_parallel_schedule",
        "DualPipeV",
    ]
    for mode, is_reported in (("full", True), ("none", False)):
        notes = config.notes(config.load(None, [*split, "--activation_checkpoint.mode", mode]))
        assert any("about ten times as often as 1F1B" in note for note in notes) is is_reported

    assert not config.notes(config.load(None, [*split[:2], "--activation_checkpoint.mode", "full"]))


def test_a_stage_that_is_named_needs_no_layer() -> None:
    parts = '[["embed"], ["layers.0", "norm", "head"]]'
    arguments = ["--parallelism.pipeline_parallel_degree", "2", "--model.overrides.num_layers", "1"]
    named = ["--parallelism.module_fqns_per_model_part", parts]

    assert any(
        "exceeds the 1 layers" in str(problem)
        for problem in config.check(config.load(None, arguments))
    )
    assert not config.check(config.load(None, [*arguments, *named]))
