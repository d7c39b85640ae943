"""``shardtrain verify --certificate``: check every dimension that must not change a number,
and write the proof.

- ``small_run`` and ``substitutes`` derive a small configuration from the user's.
- ``dimensions`` lists what is varied.
- ``trial``, ``trial_runs``, ``trial_rank`` and ``trial_batches`` run the variants through the trainer.
- ``comparison`` judges the errors, ``trial_causes`` names causes, and ``certificate_table`` prints them.
- ``mesh_engine`` holds the functions of the mesh comparison.
- ``check_command`` is ``verify --check``.

The file itself belongs to ``config.certificate``, because ``train`` reads it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardtrain.config import Loaded, certificate
from shardtrain.tools.verify import meshes as mesh_plans
from shardtrain.tools.verify import verify_report
from shardtrain.tools.verify.certificate import (
    certificate_table,
    comparison,
    small_run,
    trial_causes,
    trial_runs,
)
from shardtrain.tools.verify.certificate.certificate_table import DimensionResult
from shardtrain.tools.verify.certificate.comparison import VariantResult
from shardtrain.tools.verify.certificate.dimensions import (
    ALL_STEPS,
    DIMENSIONS,
    MESH,
    PRECISION,
    VALIDATION,
    Variant,
    VariantRequest,
)
from shardtrain.tools.verify.certificate.mesh_engine import MeshEngine
from shardtrain.tools.verify.certificate.small_run import ROWS, SmallRun
from shardtrain.tools.verify.certificate.trial import (
    REFERENCE,
    SHAKEN,
    NumberError,
    Trial,
    TrialErrors,
)
from shardtrain.tools.verify.certificate.trial_causes import Differing
from shardtrain.tools.verify.meshes import changed
from shardtrain.tools.verify.verify_request import VerifyOptions
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.temporary import temporary_folder

PRECISION_MESHES = ("dp_shard=2", "tp=2", "cp=2")
"""Meshes of the dimension precision. A sum may be rounded only on the ranks of one axis."""
QUICK_PRECISION_MESHES = ("dp_shard=2",)
QUICK_MESHES = ("dp_shard=2", "tp=2", "pp=2")


def main(request: VerifyOptions, loaded: Loaded, engine: MeshEngine) -> int:
    """Check the requested dimensions, print the table, write the certificate, and return 0 or 4.

    Raises:
        ConfigError: the configuration is wrong, or a requested mesh or dimension is not possible.
    """
    assert request.certificate is not None
    certificate.require_writable(request.certificate, "--certificate")
    requested_dimensions(request.dimensions)
    started = time.perf_counter()
    with temporary_folder("certificate") as folder:
        run = small_run.prepare(loaded, request.meshes, Path(folder), engine.small_copy)
        if not request.json:
            model = loaded.config.model
            print(
                f"certificate of {model.name}/{model.flavor}: each dimension against one process",
                flush=True,
            )
            for note in run.notes:
                print(f"  {note}", flush=True)
        # Import PyTorch in this process, so its forks, the ranks, do not need to import it again.
        with heartbeat("importing PyTorch"):
            from shardtrain.train import trainer
        results = check_all(run, request, trainer, engine)

    document = document_of(loaded, run, results, request, time.perf_counter() - started)
    certificate.write(request.certificate, document)
    if request.json:
        print(json.dumps(document, indent=2))
    else:
        print(certificate_table.table(results))
        verdict = "does not hold"
        if document["holds"]:
            verdict = "holds"
        elif all(result.holds for result in results):
            verdict = "proves nothing, because no requested mesh is possible"
        print(f"\nthe certificate {verdict}: {request.certificate}, {document['seconds']:.0f} s")
    # With --allow-impossible, an impossible mesh is a success, although it proves nothing.
    return 0 if all(result.holds for result in results) else 4


def requested_dimensions(names: Sequence[str]) -> list[str]:
    """Return the dimensions to check.

    Raises:
        ConfigError: a name is unknown.
    """
    known = [dimension.name for dimension in DIMENSIONS]
    for name in names:
        if name not in known:
            rule = f'has an unknown dimension "{name}"'
            raise ConfigError(
                Problem(
                    "--dimension", None, rule, f"dimensions are {', '.join(known)}", "command line"
                )
            )
    return list(names) or known


def check_all(
    run: SmallRun, request: VerifyOptions, trainer: Any, engine: MeshEngine
) -> list[DimensionResult]:
    """Check all requested dimensions. Return a result for each dimension, also for those that do not apply."""
    names = requested_dimensions(request.dimensions)
    wanted = VariantRequest(run, request.meshes, request.quick)
    accepts_impossible = request.allow_impossible or not request.meshes
    results: dict[str, DimensionResult] = {}
    variants: dict[str, list[Variant]] = {}
    for dimension in DIMENSIONS:
        reason = dimension.reason_not_to_apply(run)
        if dimension.name not in names:
            results[dimension.name] = DimensionResult(
                dimension.name, "not requested", reason="not in --dimension"
            )
        elif reason:
            # A dimension that the user names must be checked.
            verdict = "not checked" if dimension.name in request.dimensions else "does not apply"
            results[dimension.name] = DimensionResult(dimension.name, verdict, reason=reason)
        elif dimension.name not in (MESH, PRECISION):
            variants[dimension.name] = list(dimension.variants(wanted))
    compared = _run_variants(run, variants)
    if MESH in names and MESH not in results:
        compared[MESH] = _compare_meshes(run, request, trainer, engine)
    if PRECISION in names and PRECISION not in results:
        compared[PRECISION] = _compare_precision(run, request, trainer, engine)
    for name, comparisons in compared.items():
        verdict = comparison.verdict_of(comparisons, accepts_impossible)
        if request.allow_impossible and verdict == "not checked" and _is_impossible(comparisons):
            verdict = "not possible"
        if (
            name == MESH
            and not request.meshes
            and verdict == "holds"
            and not _has_own_mesh(run, comparisons)
        ):
            verdict = "not checked"
        results[name] = DimensionResult(name, verdict, tuple(comparisons))
    return [results[dimension.name] for dimension in DIMENSIONS]


def _is_impossible(comparisons: Sequence[VariantResult]) -> bool:
    """True if no requested mesh is possible."""
    return all(comparison.verdict == "not possible" for comparison in comparisons)


def _has_own_mesh(run: SmallRun, comparisons: Sequence[VariantResult]) -> bool:
    """True if the configuration's own axes were compared together. Meshes of more than 8 ranks are not tried."""
    configured = mesh_plans.own_axes(run.user)
    if not configured:
        return True
    same = [comparison.compared for comparison in comparisons if comparison.verdict == "same"]
    return any(compared.startswith(configured) for compared in same)


