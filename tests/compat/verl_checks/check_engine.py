"""The engine of shardtrain in verl, compared with verl's engine fsdp2. Run by tests/compat/test_verl.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from verl.trainer.config import CheckpointConfig
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.utils.losses import value_loss
from verl_runs import (
    batch,
    fsdp_engine,
    full,
    make_model,
    model_config,
    optimizer_config,
    policy_loss,
    shardtrain_engine,
)

from shardtrain.compat.verl import CriticConfig
from shardtrain.hf.hub_model import translation_of
from shardtrain.hf.mapping import in_hub_format
from shardtrain.ops.dtensor import local_slices, local_tensor

TOLERANCE = 1e-5
"""Largest difference. Both engines compute in float32, in other orders."""

MESHES = [
    (1, {}),
    (2, {}),
    (2, {"data_parallel_replicate_degree": 2}),
    (2, {"tensor_parallel_degree": 2}),
    (2, {"context_parallel_degree": 2}),
    (2, {"pipeline_parallel_degree": 2}),
    (
        2,
        {
            "pipeline_parallel_degree": 2,
            "options": {"parallelism": {"pipeline_parallel_schedule": "Interleaved1F1B"}},
        },
    ),
    (4, {"pipeline_parallel_degree": 2, "context_parallel_degree": 2}),
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
    rank_in_data = engine.get_data_parallel_rank()
    size_of_data = engine.get_data_parallel_size()
    part = (rank_in_data, size_of_data)
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
    rows = {}
    for name, nested_rows in outputs.items():
        rows[name] = [row.numpy() for row in nested_rows.unbind()]
    return {
        "rank": rank_in_data,
        "has_outputs": engine.is_mp_src_rank_with_outputs(),
        "rows": rows,
        "loss": loss.item() / size_of_data,
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
    # A pipeline rank only has the gradients of its own stages.
    named = [(name, full(ours[name].grad)) for name in translation.sources if name in ours]
    return {name: tensor.numpy() for name, tensor in in_hub_format(named, translation)}


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the rows of all data-parallel ranks in the order of the batch, and the gradients of all stages."""
    gradients: dict[str, Any] = {}
    for result in results:
        gradients |= result["gradients"]

    results_with_outputs = [result for result in results if result["has_outputs"]]
    results_with_outputs.sort(key=lambda result: result["rank"])
    first = results_with_outputs[0]
    rows: dict[str, list[Any]] = {name: [] for name in first["rows"]}
    for result in results_with_outputs:
        for name in rows:
            rows[name] += result["rows"][name]
    return {**first, "rows": rows, "gradients": gradients}


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected), rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.parametrize("num_ranks, mesh", MESHES)
def test_a_policy_update_equals_that_of_verls_engine_on_any_mesh(
    folder, reference, num_ranks, mesh
):
    """Compare log-probabilities, entropies, the PPO loss, its gradients and the updated weights."""
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


def save_and_load(
    rank: int, folder: Any, output: str, old: dict[str, int], new: dict[str, int]
) -> Any:
    """Train and save on one mesh, then load and train on another. Return the weights after each."""
    data = CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"])
    results = []
    for mesh in (old, new):
        engine = shardtrain_engine(folder, checkpoint=data, **mesh)
        part = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        if mesh is new:
            engine.load_checkpoint(f"{output}/global_step_1", del_local_after_load=True)
        with engine.train_mode():
            engine.train_batch(batch(*part), policy_loss())
        rate = engine.lr_scheduler_step()
        if mesh is old:
            engine.save_checkpoint(f"{output}/global_step_1", global_step=1, max_ckpt_to_keep=2)
            with engine.train_mode():
                engine.train_batch(batch(*part), policy_loss())
            rate = engine.lr_scheduler_step()
        weights, _ = engine.get_per_tensor_param()
        results.append((rate, {name: full(tensor).numpy() for name, tensor in weights}))
    return results


