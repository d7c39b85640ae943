"""No checkpoint holds a weight or optimizer state that is not finite: an update may make one, unseen by its loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import tiny_config, train_whole

from shardtrain.ops.dtensor import local_tensor
from shardtrain.train import trainer
from shardtrain.utils.errors import NumericalError

NAN, INFINITY = float("nan"), float("inf")


def first_weight(run: trainer.Run) -> torch.Tensor:
    return next(tensor for name, tensor in run.runner.parameters().items() if "ffn.w1" in name)


def second_moment(run: trainer.Run) -> torch.Tensor:
    return next(state["exp_avg_sq"] for state in run.optimizer.state.values())


PLACES: dict[str, tuple[Callable[[trainer.Run], torch.Tensor], float]] = {
    "a weight": (first_weight, NAN),
    "the optimizer": (second_moment, INFINITY),
}


def ends(rank: int, folder: Path, place: str, mode: str, steps: int) -> str:
    """How a run ends of which the last rank has a number that is not finite after the fourth update."""
    of, value = PLACES[place]
    step = trainer.step

    def poisoned(run: trainer.Run) -> trainer.Outcome | None:
        outcome = step(run)
        if run.state.step == 4 and rank == torch.distributed.get_world_size() - 1:
            local_tensor(of(run).detach()).view(-1)[0] = value
        return outcome

    trainer.step = poisoned
    config = tiny_config(
        job={"dump_folder": str(folder)},
        training={"seq_len": 16, "local_batch_size": 4, "steps": steps},
        checkpoint={"enable": True, "interval": 2, "async_mode": mode},
    )
    try:
        error = train_whole(rank, config).error
    finally:
        trainer.step = step
    assert isinstance(error, NumericalError), error
    return str(error)


@pytest.mark.parametrize(
    ("place", "mode", "steps"),
    cases(
        [("a weight", "async", 4)],
        nightly=[("a weight", "disabled", 8), ("the optimizer", "disabled", 4), ("the optimizer", "async", 8)],
    ),
)
def test_an_update_that_left_a_number_not_finite_is_reported_before_it_is_saved(
    place: str, mode: str, steps: int, tmp_path: Path
) -> None:
    told = run_ranks(2, ends, tmp_path, place, mode, steps)
    name = "ffn.w1.weight" if place == "a weight" else "exp_avg_sq"
    assert told[0] == told[1] and "\n" not in told[0]
    assert told[0].startswith("step 4: non-finite values after the update in ")
    assert name in told[0] and "(rank 1): continue from step 2" in told[0]
    assert told[0].endswith("; reason: this step was not saved")
    kept = sorted(path.name for path in (tmp_path / "checkpoint").glob("step-*"))
    assert kept == ["step-2"]
    assert json.loads((tmp_path / "checkpoint/step-2/manifest.json").read_text())["step"] == 2
