"""Verify detects and names each fault planted in the engine of the ranks.

Patches apply to the ranks, which are forked from this process. The reference ran before, and the diagnosis computes the
expected shards in plain PyTorch, without the patched code. ``FAULTS`` is a table: the mesh, and texts that the answer
must contain. Some faults run by default, all of them with ``--all``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from shardtrain import optim
from shardtrain.config import stages
from shardtrain.distributed import (
    expert_parallel,
    fsdp,
    grad_clip,
    pipeline_parallel,
    runner,
    zero1,
)
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel import gather, masks, ulysses
from shardtrain.distributed.mesh import BATCH_AXES, Mesh
from shardtrain.distributed.tensor_parallel import plan as tensor_parallel
from shardtrain.distributed.tensor_parallel import styles
from shardtrain.distributed.tensor_parallel.split_vocabulary import SplitVocabulary
from shardtrain.models import moe
from shardtrain.ops import init_weights
from shardtrain.ops.dtensor import local_tensor
from shardtrain.tools.verify.verify_report import BLIND
from shardtrain.train import trainer


class Fault(NamedTuple):
    """The function that plants a fault, its mesh, and texts that the answer must contain."""

    plant: Callable[[pytest.MonkeyPatch], None]
    mesh: str
    answer: tuple[str, ...]
    by_default: bool
    options: dict[str, Any]
    model: str


FAULTS: dict[str, Fault] = {}


def fault(
    mesh: str, *answer: str, by_default: bool = False, model: str = "llama3", **options: Any
) -> Any:
    """Register a function that plants a fault, under its name."""

    def register(plant: Any) -> Any:
        FAULTS[plant.__name__.replace("_", " ")] = Fault(
            plant, mesh, answer, by_default, options, model
        )
        return plant

    return register


def wrap(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Any) -> None:
    """Replace a function by ``change(original, *arguments)``."""
    original = getattr(owner, name)
    monkeypatch.setattr(
        owner, name, lambda *arguments, **named: change(original, *arguments, **named)
    )


def divide_gradients(monkeypatch, factor):
    def average(apply, model, layout, mesh, config):
        apply(model, layout, mesh, config)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)

    wrap(monkeypatch, fsdp, "apply", average)


# gradients: their sums over axes and micro-batches


@fault(
    "dp_shard=2", "step 1", "embed.weight", "scaled by 1/2", "dp_shard", "averaged", by_default=True
)
def gradients_averaged_over_shards(monkeypatch):
    divide_gradients(monkeypatch, 2.0)


@fault("dp_replicate=2", "scaled by 1/2", "dp_replicate", "averaged where it must be summed")
def gradients_averaged_over_replicas(monkeypatch):
    divide_gradients(monkeypatch, 2.0**0.5)  # FSDP divides by it before each of two collectives


@fault("cp=2", "scaled by 1/2", "axis cp", "averaged where it must be summed")
def gradients_averaged_over_parts_of_the_sequence(monkeypatch):
    divide_gradients(monkeypatch, 2.0)


@fault("dp_replicate=2", "scaled by 2", "dp_replicate", "counted 2 times")
def gradients_counted_once_for_each_replica(monkeypatch):
    wrap(
        monkeypatch,
        runner.PlainRunner,
        "forward_backward",
        lambda f, self, b, weight: f(self, b, weight * 2) / 2,
    )


@fault("dp_replicate=2,dp_shard=2", "missing reduction over dp_replicate")
def reduction_over_replicas_skipped(monkeypatch):
    monkeypatch.setattr(Mesh, "data_mesh", lambda self: self.submesh("dp_shard"))


@fault("cp=2", "missing reduction over cp")
def reduction_over_parts_of_the_sequence_skipped(monkeypatch):
    monkeypatch.setattr(Mesh, "data_mesh", lambda self: self.submesh("dp_shard"))


@fault("tp=2", "norm.weight", "layer 0", "missing reduction over tp", by_default=True)
def norms_of_the_split_sequence_not_reduced(monkeypatch):
    def forget_norms(style_of, layout, path):
        style = style_of(layout, path)
        return None if style == "sequence" else style

    wrap(monkeypatch, tensor_parallel, "style_of", forget_norms)


@fault("dp_shard=2", "micro-batches dropped", "only the last of 4")
def only_the_last_micro_batch_counts(monkeypatch):
    wrap(
        monkeypatch,
        runner.PlainRunner,
        "forward_backward",
        lambda f, self, b, weight: f(self, b[-1:], weight),
    )


@fault("tp=2", "micro-batch dropped", "the first of 4")
def the_first_micro_batch_dropped(monkeypatch):
    wrap(
        monkeypatch,
        runner.PlainRunner,
        "forward_backward",
        lambda f, self, b, weight: f(self, b[1:], weight),
    )


@fault("dp_shard=2", "micro-batch counted twice", "the first of 4")
def the_first_micro_batch_counted_twice(monkeypatch):
    wrap(
        monkeypatch,
        runner.PlainRunner,
        "forward_backward",
        lambda f, self, b, weight: f(self, [b[0], *b], weight),
    )


@fault("dp_shard=2", "no gradient")
def gradients_never_synchronised(monkeypatch):
    wrap(monkeypatch, fsdp, "set_gradient_sync", lambda f, part, on: f(part, False))


@fault("pp=2", "scaled by 1/8", "micro-batches")
def micro_batches_averaged_by_the_pipeline(monkeypatch):
    def average(build, self, micro_batches):
        built = build(self, micro_batches)
        built._scale_grads = built.scale_grads = True
        return built

    wrap(monkeypatch, pipeline_parallel.PipelineRunner, "_build_schedule", average)


@fault("dp_shard=2", "no simple cause fits", "check the backward pass")
def a_gradient_without_its_positive_numbers(monkeypatch):
    def clamp(norm, parameters, mesh):
        parameters = list(parameters)
        with torch.no_grad():
            local_tensor(parameters[0].grad).clamp_(max=0.0)
        return norm(parameters, mesh)

    wrap(monkeypatch, grad_clip, "gradient_norm", clamp)


@fault(
    "dp_replicate=2",
    "unsynchronised: copies of the gradient differ between ranks of axis dp_replicate",
)
def noise_in_one_copy_of_a_gradient(monkeypatch):
    def noise(norm, parameters, mesh):
        parameters = list(parameters)
        with torch.no_grad():
            local_tensor(parameters[0].grad).add_(
                torch.rand(8, generator=torch.Generator().manual_seed(dist.get_rank())).mean()
            )
        return norm(parameters, mesh)

    wrap(monkeypatch, grad_clip, "gradient_norm", noise)


@fault("dp_shard=2", "each number of the gradient is a bfloat16")
def gradients_reduced_in_a_shorter_type(monkeypatch):
    def round_off(norm, parameters, mesh):
        parameters = list(parameters)
        with torch.no_grad():
            for parameter in parameters:
                gradient = local_tensor(parameter.grad)
                gradient.copy_(gradient.bfloat16())
        return norm(parameters, mesh)

    wrap(monkeypatch, grad_clip, "gradient_norm", round_off)


@fault("tp=2", "no gradient", "layers.1.ffn.w2.weight")
def a_layer_that_is_frozen(monkeypatch):
    def freeze(apply, model, *others):
        apply(model, *others)
        model.layers["1"].ffn.w2.weight.requires_grad_(False)

    wrap(monkeypatch, fsdp, "apply", freeze)


# the loss: its divisor, targets and samples


@fault("dp_shard=2", "divided twice by the", "target tokens")
def the_loss_divided_twice(monkeypatch):
    wrap(
        monkeypatch,
        runner.PlainRunner,
        "forward_backward",
        lambda f, self, b, weight: f(self, b, weight * weight),
    )


@fault("dp_shard=2", "scaled by 1.25", "which is not a size of an axis")
def a_wrong_divisor(monkeypatch):
    wrap(
        monkeypatch,
        runner.PlainRunner,
        "forward_backward",
        lambda f, self, b, weight: f(self, b, weight * 1.25) / 1.25,
    )


@fault(
    "dp_shard=2",
    "each data rank divided by its own count of target tokens",
    "a mean of means",
    by_default=True,
)
def each_rank_divides_by_its_own_count(monkeypatch):
    wrap(
        monkeypatch,
        Mesh,
        "sum_of_all",
        lambda _total, self, values: values * self.size(*BATCH_AXES),
    )


@fault("tp=2", "each micro-batch divided by its own count of target tokens", "a mean of means")
def each_micro_batch_divides_by_its_own_count(monkeypatch):
    def divide(loss, self, batch, weight):
        return loss(self, batch, torch.ones_like(weight) / batch.num_targets / 4)

    wrap(monkeypatch, runner.PlainRunner, "_loss", divide)


@fault("pp=2", "targets of micro-batches out of order", "2 and 3 swapped")
def targets_of_two_micro_batches_swapped(monkeypatch):
    def swap(run, self, method, batches):
        (batch,) = batches
        order = [0, 2, 1, *range(3, len(batch.targets_BT))]
        return run(self, method, [dataclasses.replace(batch, targets_BT=batch.targets_BT[order])])

    wrap(monkeypatch, pipeline_parallel.PipelineRunner, "_run", swap)


@fault("cp=2", "the logits agree: check the targets")
def targets_shifted_under_cp(monkeypatch):
    def shift(cut, batch, mesh, config):
        tokens, targets, positions = cut(batch, mesh, config)
        return tokens, targets.roll(1, dims=1), positions

    wrap(monkeypatch, context_parallel, "cut", shift)


@fault("tp=2", "the logits agree: check the targets")
def the_vocabulary_of_each_rank_starts_at_zero(monkeypatch):
    def start(make, self, mesh, size):
        make(self, mesh, size)
        self.offset = 0

    wrap(monkeypatch, SplitVocabulary, "__init__", start)


@fault("dp_replicate=2", "same samples", "dp_replicate")
def all_ranks_read_the_same_samples(monkeypatch):
    wrap(
        monkeypatch,
        Mesh,
        "rank",
        lambda f, self, *axes: 0 if axes == BATCH_AXES else f(self, *axes),
    )


@fault("pp=2", "the reported loss is scaled by 2", "axis pp")
def the_loss_counted_on_both_stages(monkeypatch):
    def everywhere(run, self, batches, weight):
        loss = run(self, batches, weight)
        dist.all_reduce(loss)
        return loss

    wrap(monkeypatch, pipeline_parallel.PipelineRunner, "forward_backward", everywhere)


# sequences that are split


@fault("cp=2", "wrong positions under cp", "each part counts from 0", by_default=True)
def positions_of_each_part_count_from_zero(monkeypatch):
    def restart(cut, batch, mesh, config):
        tokens, targets, positions = cut(batch, mesh, config)
        return tokens, targets, torch.arange(positions.size(1)).expand_as(positions)

    wrap(monkeypatch, context_parallel, "cut", restart)


@fault("cp=2", "wrong positions or tokens under cp", "before attention")
def positions_with_an_offset(monkeypatch):
    def shift(cut, batch, mesh, config):
        tokens, targets, positions = cut(batch, mesh, config)
        return tokens, targets, positions + 3 * mesh.rank("cp")

    wrap(monkeypatch, context_parallel, "cut", shift)


RING = {"context_parallel_rotate_method": "alltoall"}


@fault("cp=2", "attention over the parts of cp is wrong", "queries, keys and values agree", **RING)
def a_wrong_causal_chunk_in_the_ring(monkeypatch):
    def all_seen(parts, tokens, source, rank, balanced):
        everything = slice(0, tokens)
        return (
            parts(tokens, source, rank, balanced)
            if source == rank
            else [(everything, everything, False)]
        )

    wrap(monkeypatch, masks, "_causal_parts", all_seen)


@fault("cp=2", "attention over the parts of cp is wrong", **RING)
def a_block_missing_in_the_ring(monkeypatch):
    def forget(parts, tokens, source, rank, balanced):
        return parts(tokens, source, rank, balanced) if source == rank else []

    wrap(monkeypatch, masks, "_causal_parts", forget)


@fault("cp=2", "attention over the parts of cp is wrong", "module layers.0.attn.core")
def gathered_keys_left_in_the_order_of_the_ranks(monkeypatch):
    monkeypatch.setattr(gather, "natural_order", lambda x, size, balanced: x)


@fault("cp=2", "attention over the parts of cp is wrong", context_parallel_method="ulysses")
def heads_of_the_wrong_rank(monkeypatch):
    wrap(monkeypatch, ulysses, "_heads_for_tokens", lambda f, x, group: f(x.flip(1), group))


@fault("cp=2", "the backward pass first differs", "module layers.", "attn.core", by_default=True)
def gradients_of_keys_of_other_ranks_lost(monkeypatch):
    def keep_own(ctx, gradient):
        size = ctx.group.size()
        rank = ctx.group.rank()
        return gradient.chunk(size, dim=1)[rank].contiguous(), None, None

    monkeypatch.setattr(gather._GatherSequence, "backward", staticmethod(keep_own))


# layers that are split


class Unsummed(RowwiseParallel):
    """A rowwise linear whose ranks keep their partial output instead of the sum."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, module, outputs, mesh):
        partial = outputs.to_local().chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
        return DTensor.from_local(
            partial.contiguous(), mesh, (Shard(1),), run_check=False
        ).to_local()


