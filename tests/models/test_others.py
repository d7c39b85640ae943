"""Model files in many styles have the numbers of one process on every kind of mesh, or are rejected for a valid reason.

They run two steps in float32, compared as in tests/test_grid.py. One launch of ranks runs all files on a mesh. A file
is rejected on all ranks before memory for its weights is allocated.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from other_styles import AMPLIFYING, FILES, FOLDER, NEWER, NO_ATTENTION, NO_CHAIN
from ranks import run_ranks
from tiers import cases
from tiny import Result, run_tiny, tiny_config, train_steps

from shardtrain import config as configs
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.utils.errors import ConfigError

STEPS = 2
BATCH = 4

TP, CP, PP, EP = (
    {f"{axis}_degree": 2}
    for axis in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
)
RING = {"context_parallel_rotate_method": "alltoall"}
ULYSSES = {"context_parallel_method": "ulysses"}
IN_ORDER = {"context_parallel_load_balancer": "none"}
PIPED = {
    **PP,
    "pipeline_parallel_schedule": "1F1B",
    "pipeline_parallel_first_stage_less_layers": 0,
    "pipeline_parallel_last_stage_less_layers": 0,
}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, TP),
    "pp": (2, PIPED),
}
NIGHTLY: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "cp ring": (2, {**CP, **RING}),
    "cp gather": (2, CP),
    "cp ulysses": (2, {**CP, **ULYSSES}),
    "cp ring in order": (2, {**CP, **RING, **IN_ORDER}),
    "pp Interleaved1F1B": (2, {**PIPED, "pipeline_parallel_schedule": "Interleaved1F1B"}),
    "cp 4 gather": (4, {"context_parallel_degree": 4}),
    "tp 4": (4, {"tensor_parallel_degree": 4}),
    "tp x cp": (4, {**TP, **CP}),
    "tp x cp ring": (4, {**TP, **CP, **RING}),
    "tp x cp ulysses": (4, {**TP, **CP, **ULYSSES}),
    "tp x pp": (4, {**TP, **PIPED}),
    "cp x pp": (4, {**CP, **PIPED}),
    "fsdp x tp": (4, TP),
    "fsdp x cp": (4, CP),
    "fsdp x ep": (4, EP),
}
ALL = {**MESHES, **NIGHTLY}
MIXTURES = ("granite_moe", "mla_moe")

# Sizes that replace those of a file. Dropout masks depend on the mesh and have separate tests.
OVERRIDES: dict[str, dict[str, Any]] = {"dropout": {"dropout": 0.0}}
WHOLE_CORE = "receives other arguments than queries, keys, values and documents_BT"
OWN_HEADS = "has 2 key-value heads, which 4 ranks cannot divide"
# file -> part of the name of a mesh -> reason for the rejection
REFUSED: dict[str, dict[str, str]] = {
    **{name: {"pp": "needs a forward that is a chain"} for name in NO_CHAIN},
    "kerple": {"cp": WHOLE_CORE},
    **{
        name: {"cp": "needs to know the attention core, which LAYOUT.context"}
        for name in NO_ATTENTION
    },
    "falcon": {"tp": "the 1 KV heads", "ulysses": "does not divide the 1 KV heads"},
    "gemma2": {
        "tp 4": "the 2 KV heads",
        "tp x cp ulysses": "split 2 ways by tensor_parallel_degree",
    },
    "griffin": {"cp": "mixes tokens outside of the attention core"},
    "sinks": {"cp": WHOLE_CORE},
    "t5_bias": {"cp": WHOLE_CORE},
    "mup": {
        "tp 4": "the 2 attention heads",
        "tp x cp ulysses": "split 2 ways by tensor_parallel_degree",
    },
    "openelm": {"tp 4": OWN_HEADS, "tp x cp ulysses": OWN_HEADS},
    **{
        name: {
            "tp 4": "the 2 KV heads",
            "tp x cp ulysses": "split 2 ways by tensor_parallel_degree",
        }
        for name in ("olmo2", "cohere", "granite_moe", "phi3")
    },
}


def config(name: str, parallelism: dict[str, Any], num_layers: int, num_ranks: int = 1) -> Config:
    degrees = [
        parallelism.get(f"{axis}_parallel_degree", 1) for axis in ("tensor", "context", "pipeline")
    ]
    data_ranks = num_ranks // (degrees[0] * degrees[1] * degrees[2])
    training = {
        "local_batch_size": BATCH
        if num_ranks == 1
        else max(1, BATCH // (2 * data_ranks)) * degrees[2]
    }
    tiny = tiny_config(
        training={"seq_len": 32, "global_batch_size": BATCH, **training}, parallelism=parallelism
    )
    overrides = {"num_layers": num_layers, **OVERRIDES.get(name, {})}
    model = replace(tiny.model, name=str(FOLDER / f"{name}.py"), flavor="tiny", overrides=overrides)
    return replace(tiny, model=model)


def num_layers(mesh: str) -> int:
    return 4 if "Interleaved" in mesh else 2


LATER = {*NEWER, *NO_CHAIN}
WITH_ALL = ("tp", "pp", "cp gather", "fsdp x tp")
"""Meshes of files outside the default tier."""


def files_of(mesh: str) -> list[str]:
    if "ep" in mesh:
        return list(MIXTURES)
    later = [name for name in FILES if name in LATER] if mesh in WITH_ALL else []
    return [name for name in FILES if name not in LATER] + later


FIRST = {
    mesh: [name for name in FILES if name not in LATER][number :: len(MESHES)]
    for number, mesh in enumerate(MESHES)
}
"""Files of the default tier, each on one mesh. The others are nightly."""


def reason(name: str, mesh: str) -> str | None:
    """Return the reason why a file is rejected on a mesh. None if it runs."""
    return next((why for part, why in REFUSED.get(name, {}).items() if part in mesh), None)


def run_files(rank: int, mesh: str, files: list[str]) -> dict[str, Result | str]:
    num_ranks, keys = ALL[mesh]
    results: dict[str, Result | str] = {}
    for name in files:
        file_config = config(name, keys, num_layers(mesh), num_ranks)
        problems = configs.check(Loaded(file_config))
        try:
            if problems:
                raise ConfigError(problems)
            results[name] = train_steps(rank, file_config, STEPS)
        except ConfigError as error:
            results[name] = str(error)
    return results


@functools.cache
def one_process(name: str, layers: int) -> Result:
    return run_tiny(1, config(name, {}, layers), STEPS)[0]


def differences(result: Result, expected: Result, times: float = 1) -> list[str]:
    """Return the differences from one process that exceed ``times`` the usual rounding."""
    messages = [
        f"initial {name}"
        for name, w in result.initial.items()
        if not torch.equal(w, expected.initial[name])
    ]
    for step in range(STEPS):
        if not abs(result.losses[step] - expected.losses[step]) <= 1e-5 * times:
            messages.append(
                f"loss of step {step + 1}: {result.losses[step]} for {expected.losses[step]}"
            )
        if not abs(result.grad_norms[step] - expected.grad_norms[step]) <= 1e-4 * times:
            messages.append(
                f"norm of step {step + 1}: {result.grad_norms[step]} for {expected.grad_norms[step]}"
            )
    # gradients of key biases are only rounding, because softmax is invariant to them
    total_norm = sum(gradient.norm() ** 2 for gradient in expected.gradients.values()) ** 0.5
    for name, gradient in result.gradients.items():
        expected_gradient = expected.gradients[name]
        if (
            not (gradient - expected_gradient).norm()
            <= (1e-5 * expected_gradient.norm() + 1e-7 * total_norm) * times
        ):
            error = (gradient - expected_gradient).norm() / expected_gradient.norm()
            messages.append(f"gradient of {name}: off by {error:.1e} of its norm")
    for name, weight in result.final.items():
        if not (weight - expected.final[name]).abs().max() <= 2e-6 * times:
            messages.append(
                f"final {name}: off by {(weight - expected.final[name]).abs().max():.1e}"
            )
    return messages


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("mesh", "files"),
    cases(
        [pytest.param(mesh, files, id=mesh) for mesh, files in FIRST.items()],
        nightly=[
            pytest.param(mesh, others, id=f"{mesh}-others")
            for mesh in ALL
            if (others := [file for file in files_of(mesh) if file not in FIRST.get(mesh, [])])
        ],
    ),
)
def test_files_have_the_numbers_of_one_process_or_are_rejected_for_a_valid_reason(
    mesh: str, files: list[str]
) -> None:
    wrong: list[str] = []
    for rank, results in enumerate(run_ranks(ALL[mesh][0], run_files, mesh, files)):
        for name, result in results.items():
            why = reason(name, mesh)
            if isinstance(result, str):
                if why is None or why not in result:
                    wrong.append(f"{name}, rank {rank}: refused: {result}")
            elif why is not None:
                wrong.append(f"{name}, rank {rank}: runs instead of being rejected: {why}")
            else:
                # their recurrences amplify rounding by this factor (see test_rounding.py of verify)
                times = 10 if name in AMPLIFYING else 1
                messages = differences(result, one_process(name, num_layers(mesh)), times)
                wrong += [f"{name}, rank {rank}: {line}" for line in messages[:3]]

    assert not wrong, "\n".join(wrong)


COMPILED = ("olmo2", "normformer", "gemma2")


def run_compiled(rank: int) -> dict[str, Result]:
    results = {}
    for name in COMPILED:
        file_config = config(name, TP, 2, num_ranks=2)
        file_config = replace(
            file_config,
            compile=replace(
                file_config.compile, enable=True, backend="aot_eager", components=["model"]
            ),
        )
        results[name] = train_steps(rank, file_config, STEPS)
    return results


@pytest.mark.nightly(
    "compiles three models; compiled tensor parallelism has a law in the default tier"
)
def test_compiled_modules_with_tensor_parallelism_have_the_numbers_of_one_process() -> None:
    """OLMo 2's first attention reads the embedding's output directly. Its gradient was lost in an earlier version."""
    for results in run_ranks(2, run_compiled):
        for name, result in results.items():
            assert differences(result, one_process(name, 2)) == [], name


@pytest.mark.parametrize(
    "names",
    cases(
        [pytest.param([name for name in FILES if name not in LATER], id="first")],
        nightly=[pytest.param([name for name in FILES if name in LATER], id="later")],
    ),
)
def test_at_least_twenty_files_exist_and_each_learns(names: list[str]) -> None:
    assert len(names) >= 20
    for name in names:
        losses = one_process(name, 2).losses
        assert losses[-1] < losses[0], name
