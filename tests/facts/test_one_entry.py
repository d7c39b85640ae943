"""A device, schedule or optimizer is one entry of one table, and every list of them includes a new entry."""

from __future__ import annotations

import copy
import random
import sys
from types import ModuleType

import pytest
import search_more
import search_space
import torch

from shardtrain import config
from shardtrain.config.options_page import options_page
from shardtrain.config.schema import Optimizer
from shardtrain.facts import devices
from shardtrain.facts.lr_schedules import SCHEDULES
from shardtrain.facts.optimizers import OPTIMIZERS, OptimizerFacts
from shardtrain.optim import build, lr_scheduler
from shardtrain.tools.plan import hardware, job_sizes
from shardtrain.train.preflight import machine


def test_a_device_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    row = copy.deepcopy(devices.table()["devices"]["h100"])
    row |= {"driver": "Abacus 9000", "memory_gib": 11.0}
    row["flops"]["bfloat16"] = 123e12
    monkeypatch.setitem(devices.table()["devices"], "abacus-9000", row)

    # The MFU of a run, `plan --device` and `config check --for-machine` use the new entry.
    assert devices.peak_flops("ACME Abacus 9000", "bfloat16") == 123e12
    assert hardware.find("abacus-9000").memory_gib == 11.0
    assert machine.named("abacus-9000", config.load("debug"), None).memory_bytes == 11 * 2**30
    with pytest.raises(config.ConfigError, match="did you mean abacus-9000"):
        hardware.find("abacus-900")


def test_a_schedule_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(step: int, total_steps: int, warmup_steps: int) -> float:
        """Keep the learning rate at half of its peak."""
        return 0.5

    monkeypatch.setitem(SCHEDULES, "half", half)
    loaded = config.load("debug", ["--lr_scheduler.name=half", "--lr_scheduler.decay_ratio=none"])

    problems = config.problems_of(loaded, 1)
    assert not [problem for problem in problems if problem.option == "lr_scheduler.name"]
    assert lr_scheduler.learning_rate(Optimizer(lr=1.0), loaded.config.lr_scheduler, 10, 3) == 0.5
    row = "| `half` | `warmup_steps` | Keep the learning rate at half of its peak. |"
    assert row in options_page()
    assert "half" in {drawn_rates(seed).get("lr_scheduler.name") for seed in range(200)}


def drawn_rates(seed: int) -> dict[str, str]:
    draft = search_more.Draft({}, 1)
    search_more.rates(random.Random(seed), draft)
    return draft.options


def test_an_optimizer_is_one_entry_and_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("shardtrain.optim.steepest")
    module.build = lambda groups, options: torch.optim.SGD(groups, lr=options.lr)
    module.initial_state = lambda parameter: {"step": torch.zeros(())}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(OPTIMIZERS, "Steepest", OptimizerFacts(state_tensors=3, state_bytes=2))
    loaded = config.load("debug", ["--optimizer.name=Steepest"])

    problems = [problem.option for problem in config.problems_of(loaded, 1)]
    assert "optimizer.name" not in problems

    # The plan, the optimizer and the random search use the new entry.
    job = job_sizes.of_config(loaded.config, 1, num_layers=2)
    assert (job.states, job.state_width) == (3, 2)

    built = build([("weight", torch.nn.Parameter(torch.zeros(2)))], loaded.config.optimizer)
    assert isinstance(built, torch.optim.SGD)

    drawn = set()
    for seed in range(200):
        training = search_space._training(random.Random(seed), "llama3")
        drawn.add(training.get("optimizer.name"))
    assert "Steepest" in drawn
