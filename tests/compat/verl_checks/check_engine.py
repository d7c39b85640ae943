"""The engine of shardtrain in verl, compared with verl's engine fsdp2. Run by tests/compat/test_verl.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from verl_runs import batch, fsdp_engine, full, make_model, policy_loss, shardtrain_engine

from shardtrain.hf.hub_model import translation_of
from shardtrain.hf.mapping import in_hub_format

TOLERANCE = 1e-5
"""Largest difference. Both engines compute in float32, in other orders."""

MESHES = [
    (1, {}),
    (2, {}),
    (2, {"data_parallel_replicate_degree": 2}),
    (2, {"tensor_parallel_degree": 2}),
    (2, {"context_parallel_degree": 2}),
    (4, {"tensor_parallel_degree": 2}),
    (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder):
    """Results of verl's engine fsdp2 in one process."""
    return joined(run_ranks(1, train_step, folder, None))


def train_step(rank: int, folder: Any, mesh: dict[str, int] | None) -> dict[str, Any]:
    """Return what an engine computes from a batch, and its weights after an update. ``None`` is verl's fsdp2."""
    engine = fsdp_engine(folder) if mesh is None else shardtrain_engine(folder, **mesh)
    part = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    with engine.eval_mode():
        outputs = engine.infer_batch(batch(*part), None)["model_output"]
    with engine.train_mode(zero_grad_on_exit=False):
        engine.optimizer_zero_grad()
        result = engine.forward_backward_batch(batch(*part), policy_loss())
        gradients = gradients_of(engine)
        norm = engine.optimizer_step()
    loss = torch.tensor(sum(result["loss"]))
    dist.all_reduce(loss, group=engine.get_data_parallel_group())
    weights, _ = engine.get_per_tensor_param()
    return {
        "rank": part[0],
        "has_outputs": engine.is_mp_src_rank_with_outputs(),
        "rows": {name: [row.numpy() for row in rows.unbind()] for name, rows in outputs.items()},
        "loss": loss.item() / part[1],
        "norm": norm,
        "gradients": gradients,
        "weights": {name: full(tensor).numpy() for name, tensor in weights},
    }


def gradients_of(engine: Any) -> dict[str, Any]:
    """Return the unsharded gradients by the names of transformers."""
    if hasattr(engine, "module"):
        return {name: full(p.grad).numpy() for name, p in engine.module.named_parameters()}
    translation = translation_of(engine.built.module, engine.built.shape, "")
    ours = engine.runner.parameters()
    named = [(name, full(ours[name].grad)) for name in translation.sources]
    return {name: tensor.numpy() for name, tensor in in_hub_format(named, translation)}


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the rows of all data-parallel ranks in the order of the batch."""
    results = sorted((one for one in results if one["has_outputs"]), key=lambda one: one["rank"])
    rows = {
        name: [row for one in results for row in one["rows"][name]] for name in results[0]["rows"]
    }
    return {**results[0], "rows": rows}


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected), rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.parametrize("num_ranks, mesh", MESHES)
def test_a_policy_update_equals_that_of_verls_engine_on_any_mesh(
    folder, reference, num_ranks, mesh
):
    """Log-probabilities, entropies, the PPO loss, its gradients and the updated weights."""
    ours = joined(run_ranks(num_ranks, train_step, folder, mesh))
    for name in ("log_probs", "entropy"):
        for actual, expected in zip(ours["rows"][name], reference["rows"][name], strict=True):
            assert_close(actual, expected)
    assert_close(ours["loss"], reference["loss"])
    assert_close(ours["norm"], reference["norm"])
    for kind in ("gradients", "weights"):
        assert ours[kind].keys() == reference[kind].keys()
        for name, expected in reference[kind].items():
            assert_close(ours[kind][name], expected)
