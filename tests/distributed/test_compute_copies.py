"""Compute copies, which replace FSDP on one process and on meshes with only tensor parallelism.

They are bitwise equal to FSDP, keep parameters unchanged, and free the memory of the copies.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import (
    SHAPE,
    Ended,
    Result,
    assert_bitwise,
    make_run,
    shallow_config,
    tiny_config,
    train_steps,
    train_whole,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.distributed import compute_copies, partial_gradients
from shardtrain.ops.dtensor import local_tensor

NEOX = {"num_kv_heads": None, "ffn_dim": 128}  # no grouped-query attention
MIXED = {"mixed_precision_param": "bfloat16"}
EXPERTS = {"num_experts": 4, "top_k": 2, "moe_ffn_dim": 48}


def _config(**sections: Any) -> Config:
    """Return a tiny configuration in mixed precision. An override of None removes a size that a model does not have."""
    model = sections.pop("model", {})
    training = {**MIXED, **sections.get("training", {})}
    config = tiny_config(**{**sections, "training": training})
    if "name" in model:
        sizes = {**SHAPE, "num_layers": 2}
        sizes.pop("ffn_dim")
        sizes |= model["overrides"]
        overrides = {name: size for name, size in sizes.items() if size is not None}
        config = replace(config, model=replace(config.model, **{**model, "overrides": overrides}))
    elif model:
        overrides = {**config.model.overrides, **model["overrides"]}
        config = replace(config, model=replace(config.model, overrides=overrides))
    return config


def _with_fsdp(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(derived, "does_without_fsdp", lambda *_: False)


def _steps(rank: int, config: Config, by_fsdp: bool) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        if by_fsdp:
            _with_fsdp(patch)
        return train_steps(rank, config, 3)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "float16": {"training": {"mixed_precision_param": "float16"}},
    "micro-batches": {"training": {"local_batch_size": 1, "global_batch_size": 3}},
    "tied ends": {"model": {"overrides": {"tied_embeddings": True}}},
    "recomputed layers": {"activation_checkpoint": {"mode": "full"}},
    "recomputed operations": {
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}
    },
    "compiled": {"compile": {"enable": True, "backend": "aot_eager"}},
    "compiled and recomputed": {
        "compile": {"enable": True, "backend": "aot_eager"},
        "activation_checkpoint": {"mode": "full"},
    },
    "experts": {"model": {"name": "qwen3_moe", "flavor": "debugmodel_moe", "overrides": EXPERTS}},
    "updates in backward": {
        "optimizer": {"early_step_in_backward": True},
        "training": {"max_norm": 0.0, "global_batch_size": 2},
    },
    "adapters": {"lora": {"enable": True, "rank": 4, "alpha": 8.0}},
}


DEFAULT = ["micro-batches", "adapters", "tied ends"]


@pytest.mark.parametrize(
    "name", cases(DEFAULT, nightly=[name for name in OPTIONS if name not in DEFAULT])
)
def test_copies_are_bitwise_equal_to_fsdp(name: str) -> None:
    """FSDP is the reference: on one process it casts, computes, accumulates and reduces without communication."""
    config = _config(**OPTIONS[name])
    assert derived.computes_with_copies(config, 1, has_experts=name == "experts")

    copies = run_ranks(1, _steps, config, False)[0]
    sharded = run_ranks(1, _steps, config, True)[0]
    assert copies.losses == sharded.losses
    assert copies.losses[-1] != copies.losses[0]
    assert_bitwise(copies.gradients, sharded.gradients)
    assert_bitwise(copies.final, sharded.final)


PEERS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "float32": {"training": {"mixed_precision_param": "float32"}},
    **{
        name: OPTIONS[name]
        for name in OPTIONS
        if name not in ("nothing else", "experts", "updates in backward")
    },
    # gradients of biases after a sum over ranks are partial on each rank
    "biases": {"model": {"name": "neox", "flavor": "debugmodel", "overrides": NEOX}},
    "biases in float32": {
        "model": {"name": "neox", "flavor": "debugmodel", "overrides": NEOX},
        "training": {"mixed_precision_param": "float32"},
    },
    "adapters in float32": {
        **OPTIONS["adapters"],
        "training": {"mixed_precision_param": "float32"},
    },
    "whole logits": {"parallelism": {"disable_loss_parallel": True}},
    "experts of each rank": {**OPTIONS["experts"], "parallelism": {"expert_parallel_degree": 2}},
    # With a single micro-batch, no gradients are accumulated, and FSDP reduces them in bfloat16.
    "one micro-batch": {"training": {"global_batch_size": 2}},
    "updates in backward": OPTIONS["updates in backward"],
    "updates of biases in backward": {
        "model": {"name": "neox", "flavor": "debugmodel", "overrides": NEOX},
        "optimizer": {"early_step_in_backward": True},
        "training": {"mixed_precision_param": "float32", "max_norm": 0.0, "global_batch_size": 2},
    },
}
"""Options for two tensor-parallel ranks, with four micro-batches by default."""
DEFAULT_OF_PEERS = ["biases in float32", "adapters"]


def _peers(name: str) -> Config:
    options = PEERS[name]
    return _config(
        **{
            **options,
            "parallelism": {"tensor_parallel_degree": 2, **options.get("parallelism", {})},
        }
    )


def _both_ways(rank: int, config: Config) -> list[Result]:
    return [_steps(rank, config, by_fsdp) for by_fsdp in (False, True)]


@pytest.mark.parametrize(
    "name",
    cases(DEFAULT_OF_PEERS, nightly=[name for name in PEERS if name not in DEFAULT_OF_PEERS]),
)
def test_tensor_parallel_ranks_are_bitwise_equal_to_fsdp(name: str) -> None:
    """With one data rank, FSDP does not shard. It casts weights, and sums gradients over tensor-parallel ranks."""
    config = _peers(name)
    assert derived.does_without_fsdp(config, 2, has_experts="experts" in name)
    for without_fsdp, sharded in run_ranks(2, _both_ways, config):
        assert without_fsdp.losses == sharded.losses
        assert without_fsdp.losses[-1] != without_fsdp.losses[0]
        # squares are summed in float64; an update in backward sums them in the order of gradients
        assert without_fsdp.grad_norms == pytest.approx(sharded.grad_norms, rel=1e-12)
        assert_bitwise(without_fsdp.gradients, sharded.gradients)
        assert_bitwise(without_fsdp.final, sharded.final)


def test_fsdp_is_used_where_it_shards_or_reduces() -> None:
    def does_without(
        ranks: int,
        has_experts: bool = False,
        training: dict[str, Any] | None = None,
        **degrees: Any,
    ) -> bool:
        config = tiny_config(training=training or {}, parallelism=degrees)
        return derived.does_without_fsdp(config, ranks, has_experts)

    tp = {"tensor_parallel_degree": 2}
    assert does_without(1)
    assert does_without(1, has_experts=True)
    assert does_without(2, **tp)
    assert does_without(2, has_experts=True, expert_parallel_degree=2, **tp)
    # experts are sharded over tensor-parallel ranks
    assert not does_without(2, has_experts=True, **tp)
    assert not does_without(2)
    assert not does_without(4, **tp)
    assert not does_without(4, context_parallel_degree=2, **tp)
    assert not does_without(4, pipeline_parallel_degree=2, **tp)
    assert not does_without(2, fsdp_reshard_after_forward="always", **tp)
    for training in (
        {"dtype": "bfloat16"},
        {"mixed_precision_reduce": "bfloat16"},
        {"enable_cpu_offload": True},
    ):
        assert not does_without(2, training=training, **tp)


def _within_and_after(rank: int, config: Config) -> dict[str, Any]:
    """Run a step. Return dtypes of its weights and gradients, and the bytes of copies that remain."""
    run = make_run(rank, config)
    model = run.runner.parts[0]
    parameters = dict(model.named_parameters())
    trained = [p for p in parameters.values() if p.requires_grad]
    copy_references: list[weakref.ref] = []
    dtypes_at_last_backward: set[torch.dtype] = set()
    layers = list(model.layers.values())
    first, last = layers[0], layers[-1]

    def note_copies(*_: Any) -> None:
        copy_references.extend(weakref.ref(copy) for copy in model.parameters())

    def note_dtypes(*_: Any) -> None:
        for parameter in last.parameters():
            if parameter.requires_grad:
                dtypes_at_last_backward.add(parameter.dtype)

    last.register_forward_hook(note_copies)
    first.register_full_backward_pre_hook(note_dtypes)
    batches = [next(run.dataloader) for _ in range(2)]
    total = run.runner.forward_backward(batches, torch.tensor(1e-3))

    # Sum the memory of copies that still exist after the step.
    bytes_of_copies = 0
    for reference in copy_references:
        copy = reference()
        if copy is not None and copy.dtype == torch.bfloat16:
            bytes_of_copies += local_tensor(copy).nbytes
        del copy

    def has_original_parameters() -> bool:
        return all(p is parameters[key] for key, p in model.named_parameters())

    def has_own_placements(parameter: Any) -> bool:
        placements = getattr(parameter, "placements", None)
        return getattr(parameter.grad, "placements", None) == placements

    facts = {
        "wrapped": isinstance(model, FSDPModule),
        "bytes of copies": bytes_of_copies,
        "last layer during backward of the first": dtypes_at_last_backward,
        "gradients": {p.grad.dtype for p in trained},
        "whole": all(has_own_placements(p) for p in trained),
        "same": has_original_parameters(),
        "finite": bool(torch.isfinite(total)),
    }

    broken = last.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.runner.forward_backward(batches, torch.tensor(1e-3))
    broken.remove()
    facts["same after an error"] = has_original_parameters()
    return facts


@pytest.mark.parametrize(
    ("ranks", "name"),
    cases([(1, "adapters"), (2, "biases")], nightly=[(1, "micro-batches"), (2, "adapters")]),
)
def test_parameters_are_restored_and_copies_freed_after_a_step(ranks: int, name: str) -> None:
    config = _config(**OPTIONS[name]) if ranks == 1 else _peers(name)
    for facts in run_ranks(ranks, _within_and_after, config):
        assert facts == {
            "wrapped": False,
            "bytes of copies": 0,
            # The last layer has its gradients by then, so its bfloat16 copies are freed.
            "last layer during backward of the first": {torch.float32},
            "gradients": {torch.float32},
            "whole": True,  # no gradient is partial
            "same": True,
            "finite": True,
            "same after an error": True,
        }


def _continued(rank: int, folder: Path, config: Config) -> list[Ended]:
    """Run without interruption, then with FSDP only before the resume, then with FSDP only after it."""

    def run(name: str, with_fsdp: bool, stop_after: int | None = None) -> Ended:
        with pytest.MonkeyPatch.context() as patch:
            if with_fsdp:
                _with_fsdp(patch)
            return train_whole(
                rank,
                replace(config, job=replace(config.job, dump_folder=str(folder / name))),
                stop_after,
            )

    straight = run("straight", False)
    run("begun", True, stop_after=2)
    run("ended", False, stop_after=2)
    return [straight, run("begun", False), run("ended", True)]


def test_checkpoints_with_and_without_fsdp_resume_bitwise_in_each_other(tmp_path: Path) -> None:
    """FSDP splits saved tensors over dp_shard and tp; compute copies split them only over tp."""
    parallelism = {"tensor_parallel_degree": 2}
    config = shallow_config(
        training={**MIXED, "steps": 4},
        parallelism=parallelism,
        checkpoint={"enable": True, "interval": 2},
    )

    for straight, *others in run_ranks(2, _continued, tmp_path, config):
        for mixed_run in others:
            assert mixed_run.error is None
            assert mixed_run.losses == straight.losses[2:]
            assert_bitwise(mixed_run.weights, straight.weights)
            assert_bitwise(mixed_run.optimizer, straight.optimizer)


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, input, use_reentrant=False)


def test_two_forward_passes_before_one_backward_sum_their_gradients() -> None:
    """Losses of preference pairs need this. The module here also recomputes its activations."""
    torch.manual_seed(0)
    model = _Weighted()
    compute_copies.use(model, torch.bfloat16)
    inputs = [torch.randn(4, 8).bfloat16() for _ in range(2)]
    (model(inputs[0]).sum() + model(inputs[1]).sum()).backward()

    assert model.inner.weight.dtype == model.inner.weight.grad.dtype == torch.float32

    # the gradient of a sum over outputs is the sum of the inputs, accumulated in bfloat16 (8 bits)
    expected = sum(input.float().sum(0) for input in inputs).expand(8, 8)
    torch.testing.assert_close(model.inner.weight.grad, expected, rtol=2**-7, atol=2**-6)
    assert torch.equal(model.inner.bias.grad, torch.full((8,), 8.0))


class _Scaled(nn.Module):
    """A weight replicated on both ranks with two uses: one with a partial gradient, one with equal gradients."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            DTensor.from_local(torch.ones(4), mesh, (Replicate(),), run_check=False)
        )

    def forward(self, input: torch.Tensor, gradient: Placement) -> torch.Tensor:
        return self.weight.to_local(grad_placements=(gradient,)) * input  # type: ignore[attr-defined]


