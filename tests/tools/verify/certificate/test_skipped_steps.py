"""A step whose gradients overflow changes nothing but the position in the data and the loss scale.

Each fault is planted before anything runs. A certificate must detect it, and name its cause.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from tiers import cases
from tools.verify.test_faults import wrap

from shardtrain.checkpoint.train_state import TrainState
from shardtrain.optim.grad_scaler import LossScaler
from shardtrain.resilience.resilience import Resilience
from shardtrain.train import trainer

FLOAT16 = ("--training.mixed_precision_param", "float16")
POLICY = (
    *("--training.nonfinite_policy", "skip", "--training.mixed_precision_param", "float32"),
    *("--training.ema_decay", "0.99", "--checkpoint.enable", "true"),
)
SOUND = {
    "loss scale": FLOAT16,
    "policy": POLICY,
    "biases of experts": (
        *("--model.name", "qwen3_moe", "--model.flavor", "debugmodel_moe", *FLOAT16),
        *("--model.overrides.load_balance_coeff", "0.01"),
    ),
    "noise": (*FLOAT16, "--training.neftune_noise_alpha", "5"),
    "pairs": (*FLOAT16, "--task.name", "preference"),
    "Muon": (*FLOAT16, "--optimizer.name", "Muon"),
}


@pytest.mark.parametrize("name", cases(("loss scale", "policy"), [*SOUND][2:]))
def test_a_sound_run_holds(check, name):
    result = check("skipped", *SOUND[name], quick=False)
    assert result.verdict == "holds", result
    labels = [comparison.compared for comparison in result.comparisons]
    assert "one process, overflow in step 2, then resumed" in labels
    assert "tp=2, overflow in step 2" in labels


def test_a_run_that_stops_has_no_skipped_steps(check):
    assert "stops at an overflow" in check("skipped").reason


def after_a_skip(monkeypatch: pytest.MonkeyPatch, change: Callable[[trainer.Run], None]) -> None:
    """Call ``change`` each time the trainer decides to skip an update."""

    def judge(original, self, run, *arguments):
        verdict = original(self, run, *arguments)
        if not verdict.apply:
            change(run)
        return verdict

    wrap(monkeypatch, Resilience, "judge", judge)


def the_schedule_advances(monkeypatch):
    """The schedule counts steps, as ``lr_scheduler.step()`` after every ``scaler.step()`` does."""

    def advance(original, self, samples, tokens, hashes, applied=True, finite=False):
        original(self, samples, tokens, hashes, True, finite)

    wrap(monkeypatch, TrainState, "advance", advance)


def moments_are_updated(monkeypatch):
    """The optimizer steps with gradients of zero and a rate of zero."""

    def decay(run):
        rates = [group["lr"] for group in run.optimizer.param_groups]
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in run.runner.optimizer_parameters().values():
            parameter.grad.zero_()
        run.optimizer.step()
        for group, rate in zip(run.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    after_a_skip(monkeypatch, decay)


def the_sampler_does_not_advance(monkeypatch):
    """The rows are tried again at a smaller scale."""

    def seek_back(run):
        loader = run.dataloader
        loader.seek(loader.samples_consumed - loader.global_batch)

    after_a_skip(monkeypatch, seek_back)


def averages_are_updated(monkeypatch):
    """The average moves towards the weights although they did not change."""

    def update(run):
        run.moving_average.update()

    after_a_skip(monkeypatch, update)


def ranks_scale_differently(monkeypatch):
    """Only the ranks that saw the overflow reduce their scale."""

    def update(original, self, finite):
        scale = self.scale
        applies = original(self, finite)
        if dist.get_rank() != dist.get_world_size() - 1:
            self.scale = scale
        return applies

    wrap(monkeypatch, LossScaler, "update", update)


def the_scale_is_not_loaded(monkeypatch):
    """The scale starts again when a run resumes."""
    monkeypatch.setattr(LossScaler, "load", lambda self, state: None)


FAULTS = {
    "the schedule advances": (
        the_schedule_advances,
        FLOAT16,
        "rate in step 3",
        "the schedule counts a step without an update",
    ),
    "the schedule advances with a policy": (
        the_schedule_advances,
        POLICY,
        "rate in step 3",
        "the schedule counts a step without an update",
    ),
    "moments are updated": (
        moments_are_updated,
        FLOAT16,
        "weights of",
        "the optimizer states change in a step without an update",
    ),
    "the sampler does not advance": (
        the_sampler_does_not_advance,
        FLOAT16,
        "in step 3",
        "the position in the data must advance in a step without an update",
    ),
    "averages are updated": (
        averages_are_updated,
        POLICY,
        "average of",
        "it is updated in a step without an update",
    ),
    "ranks scale differently": (
        ranks_scale_differently,
        FLOAT16,
        "scale in step 3",
        "ranks have the loss scales 1024, 512 in step 3",
    ),
    "the scale is not loaded": (
        the_scale_is_not_loaded,
        FLOAT16,
        "scale in step 3",
        "a checkpoint contains it",
    ),
}
"""Function that plants a fault, options of the run, and parts of the first difference and its cause."""


@pytest.mark.parametrize("name", cases([*FAULTS][::2], [*FAULTS][1::2]))
def test_a_fault_of_a_skipped_step_is_seen(check, monkeypatch, name):
    plant, options, first, cause = FAULTS[name]
    plant(monkeypatch)
    result = check("skipped", *options)
    assert result.verdict == "differs", result
    differing = [one for one in result.comparisons if one.verdict == "differs"]
    assert first in differing[0].first, differing
    assert cause in differing[0].cause, differing
