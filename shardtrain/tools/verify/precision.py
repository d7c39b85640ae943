"""Verify in the run's own precision: bfloat16, float16, float8, MX, and FSDP's mixed precision.

The reference is one process in float32, whose casts are disabled. The effect of rounding on each tensor
is measured on the reference (``rounding_noise``), and a mesh may differ by a multiple of that
(``judge_precision``). Two checks see smaller errors: each module against float64 on the same inputs
(``module_rounding``), and each update, norm and gradient against its own numbers (``update_rounding``).
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardtrain.config import Config
from shardtrain.config.derived import compute_dtype
from shardtrain.ops import accelerator
from shardtrain.tools.verify import casts, forked_workers, module_rounding
from shardtrain.tools.verify.judge_precision import NOISY_RUNS, judge_precision, tolerances_of
from shardtrain.tools.verify.meshes import MeshPlan
from shardtrain.tools.verify.rounding_noise import ROUNDOFF, RoundingNoise
from shardtrain.tools.verify.shrink import VerifyTask
from shardtrain.tools.verify.verify_rank import Trainer, run_steps
from shardtrain.tools.verify.verify_report import ONE_PROCESS, MeshResult, Verdict
from shardtrain.utils.errors import ConfigError


def tolerances(task: VerifyTask, trainer: Trainer, folder: Path) -> Mapping[str, float]:
    """Measure how much rounding in the precision of ``task.own_precision`` changes each number of a run.

    Trains on one process in float32, once without and ``NOISY_RUNS`` times with simulated rounding, and
    leaves the records in ``folder``. ``task`` is planned with ``precision="own"``.

    Returns:
        The tolerance of each number by key: "loss/STEP" (absolute), "norm/STEP" (relative),
            "gradient/STEP/NAME" (relative to the norm of the gradient, or to a twentieth of that of all
            gradients if that is more), and "weights/STEP/NAME" (absolute, of any element). Steps count from
            0. A tolerance is never below the usual one of float32 (``compare.USUAL``).

    Raises:
        ConfigError: the model does not train on one process.
    """
    _record_references(task, trainer, folder, _check_modules(task, folder))
    (allowed,) = forked_workers.run(
        1, tolerances_of, task.own_precision, str(folder), task.steps, folder=folder
    )
    return dict(allowed)


def verify(task: VerifyTask, trainer: Trainer, folder: Path) -> list[MeshResult]:
    """Compare one process and each mesh in the run's own precision with float32. Return a row for each.

    Raises:
        ConfigError: the model does not train on one process.
    """
    modules = _check_modules(task, folder)
    _record_references(task, trainer, folder, modules)
    rows = [_on_one_process(task, trainer, folder, modules)]
    for plan in task.plans:
        rows.append(_on_mesh(task, plan, trainer, folder))
    return rows


def _check_modules(task: VerifyTask, folder: Path) -> dict[str, Any]:
    """Run ``module_rounding.check_modules`` in a separate process."""
    assert task.own_precision is not None
    folder = folder / "modules"
    folder.mkdir(parents=True)
    arguments = (task.own_precision, task.own_precision.debug.seed, task.unit_gain)
    try:
        (answer,) = forked_workers.run(
            1, module_rounding.check_modules, *arguments, folder=folder, backend="gloo"
        )
    except forked_workers.RankFailed as error:
        raise ConfigError(f"the model does not train on one process: {error}") from error
    return dict(answer)


def _record_references(
    task: VerifyTask, trainer: Trainer, folder: Path, modules: Mapping[str, Any]
) -> None:
    """Record one process in float32, without and with simulated rounding.

    ``modules`` is the result of ``module_rounding.check_modules``.
    """
    assert task.own_precision is not None
    # Stochastic rounding has no bias, so the noise contains it.
    # Rounding to nearest may lose all small updates.
    stored = torch.float32
    if not task.own_precision.optimizer.bf16_stochastic_round:
        stored = getattr(torch, task.own_precision.training.dtype)
    outputs = {path: ROUNDOFF[dtype] for path, dtype in modules["outputs"].items()}
    products = frozenset(modules["products"])
    of_weights = ROUNDOFF[compute_dtype(task.own_precision)]
    runs = {"reference": RoundingNoise(0.0, {}, frozenset(), stored)}
    for number in range(NOISY_RUNS):
        runs[f"noisy-{number}"] = RoundingNoise(of_weights, outputs, products, stored, number)
    for name, noise in runs.items():
        steps = partial(_run_in_float32, noise=noise)
        try:
            _run_ranks(1, steps, trainer, task.reference, task, folder / name)
        except forked_workers.RankFailed as error:
            raise ConfigError(f"the model does not train on one process: {error}") from error


def _run_in_float32(
    rank: int,
    num_ranks: int,
    trainer: Trainer,
    config: Config,
    task: VerifyTask,
    folder: str,
    noise: RoundingNoise,
) -> None:
    """Run the steps with all casts to shorter dtypes disabled, including casts by a fault of the engine."""
    with casts.off():
        run_steps(rank, num_ranks, trainer, config, task, folder, noise=noise)


def _run_ranks(
    count: int, steps: Any, trainer: Trainer, config: Config, task: VerifyTask, folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    device = config.training.device
    backend = accelerator.collectives("cpu" if device == "auto" else device)
    limit = forked_workers.FULL_TIMEOUT_SECONDS
    if task.unit_gain:
        limit = forked_workers.TIMEOUT_SECONDS
    arguments = (trainer, config, task, str(folder))
    forked_workers.run(
        count, steps, *arguments, folder=folder, backend=backend, limit_seconds=limit
    )


def _on_one_process(
    task: VerifyTask, trainer: Trainer, folder: Path, modules: Mapping[str, Any]
) -> MeshResult:
    """Compare one process, with several micro-batches, with the float32 reference.

    Also add the differences of single modules from float64.
    Meshes do not, because they would show the same errors.
    """
    assert task.own_precision is not None
    row = _compared(
        MeshResult(ONE_PROCESS, "", "same"), task, task.own_precision, {}, 1, trainer, folder
    )
    if modules["skipped"]:
        # Modules that were not compared leave the result open, unless it is already a difference.
        reasons = [text for text in (row.unproven, modules["skipped"]) if text]
        verdict: Verdict = "not proven" if row.verdict == "same" else row.verdict
        row = dataclasses.replace(row, verdict=verdict, unproven="; ".join(reasons))
    excess = modules["excess"]
    if not excess or row.verdict not in ("same", "differs", "not proven"):
        return row
    # A module that rounds too much is a cause, and a gradient that differs its consequence.
    first = module_rounding.sentence(excess[0])
    if len(excess) > 1:
        first += f" (and {len(excess) - 1} more results)"
    return dataclasses.replace(row, verdict="differs", first=first, cause=excess[0]["cause"])


def _on_mesh(task: VerifyTask, plan: MeshPlan, trainer: Trainer, folder: Path) -> MeshResult:
    row = MeshResult(plan.name, plan.schedule, "not possible", options=plan.described_options)
    if plan.problem:
        return dataclasses.replace(row, cause=plan.problem.replace("\n", "; "))
    return _compared(row, task, plan.loaded.config, plan.degrees, plan.num_ranks, trainer, folder)


def _compared(
    row: MeshResult,
    task: VerifyTask,
    config: Config,
    degrees: Mapping[str, int],
    num_ranks: int,
    trainer: Trainer,
    folder: Path,
) -> MeshResult:
    """Train on a mesh in its own precision, and judge its records."""
    started = time.perf_counter()
    ranks = Path(tempfile.mkdtemp(dir=folder))
    verdict: Verdict
    try:
        _run_ranks(num_ranks, run_steps, trainer, config, task, ranks)
    except forked_workers.RankFailed as error:
        seconds = time.perf_counter() - started
        verdict = "not possible" if error.refused else "failed"
        return dataclasses.replace(row, verdict=verdict, seconds=seconds, cause=str(error))
    arguments = (config, dict(degrees), str(folder), str(ranks), num_ranks, task.steps)
    (fields,) = forked_workers.run(1, judge_precision, *arguments, folder=ranks)
    shutil.rmtree(ranks, ignore_errors=True)
    seconds = time.perf_counter() - started
    return dataclasses.replace(row, verdict=verdict_of(fields), seconds=seconds, **fields)


def verdict_of(fields: Mapping[str, Any]) -> Verdict:
    """Return the verdict of a compared mesh, from the result of ``judge_precision``."""
    if fields["first"]:
        return "differs"
    if fields["unproven"]:
        return "not proven"
    return "same"
