"""Laws of mixed precision on one process: FSDP's bits, parameters that stay what they are, memory that is freed."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import SHAPE, Result, assert_bitwise, make_run, tiny_config, train_steps
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.distributed import compute_copies

MIXED = {"mixed_precision_param": "bfloat16"}
EXPERTS = {"num_experts": 4, "top_k": 2, "moe_ffn_dim": 48}


def _config(**sections: Any) -> Config:
    model = sections.pop("model", {})
    config = tiny_config(**{**sections, "training": {**MIXED, **sections.get("training", {})}})
    if "name" in model:
        sizes = {name: size for name, size in {**SHAPE, "num_layers": 2}.items() if name != "ffn_dim"}
        sizes |= model["overrides"]
        config = replace(config, model=replace(config.model, **{**model, "overrides": sizes}))
    elif model:
        config = replace(
            config, model=replace(config.model, overrides={**config.model.overrides, **model["overrides"]})
        )
    return config


def _steps(rank: int, config: Config, by_fsdp: bool) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        if by_fsdp:
            patch.setattr(derived, "computes_with_copies", lambda *_: False)
        return train_steps(rank, config, 3)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "float16": {"training": {"mixed_precision_param": "float16"}},
    "micro-batches": {"training": {"local_batch_size": 1, "global_batch_size": 3}},
    "tied ends": {"model": {"overrides": {"tied_embeddings": True}}},
    "recomputed layers": {"activation_checkpoint": {"mode": "full"}},
    "recomputed operations": {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
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


@pytest.mark.parametrize("name", cases(DEFAULT, nightly=[name for name in OPTIONS if name not in DEFAULT]))
def test_copies_have_the_bits_of_fsdp(name: str) -> None:
    """FSDP is the reference: on one process it casts, computes, accumulates and reduces without any exchange."""
    config = _config(**OPTIONS[name])
    assert derived.computes_with_copies(config, 1)
    copies = run_ranks(1, _steps, config, False)[0]
    sharded = run_ranks(1, _steps, config, True)[0]
    assert copies.losses == sharded.losses and copies.losses[-1] != copies.losses[0]
    assert_bitwise(copies.gradients, sharded.gradients)
    assert_bitwise(copies.final, sharded.final)


def _within_and_after(rank: int, name: str) -> dict[str, Any]:
    """What modules hold at moments of a step, and which copies have memory when it is over."""
    run = make_run(rank, _config(**OPTIONS[name]))
    model = run.runner.parts[0]
    parameters = dict(model.named_parameters())
    made: list[weakref.ref] = []
    held_at_last_backward: set[torch.dtype] = set()
    first, last = (list(model.layers.values())[place] for place in (0, -1))

    def note(*_: Any) -> None:
        made.extend(weakref.ref(copy) for copy in model.parameters())

    def look(*_: Any) -> None:
        held_at_last_backward.update(p.dtype for key, p in last.named_parameters() if p.requires_grad)

    last.register_forward_hook(note)
    first.register_full_backward_pre_hook(look)
    batches = [next(run.dataloader) for _ in range(2)]
    total = run.runner.forward_backward(batches, torch.tensor(1e-3))
    copies = [copy() for copy in made if copy() is not None]
    facts = {
        "wrapped": isinstance(model, FSDPModule),
        "bytes of copies": sum(copy.nbytes for copy in copies if copy.dtype == torch.bfloat16),
        "last layer while the first goes back": held_at_last_backward,
        "gradients": {p.grad.dtype for p in parameters.values() if p.requires_grad},
        "same": all(p is parameters[key] for key, p in model.named_parameters()),
        "finite": bool(torch.isfinite(total)),
    }
    del copies

    broken = last.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.runner.forward_backward(batches, torch.tensor(1e-3))
    broken.remove()
    facts["same after an error"] = all(p is parameters[key] for key, p in model.named_parameters())
    return facts


@pytest.mark.parametrize("name", ["micro-batches", "adapters"])
def test_parameters_are_themselves_again_after_a_step_and_copies_are_gone(name: str) -> None:
    assert run_ranks(1, _within_and_after, name)[0] == {
        "wrapped": False,
        "bytes of copies": 0,
        "last layer while the first goes back": {torch.float32},  # its gradients are there: no copy waits for the end
        "gradients": {torch.float32},
        "same": True,
        "finite": True,
        "same after an error": True,
    }


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, input, use_reentrant=False)


def test_two_passes_before_one_backward_have_the_gradient_of_both() -> None:
    """As losses of pairs do, with what is recomputed."""
    torch.manual_seed(0)
    model = _Weighted()
    compute_copies.use(model, torch.bfloat16)
    inputs = [torch.randn(4, 8).bfloat16() for _ in range(2)]
    (model(inputs[0]).sum() + model(inputs[1]).sum()).backward()
    assert model.inner.weight.dtype == model.inner.weight.grad.dtype == torch.float32
    # the gradient of a sum over outputs is the sum of the inputs, added up in bfloat16: 8 bits
    expected = sum(input.float().sum(0) for input in inputs).expand(8, 8)
    torch.testing.assert_close(model.inner.weight.grad, expected, rtol=2**-7, atol=2**-6)
    assert torch.equal(model.inner.bias.grad, torch.full((8,), 8.0))


def test_forward_passes_see_what_was_written_since_the_last_one() -> None:
    model = _Weighted()
    compute_copies.use(model, torch.bfloat16)
    input = torch.ones(1, 8).bfloat16()
    weight = model.inner.weight
    with torch.no_grad():
        before = model(input)
        assert model.inner.weight.dtype == torch.bfloat16 and torch.equal(model(input), before)
        weight.add_(1.0)
        torch.testing.assert_close(model(input), before + 8, rtol=2**-7, atol=0)
    compute_copies.drop(model)
    assert model.inner.weight is weight
