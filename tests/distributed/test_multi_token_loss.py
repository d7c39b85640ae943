"""The loss of multi-token prediction and its gradients equal a plain loop over documents, on every mesh.

The loop is written from section 2.2 of the DeepSeek-V3 paper, in float64: depth k shortens each document by k tokens.
Blocks, norms and head are the modules of the model, which other tests compare with transformers. float32 sums differ by
a relative 1e-7 per operation, so losses agree to 1e-5 and each gradient to 1e-5 of its norm.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import make_run, tiny_config
from torch import Tensor
from torch.nn import functional as F

from shardtrain import data, models
from shardtrain.config import Loaded
from shardtrain.config.rules import check
from shardtrain.config.schema import Config, Float8Linear, QuantizeLinear
from shardtrain.distributed import BATCH_AXES, LOSS_AXES
from shardtrain.metrics.flops import count_model
from shardtrain.ops.dtensor import to_full
from shardtrain.ops.next_tokens import targets_ahead, tokens_ahead
from shardtrain.ops.targets import IGNORE

NUM_DEPTHS = 2
FACTOR = 0.3
ROWS = 8
TOKENS = 32
VOCAB = 264
SHAPE = {
    "vocab_size": VOCAB,
    "dim": 32,
    "num_layers": 2,
    "num_dense_layers": 1,
    "num_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "ffn_dim": 48,
    "moe_ffn_dim": 16,
    "num_experts": 8,
    "top_k": 2,
    "num_groups": 4,
    "top_groups": 2,
    "init_std": 0.1,
    # the loop has no balance loss
    "balance_loss_coeff": 0.0,
    "num_nextn_predict_layers": NUM_DEPTHS,
}


def config(
    rows: int, overrides: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Config:
    """Return a configuration with ``rows`` rows per micro-batch."""
    training = {
        "seq_len": TOKENS,
        "local_batch_size": rows,
        "global_batch_size": ROWS,
        "mtp_loss_scaling_factor": FACTOR,
    }
    sections["training"] = {**training, **sections.get("training", {})}
    tiny = tiny_config(**sections)
    shape = {**SHAPE, **(overrides or {})}
    model = replace(tiny.model, name="deepseek_v3", flavor="671B", overrides=shape)
    return replace(tiny, model=model)


@functools.cache
def batch(masked: bool) -> data.Batch:
    """Return all rows of a step. A fifth of the targets is ignored, as those of prompts are."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (ROWS, TOKENS + 1), generator=generator)
    targets_BT = tokens[:, 1:].clone()
    is_ignored_BT = torch.rand(ROWS, TOKENS, generator=generator) < 0.2
    targets_BT[is_ignored_BT] = IGNORE
    positions_BT = torch.arange(TOKENS).repeat(ROWS, 1)
    documents_BT = None
    if masked:
        begins_BT = torch.rand(ROWS, TOKENS, generator=generator) < 0.15
        begins_BT[:, 0] = False
        documents_BT = begins_BT.long().cumsum(1)
        # the last token of a document has no target, and positions restart
        is_last_BT = F.pad(begins_BT[:, 1:], (0, 1))
        targets_BT[is_last_BT] = IGNORE
        starts_BT = torch.where(begins_BT, positions_BT, 0).cummax(1).values
        positions_BT = positions_BT - starts_BT
    return data.Batch(tokens[:, :-1], targets_BT, positions_BT, torch.arange(ROWS), documents_BT)


