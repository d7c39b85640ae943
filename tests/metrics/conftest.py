import threading
from types import SimpleNamespace

import patience
import pytest
import torch

from shardtrain.config.schema import Config
from shardtrain.config.schema import Metrics as Options
from shardtrain.metrics import Metrics, RunFacts


class OneRank:
    """Reduce over one rank."""

    def sum(self, tensor):
        return tensor

    def max(self, tensor):
        return tensor


class Ranks:
    """Reduce over threads that each act as one rank."""

    def __init__(self, count):
        self.barrier = threading.Barrier(count, timeout=patience.seconds(10))
        self.values = [None] * count
        self.calls = 0

    def of(self, rank):
        return SimpleNamespace(
            sum=lambda t: self._reduce(rank, t, sum), max=lambda t: self._reduce(rank, t, max)
        )

    def _reduce(self, rank, tensor, how):
        self.values[rank] = tensor
        self.calls += 1
        self.barrier.wait()
        result = torch.as_tensor(how(self.values))
        self.barrier.wait()
        return result


class Clock:
    """A clock that only changes when a test sets ``now``."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("SLURM_JOB_ID", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kit():
    """Builders of configurations, run facts and runs for the tests of metrics."""

    def config(**options):
        return Config(metrics=Options(**{"log_freq": 5, **options}))

    def facts(**changes):
        known = dict(
            rank=0,
            world_size=1,
            is_writer=True,
            start_step=0,
            total_steps=12,
            num_params=1000,
            flops_per_token=2e9,
            device_type="cpu",
            device_name="AMD EPYC",
            compute_dtype="bfloat16",
            description="test run",
            model="llama3/debugmodel",
        )
        return RunFacts(**{**known, **changes})

    def run(folder, steps, *, options=None, start_step=0, clock=None, **changes):
        """Report steps start_step + 1 to steps of one rank: half a second, 100 tokens and a mean loss of 1 / step."""
        clock = clock or Clock()
        run_facts = facts(start_step=start_step, **changes)
        metrics = Metrics(
            config(**(options or {})),
            folder,
            run_facts,
            OneRank(),
            tokens_seen=100 * start_step,
            clock=clock,
        )
        with metrics:
            for step in range(start_step + 1, steps + 1):
                clock.now += 0.5
                metrics.update(step, torch.tensor(100.0 / step), 100, 100, 0.25, 1e-3, 0.125)
        return metrics

    return SimpleNamespace(
        config=config, facts=facts, run=run, Clock=Clock, Ranks=Ranks, OneRank=OneRank
    )
