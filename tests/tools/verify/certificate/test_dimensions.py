"""Each dimension of a certificate sees its faults, and sound configurations give no alarm."""

from __future__ import annotations

import pytest
import torch

from shardtrain.data.loader import DataLoader
from shardtrain.distributed import fsdp, runner
from shardtrain.train.step_sums import StepSums

DIMENSIONS = ("mesh", "task", "accumulation", "resume")


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_a_sound_configuration_holds(check, dimension):
    result = check(dimension)
    assert result.verdict == "holds", result
    assert result.worst.error <= result.worst.tolerance


def test_a_divisor_that_each_rank_counts_itself(check, monkeypatch):
    monkeypatch.setattr(StepSums, "all_reduce", lambda self, _: self)
    result = check("task", meshes=("dp_shard=2",))
    assert result.verdict == "differs", result
    assert "gradient of" in result.comparisons[0].first and "in step 1" in result.comparisons[0].first


def test_a_forgotten_reduction(check, monkeypatch):
    apply = fsdp.apply

    def average(model, layout, mesh, config):
        apply(model, layout, mesh, config)
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.set_gradient_divide_factor(2.0)

    monkeypatch.setattr(fsdp, "apply", average)
    assert check("mesh", meshes=("dp_shard=2",)).verdict == "differs"


def test_a_loss_divided_by_the_targets_of_each_micro_batch(check, monkeypatch):
    forward_backward = runner.PlainRunner.forward_backward

    def mean_of_means(self, batches, weight):
        total = sum(batch.num_targets for batch in batches)
        losses = [
            forward_backward(self, [batch], weight * total / len(batches) / batch.num_targets) for batch in batches
        ]
        return sum(losses)

    monkeypatch.setattr(runner.PlainRunner, "forward_backward", mean_of_means)
    result = check("accumulation")
    assert result.verdict == "differs" and "in step 1" in result.comparisons[0].first, result


def test_a_resume_that_skips_a_batch(check, monkeypatch):
    seek = DataLoader.seek

    def skip(self, samples_consumed, cursors=None):
        extra = self.global_batch if samples_consumed else 0
        seek(self, samples_consumed + extra, cursors)

    monkeypatch.setattr(DataLoader, "seek", skip)
    result = check("resume")
    assert result.verdict == "differs", result
    assert "in step 3" in result.comparisons[0].first


def test_a_resume_that_starts_again(check, monkeypatch):
    from shardtrain.train import trainer

    monkeypatch.setattr(trainer, "resume", lambda run, checkpoints: None)
    result = check("resume")
    assert result.verdict == "failed"
    assert "continued at step 0 instead of 2" in result.comparisons[0].first


def test_a_resume_that_forgets_the_optimizer(check, monkeypatch):
    monkeypatch.setattr("shardtrain.train.run.Run.optimizer_state_dict", lambda self: {})
    result = check("resume")
    assert result.verdict == "differs" and "weights of" in result.comparisons[0].first, result


def test_a_requested_mesh_that_is_impossible_is_not_checked(check):
    result = check("task", meshes=("tp=3",))
    assert result.verdict == "not checked" and not result.holds