@fault(
    "tp=2",
    "first differs",
    "module layers.0.attn.wo",
    'LAYOUT.tensor calls "rowwise"',
    by_default=True,
)
def the_sum_after_a_rowwise_linear_missing(monkeypatch):
    def style(make, path, module, name, splitting):
        if name == "rowwise":
            return Unsummed(output_layouts=Shard(1))
        return make(path, module, name, splitting)

    wrap(monkeypatch, tensor_parallel, "style_for", style)


@fault("pp=2", "layers in another order", "layers.1 has the input that layers.0 has on one process")
def layers_on_the_wrong_stage(monkeypatch):
    def swap(parts, *arguments):
        other = {"layers.0": "layers.1", "layers.1": "layers.0"}
        swapped = []
        for modules in parts(*arguments):
            swapped.append([other.get(name, name) for name in modules])
        return swapped

    wrap(monkeypatch, stages, "modules_per_stage", swap)
    monkeypatch.setattr(pipeline_parallel, "_check_parts", lambda *_: None)


@fault("tp=2", "step 1", "embed.weight in module embed", "no simple cause fits", model="tied")
def lookups_in_a_tied_table_add_no_gradient(monkeypatch):
    def without_gradient(apply, self, module, mesh):
        module = apply(self, module, mesh)
        module.register_forward_hook(lambda _module, _inputs, output: output.detach())
        return module

    wrap(monkeypatch, styles.SplitEmbedding, "_apply", without_gradient)