def _gradient_of_two_ways(rank: int, ways: list[Placement]) -> torch.Tensor:
    model = _Scaled(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    compute_copies.use(model, torch.bfloat16)
    for way in ways:
        model(
            torch.full((4,), 3.0 if isinstance(way, Replicate) else rank + 1.0).bfloat16(), way
        ).sum().backward()
    partial_gradients.sum_over_ranks(model.weight)
    assert model.weight.grad.placements == (Replicate(),)
    assert model.weight.grad.dtype == torch.float32
    return local_tensor(model.weight.grad)


@pytest.mark.parametrize(
    "ways", [[Partial(), Replicate()], [Replicate(), Partial(), Partial()]], ids=str
)
def test_partial_and_replicated_gradients_add_up(ways: list[Placement]) -> None:
    expected = sum(3.0 if isinstance(way, Replicate) else 1.0 + 2.0 for way in ways)
    for gradient in run_ranks(2, _gradient_of_two_ways, ways):
        assert torch.equal(gradient, torch.full((4,), expected))


def test_forward_sees_changes_of_parameters_since_the_previous_one() -> None:
    model = _Weighted()
    compute_copies.use(model, torch.bfloat16)
    input = torch.ones(1, 8).bfloat16()
    weight = model.inner.weight
    with torch.no_grad():
        before = model(input)
        assert model.inner.weight.dtype == torch.bfloat16
        assert torch.equal(model(input), before)
        weight.add_(1.0)
        torch.testing.assert_close(model(input), before + 8, rtol=2**-7, atol=0)
    compute_copies.drop(model)

    assert model.inner.weight is weight
