"""Tied embeddings in two pipeline stages train as one parameter, on one rank or on two."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import Result, deep_config, make_run, run_tiny

from shardtrain.ops.dtensor import local_tensor
from shardtrain.train import trainer

TIED = {"overrides": {"tied_embeddings": True}}
STAGES = {"pipeline_parallel_degree": 2, "pipeline_parallel_first_stage_less_layers": 0}
STAGES |= {"pipeline_parallel_last_stage_less_layers": 0}
# 1F1B and Interleaved1F1B have the ends on two ranks; ZBVZeroBubble has both on the first
SPLITS: dict[str, dict[str, Any]] = {
    "two ranks": {"pipeline_parallel_schedule": "1F1B"},
    "one rank": {"pipeline_parallel_schedule": "ZBVZeroBubble"},
    "four stages": {"pipeline_parallel_schedule": "Interleaved1F1B"},
}


def config_of(split: str, **training: Any) -> Any:
    return deep_config(model=TIED, parallelism={**STAGES, **SPLITS[split]}, training=training)


@functools.cache
def expected() -> Result:
    return run_tiny(1, deep_config(model=TIED, training={"local_batch_size": 8}), steps=3)[0]


@pytest.mark.parametrize("split", SPLITS)
def test_tied_embeddings_in_two_stages_change_no_number(split: str) -> None:
    one_process = expected()
    for result in run_tiny(2, config_of(split, local_batch_size=8), steps=3):
        # float32 sums in a different order
        assert result.losses == pytest.approx(one_process.losses, abs=1e-5)
        # both copies are counted once
        assert result.grad_norms == pytest.approx(one_process.grad_norms, rel=1e-6)
        assert "head.weight" not in result.initial
        if "embed.weight" in result.gradients:  # a rank has only the gradients of its stages
            torch.testing.assert_close(
                result.gradients["embed.weight"],
                one_process.gradients["embed.weight"],
                rtol=1e-5,
                atol=1e-7,
            )


def copies_of(rank: int, split: str) -> list[torch.Tensor]:
    run = make_run(rank, config_of(split, local_batch_size=8))
    for _ in range(3):
        trainer.step(run)
    run.runner.evaluate(next(run.dataloader))  # first updates the tied copy
    named = [(name, p) for part in run.runner.parts for name, p in part.named_parameters()]
    return [
        local_tensor(p.detach()).clone()
        for name, p in named
        if name in ("embed.weight", "head.weight")
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_copies_are_bitwise_equal_after_training(split: str) -> None:
    first, second = [copy for copies in run_ranks(2, copies_of, split) for copy in copies]
    assert torch.equal(first, second)