def _run_variants(
    run: SmallRun, variants: dict[str, list[Variant]]
) -> dict[str, list[VariantResult]]:
    """Run all variants and the reference, and judge them."""
    reference = run.loaded
    if VALIDATION in variants:
        reference, _ = run.validating(REFERENCE, ROWS)
    trials = [Trial(REFERENCE, reference, 1, ALL_STEPS, is_reference=True)]
    for of_dimension in variants.values():
        for variant in of_dimension:
            # Variants of a dimension may share a reference.
            trials += [trial for trial in variant.trials if trial not in trials]
    answers = trial_runs.run_all(trials, run.folder) if variants else {}
    shaken: TrialErrors | None = None
    compared: dict[str, list[VariantResult]] = {}
    for name, of_dimension in variants.items():
        compared[name] = []
        for variant in of_dimension:
            result = _judge(name, variant, answers, None)
            if result is None:
                # Only a shaken run can tell whether this is rounding. Most certificates do not need it.
                shaken = shaken or _shaken(run)
                result = _judge(name, variant, answers, shaken)
                assert result is not None
            if result.verdict == "differs" and variant.without_resume:
                shaken = shaken or _shaken(run)
                result = _with_cause_in_mesh(run, result, variant, answers[REFERENCE], shaken)
            compared[name].append(result)
    return compared


def _judge(
    dimension: str,
    variant: Variant,
    answers: dict[str, TrialErrors],
    shaken: TrialErrors | None,
) -> VariantResult | None:
    # First exclude variants without numbers to compare: impossible, failed, or with rows that differ.
    if variant.impossible:
        return VariantResult(variant.label, "not possible", first=variant.impossible)
    for trial in variant.trials:
        answer = answers[trial.name]
        if answer.failure:
            verdict: Any = "not possible" if answer.is_refused else "failed"
            return VariantResult(variant.label, verdict, first=answer.failure)
    last = variant.trials[-1]
    errors = answers[last.name].errors
    facts = answers[last.name].facts
    if facts.layout_difference:
        return VariantResult(
            variant.label,
            "differs",
            first=facts.layout_difference,
            cause="the packing lays documents out in another way than its rule: check data/packing",
        )
    if facts.num_shared_rows == 0:
        return VariantResult(
            variant.label,
            "not checked",
            first="no sequence has two documents with targets, so no border was compared; raise training.seq_len",
        )
    # A number that was not compared must not count as equal.
    compared = {(error.kind, error.step) for error in errors}
    missing = []
    for step, kind in itertools.product(last.steps, verify_report.USUAL):
        if (kind, step) not in compared:
            missing.append(f"{kind} of step {step}")
    if missing:
        first = f"was not compared: {', '.join(missing)}"
        return VariantResult(variant.label, "failed", first=first)

    def explain(beyond: Sequence[NumberError], first: NumberError) -> str:
        expected = answers[last.compared_with].facts
        differing = Differing(dimension, variant.label, beyond, first, facts, expected)
        return trial_causes.cause_of(differing)

    shaken_errors = None if shaken is None else shaken.errors
    return comparison.judge(variant.label, errors, variant.is_exact, shaken_errors, explain)


