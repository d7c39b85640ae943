"""The mesh changes no result: each mesh and option equals one process, in 4 steps of float32, and sometimes 10.

Sums in another order differ by a relative 1e-7. A loss is about 6 and a norm about 0.4, so tolerances of 1e-5 and 1e-4
allow ten steps of such errors, but detect a wrong scale, a missing reduction or a lost batch.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tiers import cases
from tiny import assert_same_numbers, reference, run_tiny, tiny_config

REPLICATE_2 = {"data_parallel_replicate_degree": 2}
TENSOR_2 = {"tensor_parallel_degree": 2}

MESHES: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "accumulation 4": (1, {}),
    "ddp 2": (2, {"parallelism": REPLICATE_2}),
    "fsdp 2": (2, {}),
    "fsdp 2, accumulation 4": (2, {"training": {"local_batch_size": 1}}),
    "fsdp 4": (4, {}),
    "fsdp 2, reshard always": (2, {"parallelism": {"fsdp_reshard_after_forward": "always"}}),
    "fsdp 2, reshard never": (2, {"parallelism": {"fsdp_reshard_after_forward": "never"}}),
    "fsdp 2, offload": (2, {"training": {"enable_cpu_offload": True}}),
    "hsdp 2x2": (4, {"parallelism": REPLICATE_2}),
    "tp 2": (2, {"parallelism": TENSOR_2}),
    "tp 2, whole logits": (2, {"parallelism": {**TENSOR_2, "disable_loss_parallel": True}}),
    "fsdp 2 x tp 2": (4, {"parallelism": TENSOR_2}),
    "ddp 2 x tp 2": (4, {"parallelism": {**REPLICATE_2, **TENSOR_2}}),
    "hsdp 2x2 x tp 2": (8, {"parallelism": {**REPLICATE_2, **TENSOR_2}}),
    "zero-1 2": (2, {"parallelism": {**REPLICATE_2, "shard_optimizer_states": True}}),
    "zero-1 2 x tp 2": (
        4,
        {"parallelism": {**REPLICATE_2, **TENSOR_2, "shard_optimizer_states": True}},
    ),
    "zero-1 2 x fsdp 2": (4, {"parallelism": {**REPLICATE_2, "shard_optimizer_states": True}}),
    "recompute full": (2, {"activation_checkpoint": {"mode": "full"}}),
    "recompute every 2nd": (2, {"activation_checkpoint": {"mode": "selective"}}),
    "recompute op": (
        2,
        {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
    ),
    "recompute full, inputs on cpu": (
        2,
        {"activation_checkpoint": {"mode": "full", "cpu_offload": True}},
    ),
    "recompute full x tp 2": (
        2,
        {"parallelism": TENSOR_2, "activation_checkpoint": {"mode": "full"}},
    ),
}


# nightly: test_grid.py also covers these meshes, or they combine other meshes of this file
MORE_MESHES = [
    "fsdp 4",
    "tp 2",
    "fsdp 2 x tp 2",
    "ddp 2 x tp 2",
    "hsdp 2x2 x tp 2",
    "zero-1 2 x tp 2",
    "zero-1 2 x fsdp 2",
    "recompute full x tp 2",
]


@pytest.mark.parametrize(
    "name", cases([name for name in MESHES if name not in MORE_MESHES], nightly=MORE_MESHES)
)
def test_mesh_and_memory_options_change_no_number(name: str) -> None:
    num_ranks, sections = MESHES[name]
    for result in run_tiny(num_ranks, tiny_config(**sections)):
        assert_same_numbers(result, reference())


@pytest.mark.nightly(
    "compiles kernels",
    by="tests/distributed/test_compile.py::test_names_never_change_and_numbers_match_eager_mode",
)
@pytest.mark.parametrize(("num_ranks", "parallelism"), [(1, {}), (2, {}), (2, TENSOR_2)])
def test_compile_changes_no_number(num_ranks: int, parallelism: dict[str, Any]) -> None:
    # the tolerance of 1e-5 holds although fused kernels round differently from eager ones
    config = tiny_config(parallelism=parallelism, compile={"enable": True})
    for result in run_tiny(num_ranks, config, steps=5):
        assert_same_numbers(result, reference(5))


@pytest.mark.nightly(
    "with recomputation",
    by="tests/distributed/test_compile.py::test_names_never_change_and_numbers_match_eager_mode",
)
@pytest.mark.parametrize("parallelism", [{}, {"context_parallel_degree": 2}])
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "full"},
        {"mode": "full", "cpu_offload": True},
        {"mode": "selective", "selective_ac_option": "op"},
        {"mode": "memory_budget"},
    ],
)
def test_compile_with_recompute_changes_no_number(
    options: dict[str, Any], parallelism: dict[str, Any]
) -> None:
    config = tiny_config(
        compile={"enable": True}, activation_checkpoint=options, parallelism=parallelism
    )
    for result in run_tiny(2, config, steps=3):
        assert_same_numbers(result, reference(3))


@pytest.mark.parametrize(
    ("num_ranks", "parallelism"), cases([(1, {}), (2, TENSOR_2)], nightly=[(2, {}), (4, TENSOR_2)])
)
def test_tied_embeddings_stay_one_tensor_on_any_mesh(
    num_ranks: int, parallelism: dict[str, Any]
) -> None:
    model = {"overrides": {"tied_embeddings": True}}
    expected = run_tiny(1, tiny_config(model=model, training={"local_batch_size": 8}), steps=3)[0]
    assert "head.weight" not in expected.initial
    for result in run_tiny(num_ranks, tiny_config(model=model, parallelism=parallelism), steps=3):
        assert_same_numbers(result, expected)


@pytest.mark.parametrize(
    "norm_type", cases(["layernorm"], nightly=["np_layernorm", "fused_rmsnorm"])
)
def test_every_norm_type_is_the_same_with_tensor_parallelism(norm_type: str) -> None:
    model = {"norm_type": norm_type}
    expected = run_tiny(1, tiny_config(model=model, training={"local_batch_size": 8}), steps=3)[0]
    for result in run_tiny(2, tiny_config(model=model, parallelism=TENSOR_2), steps=3):
        assert_same_numbers(result, expected)


@pytest.mark.parametrize(
    ("num_ranks", "parallelism"),
    cases([(2, {})], nightly=[(2, REPLICATE_2), (2, TENSOR_2), (4, TENSOR_2)]),
)
def test_bfloat16_is_the_same_on_every_mesh(num_ranks: int, parallelism: dict[str, Any]) -> None:
    # bfloat16 has 8-bit mantissas: sums of activations in another order sometimes differ by a relative 2^-8
    training = {"mixed_precision_param": "bfloat16"}
    expected = run_tiny(1, tiny_config(training={**training, "local_batch_size": 8}))[0]
    for result in run_tiny(num_ranks, tiny_config(training=training, parallelism=parallelism)):
        assert_same_numbers(result, expected, loss=5e-3, grad_norm=1e-2)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("num_ranks", "parallelism"), cases([(2, REPLICATE_2)], nightly=[(1, {}), (2, TENSOR_2)])
)
def test_low_precision_agrees_with_float32(
    precision: str, num_ranks: int, parallelism: dict[str, Any]
) -> None:
    config = tiny_config(training={"mixed_precision_param": precision}, parallelism=parallelism)
    for result in run_tiny(num_ranks, config):
        assert_same_numbers(result, reference(), loss=2e-2, grad_norm=2e-2)


@pytest.mark.parametrize(
    ("num_ranks", "parallelism"),
    cases([(2, {})], nightly=[(2, TENSOR_2), (4, {**REPLICATE_2, "shard_optimizer_states": True})]),
)
def test_numbers_and_weights_after_ten_steps_are_the_same(
    num_ranks: int, parallelism: dict[str, Any]
) -> None:
    expected = reference(10)
    result = run_tiny(num_ranks, tiny_config(parallelism=parallelism), 10)[0]

    assert_same_numbers(result, expected)
    for name, weight in expected.final.items():
        # ten float32 updates from gradients that are summed in a different order
        torch.testing.assert_close(result.final[name], weight, atol=2e-6, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("num_ranks", "parallelism", "copies"), cases([(2, {}, 1)], nightly=[(4, TENSOR_2, 2)])
)
def test_ranks_read_disjoint_samples_and_together_all_samples(
    num_ranks: int, parallelism: dict[str, Any], copies: int
) -> None:
    expected = reference()
    results = run_tiny(num_ranks, tiny_config(parallelism=parallelism), steps=3)

    for step in range(3):
        samples_of_ranks = [result.sample_ids[step] for result in results]
        all_samples = sorted(itertools.chain.from_iterable(samples_of_ranks))
        assert all_samples == sorted(expected.sample_ids[step] * copies)
        if copies == 2:  # pairs of ranks are tensor-parallel peers, which read the same rows
            first, peer_of_first, second, _ = samples_of_ranks
            assert first == peer_of_first
            assert first != second


def test_parameters_and_optimizer_state_are_sharded() -> None:
    """The tolerance of 1 % allows for small parameters, which are padded or replicated."""
    num_params = reference().facts["num_params"]
    fsdp = run_tiny(2, tiny_config(), steps=1)[0].facts
    assert fsdp["local_numel"] == pytest.approx(num_params / 2, rel=0.01)

    ddp = run_tiny(2, tiny_config(parallelism=REPLICATE_2), steps=1)[0].facts
    assert ddp["local_numel"] == num_params
    sharded_states = tiny_config(parallelism={**REPLICATE_2, "shard_optimizer_states": True})
    zero = run_tiny(2, sharded_states, steps=1)[0].facts
    assert zero["local_numel"] == num_params
    assert zero["optimizer_bytes"] == pytest.approx(ddp["optimizer_bytes"] / 2, rel=0.01)