def documents_of(full_batch: data.Batch) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and targets of each document."""
    documents = []
    for row in range(ROWS):
        numbers_T = torch.zeros(TOKENS)
        if full_batch.documents_BT is not None:
            numbers_T = full_batch.documents_BT[row]
        for number in numbers_T.unique():
            place = numbers_T == number
            documents.append((full_batch.tokens_BT[row, place], full_batch.targets_BT[row, place]))
    return documents


def loop(weights: dict[str, Tensor], masked: bool, overrides: dict[str, Any] | None = None) -> Any:
    """Return the mean loss of each depth and the gradients of the total loss, from a loop in float64."""
    module = models.find("deepseek_v3")
    model = module.Model(module.Config(**{**SHAPE, **(overrides or {})}))
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights[name])
    model = model.double()
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(1 + NUM_DEPTHS)]
    counts = [0] * (1 + NUM_DEPTHS)
    for tokens, targets in documents_of(batch(masked)):
        # depth 0: the model itself
        angles = model.rope(torch.arange(len(tokens)).unsqueeze(0))
        h = model.embed(tokens).unsqueeze(0)
        for layer in model.layers.values():
            h = layer(h, angles)
        h = model.norm(h)
        for depth in range(1 + NUM_DEPTHS):
            length = len(tokens) - depth
            if length <= 0:
                break
            if depth > 0:
                # a prediction layer joins the previous depth with the embeddings of later tokens
                layer = list(model.mtp_layers.values())[depth - 1]
                ahead = layer.join.enorm(model.embed(tokens[depth:])).unsqueeze(0)
                behind = layer.join.hnorm(h[:, :length])
                x = torch.cat((ahead, behind), -1) @ layer.join.eh_proj.weight.T
                angles_of_depth = tuple(angle[:, :length] for angle in angles)
                x = x + layer.attn(layer.attn_norm(x), angles_of_depth)
                x = x + layer.moe(layer.ffn_norm(x))
                h = layer.shared_norm(x)
            logits = (h @ model.head.weight.T)[0]
            targets_of_depth = targets[depth:]
            loss = F.cross_entropy(logits, targets_of_depth, ignore_index=IGNORE, reduction="sum")
            losses[depth] = losses[depth] + loss
            counts[depth] += int((targets_of_depth != IGNORE).sum())

    means = [loss / count for loss, count in zip(losses, counts, strict=True)]
    total = means[0] + FACTOR / NUM_DEPTHS * sum(means[1:])
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [mean.item() for mean in means], gradients


def step(rank: int, settings: Config, masked: bool) -> dict[str, Any]:
    """Run one step without an update, as one rank. Return losses, weights and gradients of this rank's stages."""
    run = make_run(rank, settings)
    weights = {name: to_full(p.detach()).clone() for name, p in run.runner.parameters().items()}

    # This rank's rows of the step, in micro-batches.
    all_rows = batch(masked)
    rows = ROWS // run.mesh.size(*BATCH_AXES)
    first = run.mesh.rank(*BATCH_AXES) * rows
    per_batch = settings.training.local_batch_size
    batches = []
    for start in range(first, first + rows, per_batch):
        part = slice(start, start + per_batch)
        micro_batch = data.Batch(
            all_rows.tokens_BT[part],
            all_rows.targets_BT[part],
            all_rows.positions_BT[part],
            all_rows.sample_ids_B[part],
            None if all_rows.documents_BT is None else all_rows.documents_BT[part],
        )
        batches.append(micro_batch)

    weight = torch.tensor(1 / all_rows.num_targets)
    loss = run.runner.forward_backward(batches, weight)
    main = run.mesh.sum(loss, over=("pp", *LOSS_AXES)).item()
    measures = run.runner.measures()
    gradients = {}
    for name, parameter in run.runner.parameters().items():
        if parameter.grad is not None:
            gradients[name] = to_full(parameter.grad).clone()
    run.runner.zero_grad()
    return {
        "losses": [main, *(measures[f"mtp_loss_{k + 1}"] for k in range(NUM_DEPTHS))],
        "weights": weights,
        "gradients": gradients,
    }


PP = {
    "pipeline_parallel_degree": 2,
    "pipeline_parallel_first_stage_less_layers": 0,
    "pipeline_parallel_last_stage_less_layers": 0,
}
TP, CP, EP, DDP = (
    {f"{axis}_degree": 2}
    for axis in (
        "tensor_parallel",
        "context_parallel",
        "expert_parallel",
        "data_parallel_replicate",
    )
)
RING = {**CP, "context_parallel_rotate_method": "alltoall"}
ULYSSES = {**CP, "context_parallel_method": "ulysses"}
MESHES = {
    "accumulation": (1, {}),
    "fsdp": (2, {}),
    "ddp": (2, DDP),
    "zero-1": (2, {**DDP, "shard_optimizer_states": True}),
    "tp": (2, TP),
    "ep": (2, EP),
    "cp": (2, CP),
    "cp ring": (2, RING),
    "cp ulysses": (2, ULYSSES),
    "pp": (2, PP),
    "pp ZBV": (2, {**PP, "pipeline_parallel_schedule": "ZBVZeroBubble"}),
    "hsdp": (4, DDP),
    "fsdp x tp": (4, TP),
    "tp x cp": (4, {**TP, **CP}),
    "tp x pp": (4, {**TP, **PP}),
    "cp x pp": (4, {**CP, **PP}),
    "pp x ep": (4, {**PP, **EP}),
}
DEFAULT = ["accumulation", "cp", "pp"]


def assert_equals_loop(
    results: list[dict[str, Any]], masked: bool, overrides: dict[str, Any] | None = None
) -> None:
    weights: dict[str, Tensor] = {}
    for result in results:
        weights |= result["weights"]
    losses, gradients = loop(weights, masked, overrides)
    names_with_gradient = set()
    for result in results:
        assert result["losses"] == pytest.approx(losses, abs=1e-5)
        for name, gradient in result["gradients"].items():
            expected = gradients[name]
            error = (gradient.double() - expected).norm() / expected.norm()
            assert error <= 1e-5, f"{name}: {error:.1e}"
        names_with_gradient |= result["gradients"].keys()
    assert names_with_gradient == gradients.keys()


