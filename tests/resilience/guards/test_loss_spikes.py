"""A loss far above those before: every rank and every number of ranks decides alike, and a rewound run is one history.

The rows of two steps are poisoned: wherever they are read, their targets are noise. A run without a poison, trained
from the same checkpoint without these rows, is what a rewound run must be.
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

STEPS, POISONED = 16, 11
"""Steps of the run, and the one whose rows are poisoned. Checkpoints are those of steps 4, 8, 12 and 16."""
EPOCH = 18
"""Steps of an epoch of the short text."""
BACK = {"spike_policy": "rewind", "spike_rewind_steps": 2, "spike_skip_steps": 2}


def config(folder: Path, local: int, keys: dict[str, Any] | None = None, **training: Any) -> Config:
    options = {"steps": STEPS, "local_batch_size": local, "seq_len": 32, "spike_window": 4, **training}
    made = shallow_config(
        job={"dump_folder": str(folder)},
        training=options,
        model={"overrides": {"num_layers": 2}},
        checkpoint={"enable": True, "interval": 4},
    )
    return dataclasses.replace(made, **(keys or {}))


def poisoned(rank: int, config: Config, steps: tuple[int, ...] = (POISONED,), stop: tuple[int, int] = (-1, 0)) -> Ended:
    """A whole run over data whose rows at the places of some steps are noise, on any mesh.

    ``stop`` (rewinds, step) ends it like a kill when so many rewinds and so many steps are done.
    """
    pull, step = data.DataLoader.__next__, trainer.step
    rows = {8 * (step - 1) + row for step in steps for row in range(8)}

    def poison(stream: data.DataLoader) -> Batch:
        first = stream._share.first_position(stream._start, stream._batches_returned)
        batch = pull(stream)
        targets_BT = batch.targets_BT.clone()
        for row in range(len(targets_BT)):
            if first + row in rows:  # ids that no text has
                noise = np.random.default_rng(first + row).integers(256, 512, targets_BT.shape[1])
                targets_BT[row] = torch.from_numpy(noise)
        return dataclasses.replace(batch, targets_BT=targets_BT)

    def stopping(run: trainer.Run) -> trainer.Outcome | None:
        if (len(run.resilience.guard.rewinds), run.state.step) == stop:
            raise NumericalError("killed")
        return step(run)

    data.DataLoader.__next__, trainer.step = poison, stopping  # type: ignore[method-assign]
    try:
        return train_whole(rank, config)
    finally:
        data.DataLoader.__next__, trainer.step = pull, step  # type: ignore[method-assign]


def one_rank(rank: int, root: Path) -> dict[str, Ended]:
    runs = {
        "log": poisoned(rank, config(root / "log", 8)),
        "off": poisoned(rank, config(root / "off", 8, spike_policy="off")),
        "skip": poisoned(rank, config(root / "skip", 8, spike_policy="skip")),
        "rewind": poisoned(rank, config(root / "rewind", 8, **BACK)),
        "far": poisoned(rank, config(root / "far", 8, **{**BACK, "spike_rewind_steps": 11})),
        "twice": poisoned(rank, config(root / "twice", 8, **{**BACK, "spike_skip_steps": 1}), (11, 12)),
        "thrice": poisoned(rank, config(root / "thrice", 8, **{**BACK, "spike_skip_steps": 1}), (11, 12, 13)),
        "killed": poisoned(rank, config(root / "killed", 8, **BACK), stop=(1, 10)),
    }
    runs["resumed"] = poisoned(rank, config(root / "killed", 8, **BACK))
    runs["late kill"] = poisoned(rank, config(root / "late", 8, **BACK), stop=(1, 14))
    shutil.copytree(root / "late", root / "late-two")
    runs["late resumed"] = poisoned(rank, config(root / "late", 8, **BACK))
    streamed = {"data": Data(mode="stream", readers=3)}
    runs["stream"] = poisoned(rank, config(root / "stream", 8, streamed, **BACK))
    poisoned(rank, config(root / "stream-killed", 8, streamed, **BACK), stop=(1, 14))
    runs["stream resumed"] = poisoned(rank, config(root / "stream-killed", 8, streamed, **BACK))
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
            rank, config(root / "rewind-pp", 8, {"parallelism": Parallelism(pipeline_parallel_degree=2)}, **BACK)
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
def two(root: Path, one: dict[str, Ended], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ended]]:
    return made_once(tmp_path_factory, "spikes-2", lambda: run_ranks(2, two_ranks, root))


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def guard_of(folder: Path, step: int) -> dict[str, Any]:
    return dict(manifest.read(folder / f"checkpoint/step-{step}").facts["guard"])


def test_a_spike_is_logged_and_counted_and_changes_no_number(root: Path, one: dict[str, Ended]) -> None:
    assert one["log"].error is None
    assert_bitwise(one["log"].weights, one["off"].weights)
    assert [record["spikes"] for record in records(root / "log")][9:12] == [0, 1, 1]
    assert {record["spikes"] for record in records(root / "off")} == {0}
    assert f"step {POISONED}: spike: the loss" in (root / "log/logs/rank-0.log").read_text()


def test_a_skipped_spike_never_reaches_the_weights(root: Path, one: dict[str, Ended]) -> None:
    skipped = one["skip"]
    assert skipped.error is None
    assert skipped.state["updates"] == STEPS - 1 and skipped.state["nonfinite_skips"] == 0
    assert skipped.lrs[POISONED] == skipped.lrs[POISONED - 1]
    assert [record["skipped_updates"] for record in records(root / "skip")] == [0] * 10 + [1] * 6
    assert all(float(count) == STEPS - 1 for name, count in skipped.optimizer.items() if name.endswith(".step"))
    assert skipped.losses[:POISONED] == one["log"].losses[:POISONED]


def test_a_rewind_goes_back_and_leaves_out_the_rows_of_the_last_steps(root: Path, one: dict[str, Ended]) -> None:
    run = one["rewind"]
    assert run.error is None
    assert run.state["step"] == STEPS and run.state["updates"] == STEPS
    # back to step 8 from the spike of 11; the data of 10 and 11 are left out, so the run reads two steps more
    assert run.state["samples_consumed"] == 8 * (STEPS + 2)
    assert guard_of(root / "rewind", 12)["rewinds"] == guard_of(root / "rewind", STEPS)["rewinds"] == [[11, 8, 72, 88]]
    assert guard_of(root / "rewind", 8)["rewinds"] == []
    assert max(run.losses[10:]) < one["log"].losses[10]


def test_the_history_of_a_rewound_run_holds_each_step_once(root: Path, one: dict[str, Ended]) -> None:
    found = records(root / "rewind")
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    assert [record["rewinds"] for record in found] == [0] * 8 + [1] * 8
    # step 9 is made again from the same state and rows, to the bit
    assert one["rewind"].losses[8] == one["rewind"].losses[10]
    # losses has 10 steps, and 8 after going back
    assert [record["loss"] for record in found] == one["rewind"].losses[:8] + one["rewind"].losses[10:]
    log = (root / "rewind/logs/rank-0.log").read_text()
    assert "continuing after step 8" in log
    assert "without rows 72 to 87 in the order of the data" in log


@pytest.mark.parametrize("name", ["resumed", "late resumed"])
def test_a_rewound_run_that_ends_and_continues_is_the_one_that_never_ended(
    root: Path, one: dict[str, Ended], name: str
) -> None:
    """Killed before the first save after going back, and after it."""

    straight, resumed = one["rewind"], one[name]
    assert resumed.error is None
    assert resumed.state == straight.state
    assert_bitwise(resumed.weights, straight.weights)
    assert_bitwise(resumed.optimizer, straight.optimizer)
    folder = root / ("killed" if name == "resumed" else "late")
    keys = ("step", "loss", "grad_norm", "lr", "tokens_seen", "order_hash", "rewinds", "spikes", "skipped_updates")
    mine, theirs = ([[r[key] for key in keys] for r in records(path)] for path in (folder, root / "rewind"))
    assert mine == theirs


@pytest.mark.nightly(
    "on two ranks",
    by="tests/resilience/guards/test_loss_spikes.py::test_a_spike_is_logged_and_counted_and_changes_no_number",
)
def test_every_number_of_ranks_decides_alike(root: Path, one: dict[str, Ended], two: list[dict[str, Ended]]) -> None:
    for rank in two:
        assert rank["rewind"].state == rank["resumed"].state == one["rewind"].state
        assert rank["pp"].state == one["rewind"].state
        for mesh in ("rewind", "pp"):
            assert rank[mesh].losses == pytest.approx(one["rewind"].losses, abs=1e-4)
    for name in ("rewind-two", "late-two", "rewind-pp"):
        assert guard_of(root / name, STEPS)["rewinds"] == [[11, 8, 72, 88]]


def test_rows_of_a_stream_are_left_out_alike(root: Path, one: dict[str, Ended]) -> None:
    straight, resumed = one["stream"], one["stream resumed"]
    assert straight.error is None and resumed.error is None
    assert guard_of(root / "stream", STEPS)["rewinds"] == [[11, 8, 72, 88]]
    assert straight.state["samples_consumed"] == 8 * (STEPS + 2)
    assert resumed.state == straight.state
    assert_bitwise(resumed.weights, straight.weights)


def test_data_that_end_earlier_by_what_was_left_out_end_the_run_well(root: Path, one: dict[str, Ended]) -> None:
    straight, resumed = one["epoch"], one["epoch resumed"]
    assert straight.error is None and resumed.error is None
    assert straight.state["step"] == EPOCH - 2
    assert straight.state["samples_consumed"] == 8 * EPOCH
    assert (root / f"epoch/checkpoint/step-{EPOCH - 2}").is_dir()
    assert resumed.state == straight.state and resumed.lrs == straight.lrs[-len(resumed.lrs) :]
    assert_bitwise(resumed.weights, straight.weights)


def test_without_an_old_checkpoint_the_rows_of_the_spike_alone_are_left_out(root: Path, one: dict[str, Ended]) -> None:
    assert one["far"].error is None
    assert guard_of(root / "far", STEPS)["rewinds"] == [[11, 10, 80, 88]]
    assert one["far"].state["samples_consumed"] == 8 * (STEPS + 1)
    assert len(one["far"].losses) == STEPS
    assert "no checkpoint is 11 steps older" in (root / "far/logs/rank-0.log").read_text()


def test_going_back_is_bounded(root: Path, one: dict[str, Ended]) -> None:
    assert one["twice"].error is None
    assert guard_of(root / "twice", STEPS)["rewinds"] == [[11, 8, 80, 88], [11, 8, 88, 96]]
    error = one["thrice"].error
    assert isinstance(error, NumericalError)
    assert str(error).startswith("step 11: the loss")
    assert "rolled back from here 2 times (training.max_rewinds)" in str(error)
