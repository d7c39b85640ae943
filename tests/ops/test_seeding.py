"""Random seeds: a function of seed, step and rank, valid for every generator and any seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from shardtrain.ops.seeding import seed_of, seed_step, set_determinism

BIG_SEEDS = [0, 1, 2**32, 2**63, 2**64 - 1, 17982163893102248868]


def numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


@pytest.fixture(autouse=True)
def own_generators():
    """Restore the generators for other tests."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.mark.parametrize("seed", BIG_SEEDS)
def test_any_seed_is_valid_for_every_generator(seed: int) -> None:
    for place in range(4):
        assert 0 <= seed_of(seed, place) < 2**32
        seed_step(seed, 10**6, place, place)


def test_seeds_never_change_between_versions() -> None:
    assert seed_of(0) == 872845860
    assert seed_of(42, 1, 2, 3) == 2889399323


def test_every_part_changes_the_seed_and_parts_are_not_concatenated() -> None:
    values = [
        seed_of(*parts)
        for parts in ((1, 23), (12, 3), (123,), (1, 2, 3), (1, 3, 2), (3, 2, 1), (0, 1, 23))
    ]
    assert len(set(values)) == len(values)


def test_thousand_inputs_have_a_thousand_seeds() -> None:
    seeds = set()
    for step in range(25):
        for rank in range(40):
            seeds.add(seed_of(0, step, rank))
    assert len(seeds) == 1000


def test_step_has_the_same_numbers_regardless_of_earlier_steps() -> None:
    seed_step(7, 3, 0, 1)
    first = numbers()
    numbers()
    seed_step(7, 3, 0, 1)
    assert numbers() == first


@pytest.mark.parametrize("arguments", [(8, 3, 0, 1), (7, 4, 0, 1), (7, 3, 1, 1), (7, 3, 0, 2)])
def test_seed_step_pipeline_stage_and_data_rank_each_change_all_three_generators(arguments) -> None:
    seed_step(7, 3, 0, 1)
    first = numbers()
    seed_step(*arguments)

    for number, first_number in zip(numbers(), first, strict=True):
        assert number != first_number


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_option_configures_pytorch(warn_only: bool, monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    benchmark = torch.backends.cudnn.benchmark
    deterministic = torch.backends.cudnn.deterministic
    try:
        set_determinism(warn_only)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cudnn.deterministic = deterministic


def test_workspace_setting_of_the_user_is_kept(monkeypatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    try:
        set_determinism()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_seeds_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    program = "from shardtrain.ops.seeding import seed_of; print(seed_of(5, 6))"
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )

    assert int(done.stdout) == seed_of(5, 6)
