"""``replay`` repeats a step bitwise, or names the first difference from the original step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from launched import end, fork
from ranks import run_ranks
from tiny import shallow_config, train_whole

from shardtrain import cli
from shardtrain.config import Loaded, check
from shardtrain.config.schema import Config
from shardtrain.resilience.guards.loss_spikes import Guard
from shardtrain.tools.runs.replay import replay_plan
from shardtrain.tools.runs.replay.replay_plan import plan
from shardtrain.utils.checked_json import line_of, record_of
from shardtrain.utils.errors import CheckpointError


def config(folder: Path, lr: float = 1e-2, **training: Any) -> Config:
    return shallow_config(
        job={"dump_folder": str(folder)},
        model={"overrides": {"num_layers": 2}},
        training={"steps": 8, "seq_len": 16, "local_batch_size": 2, **training},
        optimizer={"lr": lr, "eps": 1e-3},
        checkpoint={"enable": True, "interval": 3},
    )


def runs(rank: int, root: Path) -> None:
    assert train_whole(rank, config(root / "run")).error is None
    assert train_whole(rank, config(root / "other", lr=2e-2, steps=6)).error is None
    find = Guard.find_spike

    def planted(guard: Guard, *arguments: Any) -> str:
        """Report a spike in step 7, and another one in step 9 after the rollback."""
        return "planted" if (len(guard.losses), len(guard.rewinds)) in ((6, 0), (8, 1)) else ""

    Guard.find_spike = planted  # type: ignore[method-assign]
    options = {
        "spike_policy": "rewind",
        "spike_rewind_steps": 2,
        "spike_skip_steps": 2,
        "steps": 11,
    }
    assert train_whole(rank, config(root / "rewound", **options)).error is None
    Guard.find_spike = find  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("replay")
    run_ranks(2, runs, root)
    return root


def replay(root: Path, *arguments: str) -> tuple[int, str]:
    """Run the verb in a separate process, and return its status and output."""
    output = root / f"output-{time.monotonic_ns()}"

    def call() -> None:
        file = output.open("w", buffering=1)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file  # instead of pytest's streams
        tempfile.tempdir = str(root)
        os._exit(cli.main(["replay", *arguments]))

    return end(fork(call)), output.read_text()


def content(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_replay_is_bitwise_and_does_not_change_the_run(root: Path) -> None:
    before = content(root / "run")
    status, output = replay(root, "5:8", str(root / "run"))
    assert status == 0, output
    assert "replaying steps 4 to 8 on 2 ranks" in output
    for step, compared in (
        (4, "record"),
        (5, "record"),
        (6, "record checkpoint"),
        (7, "record"),
        (8, "record checkpoint"),
    ):
        assert f"step {step}: " in output
        assert f": {compared}: equal" in output
    assert content(root / "run") == before


def test_without_an_earlier_checkpoint_a_replay_begins_at_the_start(root: Path) -> None:
    status, output = replay(root, "2", str(root / "run"), "--output", str(root / "kept"))
    assert status == 0, output
    assert "replaying steps 1 to 2" in output
    assert (root / "kept/logs/rank-1.log").is_file()


def test_a_run_without_checkpoints_replays_from_its_start_with_progress(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lower the interval from 5 seconds, to print the progress of short work, too.
    monkeypatch.setenv("SHARDTRAIN_HEARTBEAT_SECONDS", "0.001")
    status, output = replay(
        root, "2", str(root / "run"), "--checkpoint.enable=false", "--nproc", "1"
    )
    assert status == 0, output
    assert "replaying steps 1 to 2" in output
    assert "building the model and opening its data: " in output
    assert "step 1: 0s" in output


def test_a_replay_on_other_ranks_is_compared_within_rounding(root: Path) -> None:
    status, output = replay(root, "6", str(root / "run"), "--nproc", "1")
    assert status == 0, output
    assert "the run had 2 ranks" in output
    assert "step 6: " in output
    assert ": record: equal" in output


@pytest.mark.nightly(
    "after a rewind",
    by="tests/tools/runs/test_replay.py::test_a_replay_is_bitwise_and_does_not_change_the_run",
)
def test_a_rewound_run_replays_without_its_excluded_rows(root: Path) -> None:
    records = [
        json.loads(line) for line in (root / "rewound/metrics.jsonl").read_text().splitlines()
    ]
    assert [record["rewinds"] for record in records] == [0] * 3 + [1] * 3 + [2] * 5

    for steps, count in (("1:11", 11), ("5:11", 8)):
        status, output = replay(root, steps, str(root / "rewound"))
        assert status == 0, output
        assert output.count("equal") == count


def test_the_first_difference_is_named(root: Path) -> None:
    folder = root / "doctored"
    shutil.copytree(root / "run", folder)
    lines = [record_of(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    was = lines[4]["grad_norm"]
    lines[4]["grad_norm"] = was * (1 + 2**-50)
    (folder / "metrics.jsonl").write_bytes(b"".join(map(line_of, lines)))
    status, output = replay(root, "6", str(folder))

    assert status == 4, output
    assert f"step 5 differs from the run: grad_norm {was} was {lines[4]['grad_norm']}" in output

    shutil.rmtree(folder / "checkpoint/step-6")
    shutil.copytree(root / "other/checkpoint/step-6", folder / "checkpoint/step-6")
    (folder / "metrics.jsonl").unlink()
    status, output = replay(root, "6", str(folder))

    assert status == 4, output
    assert "step 6 differs from the run: model.embed.weight and " in output
    assert "more tensors of step-6 differ" in output


def test_an_impossible_replay_is_reported_in_one_line(root: Path, tmp_path: Path) -> None:
    for arguments, code, text in (
        (("0", str(root / "run")), 2, 'STEP="0" is neither a step above 0'),
        (("7:5", str(root / "run")), 2, "is neither a step above 0 nor a range of steps"),
        ((), 2, "STEP is not set"),
        (("--nproc", "2"), 2, "STEP is not set"),
        (("3", str(root)), 2, "it has no config.resolved.toml"),
        (("3", str(root / "run"), "--nproc", "none"), 2, '--nproc="none" must be a whole number'),
        (("3", str(root / "run"), "--output", str(root / "run")), 2, "is the run's own folder"),
        (("3", str(root / "run"), "--training.stepz", "4"), 2, "training.stepz"),
        (
            ("3", "--job.dump_folder", str(tmp_path)),
            5,
            "has neither metrics.jsonl nor a checkpoint",
        ),
    ):
        status, output = replay(root, *arguments)
        assert (status, text in output) == (code, True), output


def test_a_replay_does_not_start_from_damaged_checkpoints(root: Path) -> None:
    folder = root / "damaged"
    shutil.copytree(root / "run", folder)
    (folder / "checkpoint/step-6/manifest.json").write_bytes(b"x")
    (folder / "checkpoint/step-3/rank-00000.bin").write_bytes(b"")

    assert plan(config(folder), 8, 8).base == 0
    assert plan(config(root / "run"), 8, 8).base == 6
    assert plan(config(root / "run"), 6, 8).base == 3
    with pytest.raises(CheckpointError, match="nothing to compare with"):
        plan(config(root / "nowhere"), 1, 1)


@pytest.mark.parametrize("verb", [("replay", "3"), ("data", "show")])
def test_opening_a_folder_runs_no_code_named_by_its_configuration(
    tmp_path: Path, verb: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each option that names a Python file yields one error line, and no file is executed."""
    folder = tmp_path / "run"
    code = tmp_path / "code.py"
    folder.mkdir()
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    # Let every option that accepts a Python file name this file.
    keys_of_sections = {
        "model": ["name", "tokenizer_path"],
        "task": ["name"],
        "optimizer": ["name"],
        "training": ["dataset"],
        "lr_scheduler": ["name"],
        "validation": ["dataset"],
        "data.sources.web": ["dataset"],
    }
    options = ["metrics.sinks", "metrics.token_metrics"]
    lines = ["[metrics]", f"sinks = [{str(code)!r}]", f"token_metrics = [{str(code)!r}]"]
    for section, keys in keys_of_sections.items():
        lines.append(f"[{section}]")
        for key in keys:
            lines.append(f"{key} = {str(code)!r}")
            options.append(f"{section}.{key}")
    (folder / "config.resolved.toml").write_text("\n".join(lines) + "\n")

    assert cli.main([*verb, str(folder)]) == 2

    stderr = capsys.readouterr().err
    for option in options:
        assert f"{option}=" in stderr, option
    assert stderr.count("is code that only the folder of a run names") == len(options)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": {"hf_interval": 2}},
        {"checkpoint": {"last_save_in_hf": True}},
        {"checkpoint": {"keep_best": "validation.loss"}, "validation": {"enable": True}},
        {"training": {"ema_decay": 0.9}},
        {"training": {"ema_decay": 0.9}, "validation": {"enable": True, "use_ema": True}},
        {"training": {"spike_policy": "rewind"}},
    ],
)
@pytest.mark.parametrize("base", [0, 3])
def test_replay_accepts_options_that_save_or_validate(
    root: Path, tmp_path: Path, options: dict[str, dict[str, Any]], base: int
) -> None:
    run_config = config(root / "run")
    for section, values in options.items():
        changed = dataclasses.replace(getattr(run_config, section), **values)
        run_config = dataclasses.replace(run_config, **{section: changed})
    folder = root / "run" / "checkpoint"
    request = replay_plan.ReplayPlan(root / "run", folder, base, 4, 1, ())
    replayed = replay_plan.config_of(run_config, request, tmp_path)

    assert list(check(Loaded(replayed))) == []
