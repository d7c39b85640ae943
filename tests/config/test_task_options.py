"""Wrong options of [task] are reported in one line each, before a rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtrain import config
from shardtrain.config import task_file
from shardtrain.config.rules import check
from shardtrain.tools import verify
from shardtrain.tools.verify.verify_request import read
from shardtrain.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
CLASSIFICATION = '[task]\nname = "classification"\n'
HELD_OUT = '[validation]\nenable = true\ndataset = "tsv"\ndataset_path = "x"\n'


def problems(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return [str(problem) for problem in check(config.load(path))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[task]\nname = "clasification"', "did you mean classification?"),
        ('[task]\nname = "no_such.py"', "is not a task"),
        ("[task]\nnum_labels = 3", "task.num_labels=3 has no effect with task.name"),
        (CLASSIFICATION + "num_labels = 1", "task.num_labels=1 must be at least 2"),
        (CLASSIFICATION + 'labels = ["a", "a"]', "name each label once"),
        (
            CLASSIFICATION + 'labels = ["a", "b"]\nnum_labels = 3',
            "is not the number of task.labels, 2",
        ),
        (CLASSIFICATION + 'label_field = "1"', "must both be numbers or both be names"),
        (CLASSIFICATION + "[task.options]\nx = 1", "task.options"),
        (CLASSIFICATION + '[data]\npacking = "padded"', "data.packing"),
        (
            CLASSIFICATION + "[data.sources.a]\ndataset = 'tsv'\ndataset_path = 'x'",
            "reads one dataset",
        ),
        (
            CLASSIFICATION + "[parallelism]\npipeline_parallel_degree = 2",
            "parallelism.pipeline_parallel_degree=2 splits",
        ),
        (
            CLASSIFICATION + "[parallelism]\ncontext_parallel_degree = 2",
            "parallelism.context_parallel_degree=2 splits",
        ),
        (
            CLASSIFICATION + "[parallelism]\ntensor_parallel_degree = 2",
            "parallelism.disable_loss_parallel=false",
        ),
        (
            CLASSIFICATION
            + "num_labels = 2\n[parallelism]\ntensor_parallel_degree = 2\ndisable_loss_parallel = true\n"
            "[compile]\nenable = true",
            "compile.enable=true cannot compile tensor-parallel layers for rows of different lengths",
        ),
        (
            CLASSIFICATION
            + HELD_OUT
            + '[checkpoint]\nenable = true\nkeep_best = "validation.acuracy"',
            'did you mean "validation.accuracy"?',
        ),
        (
            HELD_OUT + '[checkpoint]\nenable = true\nkeep_best = "validation.accuracy"',
            "must be validation.loss or",
        ),
        (
            HELD_OUT + "freq = 5\nper_epoch = 1",
            "validation.freq=5 has no effect with validation.per_epoch",
        ),
        (
            HELD_OUT + 'per_epoch = 1\n[data]\nmode = "stream"',
            "per_epoch=1 requires the number of rows, which is unknown",
        ),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    lines = problems(tmp_path, text)
    assert any(message in line for line in lines), lines


def test_each_metric_has_its_direction(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    checkpoint = '[checkpoint]\nenable = true\nkeep_best = "validation.{}"\n'
    for metric, mode in (("accuracy", "max"), ("loss", "min")):
        path.write_text(CLASSIFICATION + HELD_OUT + checkpoint.format(metric))
        assert task_file.best_mode(config.load(path).config) == mode
    path.write_text(CLASSIFICATION + HELD_OUT + checkpoint.format("accuracy") + 'best_mode = "min"')

    assert task_file.best_mode(config.load(path).config) == "min"


def test_a_file_that_builds_on_a_task_has_its_metrics_and_is_never_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from shardtrain.tasks.classification import Classification\nraise SystemExit\n"
    )

    assert task_file.read_task_file(str(file)) == task_file.read_task_file("classification")

    # Literal tables can be read without running the file. Other expressions are refused below.
    file.write_text("METRICS = {'f': 'max'}\nDEGREES = ()\n")
    assert task_file.read_task_file(str(file)) == task_file.TaskFacts(
        {"loss": "min", "f": "max"}, ()
    )

    file.write_text("METRICS = dict(f=max)\n")
    with pytest.raises(ConfigError, match="not literals of names"):
        task_file.read_task_file(str(file))


def test_verbs_for_next_token_losses_reject_other_tasks() -> None:
    with pytest.raises(ConfigError, match='task.name="classification" has its own loss'):
        verify.load(read([str(ROOT / "configs" / "debug_classification.toml")]))
