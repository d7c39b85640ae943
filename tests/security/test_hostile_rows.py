"""Invalid values in columns and environment variables exit with one line that names them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import CompletedProcess

import forked
import patience
import pytest
from tiers import cases

NAN = float("nan")
INFINITY = float("inf")
COLUMNS = {
    "a text": ({"text": [NAN, NAN, 1.0]}, {}),
    "a label": (
        {"text": ["a", "b", "c"], "label": [NAN, 0.0, 1.0]},
        {"task.name": "classification"},
    ),
    "an infinite label": (
        {"text": ["a", "b", "c"], "label": [-INFINITY, 1.0, 0.0]},
        {"task.name": "classification"},
    ),
}
VARIABLES = {
    "NGPU": {},
    "SHARDTRAIN_NNODES": {},
    "SHARDTRAIN_NODE_RANK": {"SHARDTRAIN_NNODES": "2"},
    "WORLD_SIZE": {"RANK": "0", "LOCAL_RANK": "0"},
    "MASTER_PORT": {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
    "SLURM_JOB_ID": {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
}


def train(
    folder: Path, environment: dict[str, str] | None = None, **options: object
) -> CompletedProcess[str]:
    all_options = {
        "job.dump_folder": folder / "outputs", "training.device": "cpu", "training.local_batch_size": 1,
        "training.seq_len": 32, "training.steps": 2, "lr_scheduler.warmup_steps": 1, **options,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "shardtrain",
        "train",
        *(f"--{name}={value}" for name, value in all_options.items()),
    ]
    names = {**os.environ, **(environment or {})}
    return forked.run(
        command,
        env=names,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
    )


@pytest.mark.parametrize("kind", cases(list(COLUMNS)[:2], nightly=list(COLUMNS)[2:]))
def test_nan_in_a_column_is_a_bad_row_with_its_position_and_column(
    kind: str, tmp_path: Path
) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns, options = COLUMNS[kind]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table(columns), path)
    more = {"training.dataset": "parquet", "training.dataset_path": path, **options}
    done = train(tmp_path, None, **more)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]

    assert done.returncode == 3, done.stderr
    assert len(errors) == 1, done.stderr
    assert str(path) in errors[0]
    assert "row 0" in errors[0]
    assert "column" in errors[0]


@pytest.mark.parametrize("name", cases(list(VARIABLES)[:1], nightly=list(VARIABLES)[1:]))
def test_environment_variable_with_newlines_is_refused_in_one_line(
    name: str, tmp_path: Path
) -> None:
    value = "2\nerror[0]: all is well\x1b[2J"
    done = train(
        tmp_path, {**VARIABLES[name], name: value}, **{"training.dataset": "python_stdlib"}
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]

    assert done.returncode == 2, done.stderr
    assert len(errors) == 1, done.stderr
    assert name in errors[0], done.stderr
    assert ("\x1b" not in done.stderr and "\\n" in errors[0]) or "?" in errors[0]
