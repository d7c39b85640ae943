"""A stop request that cancels a validation: the resumed run repeats it, and ends like an uninterrupted run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from once import made_once
from ranks import run_ranks
from tiers import cases
from tiny import Ended, assert_bitwise, shallow_config, text_file, train_whole

from shardtrain import optim
from shardtrain.checkpoint import manifest, retention
from shardtrain.checkpoint.best import read_pointer
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.launch import signals
from shardtrain.launch.stop_request import StopRequest
from shardtrain.train import validation
from shardtrain.train.validation import Evaluation, Validator

LOSSES = [3.0, 2.0, 2.5, 1.0, 9.0, 9.0, 0.5, 0.7]
"""Validation loss after each step. With a patience of 2, the best is 1.0 at step 4, and the run ends at step 6."""
NEW_BEST = 4
PATIENCE_ENDS = 6
LAST = len(LOSSES)

# phase of the request, step, patience. In "twice", the repeated validation is canceled too. In "killed", the resumed
# run dies two steps later without a save, so the validation is repeated again.
DEFAULT = [
    ("validation", NEW_BEST, 0),
    ("validation", PATIENCE_ENDS, 2),
    ("step", LAST, 0),
    ("twice", NEW_BEST, 2),
    ("killed", NEW_BEST - 1, 0),
]
ALL = [
    (phase, step, patience)
    for phase in ("step", "validation", "twice", "killed", "sample", "save")
    for patience, last in ((0, LAST), (2, PATIENCE_ENDS))
    for step in (1, NEW_BEST - 1, NEW_BEST, last)
    if phase != "save" or step != NEW_BEST - 1  # no checkpoint is due after that step
]


def config(folder: Path, patience: int) -> Config:
    held_out = {
        "dataset": "text",
        "dataset_path": text_file(),
        "seq_len": 64,
        "steps": 3,
        "local_batch_size": 2,
    }
    return shallow_config(
        job={"dump_folder": str(folder)},
        training={"steps": LAST, "seq_len": 32, "local_batch_size": 4},
        metrics={"log_freq": 1, "sample_freq": 1},
        checkpoint={"enable": True, "interval": 5, "keep_best": "validation.loss"},
        validation={"enable": True, "freq": 1, "patience": patience, **held_out},
    )


def request_stop_in(patch: pytest.MonkeyPatch, phase: str, step: int, is_asked: bool) -> None:
    """Request a stop of this rank in a phase of a step, and give validations the scripted losses."""
    signals._current = stop = StopRequest()
    current = [0]
    originals: dict[str, Any] = {
        "run": Validator.run,
        "batches": validation._batches,
        "rate": optim.set_learning_rate,
        "save": Checkpoints.save,
    }

    def ask(now: str) -> None:
        if is_asked and now == phase and current[0] == step:
            stop.note("SIGTERM")

    def run(self: Validator, step: int) -> Evaluation | None:
        current[0] = step
        done = originals["run"](self, step)
        ask("sample")  # samples follow the validation
        return done and dataclasses.replace(done, loss=LOSSES[step - 1])

    def batches(*arguments: Any) -> Any:
        for batch in originals["batches"](*arguments):
            ask("validation")
            yield batch

    def set_learning_rate(*arguments: Any) -> None:
        current[0] += 1
        ask("step")
        originals["rate"](*arguments)

    def save(self: Checkpoints, at: int, *arguments: Any, **names: Any) -> None:
        ask("save")
        originals["save"](self, at, *arguments, **names)

    patch.setattr(Validator, "run", run)
    patch.setattr(validation, "_batches", batches)
    patch.setattr(optim, "set_learning_rate", set_learning_rate)
    patch.setattr(Checkpoints, "save", save)


def train(
    rank: int,
    folder: Path,
    patience: int,
    phase: str = "",
    step: int = 0,
    stop_after: int | None = None,
) -> Ended:
    """Run once. Only rank 1 gets the request."""
    with pytest.MonkeyPatch.context() as patch:
        request_stop_in(patch, phase, step, rank == 1)
        return train_whole(rank, config(folder, patience), stop_after)


def stopped_and_resumed(
    rank: int, folder: Path, phase: str, step: int, patience: int
) -> list[Ended]:
    in_validation = phase in ("twice", "killed")
    starts = [train(rank, folder, patience, "validation" if in_validation else phase, step)]
    if phase == "twice":
        starts.append(train(rank, folder, patience, "validation", step))
    if phase == "killed":
        starts.append(train(rank, folder, patience, stop_after=step + 1))
    return [*starts, train(rank, folder, patience)]


def result(folder: Path) -> dict[str, Any]:
    """Return all results of validations."""
    checkpoints = folder / "checkpoint"
    facts = manifest.read(checkpoints / f"step-{retention.steps(checkpoints)[-1]}").facts
    samples = [
        json.loads(line)["step"] for line in (folder / "samples.jsonl").read_text().splitlines()
    ]
    return {
        "validations": (folder / "validation.jsonl").read_text(),
        "pointer": read_pointer(checkpoints),
        "best": facts["best"],
        "owes": facts["owes_validation"],
        "samples": samples,
    }


@pytest.mark.parametrize(
    ("phase", "step", "patience"), cases(DEFAULT, [case for case in ALL if case not in DEFAULT])
)
def test_canceled_validation_is_repeated(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, phase: str, step: int, patience: int
) -> None:
    uninterrupted = made_once(
        tmp_path_factory, f"validated-{patience}", lambda: tmp_path_factory.mktemp("straight")
    )
    straight = made_once(
        tmp_path_factory, f"run-{patience}", lambda: run_ranks(2, train, uninterrupted, patience)[0]
    )

    assert straight.error is None
    assert straight.state["step"] == (PATIENCE_ENDS if patience else LAST)
    assert len(result(uninterrupted)["validations"].splitlines()) == straight.state["step"]

    # A run that is stopped in a validation exits with a status that the scheduler retries.
    starts = run_ranks(2, stopped_and_resumed, tmp_path, phase, step, patience)[0]
    is_complete = phase in ("sample", "save") and step == straight.state["step"]
    num_stopped = 2 if phase == "twice" else 1
    for start in starts[:num_stopped]:
        if is_complete:
            assert start.error is None
        else:
            assert start.error is not None
            assert start.error.exit_code == 75
        if phase != "save":
            assert start.state["step"] == step

    # The last start ends like the uninterrupted run.
    assert starts[-1].error is None
    assert starts[-1].state == straight.state
    assert_bitwise(starts[-1].weights, straight.weights)
    assert result(tmp_path) == result(uninterrupted)