def num_layers(mesh: str) -> dict[str, Any]:
    return {"num_layers": 4 if "ZBV" in mesh else 2}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("mesh", "masked"),
    cases(
        [(mesh, True) for mesh in DEFAULT],
        nightly=[
            (mesh, masked)
            for mesh in MESHES
            for masked in (True, False)
            if not (masked and mesh in DEFAULT)
        ],
    ),
)
def test_losses_and_gradients_equal_a_plain_loop(mesh: str, masked: bool) -> None:
    num_ranks, parallelism = MESHES[mesh]
    rows = 2 if mesh == "accumulation" or "pp" in mesh else 1
    settings = config(rows, num_layers(mesh), parallelism=parallelism)
    assert_equals_loop(run_ranks(num_ranks, step, settings, masked), masked, num_layers(mesh))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "num_ranks"), cases([("full", 1)], nightly=[("full", 2), ("selective", 2)])
)
def test_recomputation_changes_no_number(kind: str, num_ranks: int) -> None:
    options = {"mode": kind, "selective_ac_option": "op"}
    settings = config(2, activation_checkpoint=options)
    assert_equals_loop(run_ranks(num_ranks, step, settings, True), True)


@pytest.mark.nightly("compiles each kind of layer")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_ranks", "parallelism"), [(1, {}), (2, TP)], ids=["one", "tp"])
def test_the_compiler_changes_no_number(num_ranks: int, parallelism: dict[str, Any]) -> None:
    settings = config(2, compile={"enable": True, "backend": "aot_eager"}, parallelism=parallelism)
    assert_equals_loop(run_ranks(num_ranks, step, settings, True), True)


@pytest.mark.nightly("two more models")
@pytest.mark.timeout(300)
def test_float8_rounds_alike_on_every_mesh() -> None:
    """Sizes are multiples of 16, which float8 products require, so layers of both kinds are converted."""
    overrides = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8, "qk_rope_head_dim": 8}
    sections: dict[str, Any] = {
        "model": {"converters": ["quantize.linear.float8"]},
        "quantize": {"linear": QuantizeLinear(float8=Float8Linear(emulate=True))},
    }
    (plain,) = run_ranks(1, step, config(2, overrides), True)
    (rounded,) = run_ranks(1, step, config(2, overrides, **sections), True)

    assert rounded["losses"] != plain["losses"]
    assert rounded["losses"] == pytest.approx(plain["losses"], rel=0.02)

    name = "mtp_layers.2.attn.wo.weight"
    assert not torch.equal(rounded["gradients"][name], plain["gradients"][name])
    for result in run_ranks(2, step, config(2, overrides, **sections), True):
        assert result["losses"] == pytest.approx(rounded["losses"], rel=1e-3)


def test_targets_stay_in_their_document_and_row() -> None:
    tokens_BT = torch.tensor([[1, 2, 3, 4, 5, 6]])
    targets_BT = torch.tensor([[2, 3, IGNORE, 5, IGNORE, 7]])
    documents_BT = torch.tensor([[0, 0, 0, 1, 1, 1]])
    ahead = tokens_ahead(tokens_BT, documents_BT, 2)

    assert ahead[0, :, 0].tolist() == [2, 3, 0, 5, 6, 0]
    assert ahead[0, :, 1].tolist() == [3, 0, 0, 6, 0, 0]

    targets = targets_ahead(targets_BT, documents_BT, 2)
    assert targets[0, :, 0].tolist() == [3, IGNORE, IGNORE, IGNORE, 7, IGNORE]
    assert targets[0, :, 1].tolist() == [IGNORE, IGNORE, IGNORE, 7, IGNORE, IGNORE]


REFUSED = {
    "depth": ({"num_nextn_predict_layers": TOKENS}, {}, "predicts 33 tokens ahead"),
    "negative depth": ({"num_nextn_predict_layers": -1}, {}, "must not be negative"),
    "factor": ({}, {"training": {"mtp_loss_scaling_factor": -0.1}}, "must be above 0"),
    "task": ({}, {"task": {"name": "orpo"}}, "requires the loss of the next token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_options_are_refused(name: str) -> None:
    overrides, sections, message = REFUSED[name]
    loaded = Loaded(config(1, overrides, **sections))
    assert message in " ".join(str(problem) for problem in check(loaded))


def test_a_factor_without_layers_is_refused() -> None:
    settings = config(1, {"num_nextn_predict_layers": 0})
    loaded = Loaded(settings, origins={"training.mtp_loss_scaling_factor": "run.toml:1"})
    assert "has no effect" in " ".join(str(problem) for problem in check(loaded))


def test_flops_count_layers_and_their_head() -> None:
    """Each layer adds 6 FLOPs for its active parameters and those of the head, and attention as in other layers."""
    module = models.find("deepseek_v3")
    values = []
    for depths in (0, 1):
        shape = module.Config(**{**SHAPE, "num_nextn_predict_layers": depths})
        model = models.build(module, shape)
        values.append((model, *count_model(model, module.LAYOUT, shape)))
    (_, plain_params, plain_flops), (model, params, flops) = values
    (layer,) = model.mtp_layers.values()
    params_of_layer = sum(p.numel() for p in layer.parameters())

    assert params == plain_params + params_of_layer

    # Only top_k experts of each layer are active.
    experts = sum(p.numel() for p in layer.moe.experts.parameters())
    active = params_of_layer - experts + experts * SHAPE["top_k"] // SHAPE["num_experts"]
    attention = 12 * SHAPE["num_heads"] * shape.head_dim * TOKENS
    head = model.head.weight.numel()

    assert flops(TOKENS) - plain_flops(TOKENS) == 6 * (active + head) + attention