# norm, clipping and update


class WithoutPipelineSum:
    """A mesh that does not sum over pp."""

    def __init__(self, mesh):
        self._mesh = mesh
        self.device = mesh.device

    def sum(self, values, over):
        return self._mesh.sum(values, over=tuple(axis for axis in over if axis != "pp"))


@fault("pp=2", "norm not reduced over pp")
def norm_not_reduced_over_pipeline_stages(monkeypatch):
    wrap(
        monkeypatch,
        grad_clip,
        "gradient_norm",
        lambda f, parameters, mesh: f(parameters, WithoutPipelineSum(mesh)),
    )


def forget_axis(monkeypatch, forgotten):
    def without(split_axes, gradient):
        names = gradient.device_mesh.mesh_dim_names
        return tuple(axis for axis in split_axes(gradient) if names[axis] != forgotten)

    wrap(monkeypatch, grad_clip, "split_axes", without)


@fault("tp=2", "norm not reduced over tp", "the gradients agree", by_default=True)
def norm_not_reduced_over_tensor_parallel_ranks(monkeypatch):
    forget_axis(monkeypatch, "tp")


@fault("dp_shard=2", "norm not reduced over dp_shard", "the gradients agree")
def norm_not_reduced_over_shards(monkeypatch):
    forget_axis(monkeypatch, "dp_shard")


