"""Document masks: loss and gradients of a packed batch equal the sums over its separate documents.

The reference runs each document in a separate row without document ids, on one process, so it uses no kernel for
documents. Everything is in float32, where sums in a different order differ by about 1e-7 of their size.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import QWEN3_NEXT, tiny_config
from torch import Tensor

from shardtrain import distributed, models
from shardtrain.config.schema import Config
from shardtrain.data.batch import IGNORE, Batch
from shardtrain.distributed import LOSS_AXES, Runner
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.process_group import World
from shardtrain.ops import init_weights
from shardtrain.ops.dtensor import to_full

T = 64
CUTS = ([], [1, 2, 3, 20, 33, 63], [16, 32, 48], [7, 40])
"""Ends of the documents in each row: one document, single tokens, boundaries at and across ends of rank parts."""
MASKED = 9
"""Every so many targets are masked, like prompts."""

CP = {"context_parallel_degree": 2}
TP = {"tensor_parallel_degree": 2}
RING = {"context_parallel_rotate_method": "alltoall"}
IN_ORDER = {"context_parallel_load_balancer": "none"}
ULYSSES = {"context_parallel_method": "ulysses"}
RECOMPUTE = {"activation_checkpoint": {"mode": "full"}}
RECOMPUTE_OP = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
COMPILE = {"compile": {"enable": True, "components": ["model"]}}


def piped(schedule: str = "1F1B") -> dict[str, Any]:
    return {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }


RUNS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "plain": (1, {}),
    "fsdp": (2, {}),
    "cp gather": (2, {"parallelism": CP}),
    "cp gather, in order": (2, {"parallelism": {**CP, **IN_ORDER}}),
    "cp ring": (2, {"parallelism": {**CP, **RING}}),
    "cp ring, in order": (2, {"parallelism": {**CP, **RING, **IN_ORDER}}),
    "cp ulysses": (2, {"parallelism": {**CP, **ULYSSES}}),
    "tp": (2, {"parallelism": TP}),
    "pp 1F1B": (2, {"parallelism": piped()}),
    "pp Interleaved1F1B": (2, {"parallelism": piped("Interleaved1F1B")}),
    "pp ZBVZeroBubble": (2, {"parallelism": piped("ZBVZeroBubble")}),
    "pp DualPipeV": (2, {"parallelism": piped("DualPipeV")}),
    "cp gather x pp": (4, {"parallelism": {**CP, **piped()}}),
    "cp ring x pp ZBV": (4, {"parallelism": {**CP, **RING, **piped("ZBVZeroBubble")}}),
    "cp ring x tp": (4, {"parallelism": {**CP, **RING, **TP}}),
    "cp ring x fsdp": (4, {"parallelism": {**CP, **RING}}),
    "recompute": (2, RECOMPUTE),
    "recompute op": (1, RECOMPUTE_OP),
    "recompute, cp ring": (2, {**RECOMPUTE, "parallelism": {**CP, **RING}}),
    "recompute op, cp gather": (2, {**RECOMPUTE_OP, "parallelism": CP}),
    "recompute, tp": (2, {**RECOMPUTE, "parallelism": TP}),
    "recompute, pp": (2, {**RECOMPUTE, "parallelism": piped()}),
    "compile": (1, COMPILE),
    "compile, recompute": (1, {**COMPILE, **RECOMPUTE}),
    "compile, tp": (2, {**COMPILE, "parallelism": TP}),
}

COMMON = {"vocab_size": 512, "dim": 64, "num_layers": 4, "num_heads": 4}
GROUPED = {**COMMON, "num_kv_heads": 2, "head_dim": 16}
# without the balance loss of experts, which is a statistic of rows and not of documents
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("debugmodel", {**GROUPED, "ffn_dim": 128}),
    "mistral": ("debugmodel", {**GROUPED, "ffn_dim": 128, "sliding_window": 13}),
    "qwen2": ("debugmodel", {**GROUPED, "ffn_dim": 128, "tied_embeddings": False}),
    "neox": ("debugmodel", {**COMMON, "head_dim": 16, "ffn_dim": 128}),
    "qwen3": ("debugmodel", {**GROUPED, "ffn_dim": 128, "tied_embeddings": False}),
    "qwen3_moe": (
        "debugmodel_moe",
        {**GROUPED, "moe_ffn_dim": 48, "num_experts": 8, "top_k": 2, "balance_loss_coeff": 0.0},
    ),
    # two layers with a recurrence and two with attention
    "qwen3_next": ("debugmodel", {**GROUPED, **QWEN3_NEXT, "balance_loss_coeff": 0.0}),
    "mixtral": (
        "debugmodel",
        {**GROUPED, "moe_ffn_dim": 48, "num_experts": 4, "balance_loss_coeff": 0.0},
    ),
    "llama4": (
        "debugmodel",
        {
            **GROUPED,
            "ffn_dim": 128,
            "moe_ffn_dim": 48,
            "num_experts": 4,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 11,
            "floor_scale": 9,
            "balance_loss_coeff": 0.0,
        },
    ),
    "gpt_oss": (
        "debugmodel",
        {
            **GROUPED,
            "moe_ffn_dim": 48,
            "num_experts": 4,
            "top_k": 2,
            "sliding_window": 13,
            "init_std": 0.1,
            "balance_loss_coeff": 0.0,
        },
    ),
    "deepseek_v3": (
        "671B",
        {
            **COMMON,
            "q_lora_rank": 32,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_dense_layers": 1,
            "ffn_dim": 128,
            "moe_ffn_dim": 32,
            "num_experts": 8,
            "top_k": 2,
            "num_groups": 4,
            "top_groups": 2,
            "init_std": 0.1,
            "balance_loss_coeff": 0.0,
        },
    ),
}


def packed_batch() -> Batch:
    """Four rows of documents. Document ids ascend with gaps and do not begin at 0."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 512, (len(CUTS), T), generator=generator)
    targets = torch.full_like(tokens, IGNORE)
    positions = torch.empty_like(tokens)
    documents = torch.empty_like(tokens)
    for row, cuts in enumerate(CUTS):
        for number, (start, stop) in enumerate(itertools.pairwise([0, *cuts, T])):
            # The last token of a document has no target.
            targets[row, start : stop - 1] = tokens[row, start + 1 : stop]
            positions[row, start:stop] = torch.arange(stop - start)
            documents[row, start:stop] = 3 + 2 * number
    targets[:, ::MASKED] = IGNORE
    return Batch(tokens, targets, positions, torch.arange(len(CUTS)), documents)


