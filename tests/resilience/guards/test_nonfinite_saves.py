"""A checkpoint never contains a weight or optimizer state that is not finite, also if the loss was finite."""

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

NAN = float("nan")
INFINITY = float("inf")


def first_weight(run: trainer.Run) -> torch.Tensor:
    return next(tensor for name, tensor in run.runner.parameters().items() if "ffn.w1" in name)


def second_moment(run: trainer.Run) -> torch.Tensor:
    return next(state["exp_avg_sq"] for state in run.optimizer.state.values())


PLACES: dict[str, tuple[Callable[[trainer.Run], torch.Tensor], float]] = {
    "a weight": (first_weight, NAN),
    "the optimizer": (second_moment, INFINITY),
}


def error_of_run(rank: int, folder: Path, place: str, mode: str, steps: int) -> str:
    """Return the error of a run whose last rank has a non-finite value in ``place`` after the fourth update."""
    tensor_of, value = PLACES[place]
    step = trainer.step

    def poisoned(run: trainer.Run) -> trainer.Outcome | None:
        outcome = step(run)
        if run.state.step == 4 and rank == torch.distributed.get_world_size() - 1:
            local_tensor(tensor_of(run).detach()).view(-1)[0] = value
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
        nightly=[
            ("a weight", "disabled", 8),
            ("the optimizer", "disabled", 4),
            ("the optimizer", "async", 8),
        ],
    ),
)
def test_nonfinite_update_is_reported_and_not_saved(
    place: str, mode: str, steps: int, tmp_path: Path
) -> None:
    messages = run_ranks(2, error_of_run, tmp_path, place, mode, steps)
    name = "ffn.w1.weight" if place == "a weight" else "exp_avg_sq"
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    assert messages[0].startswith("step 4: non-finite values after the update in ")
    assert name in messages[0]
    assert "(rank 1): continue from step 2" in messages[0]
    assert messages[0].endswith("; reason: this step was not saved")
    assert [path.name for path in (tmp_path / "checkpoint").glob("step-*")] == ["step-2"]
    assert json.loads((tmp_path / "checkpoint/step-2/manifest.json").read_text())["step"] == 2
