"""Seeds decide everything that is random, and nothing else does."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import Ended, assert_bitwise, assert_same_numbers, make_run, shallow_config, train_steps, train_whole, whole

from shardtrain import config as configs
from shardtrain.config.schema import Config
from shardtrain.train import trainer

LARGE_SEEDS = (17982163893102248868, 2**64 - 1)
"""Seeds above 2**63 have overflowed the generators of other trainers."""


def config(seed: int = 42, num_ranks: int = 2, folder: str = ".", deterministic: bool = False) -> Config:
    return shallow_config(
        job={"dump_folder": folder},
        training={"steps": 3, "local_batch_size": 8 // num_ranks},
        debug={"seed": seed, "deterministic": deterministic},
    )


def drawn_by_each_step(rank: int, config: Config) -> list[tuple[float, float, float]]:
    """One number of each generator after the seeding of three steps."""
    run, numbers = make_run(rank, config), []
    original = run.runner.forward_backward

    def draw(batches, weight):
        numbers.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return original(batches, weight)

    run.runner.forward_backward = draw  # type: ignore[method-assign]
    for _ in range(3):
        trainer.step(run)
    return numbers


def twice(rank: int, root: Path) -> dict[str, Ended]:
    return {name: train_whole(rank, config(folder=str(root / name), deterministic=True)) for name in ("one", "two")}


def of_seeds(rank: int, num_ranks: int) -> dict[str, object]:
    found: dict[str, object] = {seed: train_steps(rank, config(seed, num_ranks), 2) for seed in LARGE_SEEDS}
    found["other"] = train_steps(rank, config(7, num_ranks), 1)
    found["draws"] = drawn_by_each_step(rank, config(num_ranks=num_ranks))
    if num_ranks == 2:
        tensor = shallow_config(training={"local_batch_size": 8}, parallelism={"tensor_parallel_degree": 2})
        found["tensor draws"] = drawn_by_each_step(rank, tensor)
        found["initial"] = whole(make_run(rank, config()))
    return found


@pytest.fixture(scope="module")
def seeds() -> list[dict[str, object]]:
    """What one process found, and each of two ranks."""
    return run_ranks(1, of_seeds, 1) + run_ranks(2, of_seeds, 2)


def test_two_runs_are_equal_to_the_bit(tmp_path: Path) -> None:
    first, again = run_ranks(2, twice, tmp_path), run_ranks(2, twice, tmp_path)
    for mine, theirs in ((first[0]["one"], first[0]["two"]), (first[1]["one"], again[1]["one"])):
        assert mine.losses == theirs.losses and mine.grad_norms == theirs.grad_norms
        assert_bitwise(mine.weights, theirs.weights)
        assert_bitwise(mine.optimizer, theirs.optimizer)


@pytest.mark.parametrize("seed", LARGE_SEEDS)
@pytest.mark.nightly(
    "large seeds",
    by="tests/test_determinism.py::test_two_runs_are_equal_to_the_bit",
)
def test_seeds_above_two_to_the_63_work_on_any_number_of_ranks(seeds, seed: int) -> None:
    one, first, second = (found[seed] for found in seeds)
    assert_same_numbers(first, one)
    assert_same_numbers(second, one)
    assert all(torch.isfinite(weight).all() for weight in one.final.values())


def test_large_seeds_are_read_from_the_command_line() -> None:
    assert configs.load(None, ["--debug.seed", str(2**64 - 1)]).config.debug.seed == 2**64 - 1


def test_other_seeds_give_other_weights_and_another_order(seeds) -> None:
    results = [seeds[0][name] for name in (*LARGE_SEEDS, "other")]
    for i, mine in enumerate(results):
        for theirs in results[:i]:
            assert mine.sample_ids[0] != theirs.sample_ids[0]
            for name, weight in mine.initial.items():
                assert "norm" in name or not torch.equal(weight, theirs.initial[name]), name


def test_steps_data_ranks_and_tensor_peers_draw_other_numbers(seeds) -> None:
    _, first, second = seeds
    assert len({*first["draws"], *second["draws"]}) == 6
    assert not set(first["tensor draws"]) & set(second["tensor draws"])  # they hold other tokens, heads and features
    assert seeds[0]["draws"] == first["draws"]  # a rank's numbers depend on its place, not on the size of the mesh


def test_initial_weights_do_not_depend_on_anything_drawn_before(seeds) -> None:
    _, first, second = seeds
    assert_bitwise(first["initial"], second["initial"])
    assert_bitwise(first["initial"], run_ranks(2, initial_after_noise)[0])


def initial_after_noise(rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    torch.rand(100 + rank)
    return whole(make_run(rank, config()))