@fault("dp_replicate=2", "norm counts replicated tensors once for each rank of axis dp_replicate")
def norm_counts_each_replica(monkeypatch):
    wrap(
        monkeypatch,
        grad_clip,
        "gradient_norm",
        lambda f, parameters, mesh: f(parameters, mesh) * 2**0.5,
    )


@fault("dp_shard=2", "clipped by another factor", "rank 0: 1", "rank 1: 0.5")
def each_rank_clips_by_its_own_factor(monkeypatch):
    wrap(
        monkeypatch,
        grad_clip,
        "scale_gradients",
        lambda f, parameters, by: f(parameters, by / (1 + dist.get_rank())),
    )


@fault("tp=2", "step 2", "clipped by another factor")
def gradients_not_clipped(monkeypatch):
    monkeypatch.setattr(grad_clip, "scale_gradients", lambda parameters, by: None)


@fault("dp_shard=2", "layers.1.ffn.w2.weight in layer 1", "not updated")
def one_parameter_is_not_updated(monkeypatch):
    def forget(build, named, config, names=None):
        return build(
            [(name, p) for name, p in named if name != "layers.1.ffn.w2.weight"], config, names
        )

    wrap(monkeypatch, optim, "build", forget)


@fault(
    "dp_replicate=2", "unsynchronised parameter", "axis dp_replicate", shard_optimizer_states=True
)
def updated_slices_not_gathered(monkeypatch):
    def keep(self):
        for name, piece in self.slices.items():
            if self._dims[name] is not None:
                self._part(name, local_tensor(self._parameters[name]).detach()).copy_(
                    local_tensor(piece).detach()
                )
                piece.grad = None

    monkeypatch.setattr(zero1.SplitStates, "after_update", keep)


