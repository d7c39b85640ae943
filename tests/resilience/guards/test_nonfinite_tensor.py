"""What is not finite never reaches the weights, and its rank, its rows and its first tensor are named.

Each place (loss, gradient, activation, parameter) x rank x micro-batch x mesh; the weights are hashed before and after.
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
    """Of the bits of all weights, and of the optimizer's memory."""
    hashed = hashlib.sha256()
    for name, tensor in sorted(whole(run).items()):
        hashed.update(name.encode() + tensor.view(torch.uint8).numpy().tobytes())
    for state in run.optimizer.state.values():
        for tensor in state.values():
            hashed.update(local_tensor(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def fail(run: trainer.Run, place: str, here: bool, micro: int, value: float, second_look: bool = True) -> str:
    """The message of a step in which a number of this rank is not finite, in one place of one micro-batch."""
    calls, undo = itertools.count(), []
    kind = "SplitCrossEntropySum" if run.mesh.size("tp") > 1 else "_CrossEntropySum"
    original = getattr(cross_entropy, kind)

    def is_due() -> bool:
        if not torch.is_grad_enabled():
            return second_look and here and next(calls) % 2 == micro
        return here and next(calls) == micro

    if place in ("loss", "gradient"):

        def apply(*arguments: Any) -> Any:
            found = original.apply(*arguments)
            if place == "gradient":
                return PoisonedGradient.apply(found, value if torch.is_grad_enabled() and is_due() else 1.0)
            return found * (value if is_due() else 1.0)

        setattr(cross_entropy, kind, type("Poisoned", (), {"apply": staticmethod(apply)}))
        undo.append(lambda: setattr(cross_entropy, kind, original))
    elif place == "activation":
        part = run.runner.parts[-1]
        layer = list(part.layers.values())[-1]
        handle = layer.ffn.register_forward_hook(lambda _m, _i, out: out * value if is_due() else None)
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
    local = 2 if mesh == "fsdp" else 4 if mesh == "one" else 4 // (2 // size) if mesh in ("tp", "pp") else 2
    config = tiny_config(
        model={"overrides": {"num_layers": 2}},
        parallelism=MESHES[mesh],
        training={"seq_len": 16, "local_batch_size": local, "global_batch_size": 8, "steps": 10},
    )
    run = make_run(rank, config)
    trainer.step(run)
    before, found = digest(run), []
    for place, culprit, micro in itertools.product(
        ("loss", "gradient", "activation", "parameter"), range(size), (0, 1)
    ):
        if place == "parameter" and micro:
            continue  # it is in every micro-batch
        if mesh == "pp" and place != "parameter" and culprit == 0 and place != "activation":
            continue  # the last stage alone has a loss
        value = NAN if micro or place == "parameter" else float("-inf")
        state = run.state.to_dict()
        message = fail(run, place, rank == culprit, micro, value)
        assert digest(run) == before, f"{place} of rank {culprit} reached the weights"
        assert run.state.to_dict() == state
        found.append((place, culprit, micro, value, message))
    found.append(("transient", 0, 0, NAN, fail(run, "loss", rank == size - 1, 0, NAN, second_look=False)))
    assert trainer.step(run) is not None and digest(run) != before
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_no_bad_number_reaches_the_weights_and_each_is_named(mesh: str) -> None:
    results = run_ranks(1 if mesh == "one" else 2, all_places, mesh)
    for rank in results:
        assert rank[0][4] and len(rank) == {"one": 8, "pp": 11}.get(mesh, 15)
        for place, culprit, _micro, _value, message in rank:
            assert "\n" not in message and message.startswith("step 2: ")
            assert "the weights are still those of step 1" in message
            if place == "parameter":
                assert f".ffn.w1.weight (rank {culprit}) itself is not finite" in message
            elif place == "gradient":
                assert message.startswith("step 2: a gradient is not finite")
                assert "the first non-finite gradient is that of embed.weight (rank" in message
            elif place == "loss":
                assert message.startswith(f"step 2: the loss of rank {culprit} is not finite")
                assert f"the output of the loss function (rank {culprit})" in message
            elif place == "activation":
                assert f".ffn (rank {culprit})" in message
            elif place == "transient":
                assert "a second forward pass of the same rows was finite" in message
    assert all(rank == results[0] or [r[4] for r in rank] == [r[4] for r in results[0]] for rank in results)
