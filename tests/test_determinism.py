"""Only the seed determines random numbers."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from tiny import (
    Ended,
    assert_bitwise,
    assert_same_numbers,
    make_run,
    shallow_config,
    train_steps,
    train_whole,
    whole,
)

from shardtrain import config as configs
from shardtrain.config.schema import Config
from shardtrain.train import trainer

LARGE_SEEDS = (17982163893102248868, 2**64 - 1)
"""Seeds above 2**63 have overflowed the generators of other trainers."""


def config(
    seed: int = 42, num_ranks: int = 2, folder: str = ".", deterministic: bool = False
) -> Config:
    return shallow_config(
        job={"dump_folder": folder},
        training={"steps": 3, "local_batch_size": 8 // num_ranks},
        debug={"seed": seed, "deterministic": deterministic},
    )


def drawn_by_each_step(rank: int, config: Config) -> list[tuple[float, float, float]]:
    """Return one number of each generator in each of three steps, after the generators were seeded for the step."""
    run = make_run(rank, config)
    numbers = []
    original = run.runner.forward_backward

    def draw(batches, weight):
        numbers.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return original(batches, weight)

    run.runner.forward_backward = draw  # type: ignore[method-assign]
    for _ in range(3):
        trainer.step(run)
    return numbers


def twice(rank: int, root: Path) -> dict[str, Ended]:
    return {
        name: train_whole(rank, config(folder=str(root / name), deterministic=True))
        for name in ("one", "two")
    }


def of_seeds(rank: int, num_ranks: int) -> dict[str, object]:
    results: dict[str, object] = {
        seed: train_steps(rank, config(seed, num_ranks), 2) for seed in LARGE_SEEDS
    }
    results["other"] = train_steps(rank, config(7, num_ranks), 1)
    results["draws"] = drawn_by_each_step(rank, config(num_ranks=num_ranks))
    if num_ranks == 2:
        tensor = shallow_config(
            training={"local_batch_size": 8}, parallelism={"tensor_parallel_degree": 2}
        )
        results["tensor draws"] = drawn_by_each_step(rank, tensor)
        results["initial"] = whole(make_run(rank, config()))
    return results


@pytest.fixture(scope="module")
def seeds() -> list[dict[str, object]]:
    """Results of one process, and of each of two ranks."""
    return run_ranks(1, of_seeds, 1) + run_ranks(2, of_seeds, 2)


def test_two_runs_are_bitwise_equal(tmp_path: Path) -> None:
    first = run_ranks(2, twice, tmp_path)
    again = run_ranks(2, twice, tmp_path)
    for a, b in ((first[0]["one"], first[0]["two"]), (first[1]["one"], again[1]["one"])):
        assert a.losses == b.losses
        assert a.grad_norms == b.grad_norms
        assert_bitwise(a.weights, b.weights)
        assert_bitwise(a.optimizer, b.optimizer)


@pytest.mark.parametrize("seed", LARGE_SEEDS)
@pytest.mark.nightly(
    "large seeds",
    by="tests/test_determinism.py::test_two_runs_are_bitwise_equal",
)
def test_seeds_above_two_to_the_63_work_on_any_number_of_ranks(seeds, seed: int) -> None:
    one_process, first, second = (results[seed] for results in seeds)
    assert_same_numbers(first, one_process)
    assert_same_numbers(second, one_process)
    assert all(torch.isfinite(weight).all() for weight in one_process.final.values())


def test_large_seeds_are_accepted_on_the_command_line() -> None:
    assert configs.load(None, ["--debug.seed", str(2**64 - 1)]).config.debug.seed == 2**64 - 1


def test_different_seeds_have_different_weights_and_order(seeds) -> None:
    results = [seeds[0][name] for name in (*LARGE_SEEDS, "other")]
    for a, b in itertools.combinations(results, 2):
        assert a.sample_ids[0] != b.sample_ids[0]
        for name, weight in a.initial.items():
            assert "norm" in name or not torch.equal(weight, b.initial[name]), name


def test_steps_data_ranks_and_tensor_peers_draw_different_numbers(seeds) -> None:
    _, first, second = seeds
    assert len({*first["draws"], *second["draws"]}) == 6
    # Tensor-parallel peers hold different heads and features, so they need different numbers.
    assert not set(first["tensor draws"]) & set(second["tensor draws"])
    # Numbers depend on a rank's coordinates in the mesh, not on the size of the mesh.
    assert seeds[0]["draws"] == first["draws"]


def test_initial_weights_do_not_depend_on_earlier_random_numbers(seeds) -> None:
    _, first, second = seeds
    assert_bitwise(first["initial"], second["initial"])
    assert_bitwise(first["initial"], run_ranks(2, initial_after_noise)[0])


def initial_after_noise(rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    torch.rand(100 + rank)
    return whole(make_run(rank, config()))