@fault("tp=2", "norm.weight in module norm", "unsynchronised parameter", "axis tp")
def copies_of_a_parameter_drift_apart(monkeypatch):
    def drift(update, self, optimizer):
        update(self, optimizer)
        with torch.no_grad():
            local_tensor(self.parameters()["norm.weight"]).add_(1e-4 * dist.get_rank())

    wrap(monkeypatch, runner.Runner, "update", drift)


@fault("dp_replicate=2", "unsynchronised parameter", "axis dp_replicate")
def a_learning_rate_of_each_rank(monkeypatch):
    wrap(
        monkeypatch,
        trainer,
        "learning_rate",
        lambda f, *arguments: f(*arguments) * (1 + dist.get_rank()),
    )


@fault("dp_shard=2", "step 2", "stale weights", "the weights from the start of step 1")
def weights_of_the_step_before(monkeypatch):
    def late(forward_backward, self, batches, weight):
        now = {name: local_tensor(p).detach().clone() for name, p in self.parameters().items()}
        for name, parameter in self.parameters().items():
            local_tensor(parameter).detach().copy_(getattr(self, "before", now)[name])
        self.before = now
        loss = forward_backward(self, batches, weight)
        for name, parameter in self.parameters().items():
            local_tensor(parameter).detach().copy_(now[name])
        return loss

    wrap(monkeypatch, runner.PlainRunner, "forward_backward", late)


# initial weights


@fault(
    "dp_shard=2",
    "before step 1",
    "initial weights depend on the rank",
    "rank 1",
    "seed",
    by_default=True,
)
def a_seed_of_each_rank(monkeypatch):
    def shifted(draw, parameter, name, how, seed):
        return draw(parameter, name, how, seed + dist.get_rank())

    wrap(monkeypatch, init_weights, "draw_", shifted)


@fault("tp=2", "before step 1", "initial weights depend on the mesh")
def a_seed_of_the_mesh(monkeypatch):
    def shifted(draw, parameter, name, how, seed):
        return draw(parameter, name, how, seed + dist.get_world_size())

    wrap(monkeypatch, init_weights, "draw_", shifted)


# experts: tokens, routing and their gradients


@fault("dp_shard=2", "expert 3", "dropped", model="qwen3_moe")
def tokens_of_one_expert_dropped(monkeypatch):
    forward = moe.Dispatch.forward

    def drop(self, experts, x_RD, count_E):
        mask = torch.ones(len(x_RD), 1)
        first = int(count_E[:3].sum())
        mask[first : first + int(count_E[3])] = 0
        return forward(self, experts, x_RD * mask, count_E) * mask

    monkeypatch.setattr(moe.Dispatch, "forward", drop)


@fault("ep=2", "first differs", "module layers.0.moe", model="qwen3_moe")
def rows_come_back_from_experts_in_another_order(monkeypatch):
    wrap(
        monkeypatch,
        expert_parallel.AllToAllDispatch,
        "forward",
        lambda f, self, *inputs: f(self, *inputs).flip(0),
    )


@fault("ep=2", "scaled by 1/2", "averaged where it must be summed", model="qwen3_moe")
def gradients_of_experts_averaged(monkeypatch):
    def average(norm, parameters, mesh):
        parameters = list(parameters)
        with torch.no_grad():
            for parameter in parameters:
                if parameter.ndim == 3:
                    local_tensor(parameter.grad).mul_(0.5)
        return norm(parameters, mesh)

    wrap(monkeypatch, grad_clip, "gradient_norm", average)


@fault("ep=2", "the backward pass first differs", "moe.router", model="qwen3_moe")
def gradients_of_router_inputs_halved(monkeypatch):
    wrap(
        monkeypatch,
        moe.Router,
        "forward",
        lambda f, self, x: f(self, (x + x.detach()) / 2),
    )


@fault("dp_shard=2", "the balance loss of experts counts 3 times", model="qwen3_moe")
def the_balance_loss_counted_three_times(monkeypatch):
    wrap(monkeypatch, expert_parallel, "before_step", lambda f, parts, weight: f(parts, weight * 3))


