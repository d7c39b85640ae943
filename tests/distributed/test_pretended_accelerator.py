"""Training steps on a fake accelerator (``pretended_accelerator.py``): no mixed devices, and one synchronization.

Each case runs one step of the real trainer with a family and a kind of recomputation, precision, parallelism, packing
and optimizer. No operation mixes devices, the host waits for the device once (for the loss and the gradient norm), and
no file of ``ops/cpu`` and ``distributed/cpu`` is imported. Every pair of two options occurs in some case (a covering
array of strength two, Cohen et al. 1997). The seed decides the other options of a case.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import sys
import traceback
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretended_accelerator import NAME, in_a_fork, pretending
from tiers import cases
from tiny import tiny_config
from torch._subclasses import fake_tensor
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtrain.config import problems_of
from shardtrain.config.load import Loaded
from shardtrain.config.schema import Config
from shardtrain.distributed import expert_parallel
from shardtrain.distributed.process_group import World
from shardtrain.models import moe
from shardtrain.ops import accelerator, device_kernels
from shardtrain.train import trainer

AGREEMENT = "loss and gradient norm"
EXCHANGE = "rows of experts to exchange"
ROWS = "rows of each expert"

WITH_EXPERTS = ("llama4", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
FAMILIES = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "neox", *WITH_EXPERTS)
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
    "every second": {"mode": "selective", "selective_ac_option": "2"},
}
PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {"mixed_precision_param": "float32"},
    "bf16": {"mixed_precision_param": "bfloat16"},
    "fp16": {"mixed_precision_param": "float16"},
    "bf16 weights": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"},
}
PIPELINE = {"pipeline_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "fsdp": (4, {}),
    "hsdp": (4, {"data_parallel_replicate_degree": 2}),
    "ddp": (2, {"data_parallel_replicate_degree": 2}),
    "zero1": (2, {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True}),
    "tp": (4, {"tensor_parallel_degree": 2}),
    "1F1B": (4, PIPELINE),
    "GPipe": (2, {**PIPELINE, "pipeline_parallel_schedule": "GPipe"}),
    "Interleaved1F1B": (2, {**PIPELINE, "pipeline_parallel_schedule": "Interleaved1F1B"}),
    "ZBVZeroBubble": (2, {**PIPELINE, "pipeline_parallel_schedule": "ZBVZeroBubble"}),
    "gather": (4, {**CONTEXT, "context_parallel_rotate_method": "allgather"}),
    "ring": (4, {**CONTEXT, "context_parallel_rotate_method": "alltoall"}),
    "ulysses": (2, {**CONTEXT, "context_parallel_method": "ulysses"}),
    "ep": (4, {"expert_parallel_degree": 2}),
    "pp x tp x fsdp": (8, {**PIPELINE, "tensor_parallel_degree": 2}),
}
# Without a real exchange, stages learn their shapes by a hook that PyTorch has since 2.12.
KNOWS_SHAPES = hasattr(schedules._PipelineSchedule, "_warmup_p2p")
if not KNOWS_SHAPES:
    MESHES = {
        name: (ranks, degrees)
        for name, (ranks, degrees) in MESHES.items()
        if "pipeline_parallel_degree" not in degrees
    }
PACKING: dict[str, dict[str, Any]] = {
    "end to end": {"packing": "concat", "document_mask": "off"},
    "documents": {"packing": "concat", "document_mask": "on"},
    "padded": {"packing": "padded", "long_documents": "cut"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"name": "AdamW"},
    "Adam": {"name": "Adam"},
    "foreach": {"name": "AdamW", "implementation": "foreach"},
    "Muon": {"name": "Muon"},
}
FACTORS = (
    FAMILIES,
    tuple(RECOMPUTE),
    tuple(PRECISION),
    tuple(MESHES),
    tuple(PACKING),
    tuple(OPTIMIZERS),
)
Case = tuple[str, str, str, str, str, str]


def is_legal(case: Case) -> bool:
    """True if the options can be combined. ``test_cases_are_legal_runs`` compares this with the rules."""
    family, _, precision, mesh, _, _ = case
    if mesh == "ep" and family not in WITH_EXPERTS:
        return False
    # flash kernels do not support float32
    return not (precision == "fp32" and mesh in ("gather", "ring"))


@functools.cache
def covering() -> list[Case]:
    """Return legal cases that contain every possible pair of options of two factors, chosen greedily."""
    draw = random.Random(0)
    open_pairs = set()
    for first, second in itertools.combinations(range(len(FACTORS)), 2):
        for option, other_option in itertools.product(FACTORS[first], FACTORS[second]):
            open_pairs.add((first, option, second, other_option))

    chosen: list[Case] = []
    while open_pairs:
        # Of 60 random cases with the next open pair, take the one with the most open pairs.
        first, option, second, other_option = min(open_pairs)
        best = None
        most = 0
        for _ in range(60):
            values: list[Any] = [draw.choice(options) for options in FACTORS]
            values[first] = option
            values[second] = other_option
            case: Case = tuple(values)  # type: ignore[assignment]
            num_pairs = len(pairs_of(case) & open_pairs) if is_legal(case) else 0
            if num_pairs > most:
                best = case
                most = num_pairs
        if best is None:  # this pair is impossible
            open_pairs.discard((first, option, second, other_option))
            continue
        chosen.append(best)
        open_pairs -= pairs_of(best)
    return chosen


def pairs_of(case: Case) -> set[tuple[int, str, int, str]]:
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(case)), 2)}


def config_of(case: Case) -> tuple[int, Config]:
    family, recompute, precision, mesh, packing, optimizer = case
    ranks, degrees = MESHES[mesh]
    layers = 4 if "Interleaved" in mesh or "ZBV" in mesh else 2
    config = tiny_config(
        parallelism=degrees,
        training={
            **PRECISION[precision],
            "seq_len": 32,
            "local_batch_size": layers,
            "global_batch_size": -1,
        },
        activation_checkpoint=RECOMPUTE[recompute],
        data=PACKING[packing],
        optimizer=OPTIMIZERS[optimizer],
    )
    flavor = "debugmodel_moe" if family == "qwen3_moe" else "debugmodel"
    model = dataclasses.replace(
        config.model, name=family, flavor=flavor, overrides={"num_layers": layers}
    )
    return ranks, dataclasses.replace(config, model=model)


def stages_know_their_shapes(_: Any, stages: list[Any], *__: Any) -> None:
    """Skip the exchange of shapes between pipeline stages, which the fake backend cannot perform."""
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC


class Experts:
    """Track the rows of the current expert block, to compute the numbers that the host would read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = self._rows = 0
        for kind, counted in ((moe.Experts, True), (expert_parallel.AllToAllDispatch, False)):
            patch.setattr(kind, "forward", self._watched(kind.forward, counted))

    def _watched(self, forward: Any, counted: bool) -> Any:
        def run(module: Any, *inputs: Any) -> Any:
            self.calls += counted
            self._rows = inputs[0 if counted else 1].size(0)
            return forward(module, *inputs)

        return run

    def exchanged(self, _: torch.Tensor) -> list[Any]:
        """Return row counts with which two expert-parallel ranks exchange half of their rows."""
        return [[self._rows // 2] * 2] * 2

    def of_each(self, counts: torch.Tensor) -> list[Any]:
        """Return an equal number of rows for each expert."""
        return [self._rows // counts.numel()] * counts.numel()


def waits_of_a_step(case: Case) -> tuple[dict[str, int], list[str], int]:
    """Return a step's waits per number that the host reads, its other waits, and its calls of expert blocks."""
    ranks, config = config_of(case)
    dist.init_process_group(f"cpu:fake,{NAME}:fake", store=FakeStore(), rank=0, world_size=ranks)
    with pytest.MonkeyPatch.context() as patch:
        experts = Experts(patch)
        patch.setattr(device_kernels, "has_flash_attention", accelerator.is_accelerator)
        # like Hopper
        patch.setattr(moe, "has_grouped_matmul", lambda _, dtype: dtype == torch.bfloat16)
        if KNOWS_SHAPES:
            patch.setattr(schedules._PipelineSchedule, "_warmup_p2p", stages_know_their_shapes)
        with pretending({EXCHANGE: experts.exchanged, ROWS: experts.of_each}) as device:
            run = trainer.build(config, World(0, ranks, 0, torch.device(NAME, 0)))
            device.waits.clear()
            outcome = trainer.step(run)
        assert outcome is not None
        assert outcome.loss_sum.device.type == NAME
    dist.destroy_process_group()
    debug._clear_sharding_prop_cache()
    reads = Counter(wait.read for wait in device.waits if wait.read)
    other_waits = [f"{wait.where}: {wait.why}" for wait in device.waits if not wait.read]
    return dict(reads), other_waits, experts.calls


def forbid_cpu_folders() -> None:
    """Make imports from the CPU folders fail in this process, including modules that are already imported."""
    for folder in ("shardtrain.ops.cpu", "shardtrain.distributed.cpu"):
        for name in [folder, *(name for name in sys.modules if name.startswith(f"{folder}."))]:
            sys.modules[name] = None  # type: ignore[assignment]


def broken(chosen: list[Case]) -> list[str]:
    """Return descriptions of problems in a step of each case. Runs in a fork with the fake device."""
    forbid_cpu_folders()
    wrong = []
    for case in chosen:
        name = ", ".join(case)
        try:
            reads, others, calls = waits_of_a_step(case)
        except Exception as error:
            # Report the last line of the package in the traceback.
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame for frame in frames if "/shardtrain/" in frame.filename]
            where = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else ""
            wrong.append(f"{name}: {where}: {type(error).__name__}: {str(error)[:300]}")
            if dist.is_initialized():
                dist.destroy_process_group()
            continue
        family, _, precision, mesh, _, _ = case
        expected = {AGREEMENT: 1}
        if family in WITH_EXPERTS and calls:
            if mesh == "ep":
                expected[EXCHANGE] = calls
            if "bf16" not in precision:
                expected[ROWS] = calls
        if reads != expected or others:
            wrong.append(f"{name}: reads {reads}, not {expected}; {others}")
    return wrong


def test_cases_are_legal_runs():
    for case in covering():
        ranks, config = config_of(case)
        problems = problems_of(Loaded(config), ranks, "cuda", ranks)
        assert not [str(problem) for problem in problems if problem.option != "training.device"], (
            case
        )


def reports() -> dict[str, str]:
    """Reports of the fake device for operations that a step must not contain."""

    def matrix() -> torch.Tensor:
        return torch.ones(4, 4, device=NAME)

    report_of_operation = {}
    attempts: dict[str, Any] = {
        "item": lambda: matrix().sum().item(),
        "bool": lambda: bool(matrix().any()),
        "tolist": lambda: matrix()[0].tolist(),
        "cpu": lambda: matrix().cpu(),
        "equal": lambda: torch.equal(matrix(), matrix()),
        "tensor": lambda: torch.tensor([1.0], device=NAME),
        "pageable": lambda: torch.ones(4).to(NAME, non_blocking=True),
        "nonzero": lambda: matrix().nonzero(),
        "mask": lambda: matrix()[matrix() > 0],
        "two devices": lambda: matrix() @ torch.ones(4, 4),
        "pinned": lambda: accelerator.to_device(torch.ones(4), NAME),
        "filled": lambda: torch.full((), 2.0, device=NAME),
        "one number of the host": lambda: matrix() * torch.ones(()),
    }
    for name, attempt in attempts.items():
        with pretending() as device:
            try:
                attempt()
            except Exception as error:
                report_of_operation[name] = type(error).__name__
                continue
        reasons = sorted({wait.why for wait in device.waits})
        report_of_operation[name] = " ".join(reasons) or "nothing"
    return report_of_operation


def test_forbidden_operations_are_reported():
    has_own_error = hasattr(fake_tensor, "FakeTensorDeviceMismatchError")
    assert in_a_fork(reports) == {
        **dict.fromkeys(("item", "bool", "tolist"), "_local_scalar_dense"),
        "cpu": "copy to the host",
        "equal": "equal",
        "tensor": "copy to the device",
        "pageable": "copy to the device from memory that is not page-locked",
        **dict.fromkeys(("nonzero", "mask"), "DynamicOutputShapeException"),
        "two devices": "FakeTensorDeviceMismatchError" if has_own_error else "RuntimeError",
        **dict.fromkeys(("pinned", "filled", "one number of the host"), "nothing"),
    }


def each_option_once() -> list[Case]:
    """Return a few of the cases that together contain every option."""
    missing = {(place, option) for place, options in enumerate(FACTORS) for option in options}
    chosen: list[Case] = []
    while missing:
        best = max(covering(), key=lambda case: len(missing & set(enumerate(case))))
        missing -= set(enumerate(best))
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("mesh", cases(["each option once"], nightly=list(MESHES)))
def test_step_waits_once_for_the_accelerator_and_mixes_no_devices(mesh):
    chosen = (
        each_option_once()
        if mesh not in MESHES
        else [case for case in covering() if case[3] == mesh]
    )

    assert in_a_fork(broken, chosen) == []
