"""``shardtrain test`` evaluates the best checkpoint. It writes all files of the original format or none."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import forked
import patience
import pytest
import torch
from launched import end, fork
from ranks import run_ranks
from reviews import config, file_of, rows
from tiny import make_run, shallow_config, text_file, train_whole

from shardtrain import cli, distributed
from shardtrain import config as configs
from shardtrain.checkpoint import best
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.distributed.process_group import World
from shardtrain.tools.held_out_eval import held_out_eval_command, held_out_eval_rank
from shardtrain.train.task_model import build_model
from shardtrain.utils.errors import CheckpointError, HelpPrinted

ROOT = Path(__file__).parents[3]
OVERRIDES = {"lr": 3e-3, "eps": 1e-8}


def trained_config(folder: Path, **sections: Any) -> Config:
    return config(
        job={"dump_folder": str(folder)},
        training={
            "steps": 30,
            "local_batch_size": 8,
            "global_batch_size": -1,
            "on_data_end": "repeat",
        },
        validation={"enable": True, "freq": 10},
        optimizer=OVERRIDES,
        checkpoint={
            "enable": True,
            "interval": 10,
            "keep_best": "validation.accuracy",
            "keep_latest_k": 3,
        },
        **sections,
    )


@functools.cache
def trained() -> Path:
    """Folder of a run, which the tests do not change."""
    folder = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / "run"
    run_ranks(1, train_whole, trained_config(folder))
    return folder


def shardtrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    names = {
        key: value for key, value in os.environ.items() if key not in ("NGPU", "RANK", "WORLD_SIZE")
    }
    environment = {**names, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardtrain", *arguments]
    return forked.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience.seconds(150),
        env=environment,
        cwd=ROOT,
        check=False,
    )


def test_two_processes_write_the_files_of_the_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lower the interval from 5 seconds, to print the progress of short work, too.
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0.001")
    options = ["--task.test_dataset_path", file_of(7, 2), "--output", str(tmp_path), "--nproc", "2"]
    result = shardtrain("test", str(trained() / "config.resolved.toml"), *options)

    assert result.returncode == 0, result.stderr

    step = best.read_pointer(trained() / "checkpoint")["step"]
    assert f"step-{step}" in result.stderr
    for what in ("measuring dev", "measuring test"):
        assert f"\n{what}: 0s" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dev_prediction.txt",
        "dev_results.json",
        "test_prediction.txt",
        "test_results.json",
    ]

    for name, size, seed in (("dev", 50, 1), ("test", 7, 2)):
        lines = (tmp_path / f"{name}_prediction.txt").read_text().splitlines()
        right = sum(
            line == str(label) for line, (_, label) in zip(lines, rows(size, seed), strict=True)
        )
        assert json.loads((tmp_path / f"{name}_results.json").read_text()) == {
            "Accuracy": right / size
        }
    logged = [
        json.loads(line) for line in (trained() / "validation.jsonl").read_text().splitlines()
    ]
    accuracy = json.loads((tmp_path / "dev_results.json").read_text())["Accuracy"]

    assert accuracy == max(line["accuracy"] for line in logged)


def choose(rank: int, run_config: Config, wanted: str | None, splits: tuple[str, ...]) -> Any:
    mesh = distributed.build(
        run_config, World(rank, torch.distributed.get_world_size(), rank, torch.device("cpu"))
    )
    built = build_model(run_config, mesh)
    try:
        path = held_out_eval_rank.load(built, run_config, wanted)
    except CheckpointError as error:
        return str(error)
    files: dict[str, str | None] = {}
    for split in splits:
        measured, labelled = held_out_eval_rank.measure(built, run_config, mesh, split)
        files |= held_out_eval_rank.files_of(split, built.task, measured, labelled)
    return path.name, files


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_without_labels_only_get_predictions(ranks: int) -> None:
    labelled, unlabelled = (
        trained_config(trained(), task={"test_dataset_path": file_of(7, 2, labels=labels)})
        for labels in (True, False)
    )
    _, with_labels = run_ranks(ranks, choose, labelled, None, ("test",))[0]

    for _, files in run_ranks(ranks, choose, unlabelled, None, ("test",)):
        assert files == {
            "test_results.json": None,
            "test_prediction.txt": with_labels["test_prediction.txt"],
        }


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("latest", "step-30"), ("20", "step-20"), ("PATH", "step-10"), ("40", None)],
)
def test_any_checkpoint_can_be_named(wanted: str, expected: str | None) -> None:
    run_config = trained_config(trained())
    wanted = str(trained() / "checkpoint" / "step-10") if wanted == "PATH" else wanted
    result = run_ranks(1, choose, run_config, wanted, ())[0]

    if expected is None:
        assert "--step=40 does not exist" in result
    else:
        assert result[0] == expected


def test_without_a_best_checkpoint_the_newest_is_used_unless_the_best_is_requested(
    tmp_path: Path,
) -> None:
    shutil.copytree(trained() / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "best.json").unlink()
    run_config = trained_config(tmp_path)
    assert run_ranks(1, choose, run_config, None, ())[0][0] == "step-30"
    assert "--step=best" in run_ranks(1, choose, run_config, "best", ())[0]


def test_files_of_an_earlier_test_that_would_mislead_are_removed(tmp_path: Path) -> None:
    (tmp_path / "test_results.json").write_text("{}")
    held_out_eval_rank._write(tmp_path, {"test_results.json": None, "test_prediction.txt": "1\n"})
    assert [path.name for path in tmp_path.iterdir()] == ["test_prediction.txt"]


def test_a_wrong_row_leaves_no_file(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.write_text("good\t1\nbad\t2\n")
    options = [
        "--task.test_dataset_path",
        str(bad),
        "--output",
        str(tmp_path / "out"),
        "--nproc",
        "1",
    ]
    arguments = ["test", str(trained() / "config.resolved.toml"), *options]
    stderr_file = tmp_path / "stderr"

    assert end(fork(main, arguments, stderr_file)) == 3
    assert f"{bad}:2: label '2' in column '1' is not one of 0, 1" in stderr_file.read_text()
    assert "Traceback" not in stderr_file.read_text()
    assert not (tmp_path / "out").exists()


def main(arguments: list[str], stderr_file: Path) -> None:
    with stderr_file.open("w") as file:
        sys.stderr = file
        code = cli.main(arguments)
    os._exit(code)


def test_a_config_without_a_held_out_set_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(configs.ConfigError, match=r"validation.dataset.*task.test_dataset_path"):
        held_out_eval_command._read(
            ["--task.name", "classification"], held_out_eval_command._open_toml
        )
    with pytest.raises(HelpPrinted):
        held_out_eval_command._read(["--help"], held_out_eval_command._open_toml)


def test_a_language_model_is_tested_by_its_loss() -> None:
    held_out = {
        "enable": True,
        "dataset": "text",
        "dataset_path": text_file(),
        "seq_len": 64,
        "steps": 2,
    }
    run_config = shallow_config(validation=held_out)
    loss, files = run_ranks(1, language_model, run_config)[0]

    assert list(files) == ["dev_results.json"]
    assert json.loads(files["dev_results.json"])["loss"] == pytest.approx(loss)


def language_model(rank: int, run_config: Config) -> Any:
    run = make_run(rank, run_config)
    built = build_model(run_config, run.mesh)
    measured, labelled = held_out_eval_rank.measure(built, run_config, run.mesh, "validation")
    return measured.loss, held_out_eval_rank.files_of("dev", built.task, measured, labelled)


def test_the_request_keeps_the_logs_of_the_run(tmp_path: Path) -> None:
    run_config = trained_config(tmp_path)
    options = held_out_eval_command.HeldOutOptions(Loaded(run_config), None, None, tmp_path)
    assert options.launched.config.job.dump_folder == str(tmp_path / "testing")