@fault("dp_shard=2", "expert_bias", "unsynchronised buffer", "axis dp_shard", model="deepseek_v3")
def biases_of_routers_by_the_tokens_of_each_rank(monkeypatch):
    def update_locally(update, parts, mesh, *applies):
        with monkeypatch.context() as patch:
            patch.setattr(Mesh, "sum", lambda self, values, over: values)
            update(parts, mesh, *applies)

    wrap(monkeypatch, expert_parallel, "update_biases", update_locally)


# ranks that fail


@fault("dp_shard=2", "rank 1: ValueError: planted", "outside of the model's forward")
def a_rank_that_fails(monkeypatch):
    def fail(forward_backward, self, batches, weight):
        if dist.get_rank() == 1:
            raise ValueError("planted")
        return forward_backward(self, batches, weight)

    wrap(monkeypatch, runner.PlainRunner, "forward_backward", fail)


@fault("tp=2", "rank", "in module layers.0.attn", "planted")
def a_module_that_fails_on_a_mesh(monkeypatch):
    from shardtrain.models import layers

    def fail(forward, self, *inputs):
        if dist.get_world_size() > 1:
            raise ValueError("planted")
        return forward(self, *inputs)

    wrap(monkeypatch, layers.Attention, "forward", fail)


AMPLIFYING = Path(__file__).parent / "amplifying_model.py"
BENCHES = {
    "llama3": (("--model.overrides.num_kv_heads=8",), ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2", "cp=2",
                                                       "dp_replicate=2,dp_shard=2")),
    "tied": (("--model.overrides.num_kv_heads=8", "--model.overrides.tied_embeddings=true"), ("tp=2",)),
    "qwen3_moe": (("--model.name=qwen3_moe", "--model.flavor=debugmodel_moe"), ("dp_shard=2", "ep=2")),
    "deepseek_v3": (("--model.name=deepseek_v3", "--model.flavor=debugmodel"), ("dp_shard=2",)),
    "amplifying": ((f"--model.name={AMPLIFYING}", "--model.flavor=tiny"),
                   ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2", "dp_replicate=2,dp_shard=2")),
}  # fmt: skip


@pytest.fixture(scope="module")
def benches(make_bench):
    """Function that returns the bench of a model, created on first use."""
    benches: dict[str, Any] = {}

    def get(model):
        if model not in benches:
            arguments, meshes = BENCHES[model]
            benches[model] = bench = make_bench(meshes, *arguments)
            bench.shake()
        return benches[model]

    return get


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if fault.by_default else pytest.mark.nightly)
        for n, fault in FAULTS.items()
    ],
)
def test_a_fault_in_the_engine_is_detected_and_named(name, benches, monkeypatch):
    planted = FAULTS[name]
    bench = benches(planted.model)
    planted.plant(monkeypatch)
    row = bench.run(planted.mesh, **planted.options)
    print(f"\n{name:50} {planted.mesh:26} {row.verdict:8} {row.first}; {row.cause}")

    assert row.verdict in ("differs", "failed"), row

    answer = f"{row.first}; {row.cause}"
    for text in planted.answer:
        assert text in answer


def test_the_recorded_claim_counts_these_faults():
    """The documentation reads the counts from this file. The tests in this module plant each fault."""
    claims = json.loads((Path(__file__).parents[3] / "benchmarks/results/claims.json").read_text())
    named = sum("no simple cause fits" not in fault.answer for fault in FAULTS.values())
    assert claims["faults_in_the_engine"]["planted"] == len(FAULTS)
    assert claims["faults_in_the_engine"]["named"] == named


OF_LLAMA = (
    "a layer that is frozen",
    "one parameter is not updated",
    "a module that fails on a mesh",
)
EVERYWHERE = [
    name
    for name, fault in FAULTS.items()
    if fault.model == "llama3" and fault.mesh in BENCHES["amplifying"][1] and name not in OF_LLAMA
]
"""Faults that apply to any model."""


@pytest.mark.nightly(
    "the same faults with another model",
    by="tests/tools/verify/test_rounding.py::test_the_tolerance_follows_the_rounding_of_one_process_up_to_a_thousandth",
)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_fault_in_the_engine_is_detected_in_a_model_that_amplifies_rounding(
    name, benches, monkeypatch
):
    """The tolerance is the effect of a last-bit perturbation on one process. All faults have larger effects."""
    planted = FAULTS[name]
    bench = benches("amplifying")
    planted.plant(monkeypatch)
    row = bench.run(planted.mesh, **planted.options)
    print(f"\n{name:50} {planted.mesh:26} {row.verdict:8} {row.first}; {row.cause}")

    assert row.verdict in ("differs", "failed"), row
    assert not row.cause.startswith(BLIND), row
