"""Losses that are not finite end the run, or skip one update, on all ranks, and leave the weights correct."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from once import made_once
from ranks import run_ranks
from tiny import Ended, assert_bitwise, shallow_config, train_whole

from shardtrain.config.schema import Config
from shardtrain.ops import cross_entropy
from shardtrain.utils.errors import NumericalError

BAD_RANK = 1


def config(folder: Path, steps: int = 5, **training: Any) -> Config:
    return shallow_config(
        job={"dump_folder": str(folder)},
        training={"steps": steps, "local_batch_size": 4, **training},
        checkpoint={"enable": True, "interval": 4},
    )


def train_with(
    rank: int, config: Config, bad: dict[int, float], stop_after: int | None = None
) -> Ended:
    """Train to the end. On ``BAD_RANK``, multiply the loss of forward pass n (from 1) by ``bad[n]``."""
    original = cross_entropy._CrossEntropySum
    calls = []

    def apply(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return original.apply(*arguments)  # the second forward pass after a failed step
        calls.append(None)
        factor = bad.get(len(calls), 1.0) if rank == BAD_RANK else 1.0
        return original.apply(*arguments) * factor

    cross_entropy._CrossEntropySum = SimpleNamespace(apply=apply)  # type: ignore[assignment, misc]
    try:
        return train_whole(rank, config, stop_after)
    finally:
        cross_entropy._CrossEntropySum = original  # type: ignore[misc]


INF = float("inf")
NAN = float("nan")
HALF = {
    "mixed_precision_param": "float16",
    "initial_loss_scale": 1024.0,
    "loss_scale_growth_interval": 3,
}


def all_runs(rank: int, root: Path) -> dict[str, Ended]:
    """Results of runs in which the gradients of some steps are not finite."""
    in_every_step = dict.fromkeys(range(1, 100), NAN)
    skip = {"nonfinite_policy": "skip"}
    bounded = config(root / "bounded", **skip, nonfinite_max_skips=2)
    separate = config(root / "separate", **skip, nonfinite_max_skips=1)
    share = config(root / "share", **skip, nonfinite_max_skip_fraction=0.001)
    half = config(root / "half", **HALF)
    hopeless = config(root / "hopeless", 40, **{**HALF, "initial_loss_scale": 8.0})
    return {
        "good": train_with(rank, config(root / "good"), {}, stop_after=2),
        "stop": train_with(rank, config(root / "stop"), {3: NAN}),
        "skip": train_with(rank, config(root / "skip", **skip), {3: NAN}),
        "bounded": train_with(rank, bounded, in_every_step),
        "separate": train_with(rank, separate, {2: INF, 4: NAN}),
        "share": train_with(rank, share, {2: INF, 4: -INF}),
        "half straight": train_with(rank, config(root / "half-straight", **HALF), {2: INF}),
        "half killed": train_with(rank, half, {2: INF}, stop_after=4),
        "half resumed": train_with(rank, half, {}),
        "half hopeless": train_with(rank, hopeless, in_every_step),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "nonfinite", lambda: tmp_path_factory.mktemp("nonfinite"))


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ended]]:
    return made_once(tmp_path_factory, "nonfinite-runs", lambda: run_ranks(2, all_runs, root))


def test_nonfinite_loss_stops_all_ranks_before_the_update(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        error = rank["stop"].error
        good = rank["good"]
        assert isinstance(error, NumericalError)
        assert error.exit_code == 4
        assert str(error).startswith(
            "step 3: the loss of rank 1 is not finite: check the device, or "
        )
        assert "; reason: the weights are still those of step 2; " in str(error)
        assert "\n" not in str(error)
        assert_bitwise(rank["stop"].weights, good.weights)
        assert_bitwise(rank["stop"].optimizer, good.optimizer)
        assert rank["stop"].state == good.state


def test_log_of_the_rank_names_its_samples(root: Path, runs: list[dict[str, Ended]]) -> None:
    # The failed step read its rows, but is not counted as a step.
    ids = runs[BAD_RANK]["stop"].sample_ids[2]
    assert len(ids) == 4
    line = f"ERROR step 3: the loss of this rank is not finite; sample ids {ids}"
    assert line in (root / f"stop/logs/rank-{BAD_RANK}.log").read_text()
    assert "sample ids" not in (root / "stop/logs/rank-0.log").read_text()


def test_run_continues_after_a_skipped_update_and_its_schedule_waits(
    runs: list[dict[str, Ended]],
) -> None:
    for rank in runs:
        skipped = rank["skip"]
        good = rank["good"]
        assert skipped.error is None
        assert skipped.losses[:2] == good.losses
        # the schedule counts updates, and this one was skipped
        assert skipped.lrs[3] == skipped.lrs[2]
        assert skipped.state["step"] == 5
        assert skipped.state["updates"] == 4
        assert skipped.state["nonfinite_skips"] == 0

        counts = [
            float(count) for name, count in skipped.optimizer.items() if name.endswith(".step")
        ]
        assert set(counts) == {4}
        assert skipped.state["samples_consumed"] == 40

    assert_bitwise(runs[0]["skip"].weights, runs[1]["skip"].weights)


def test_number_of_consecutive_skips_is_limited(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        assert isinstance(rank["bounded"].error, NumericalError)
        assert str(rank["bounded"].error).startswith("step 3: the loss of rank 1 is not finite")
        assert rank["bounded"].state["updates"] == 0
        assert rank["separate"].error is None
        assert rank["separate"].state["updates"] == 3


def test_fraction_of_skipped_steps_is_limited(root: Path, runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        assert isinstance(rank["share"].error, NumericalError)
        assert str(rank["share"].error).startswith("step 4: the loss of rank 1 is not finite")
        assert "; 1 of 1000 updates were skipped (training.nonfinite_max_skip_fraction)" in str(
            rank["share"].error
        )

    records = [json.loads(line) for line in (root / "share/metrics.jsonl").read_text().splitlines()]
    assert [record["skipped_updates"] for record in records] == [0, 1, 1]


def test_float16_overflow_halves_the_loss_scale_on_every_rank(
    root: Path, runs: list[dict[str, Ended]]
) -> None:
    for number, rank in enumerate(runs):
        run = rank["half straight"]
        assert run.error is None  # the policy is to stop, but an overflow only lowers the scale
        assert run.lrs[2] == run.lrs[1] != run.lrs[0]
        assert run.state["step"] == 5
        assert run.state["updates"] == 4
        # The scale is halved at step 2, and doubled after steps 3, 4 and 5.
        assert run.scaler == {"scale": 1024.0, "finite_steps": 0}
        assert rank["half killed"].scaler == {"scale": 512.0, "finite_steps": 2}

        log = (root / f"half-straight/logs/rank-{number}.log").read_text()
        assert "step 2: the loss of rank 1 overflowed float16 at loss scale 1024" in log

    assert_bitwise(runs[0]["half straight"].weights, runs[1]["half straight"].weights)


def test_resumed_run_has_the_same_loss_scale(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        straight = rank["half straight"]
        resumed = rank["half resumed"]
        assert resumed.error is None
        assert resumed.scaler == straight.scaler
        assert resumed.state == straight.state
        assert resumed.losses == straight.losses[4:]
        assert resumed.lrs == straight.lrs[4:]
        assert_bitwise(resumed.weights, straight.weights)


def test_run_ends_if_even_the_smallest_loss_scale_overflows(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        assert isinstance(rank["half hopeless"].error, NumericalError)
        # Steps 1 to 17 halve the scale from 8 to the smallest one, 2**-14. Step 18 ends the run.
        assert rank["half hopeless"].state["step"] == 17
        assert rank["half hopeless"].state["updates"] == 0


def test_nonfinite_metrics_are_written_as_null(root: Path, runs: list[dict[str, Ended]]) -> None:
    records = [json.loads(line) for line in (root / "skip/metrics.jsonl").read_text().splitlines()]
    assert [record["loss"] is None for record in records] == [False, False, True, False, False]
    assert records[2]["grad_norm"] is None
