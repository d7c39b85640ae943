"""Values that are not finite never reach the weights, and the error names the first tensor that has them and its rank.

The tests try each place (loss, gradient, activation, parameter), rank, micro-batch and mesh, and compare hashes of the
weights before and after the step.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import make_run, tiny_config, whole
from torch import Tensor

from shardtrain.ops import cross_entropy
from shardtrain.ops.dtensor import local_tensor
from shardtrain.train import trainer
from shardtrain.utils.errors import NumericalError

MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp": {},
    "ddp": {"data_parallel_replicate_degree": 2},
    "tp": {"tensor_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2},
}
NAN = float("nan")


class PoisonedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


def digest(run: trainer.Run) -> str:
    """Return a hash of the bits of all weights and of the optimizer state."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(whole(run).items()):
        hashed.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
    for state in run.optimizer.state.values():
        for tensor in state.values():
            hashed.update(
                local_tensor(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    return hashed.hexdigest()


def fail(
    run: trainer.Run, place: str, here: bool, micro: int, value: float, second_look: bool = True
) -> str:
    """Return the error of a step with a non-finite value in one place of micro-batch ``micro``, if ``here`` is set.

    Without ``second_look``, the value is finite in the second forward pass after the failed one.
    """
    calls = itertools.count()
    undo = []
    kind = "SplitCrossEntropySum" if run.mesh.size("tp") > 1 else "_CrossEntropySum"
    original = getattr(cross_entropy, kind)

    def is_due() -> bool:
        if not torch.is_grad_enabled():
            return second_look and here and next(calls) % 2 == micro
        return here and next(calls) == micro

    if place in ("loss", "gradient"):

        def apply(*arguments: Any) -> Any:
            loss = original.apply(*arguments)
            if place == "gradient":
                return PoisonedGradient.apply(
                    loss, value if torch.is_grad_enabled() and is_due() else 1.0
                )
            return loss * (value if is_due() else 1.0)

        setattr(cross_entropy, kind, type("Poisoned", (), {"apply": staticmethod(apply)}))
        undo.append(lambda: setattr(cross_entropy, kind, original))
    elif place == "activation":
        part = run.runner.parts[-1]
        layer = list(part.layers.values())[-1]
        handle = layer.ffn.register_forward_hook(
            lambda _m, _i, out: out * value if is_due() else None
        )
        undo.append(handle.remove)
    elif here:
        name = next(name for name in run.runner.parameters() if "ffn.w1" in name)
        local = local_tensor(run.runner.parameters()[name].detach())
        before = local.flatten()[0].item()
        local.view(-1)[0] = value
        undo.append(lambda: local.view(-1).__setitem__(0, before))
    try:
        with pytest.raises(NumericalError) as caught:
            trainer.step(run)
    finally:
        for action in undo:
            action()
        run.runner.zero_grad()
    return str(caught.value)


def all_places(rank: int, mesh: str) -> list[tuple[str, int, int, float, str]]:
    size = torch.distributed.get_world_size()
    local = 2 if mesh in ("fsdp", "ddp") else 4  # two micro-batches on every mesh
    config = tiny_config(
        model={"overrides": {"num_layers": 2}},
        parallelism=MESHES[mesh],
        training={"seq_len": 16, "local_batch_size": local, "global_batch_size": 8, "steps": 10},
    )
    run = make_run(rank, config)
    trainer.step(run)
    before = digest(run)
    results = []
    for place, culprit, micro in itertools.product(
        ("loss", "gradient", "activation", "parameter"), range(size), (0, 1)
    ):
        if place == "parameter" and micro:
            continue  # parameters are shared by all micro-batches
        if mesh == "pp" and culprit == 0 and place in ("loss", "gradient"):
            continue  # only the last pipeline stage computes the loss and its gradient
        value = NAN if micro or place == "parameter" else float("-inf")
        state = run.state.to_dict()
        message = fail(run, place, rank == culprit, micro, value)
        assert digest(run) == before, f"{place} of rank {culprit} reached the weights"
        assert run.state.to_dict() == state
        results.append((place, culprit, micro, value, message))
    message = fail(run, "loss", rank == size - 1, 0, NAN, second_look=False)
    results.append(("transient", 0, 0, NAN, message))
    assert trainer.step(run) is not None
    assert digest(run) != before
    return results


@pytest.mark.parametrize("mesh", MESHES)
def test_nonfinite_values_are_named_and_never_reach_the_weights(mesh: str) -> None:
    results = run_ranks(1 if mesh == "one" else 2, all_places, mesh)
    num_places = {"one": 8, "pp": 11}.get(mesh, 15)
    for rank in results:
        assert len(rank) == num_places
        for place, culprit, _micro, _value, message in rank:
            assert "\n" not in message
            assert message.startswith("step 2: ")
            assert "the weights are still those of step 1" in message
            if place == "parameter":
                assert f".ffn.w1.weight (rank {culprit}) itself is not finite" in message
            elif place == "gradient":
                assert message.startswith("step 2: a gradient is not finite")
                assert "the first non-finite gradient is that of embed.weight (rank" in message
            elif place == "loss":
                assert message.startswith(f"step 2: the loss of rank {culprit} is not finite")
                first = "the first non-finite output is that of the loss function"
                assert f"{first} (rank {culprit})" in message
            elif place == "activation":
                assert f".ffn (rank {culprit})" in message
            elif place == "transient":
                assert "a second forward pass of the same rows was finite" in message

    # All ranks end with the same messages.
    messages = [[message for *_, message in rank] for rank in results]
    assert messages == messages[:1] * len(results)
