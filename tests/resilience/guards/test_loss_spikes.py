"""A loss far above the previous ones causes the same decision on all ranks, for any number of ranks.

The rows of some steps are poisoned: their targets are noise whenever they are read. Depending on its policy, a run logs
the spike, skips its update, or returns to an older checkpoint and continues without the rows ("rewind").
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from once import made_once
from ranks import run_ranks
from tiny import Ended, assert_bitwise, shallow_config, text_file, train_whole

from shardtrain import data
from shardtrain.checkpoint import manifest
from shardtrain.config.schema import Config, Data, Parallelism
from shardtrain.data.batch import Batch
from shardtrain.train import trainer
from shardtrain.utils.errors import NumericalError

STEPS = 16
POISONED = 11
"""Steps of the run, and the step whose rows are poisoned. Checkpoints are saved at steps 4, 8, 12 and 16."""
EPOCH = 18
"""Steps of one epoch of the short text."""
BACK = {"spike_policy": "rewind", "spike_rewind_steps": 2, "spike_skip_steps": 2}


def config(folder: Path, local: int, keys: dict[str, Any] | None = None, **training: Any) -> Config:
    options = {
        "steps": STEPS,
        "local_batch_size": local,
        "seq_len": 32,
        "spike_window": 4,
        **training,
    }
    result = shallow_config(
        job={"dump_folder": str(folder)},
        training=options,
        model={"overrides": {"num_layers": 2}},
        checkpoint={"enable": True, "interval": 4},
    )
    return dataclasses.replace(result, **(keys or {}))


def poisoned(
    rank: int, config: Config, steps: tuple[int, ...] = (POISONED,), stop: tuple[int, int] = (-1, 0)
) -> Ended:
    """Train with random targets in the rows that an undisturbed run reads in ``steps``.

    The same rows have the same random targets after a rewind and on any mesh. ``stop=(rewinds, step)`` raises an
    error after ``step`` of a run that has rewound ``rewinds`` times, as a substitute for a kill.
    """
    pull = data.DataLoader.__next__
    step = trainer.step
    rows = {8 * (step - 1) + row for step in steps for row in range(8)}

    def poison(stream: data.DataLoader) -> Batch:
        first = stream._share.first_position(stream._start, stream._batches_returned)
        batch = pull(stream)
        targets_BT = batch.targets_BT.clone()
        for row in range(len(targets_BT)):
            if first + row in rows:  # token ids that the text does not contain
                noise = np.random.default_rng(first + row).integers(256, 512, targets_BT.shape[1])
                targets_BT[row] = torch.from_numpy(noise)
        return dataclasses.replace(batch, targets_BT=targets_BT)

    def step_or_stop(run: trainer.Run) -> trainer.Outcome | None:
        if (len(run.resilience.guard.rewinds), run.state.step) == stop:
            raise NumericalError("killed")
        return step(run)

    data.DataLoader.__next__, trainer.step = poison, step_or_stop  # type: ignore[method-assign]
    try:
        return train_whole(rank, config)
    finally:
        data.DataLoader.__next__, trainer.step = pull, step  # type: ignore[method-assign]


def one_rank(rank: int, root: Path) -> dict[str, Ended]:
    """Results of all runs on one rank, which the tests compare with each other."""
    # Each policy, and rewinds after one, two and three poisoned steps.
    one_step = {**BACK, "spike_skip_steps": 1}
    farther_back = {**BACK, "spike_rewind_steps": 11}
    runs = {
        "log": poisoned(rank, config(root / "log", 8)),
        "off": poisoned(rank, config(root / "off", 8, spike_policy="off")),
        "skip": poisoned(rank, config(root / "skip", 8, spike_policy="skip")),
        "rewind": poisoned(rank, config(root / "rewind", 8, **BACK)),
        "far": poisoned(rank, config(root / "far", 8, **farther_back)),
        "twice": poisoned(rank, config(root / "twice", 8, **one_step), (11, 12)),
        "thrice": poisoned(rank, config(root / "thrice", 8, **one_step), (11, 12, 13)),
    }

    # Kills before and after the first save that follows a rewind.
    runs["killed"] = poisoned(rank, config(root / "killed", 8, **BACK), stop=(1, 10))
    runs["resumed"] = poisoned(rank, config(root / "killed", 8, **BACK))
    runs["late kill"] = poisoned(rank, config(root / "late", 8, **BACK), stop=(1, 14))
    shutil.copytree(root / "late", root / "late-two")
    runs["late resumed"] = poisoned(rank, config(root / "late", 8, **BACK))

    # Streamed data.
    streamed = {"data": Data(mode="stream", readers=3)}
    runs["stream"] = poisoned(rank, config(root / "stream", 8, streamed, **BACK))
    poisoned(rank, config(root / "stream-killed", 8, streamed, **BACK), stop=(1, 14))
    runs["stream resumed"] = poisoned(rank, config(root / "stream-killed", 8, streamed, **BACK))

    # Data that end after one epoch.
    short = root / "short.txt"
    short.write_text(Path(text_file()).read_text()[: EPOCH * 8 * 32 - 1])
    epoch = {**BACK, "dataset_path": str(short), "epochs": 1}
    runs["epoch"] = poisoned(rank, config(root / "epoch", 8, **epoch))
    poisoned(rank, config(root / "epoch-killed", 8, **epoch), stop=(1, 13))
    runs["epoch resumed"] = poisoned(rank, config(root / "epoch-killed", 8, **epoch))
    return runs


def two_ranks(rank: int, root: Path) -> dict[str, Ended]:
    return {
        "rewind": poisoned(rank, config(root / "rewind-two", 4, **BACK)),
        "pp": poisoned(
            rank,
            config(
                root / "rewind-pp",
                8,
                {"parallelism": Parallelism(pipeline_parallel_degree=2)},
                **BACK,
            ),
        ),
        "resumed": poisoned(rank, config(root / "late-two", 4, **BACK)),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "spikes", lambda: tmp_path_factory.mktemp("spikes"))


@pytest.fixture(scope="module")
def one(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    return made_once(tmp_path_factory, "spikes-1", lambda: run_ranks(1, one_rank, root)[0])


@pytest.fixture(scope="module")
def two(
    root: Path, one: dict[str, Ended], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Ended]]:
    return made_once(tmp_path_factory, "spikes-2", lambda: run_ranks(2, two_ranks, root))


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def guard_of(folder: Path, step: int) -> dict[str, Any]:
    return dict(manifest.read(folder / f"checkpoint/step-{step}").facts["guard"])


def test_logged_spike_is_counted_and_changes_no_weight(root: Path, one: dict[str, Ended]) -> None:
    assert one["log"].error is None
    assert_bitwise(one["log"].weights, one["off"].weights)
    assert [record["spikes"] for record in records(root / "log")][9:12] == [0, 1, 1]
    assert {record["spikes"] for record in records(root / "off")} == {0}
    assert f"step {POISONED}: spike: the loss" in (root / "log/logs/rank-0.log").read_text()


def test_skipped_spike_does_not_change_the_weights(root: Path, one: dict[str, Ended]) -> None:
    skipped = one["skip"]
    assert skipped.error is None
    assert skipped.state["updates"] == STEPS - 1
    assert skipped.state["nonfinite_skips"] == 0
    assert skipped.lrs[POISONED] == skipped.lrs[POISONED - 1]
    skipped_updates = [record["skipped_updates"] for record in records(root / "skip")]
    assert skipped_updates == [0] * 10 + [1] * 6

    # The optimizer did not count the skipped step either.
    for name, count in skipped.optimizer.items():
        if name.endswith(".step"):
            assert float(count) == STEPS - 1, name
    assert skipped.losses[:POISONED] == one["log"].losses[:POISONED]


def test_rewind_continues_without_the_rows_of_the_last_steps(
    root: Path, one: dict[str, Ended]
) -> None:
    run = one["rewind"]
    assert run.error is None
    assert run.state["step"] == STEPS
    assert run.state["updates"] == STEPS
    # The spike of step 11 leads back to step 8. The rows of steps 10 and 11 are skipped, so two more steps are read.
    assert run.state["samples_consumed"] == 8 * (STEPS + 2)
    assert (
        guard_of(root / "rewind", 12)["rewinds"]
        == guard_of(root / "rewind", STEPS)["rewinds"]
        == [[11, 8, 72, 88]]
    )
    assert guard_of(root / "rewind", 8)["rewinds"] == []
    assert max(run.losses[10:]) < one["log"].losses[10]


def test_metrics_of_a_rewound_run_have_each_step_once(root: Path, one: dict[str, Ended]) -> None:
    rows = records(root / "rewind")
    assert [record["step"] for record in rows] == list(range(1, STEPS + 1))
    assert [record["rewinds"] for record in rows] == [0] * 8 + [1] * 8
    # Step 9 is repeated with the same state and rows, so its loss is bitwise equal.
    assert one["rewind"].losses[8] == one["rewind"].losses[10]
    # ``losses`` has 10 values before the rewind, and 8 after it.
    assert [record["loss"] for record in rows] == one["rewind"].losses[:8] + one["rewind"].losses[
        10:
    ]

    log = (root / "rewind/logs/rank-0.log").read_text()
    assert "continuing after step 8" in log
    assert "skipping rows 72 to 87 of the data" in log


@pytest.mark.parametrize("name", ["resumed", "late resumed"])
def test_killed_run_with_a_rewind_resumes_bitwise(
    root: Path, one: dict[str, Ended], name: str
) -> None:
    """One run is killed before the first save after the rewind, the other after it."""
    straight = one["rewind"]
    resumed = one[name]
    assert resumed.error is None
    assert resumed.state == straight.state
    assert_bitwise(resumed.weights, straight.weights)
    assert_bitwise(resumed.optimizer, straight.optimizer)

    folder = root / ("killed" if name == "resumed" else "late")
    keys = (
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens_seen",
        "order_hash",
        "rewinds",
        "spikes",
        "skipped_updates",
    )

    # The logs are equal too, except for times.
    actual = records(folder)
    expected = records(root / "rewind")
    assert len(actual) == len(expected)
    for record, expected_record in zip(actual, expected, strict=True):
        for key in keys:
            assert record[key] == expected_record[key], key


@pytest.mark.nightly(
    "on two ranks",
    by="tests/resilience/guards/test_loss_spikes.py::test_logged_spike_is_counted_and_changes_no_weight",
)
def test_two_ranks_rewind_like_one(
    root: Path, one: dict[str, Ended], two: list[dict[str, Ended]]
) -> None:
    expected = one["rewind"]
    for rank in two:
        for name in ("rewind", "resumed", "pp"):
            assert rank[name].state == expected.state
        for mesh in ("rewind", "pp"):
            # float32 sums in a different order, amplified by 16 steps
            assert rank[mesh].losses == pytest.approx(expected.losses, abs=1e-4)
    for name in ("rewind-two", "late-two", "rewind-pp"):
        assert guard_of(root / name, STEPS)["rewinds"] == [[11, 8, 72, 88]]


def test_rewind_skips_the_same_rows_of_a_stream(root: Path, one: dict[str, Ended]) -> None:
    straight = one["stream"]
    resumed = one["stream resumed"]
    assert straight.error is None
    assert resumed.error is None
    assert guard_of(root / "stream", STEPS)["rewinds"] == [[11, 8, 72, 88]]
    assert straight.state["samples_consumed"] == 8 * (STEPS + 2)
    assert resumed.state == straight.state
    assert_bitwise(resumed.weights, straight.weights)


def test_skipped_rows_end_the_epoch_earlier_without_an_error(
    root: Path, one: dict[str, Ended]
) -> None:
    straight = one["epoch"]
    resumed = one["epoch resumed"]
    assert straight.error is None
    assert resumed.error is None
    assert straight.state["step"] == EPOCH - 2
    assert straight.state["samples_consumed"] == 8 * EPOCH
    assert (root / f"epoch/checkpoint/step-{EPOCH - 2}").is_dir()
    assert resumed.state == straight.state
    assert resumed.lrs == straight.lrs[-len(resumed.lrs) :]
    assert_bitwise(resumed.weights, straight.weights)


def test_without_an_old_checkpoint_only_rows_of_the_spike_are_skipped(
    root: Path, one: dict[str, Ended]
) -> None:
    assert one["far"].error is None
    assert guard_of(root / "far", STEPS)["rewinds"] == [[11, 10, 80, 88]]
    assert one["far"].state["samples_consumed"] == 8 * (STEPS + 1)
    assert len(one["far"].losses) == STEPS
    assert "no checkpoint is 11 steps older" in (root / "far/logs/rank-0.log").read_text()


def test_number_of_rewinds_is_limited(root: Path, one: dict[str, Ended]) -> None:
    assert one["twice"].error is None
    assert guard_of(root / "twice", STEPS)["rewinds"] == [[11, 8, 80, 88], [11, 8, 88, 96]]
    error = one["thrice"].error
    assert isinstance(error, NumericalError)
    assert str(error).startswith("step 11: the loss")
    assert "rolled back from here 2 times (training.max_rewinds)" in str(error)