def _with_cause_in_mesh(
    run: SmallRun,
    result: VariantResult,
    variant: Variant,
    of_reference: TrialErrors,
    shaken: TrialErrors,
) -> VariantResult:
    """Return the result of a resumed run. If one of its meshes also differs without a resume, name the mesh's cause."""
    for on_mesh in variant.without_resume:
        answers = trial_runs.run_all(on_mesh.trials, run.folder)
        answers[REFERENCE] = of_reference
        of_mesh = _judge("task", on_mesh, answers, shaken)
        assert of_mesh is not None
        if of_mesh.verdict == "differs":
            cause = (
                f"the checkpoint is not the cause, because {on_mesh.label} differs without a resume, too: "
                f"{of_mesh.first}; {of_mesh.cause}"
            )
            return dataclasses.replace(result, cause=cause)
    return result


def _shaken(run: SmallRun) -> TrialErrors:
    shaken = Trial(SHAKEN, run.varied(SHAKEN, {}), 1, ALL_STEPS, is_shaken=True)
    return trial_runs.run_all([shaken], run.folder)[SHAKEN]


def _compare_meshes(
    run: SmallRun, request: VerifyOptions, trainer: Any, engine: MeshEngine
) -> list[VariantResult]:
    """Compare each requested mesh, or those of the default list, in float32."""
    names = request.meshes
    if request.quick and not names:
        names = _with_own_axes(run, QUICK_MESHES)
    options = dataclasses.replace(request, meshes=tuple(names), precision="float32")
    return _compare_synthetic(run.with_substitutes, options, trainer, engine, run.folder / "mesh")


def _with_own_axes(run: SmallRun, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return meshes, beginning with that of the configuration's own axes."""
    configured = mesh_plans.own_axes(run.user)
    if not configured or configured in names:
        return names
    return (configured, *names)


def _compare_precision(
    run: SmallRun, request: VerifyOptions, trainer: Any, engine: MeshEngine
) -> list[VariantResult]:
    """Compare one process and meshes in the dtypes of the run.

    If 8-bit rounding hides faults, also compare without converters, where the tolerances are smaller. This
    does not prove the dimension, but it can find a fault of the 16-bit dtypes.
    """
    names = request.meshes
    if not names:
        default = QUICK_PRECISION_MESHES if request.quick else PRECISION_MESHES
        names = _with_own_axes(run, default)
    options = dataclasses.replace(request, meshes=tuple(names), precision="own")
    loaded = run.with_substitutes
    results = _compare_synthetic(loaded, options, trainer, engine, run.folder / "precision")
    is_unproven = any(result.verdict == "not proven" for result in results)
    if not (is_unproven and loaded.config.model.converters):
        return results
    # Options of the converters would now be options without effect. Without origins, no option counts as set.
    plain = changed(loaded, {"model": {"converters": []}}, set(), "")
    plain = dataclasses.replace(plain, origins={})
    for result in _compare_synthetic(
        plain, options, trainer, engine, run.folder / "without-converters"
    ):
        results.append(dataclasses.replace(result, compared=f"{result.compared}, converters off"))
    return results


def _compare_synthetic(
    loaded: Loaded, request: VerifyOptions, trainer: Any, engine: MeshEngine, folder: Path
) -> list[VariantResult]:
    """Compare meshes with synthetic data, as ``verify`` does without a certificate."""
    # An impossible mesh is a row of the certificate, not an error.
    request = dataclasses.replace(request, allow_impossible=True)
    task = engine.plan(engine.comparable(loaded), request)
    folder.mkdir()
    task, _ = engine.probe(task, folder)
    has_measured_tolerances = request.precision == "own"
    results = []
    for row in engine.verify(task, trainer, folder):
        results.append(comparison.of_mesh(row, has_measured_tolerances))
    return results


def document_of(
    loaded: Loaded,
    run: SmallRun,
    results: Sequence[DimensionResult],
    request: VerifyOptions,
    seconds: float,
) -> dict[str, Any]:
    """Return the content of the certificate."""
    axes: set[str] = set()
    for result in results:
        axes |= result.compared_axes
    # Dimensions that do not apply hold, but at least one dimension must have been compared.
    all_hold = all(result.holds for result in results)
    is_any_compared = any(result.verdict == "holds" for result in results)
    return {
        "format": certificate.FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "holds": all_hold and is_any_compared,
        "quick": request.quick,
        **certificate.facts_of(loaded),
        "commit": certificate.commit(),
        "hardware": certificate.hardware(),
        "notes": list(run.notes),
        "compared_axes": sorted(axes),
        "dimensions": [result.to_json() for result in results],
        "seconds": round(seconds, 1),
    }
