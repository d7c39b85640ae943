"""Context parallelism: every token goes to one rank with its position and target, and numbers do not change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import assert_same_numbers, make_run, reference, run_tiny, tiny_config

from shardtrain import config as configs
from shardtrain.config import Loaded
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.train import trainer

WAYS = {
    "gather": {},
    "gather, in order": {"context_parallel_load_balancer": "none"},
    "ring": {"context_parallel_rotate_method": "alltoall"},
    "ring, in order": {
        "context_parallel_rotate_method": "alltoall",
        "context_parallel_load_balancer": "none",
    },
    "ulysses": {"context_parallel_method": "ulysses"},
}


class FakeMesh:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self, axis: str) -> int:
        return self._size

    def rank(self, axis: str) -> int:
        return self._rank


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_token_goes_to_one_rank_with_its_position_and_target(way: str, size: int) -> None:
    config = tiny_config(parallelism={"context_parallel_degree": size, **WAYS[way]})
    tokens = torch.arange(3 * 64).view(3, 64)
    batch = SimpleNamespace(
        tokens_BT=tokens, targets_BT=tokens + 1000, positions_BT=torch.arange(64).expand(3, 64)
    )
    tokens_of_ranks = []
    for rank in range(size):
        tokens_Bt, targets_Bt, positions_Bt = context_parallel.cut(
            batch, FakeMesh(size, rank), config
        )  # type: ignore[arg-type]
        assert tokens_Bt.shape == (3, 64 // size)
        assert torch.equal(targets_Bt, tokens_Bt + 1000)
        assert torch.equal(tokens_Bt % 64, positions_Bt)
        tokens_of_ranks.append(tokens_Bt)

    assert torch.equal(torch.cat(tokens_of_ranks, 1).sort(1).values, tokens)


IN_ORDER = ("gather, in order", "ring, in order")


@pytest.mark.parametrize(
    "way", cases([way for way in WAYS if way not in IN_ORDER], nightly=IN_ORDER)
)
def test_context_parallelism_changes_no_number(way: str) -> None:
    config = tiny_config(parallelism={"context_parallel_degree": 2, **WAYS[way]})
    for result in run_tiny(2, config):
        assert_same_numbers(result, reference())


FIRST_ODD = [("ulysses", 34, 2, 1), ("ring", 36, 2, 1)]
ODD = [  # lengths with an odd number of tokens per rank or chunk, which cannot be split further
    ("gather, in order", 34, 2, 1),
    ("ring, in order", 34, 2, 1),
    ("gather", 36, 2, 2),
    ("ring, in order", 36, 2, 2),
]


@pytest.mark.parametrize(("way", "seq_len", "cp", "tp"), cases(FIRST_ODD, nightly=ODD))
def test_any_divisible_length_is_accepted_and_changes_no_number(way, seq_len, cp, tp) -> None:
    parallelism = {"context_parallel_degree": cp, "tensor_parallel_degree": tp, **WAYS[way]}
    config = tiny_config(parallelism=parallelism, training={"seq_len": seq_len})
    assert configs.check(Loaded(config)) == []

    [expected] = run_tiny(1, tiny_config(training={"local_batch_size": 8, "seq_len": seq_len}), 2)
    for result in run_tiny(cp * tp, config, 2):
        assert_same_numbers(result, expected)


@pytest.mark.parametrize(
    ("way", "seq_len", "tp", "multiple"),
    [("ring", 34, 1, 4), ("ulysses", 33, 1, 2), ("gather", 34, 2, 4)],
)
def test_indivisible_length_is_rejected_with_the_nearest_valid_ones(
    way, seq_len, tp, multiple
) -> None:
    parallelism = {"context_parallel_degree": 2, "tensor_parallel_degree": tp, **WAYS[way]}
    [problem] = configs.check(
        Loaded(tiny_config(parallelism=parallelism, training={"seq_len": seq_len}))
    )
    low = seq_len // multiple * multiple

    assert f"training.seq_len={seq_len} is not a multiple of {multiple} (" in str(problem)
    assert str(problem).endswith(f"use {low} or {low + multiple}")


@pytest.mark.nightly(
    "on two ranks",
    by="tests/distributed/context_parallel/test_cores.py::test_context_parallelism_changes_no_number",
)
@pytest.mark.parametrize("way", cases(["ring"], nightly=["gather"]))
def test_four_context_ranks_change_no_number(way: str) -> None:
    config = tiny_config(parallelism={"context_parallel_degree": 4, **WAYS[way]})
    for result in run_tiny(4, config, steps=4):
        assert_same_numbers(result, reference(4))


def test_largest_loss_of_a_rank_is_per_token_of_its_part() -> None:
    config = tiny_config(parallelism={"context_parallel_degree": 2})
    results = run_ranks(2, tokens_of_rank, config)
    [(num_tokens, loss_sum)] = run_ranks(1, tokens_of_rank, tiny_config())
    assert num_tokens == 8 * 64
    assert sum(tokens_of_part for tokens_of_part, _ in results) == num_tokens
    for tokens_of_part, loss_of_part in results:
        # both ranks read similar text, so their losses per token are close
        assert abs(loss_of_part / tokens_of_part - loss_sum / num_tokens) < 0.1


def tokens_of_rank(rank: int, config: Any) -> tuple[int, float]:
    outcome = trainer.step(make_run(rank, config))
    return outcome.local_tokens, float(outcome.loss_sum)
