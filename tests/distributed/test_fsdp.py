"""Data parallelism: dtypes of compute and reduction, number of collectives, and unchanged names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import SHAPE, assert_bitwise, deep_config, make_run, tiny_config, train_steps
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from shardtrain.distributed import fsdp
from shardtrain.distributed.cpu.shared_memory import AllGather, ReduceScatter
from shardtrain.distributed.fsdp import precision_policy
from shardtrain.models import build, find, shape_of
from shardtrain.ops.dtensor import local_tensor, to_full

REPLICATE = {"data_parallel_replicate_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
UNITS = 4 + 2  # four layers, the embedding, and the norm with the head


def _run(rank: int, **sections: dict[str, Any]):
    return make_run(
        rank,
        deep_config(
            **{**sections, "training": {"global_batch_size": -1, **sections.get("training", {})}}
        ),
    )


class Collectives(TorchDispatchMode):
    """Count collectives by kind, and record the dtypes of those that send more than one number.

    PyTorch's CommDebugMode counts too, but fails on a second forward pass. FSDP's collectives are counted once each,
    without the collectives that implement them on a CPU.
    """

    KINDS: ClassVar = {
        "allgather": "gather",
        "reduce_scatter": "reduce_scatter",
        "allreduce": "all_reduce",
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys(self.KINDS.values(), 0)
        self.reduced: set[str] = set()
        self._within = False

    def __enter__(self):
        self._patches = pytest.MonkeyPatch()
        for kind, collective in (("gather", AllGather), ("reduce_scatter", ReduceScatter)):
            self._patches.setattr(collective, "__call__", self._counting(kind, collective.__call__))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.undo()
        return super().__exit__(*error)

    def _counting(self, kind, call):
        def counting(collective, output_tensor, input_tensor, **keywords):
            self.counts[kind] += 1
            if kind == "reduce_scatter":
                self.reduced.add(str(input_tensor.dtype))
            self._within = True
            try:
                return call(collective, output_tensor, input_tensor, **keywords)
            finally:
                self._within = False

        return counting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and not self._within:
            kinds = [kind for part, kind in self.KINDS.items() if part in func.__name__]
            assert kinds, func
            kind = kinds[0]
            self.counts[kind] += 1
            # An argument is a tensor, a list of tensors, or an option.
            tensors = []
            for argument in args:
                values = argument if isinstance(argument, list) else [argument]
                tensors += [value for value in values if isinstance(value, Tensor)]
            if kind != "gather" and tensors[0].numel() > 1:
                self.reduced |= {str(tensor.dtype) for tensor in tensors}
        return func(*args, **(kwargs or {}))


def _count(run, passes: int) -> dict[str, int]:
    """Count collectives by kind, in ``passes`` accumulated forward and backward passes."""
    batches = [next(run.dataloader) for _ in range(passes)]
    with Collectives() as collectives:
        run.runner.forward_backward(batches, torch.tensor(1e-3))
    run.runner.zero_grad()
    return collectives.counts


def _communication(rank: int) -> dict[str, dict[str, int]]:
    counts = {}
    for policy in ("default", "always", "never"):
        run = _run(rank, parallelism={"fsdp_reshard_after_forward": policy})
        counts[policy] = _count(run, 1)
        counts[f"{policy}, 3 passes"] = _count(run, 3)
    run = _run(rank, parallelism=REPLICATE)
    counts["ddp"], counts["ddp, 3 passes"] = _count(run, 1), _count(run, 3)
    return counts


@pytest.fixture(scope="module")
def communication() -> dict[str, dict[str, int]]:
    return run_ranks(2, _communication)[0]


def test_each_unit_is_gathered_in_forward_and_again_in_backward_if_it_was_freed(
    communication,
) -> None:
    gathers = {policy: communication[policy]["gather"] for policy in ("never", "default", "always")}
    # by default, the last layer and the head are not freed, because backward needs them first
    assert gathers == {"never": UNITS, "default": 2 * UNITS - 2, "always": 2 * UNITS}


@pytest.mark.parametrize("policy", ["default", "always", "never"])
def test_gradients_are_reduced_once_per_update_for_any_number_of_passes(
    policy: str, communication
) -> None:
    assert communication[policy]["reduce_scatter"] == UNITS
    assert communication[f"{policy}, 3 passes"]["reduce_scatter"] == UNITS
    assert communication[policy]["all_reduce"] == 0


def test_replicas_reduce_their_gradients_once_per_update(communication) -> None:
    assert communication["ddp"]["all_reduce"] == UNITS
    assert communication["ddp, 3 passes"]["all_reduce"] == UNITS


def _observed_types(run) -> tuple[set[str], set[str]]:
    """Return dtypes of weights and inputs within forward, and of reductions, in one forward and backward pass."""
    computed: set[str] = set()

    def note(module, inputs, output) -> None:
        computed.update((str(module.weight.dtype), str(inputs[0].dtype)))

    for layer in run.runner.parts[0].layers.values():
        layer.attn.wq.register_forward_hook(note)
    with Collectives() as collectives:
        run.runner.forward_backward([next(run.dataloader)], torch.tensor(1e-3))
    return computed, collectives.reduced


def _types(rank: int) -> dict[str, tuple[set, ...]]:
    dtypes = [
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float32", "float32"),
    ]
    types_of_run = {}
    for name, parallelism in (("fsdp", {}), ("ddp", REPLICATE)):
        for param, reduce in dtypes:
            training = {"mixed_precision_param": param, "mixed_precision_reduce": reduce}
            run = _run(rank, training=training, parallelism=parallelism)
            computed, reduced = _observed_types(run)
            stored = {str(p.dtype) for p in run.runner.parameters().values()}
            gradients = {str(p.grad.dtype) for p in run.runner.parameters().values()}
            types_of_run[f"{name} {param} {reduce}"] = (computed, reduced, stored, gradients)
    return types_of_run


def test_compute_and_reduction_have_separate_dtypes_and_weights_stay_in_float32() -> None:
    for key, (computed, reduced, stored, gradients) in run_ranks(2, _types)[0].items():
        _, param, reduce = key.split()
        assert computed == {f"torch.{param}"}, key
        assert reduced == {f"torch.{reduce}"}, key
        assert stored == gradients == {"torch.float32"}, key


def _one_process(rank: int) -> dict[str, Any]:
    """Return dtypes of runs on one process, and True if a run without mixed precision uses FSDP."""
    plain = _run(rank)
    mixed = _run(rank, training={"mixed_precision_param": "bfloat16"})
    stored = _run(rank, training={"dtype": "bfloat16"})
    computed = _observed_types(mixed)[0]
    computed_in_stored = _observed_types(stored)[0]
    return {
        "plain is wrapped": isinstance(plain.runner.parts[0], FSDPModule),
        "computed": computed,
        "stored": {str(p.dtype) for p in mixed.runner.parameters().values()},
        "bfloat16 throughout": computed_in_stored
        | {str(p.dtype) for p in stored.runner.parameters().values()},
    }


def test_one_process_computes_in_the_same_dtypes() -> None:
    assert run_ranks(1, _one_process)[0] == {
        "plain is wrapped": False,
        "computed": {"torch.bfloat16"},
        "stored": {"torch.float32"},
        "bfloat16 throughout": {"torch.bfloat16"},
    }


def test_policy_does_not_cast_inputs() -> None:
    policy = precision_policy(deep_config(training={"mixed_precision_param": "bfloat16"}))
    assert (policy.param_dtype, policy.reduce_dtype, policy.cast_forward_inputs) == (
        torch.bfloat16,
        torch.float32,
        False,
    )


COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"parallelism": REPLICATE},
    {"parallelism": TENSOR},
    {"compile": {"enable": True, "backend": "eager"}, "activation_checkpoint": {"mode": "full"}},
    {
        "parallelism": TENSOR,
        "compile": {"enable": True, "backend": "eager"},
        "activation_checkpoint": {"mode": "full"},
    },
    {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
    {"parallelism": {**REPLICATE, "shard_optimizer_states": True}},
]


def _names(rank: int) -> list[tuple[list[str], list[str], list[str], bool]]:
    facts = []
    for sections in COMBINATIONS:
        run = _run(rank, **sections)
        # triggers compilation
        run.runner.forward_backward([next(run.dataloader)], torch.tensor(1e-3))
        parameters = run.runner.optimizer_parameters()
        # the fused optimizer requires contiguous memory
        packed = all(local_tensor(p).is_contiguous() for p in parameters.values())
        packed &= all(
            local_tensor(p.grad).is_contiguous() for p in parameters.values() if p.grad is not None
        )
        facts.append(
            (
                list(run.runner.parameters()),
                list(run.runner.parts[0].state_dict()),
                list(parameters),
                packed,
            )
        )
    return facts


def test_names_never_change_and_memory_is_contiguous() -> None:
    module = find("llama3")
    plain = [
        n
        for n, _ in build(
            module, shape_of(module, "debugmodel", SHAPE, "rmsnorm")
        ).named_parameters()
    ]

    for sections, (parameters, state, optimized, packed) in zip(
        COMBINATIONS, run_ranks(2, _names)[0], strict=True
    ):
        assert parameters == state == optimized == plain, sections
        assert packed, sections


def _gradient_of_a_frequent_token(rank: int, **sections: dict[str, Any]) -> tuple[float, float]:
    """Return the gradient of a token with 4,096 occurrences (gradient 1 each), and the largest of any other token."""
    run = make_run(rank, deep_config(**sections))
    embed = run.runner.parts[0].embed
    embed(torch.full((8, 512), 3)).float().sum().backward()
    gradient = to_full(embed.weight.grad).float()
    others = gradient.clone()
    others[3] = 0.0
    return gradient[3].mean().item(), others.abs().max().item()


@pytest.mark.parametrize(
    ("num_ranks", "sections"),
    [
        (1, {"training": {"mixed_precision_param": "bfloat16"}}),
        (1, {"training": {"dtype": "bfloat16"}}),
        (
            2,
            {
                "training": {"mixed_precision_param": "bfloat16"},
                "parallelism": {"tensor_parallel_degree": 2},
            },
        ),
    ],
)
def test_gradient_of_a_frequent_token_is_rounded_once(
    num_ranks: int, sections: dict[str, Any]
) -> None:
    # a sum of ones in bfloat16 stops at 256
    for gradient, largest_other in run_ranks(
        num_ranks, partial(_gradient_of_a_frequent_token, **sections)
    ):
        assert gradient == 4096.0
        assert largest_other == 0.0


EXPERTS_APART = {
    "model": {"name": "qwen3_moe", "overrides": {"moe_ffn_dim": 48, "num_experts": 4, "top_k": 2}},
    "parallelism": {"expert_parallel_degree": 2},
}


def _run_with_prefetch(rank: int, config, ahead: bool):
    """Run two steps, optionally with the prefetch of accelerators. Return the result and the prefetching units."""

    shard = fsdp.apply

    def apply(model, layout, mesh, config):
        shard(model, layout, mesh, config)
        if ahead:
            fsdp.gather_ahead(model, layout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "apply", apply)
        run = make_run(rank, config)
        units = [
            m for part in run.runner.parts for m in part.modules() if isinstance(m, FSDPModule)
        ]
        asking = sum(bool(unit._get_fsdp_state()._states_to_forward_prefetch) for unit in units)
        return train_steps(rank, config, 2).final, asking


@pytest.mark.parametrize(
    ("ranks", "sections"),
    cases(
        [(2, {})], nightly=[(4, EXPERTS_APART), (2, {"activation_checkpoint": {"mode": "full"}})]
    ),
)
def test_prefetch_is_bitwise_equal(ranks, sections):
    sections_without_model = {name: table for name, table in sections.items() if name != "model"}
    config = tiny_config(**sections_without_model)
    if "model" in sections:
        sizes = {**SHAPE, "num_layers": 2, **sections["model"]["overrides"]}
        sizes.pop("ffn_dim")
        name = sections["model"]["name"]
        model = replace(config.model, name=name, flavor="debugmodel_moe", overrides=sizes)
        config = replace(config, model=model)
    ahead = run_ranks(ranks, _run_with_prefetch, config, True)
    plain = run_ranks(ranks, _run_with_prefetch, config, False)

    # the embedding and both layers prefetch
    assert ahead[0][1] >= 3
    assert plain[0][1] == 0
    for (prefetched, _), (expected, _) in zip(ahead, plain, strict=True):
        assert_bitwise(prefetched, expected)
