"""Each fault that is planted in the ranks, and in them alone, is caught and named.

A patch made here holds in the ranks that are forked from this process; the reference was run before, and the diagnosis
computes what each share would give in plain PyTorch, without the code that is patched.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from shardtrain import init, optim
from shardtrain.parallel import attention, clip, context, pieces, pipeline, runner, shard, tensor
from shardtrain.parallel.mesh import BATCH_AXES, Mesh
from shardtrain.shards import local_tensor


def caught(row: Any, *words: str) -> None:
    """The mesh is found to differ, and the cause has these words."""
    assert row.verdict == "differs", row
    assert all(word in row.cause for word in words), row.cause


def wrap(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Any) -> None:
    """Replace a function by ``change(original, *arguments)``."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments, **named: change(original, *arguments, **named))


def test_gradients_averaged_over_shards(bench, monkeypatch):
    def average(apply, model, layout, mesh, config):
        apply(model, layout, mesh, config)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)

    monkeypatch.setattr("shardtrain.parallel.STEPS", (lambda *a: average(shard.apply, *a),))
    row = bench.run("dp_shard=2")
    caught(row, "scaled by 1/2", "dp_shard", "averaged where it must be summed")
    assert "step 1" in row.first and "embed.weight" in row.first


def test_gradients_counted_once_for_each_replica(bench, monkeypatch):
    def double(forward_backward, self, batches, weight):
        return forward_backward(self, batches, weight * 2) / 2

    wrap(monkeypatch, runner.PlainRunner, "forward_backward", double)
    caught(bench.run("dp_replicate=2"), "scaled by 2", "dp_replicate", "counted 2 times")


def test_reduction_over_replicas_skipped(bench, monkeypatch):
    monkeypatch.setattr(Mesh, "data_mesh", lambda self: self.submesh("dp_shard"))
    caught(bench.run("dp_replicate=2,dp_shard=2"), "missing reduction over dp_replicate")


def test_sequence_parallel_norm_not_reduced(bench, monkeypatch):
    def forget_norms(word_of, layout, path):
        word = word_of(layout, path)
        return None if word == "sequence" else word

    wrap(monkeypatch, tensor, "word_of", forget_norms)
    row = bench.run("tp=2")
    caught(row, "missing reduction over tp")
    assert "norm.weight" in row.first and "layer 0" in row.first


def test_only_the_last_micro_batch_counts(bench, monkeypatch):
    wrap(monkeypatch, runner.PlainRunner, "forward_backward", lambda f, self, b, weight: f(self, b[-1:], weight))
    caught(bench.run("dp_shard=2"), "micro-batches dropped", "only the last of 4")


def test_the_first_micro_batch_dropped(bench, monkeypatch):
    wrap(monkeypatch, runner.PlainRunner, "forward_backward", lambda f, self, b, weight: f(self, b[1:], weight))
    caught(bench.run("tp=2"), "micro-batch dropped", "the first of 4")


def test_micro_batches_averaged_by_the_pipeline(bench, monkeypatch):
    def average(build, self):
        schedule = build(self)
        schedule._scale_grads = True
        schedule.scale_grads = True
        return schedule

    wrap(monkeypatch, pipeline.PipelineRunner, "_build_schedule", average)
    caught(bench.run("pp=2"), "scaled by 1/8", "micro-batches")


def test_targets_of_two_micro_batches_swapped(bench, monkeypatch):
    def swap(run, self, method, batches):
        (batch,) = batches
        order = [0, 2, 1, *range(3, len(batch.targets_BT))]
        return run(self, method, [dataclasses.replace(batch, targets_BT=batch.targets_BT[order])])

    wrap(monkeypatch, pipeline.PipelineRunner, "_run", swap)
    caught(bench.run("pp=2"), "targets of micro-batches out of order", "2 and 3 swapped")


def test_positions_of_each_part_count_from_zero(bench, monkeypatch):
    def restart(cut, batch, mesh, config):
        tokens, targets, positions = cut(batch, mesh, config)
        return tokens, targets, torch.arange(positions.size(1)).expand_as(positions)

    wrap(monkeypatch, context, "cut", restart)
    caught(bench.run("cp=2"), "wrong positions under cp", "each part counts from 0")


def test_positions_with_an_offset(bench, monkeypatch):
    def shift(cut, batch, mesh, config):
        tokens, targets, positions = cut(batch, mesh, config)
        return tokens, targets, positions + 3 * mesh.rank("cp")

    wrap(monkeypatch, context, "cut", shift)
    caught(bench.run("cp=2"), "wrong positions or tokens under cp", "before attention")


def test_wrong_causal_chunk_in_the_ring(bench, monkeypatch):
    def all_seen(parts, tokens, source, rank, balanced):
        everything = slice(0, tokens)
        return parts(tokens, source, rank, balanced) if source == rank else [(everything, everything, False)]

    wrap(monkeypatch, pieces, "_causal_parts", all_seen)
    row = bench.run("cp=2", context_parallel_rotate_method="alltoall")
    caught(row, "attention over the parts of cp is wrong", "queries, keys and values agree")


def test_gathered_keys_left_in_the_order_of_the_ranks(bench, monkeypatch):
    monkeypatch.setattr(attention, "_natural_order", lambda x, size, balanced: x)
    caught(bench.run("cp=2"), "attention over the parts of cp is wrong")