@pytest.mark.parametrize(
    "old, new",
    [
        ({"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}),
        ({"pipeline_parallel_degree": 2}, {"context_parallel_degree": 2}),
    ],
)
def test_a_checkpoint_continues_on_another_mesh_and_exports_to_transformers(
    folder, tmp_path, old, new
):
    results = run_ranks(2, save_and_load, folder, str(tmp_path), old, new)
    (rate, weights), (loaded_rate, loaded_weights) = results[0]
    assert loaded_rate == rate
    for name, tensor in weights.items():
        assert_close(loaded_weights[name], tensor)

    # the exported folder contains the weights of the first step, which transformers loads
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_1/huggingface")
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()

    for name, tensor in exported.state_dict().items():
        assert not torch.equal(tensor, before[name])
        # The second step changes a weight by at most the learning rate.
        assert float((tensor - torch.as_tensor(weights[name])).abs().max()) < 0.02


def test_old_checkpoints_are_deleted(folder, tmp_path):
    run_ranks(1, save_three, folder, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "global_step_3"]


def save_three(rank: int, folder: Any, output: Any) -> None:
    engine = shardtrain_engine(folder)
    for step in (1, 2, 3):
        engine.save_checkpoint(
            str(output / f"global_step_{step}"), global_step=step, max_ckpt_to_keep=2
        )


HEAD = torch.linspace(-1, 1, 32)[None]
"""The head of critics, which engines would draw."""


def values_of(rank: int, folder: Any, mesh: dict[str, int]) -> Any:
    """Return the values of a critic, their loss as computed by verl, and the gradient norm."""
    engine = shardtrain_engine(folder, "value_model", **mesh)
    head = engine.runner.parameters()["head.weight"]
    local_tensor(head).data.copy_(HEAD[local_slices(head)])
    part = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    with engine.eval_mode():
        values = engine.infer_batch(batch(*part), None)["model_output"]["values"]
    with engine.train_mode():
        result = engine.train_batch(batch(*part), critic_loss())
    return values.values().numpy(), sum(result["loss"]), result["metrics"].get("grad_norm")


def critic_loss() -> Any:
    return partial(value_loss, config=CriticConfig(use_dynamic_bsz=True))


@pytest.fixture(scope="module")
def reference_values(folder):
    """Results of ``values_of``, computed with transformers.

    verl's engine fsdp2 cannot compute them without a GPU: it requires flash attention for critics.
    """
    model = AutoModelForTokenClassification.from_pretrained(
        folder, num_labels=1, attn_implementation="eager", dtype=torch.float32
    ).eval()
    model.score.weight.data.copy_(HEAD)
    model.score.bias = None
    data = batch()
    values = [model(row[None]).logits[0, :, 0] for row in data["input_ids"].unbind()]
    nested = torch.nested.nested_tensor_from_jagged(torch.cat(values), data["input_ids"].offsets())
    num_tokens = int(data["loss_mask"].sum())
    assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens)
    loss, _ = critic_loss()(model_output={"values": nested}, data=data)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
    return nested.values().detach().numpy(), loss.item(), float(norm)


@pytest.mark.parametrize("num_ranks, mesh", [(1, {}), (2, {"tensor_parallel_degree": 2})])
def test_a_critic_equals_that_of_transformers(folder, reference_values, num_ranks, mesh):
    ours = run_ranks(num_ranks, values_of, folder, mesh)[0]
    for value, expected in zip(ours, reference_values, strict=True):
        assert_close(value, expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model": {"lora_rank": 8}},
            "model.lora_rank=8 is not supported by the engine shardtrain",
        ),
        ({"model": {"use_remove_padding": False}}, "set it to true: rows are always packed"),
        ({"model": {"override_config": {"num_hidden_layers": 1}}}, "options.model.overrides"),
        ({"optimizer": {"optimizer": "AdamW8bit"}}, "use one of AdamW, Adam"),
        ({"options": {"data": {"seed": 1}}}, "options.data is not supported"),
        ({"options": {"training": {"seq_lenn": 1}}}, "training.seq_len"),
        ({"tensor_parallel_degree": 3}, "parallelism.tensor_parallel_degree"),
        ({"router_replay": EngineRouterReplayConfig(mode="R2")}, "router_replay.mode"),
    ],
)
def test_an_option_without_effect_is_refused_in_one_line(folder, changes, message):
    changes = dict(changes)
    options = {
        "model": model_config(folder, **changes.pop("model", {})),
        "optimizer": optimizer_config(**changes.pop("optimizer", {})),
        **changes,
    }

    with pytest.raises(AssertionError) as raised:
        run_ranks(1, make_engine, folder, options)
    assert "shardtrain.utils.errors.ConfigError: " in str(raised.value)
    assert message in str(raised.value).splitlines()[-1]


def make_engine(rank: int, folder: Any, options: dict[str, Any]) -> None:
    shardtrain_engine(folder, **options)


@pytest.mark.parametrize("rows", [1, 3])
def test_images_and_padded_batches_are_refused(folder, rows):
    with pytest.raises(AssertionError, match="use text, or the engine fsdp"):
        run_ranks(1, infer_images, folder, rows)


def infer_images(rank: int, folder: Any, rows: int) -> None:
    engine = shardtrain_engine(folder, forward_only=True)
    data = batch(rows=rows, micro_batch_size=1)
    data["multi_modal_inputs"] = torch.zeros(rows)
    with engine.eval_mode():
        engine.infer_batch(data, None)