def split_documents(batch: Batch) -> list[Batch]:
    """Return each document as a separate batch."""
    assert batch.documents_BT is not None
    columns = (batch.tokens_BT, batch.targets_BT, batch.positions_BT)
    return [
        Batch(
            *(column[row : row + 1][:, documents == number] for column in columns),
            torch.tensor([row]),
        )
        for row, documents in enumerate(batch.documents_BT)
        for number in documents.unique()
    ]


def config_of(family: str, sections: dict[str, dict[str, Any]], num_ranks: int = 1) -> Config:
    merged = {key: dict(values) for key, values in sections.items()}
    degrees = merged.get("parallelism", {})
    shares = num_ranks // (
        degrees.get("context_parallel_degree", 1)
        * degrees.get("tensor_parallel_degree", 1)
        * degrees.get("pipeline_parallel_degree", 1)
    )
    merged["training"] = {
        "seq_len": T,
        "local_batch_size": len(CUTS) // shares,
        "global_batch_size": len(CUTS),
    }
    flavor, overrides = FAMILIES[family]
    config = tiny_config(**merged)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, name=family, flavor=flavor, overrides=overrides),
    )


def build(rank: int, config: Config) -> tuple[Runner, distributed.Mesh]:
    world = World(rank, torch.distributed.get_world_size(), rank, torch.device("cpu"))
    mesh = distributed.build(config, world)
    module = models.find(config.model.name)
    shape = models.shape_of(module, config.model.flavor, config.model.overrides, "rmsnorm")
    model = models.build(module, shape)
    names = [name for name, _ in model.named_parameters()]
    draws = init_weights.plan(names, module.initial(shape), module.LAYOUT, shape.num_layers)
    runner = distributed.parallelize(model, module.LAYOUT, mesh, config, shape.vocab_size)
    runner.materialize(draws, seed=1)
    return runner, mesh


def own_rows(batch: Batch, mesh: distributed.Mesh) -> Batch:
    share = batch.tokens_BT.size(0) // mesh.size("dp_shard")
    return batch._each(lambda x: x[mesh.rank("dp_shard") * share :][:share])


def measure(
    rank: int, config: Config, batches: Sequence[Batch]
) -> tuple[float, float, dict[str, Tensor]]:
    """Return the loss sums of training and evaluation over all ranks, and full gradients of this rank's parameters."""
    runner, mesh = build(rank, config)
    axes = ("pp", *LOSS_AXES)
    own_batches = [own_rows(batch, mesh) for batch in batches]
    own_loss = runner.forward_backward(own_batches, torch.ones(()))
    loss = mesh.sum(own_loss.double(), over=axes).item()

    gradients = {}
    for name, parameter in runner.parameters().items():
        if parameter.grad is not None:
            gradients[name] = to_full(parameter.grad).clone()

    own_evaluated = sum(runner.evaluate(batch).double() for batch in own_batches)
    evaluated = mesh.sum(own_evaluated, over=axes).item()
    return loss, evaluated, gradients


@functools.cache
def reference(family: str) -> tuple[float, float, dict[str, Tensor]]:
    return run_ranks(1, measure, config_of(family, {}), split_documents(packed_batch()))[0]