def test_gradients_of_the_parts_of_a_sequence_not_reduced(bench, monkeypatch):
    monkeypatch.setattr(Mesh, "data_mesh", lambda self: self.submesh("dp_shard"))
    caught(bench.run("cp=2"), "missing reduction over cp")


class WithoutPipelineSum:
    """A mesh that does not sum over pp."""

    def __init__(self, mesh):
        self._mesh, self.device = mesh, mesh.device

    def sum(self, values, over):
        return self._mesh.sum(values, over=tuple(axis for axis in over if axis != "pp"))


def test_norm_not_reduced_over_pipeline_stages(bench, monkeypatch):
    wrap(monkeypatch, clip, "gradient_norm", lambda f, parameters, mesh: f(parameters, WithoutPipelineSum(mesh)))
    caught(bench.run("pp=2"), "norm not reduced over pp")


def test_norm_not_reduced_over_tensor_parallel_ranks(bench, monkeypatch):
    def without_tp(split_axes, gradient):
        names = gradient.device_mesh.mesh_dim_names
        return tuple(axis for axis in split_axes(gradient) if names[axis] != "tp")

    wrap(monkeypatch, clip, "split_axes", without_tp)
    row = bench.run("tp=2")
    caught(row, "norm not reduced over tp", "the gradients agree")
    assert row.gradient < 1e-5 and row.loss < 1e-5


def test_loss_divided_twice(bench, monkeypatch):
    wrap(monkeypatch, runner.PlainRunner, "forward_backward", lambda f, self, b, weight: f(self, b, weight * weight))
    caught(bench.run("dp_shard=2"), "divided twice by the", "target tokens")


def test_each_rank_divides_by_its_own_count(bench, monkeypatch):
    wrap(monkeypatch, Mesh, "sum_of_all", lambda _total, self, values: values * self.size(*BATCH_AXES))
    caught(bench.run("dp_shard=2"), "each data rank divided by its own count of target tokens", "a mean of means")


def test_all_ranks_read_the_same_samples(bench, monkeypatch):
    wrap(monkeypatch, Mesh, "rank", lambda f, self, *axes: 0 if axes == BATCH_AXES else f(self, *axes))
    caught(bench.run("dp_replicate=2"), "same samples", "dp_replicate")


def test_copies_of_a_parameter_drift_apart(bench, monkeypatch):
    def drift(update, self, optimizer):
        update(self, optimizer)
        with torch.no_grad():
            local_tensor(self.parameters()["norm.weight"]).add_(1e-4 * dist.get_rank())

    wrap(monkeypatch, runner.Runner, "update", drift)
    row = bench.run("tp=2")
    caught(row, "unsynchronised parameter", "axis tp")
    assert "norm.weight in module norm" in row.first


def test_one_parameter_is_not_updated(bench, monkeypatch):
    def forget(build, named, config, names=None):
        return build([(name, p) for name, p in named if name != "layers.1.ffn.w2.weight"], config, names)

    wrap(monkeypatch, optim, "build", forget)
    row = bench.run("dp_shard=2")
    caught(row, "not updated")
    assert "layers.1.ffn.w2.weight in layer 1" in row.first


def test_a_seed_of_each_rank(bench, monkeypatch):
    wrap(
        monkeypatch,
        init,
        "draw_",
        lambda f, parameter, name, draw, seed: f(parameter, name, draw, seed + dist.get_rank()),
    )
    row = bench.run("dp_shard=2")
    caught(row, "initial weights depend on the rank", "rank 1", "seed")
    assert row.initial > 0 and row.first.startswith("before step 1")


def test_a_gradient_of_copies_that_no_arithmetic_explains(bench, monkeypatch):
    def noise(norm, parameters, mesh):
        parameters = list(parameters)
        with torch.no_grad():
            local_tensor(parameters[0].grad).add_(
                torch.rand(8, generator=torch.Generator().manual_seed(dist.get_rank())).mean()
            )
        return norm(parameters, mesh)

    wrap(monkeypatch, clip, "gradient_norm", noise)
    caught(
        bench.run("dp_replicate=2"), "unsynchronised: copies of the gradient differ between ranks of axis dp_replicate"
    )


def test_a_backward_pass_that_is_wrong_is_told_from_a_forward_pass_that_is(bench, monkeypatch):
    def clamp(norm, parameters, mesh):
        parameters = list(parameters)
        with torch.no_grad():
            local_tensor(parameters[0].grad).clamp_(max=0.0)
        return norm(parameters, mesh)

    wrap(monkeypatch, clip, "gradient_norm", clamp)
    caught(bench.run("dp_shard=2"), "no simple cause fits", "look at the backward pass")


def test_a_rank_that_fails_is_told_with_its_error(bench, monkeypatch):
    def fail(forward_backward, self, batches, weight):
        if dist.get_rank() == 1:
            raise ValueError("planted")
        return forward_backward(self, batches, weight)

    wrap(monkeypatch, runner.PlainRunner, "forward_backward", fail)
    row = bench.run("dp_shard=2")
    assert row.verdict == "failed" and "rank 1: ValueError: planted" in row.cause