def assert_same(
    results: list[Any], expected: tuple[float, float, dict[str, Tensor]], tolerance: float
) -> None:
    """Compare with a tolerance relative to the loss and to the norm of each gradient."""
    compared: set[str] = set()
    for loss, evaluated, gradients in results:
        assert loss == pytest.approx(expected[0], rel=tolerance)
        assert evaluated == pytest.approx(expected[1], rel=tolerance)
        compared |= gradients.keys()
        for name, gradient in gradients.items():
            error = float(
                (gradient - expected[2][name]).norm() / expected[2][name].norm().clamp_min(1e-30)
            )
            assert error <= tolerance, f"gradient of {name} is off by {error:.1e} of its norm"
    assert compared == expected[2].keys()


FIRST = ("plain", "fsdp", "tp", "cp gather", "cp ring", "cp ulysses", "pp 1F1B", "recompute op")


@pytest.mark.parametrize("run", cases(FIRST, nightly=[run for run in RUNS if run not in FIRST]))
def test_packed_documents_match_separate_ones(run: str) -> None:
    num_ranks, sections = RUNS[run]
    results = run_ranks(
        num_ranks, measure, config_of("llama3", sections, num_ranks), [packed_batch()]
    )

    assert_same(results, reference("llama3"), 1e-5)


@pytest.mark.parametrize(
    ("family", "run"),
    cases(
        [
            *itertools.product(
                (
                    "qwen3",
                    "deepseek_v3",
                    "qwen3_moe",
                    "mixtral",
                    "mistral",
                    "qwen2",
                    "neox",
                    "llama4",
                    "gpt_oss",
                ),
                ("plain",),
            ),
            ("deepseek_v3", "cp ring"),
            ("mixtral", "pp 1F1B"),
            ("mistral", "cp gather"),
            ("llama4", "cp ring"),
            ("gpt_oss", "cp ulysses"),
            ("qwen3_next", "plain"),
            ("qwen3_next", "cp ring"),
        ],
        nightly=[
            *itertools.product(("qwen3", "qwen3_moe"), ("cp ring", "cp gather", "tp", "pp 1F1B")),
            *itertools.product(("deepseek_v3",), ("cp gather", "tp", "pp 1F1B")),
            *itertools.product(
                ("qwen3_next",),
                ("cp gather", "cp ulysses", "tp", "pp 1F1B", "recompute op", "compile"),
            ),
            *itertools.product(("mixtral",), ("cp ring", "cp gather", "tp")),
            *itertools.product(("mistral",), ("cp ring", "cp ulysses", "tp")),
            *itertools.product(("mistral",), ("recompute op", "recompute, cp ring", "pp 1F1B")),
            *itertools.product(("qwen2", "neox"), ("tp",)),
            *itertools.product(
                ("llama4",), ("cp gather", "cp ulysses", "tp", "pp 1F1B", "recompute op", "compile")
            ),
            *itertools.product(
                ("gpt_oss",), ("cp gather", "cp ring", "tp", "pp 1F1B", "recompute op", "compile")
            ),
        ],
    ),
)
def test_packed_documents_of_every_family_match_separate_ones(family: str, run: str) -> None:
    num_ranks, sections = RUNS[run]
    results = run_ranks(
        num_ranks, measure, config_of(family, sections, num_ranks), [packed_batch()]
    )

    assert_same(results, reference(family), 1e-5)


def test_without_document_ids_packed_documents_differ_from_separate_ones() -> None:
    blind = dataclasses.replace(packed_batch(), documents_BT=None)
    results = run_ranks(1, measure, config_of("llama3", {}), [blind])
    with pytest.raises(AssertionError):
        assert_same(results, reference("llama3"), 1e-3)


@pytest.mark.parametrize(
    "run",
    cases(
        ["plain", "cp ring"],
        nightly=["cp gather", "cp ring, in order", "cp ulysses", "pp 1F1B", "tp"],
    ),
)
def test_one_document_id_for_all_tokens_changes_nothing(run: str) -> None:
    num_ranks, sections = RUNS[run]
    batch = dataclasses.replace(packed_batch(), documents_BT=None)
    constant = dataclasses.replace(batch, documents_BT=torch.full_like(batch.tokens_BT, 7))
    config = config_of("llama3", sections, num_ranks)
    without = run_ranks(num_ranks, measure, config, [batch])

    for with_one_id, without_ids in zip(
        run_ranks(num_ranks, measure, config, [constant]), without, strict=True
    ):
        assert with_one_id[:2] == pytest.approx(without_ids[:2], rel=1e-6)
        for name, gradient in without_ids[2].items():
            # each entry within 1e-6 of the largest; float32 rounds to 6e-8
            torch.testing.assert_close(
                with_one_id[2][name], gradient, rtol=0, atol=1e-6 * float(gradient.abs().max())
            )


def test_micro_batches_with_and_without_documents_are_rejected() -> None:
    batch = packed_batch()
    blind = dataclasses.replace(batch, documents_BT=None)
    with pytest.raises(ValueError, match="all micro-batches of a step must have documents_BT"):
        context_parallel.document_argument([batch, blind])
