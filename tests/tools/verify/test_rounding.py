"""Verify distinguishes rounding from faults: a model that amplifies rounding causes no alarm, its faults are still
detected, and a cause is only named if it explains the difference.

``amplifying_model.py`` doubles the error of its state in each of its ``rounds``. With 4 rounds, meshes differ by more
than the usual tolerance. With 20, rounding determines all results.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from shardtrain import config
from shardtrain.config import Config
from shardtrain.layout import Layout
from shardtrain.tools.verify import before_training, causes, verify_report
from shardtrain.tools.verify.compare import USUAL, Errors, Expected, First, tolerances
from shardtrain.tools.verify.evidence import Evidence
from shardtrain.tools.verify.verify_rank import RankRecord
from shardtrain.tools.verify.verify_report import MOST, ROUNDING

AMPLIFYING = Path(__file__).parent / "amplifying_model.py"
MESHES = ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2", "dp_replicate=2,dp_shard=2")
BY = "tests/tools/verify/test_rounding.py::test_the_tolerance_follows_the_rounding_of_one_process_up_to_a_thousandth"


def kinds(errors: Errors) -> dict[str, float]:
    return dataclasses.asdict(errors)


def test_the_tolerance_follows_the_rounding_of_one_process_up_to_a_thousandth() -> None:
    errors = [Errors(size, size, size, size) for size in (0.0, 4e-6, math.inf)]
    quiet, amplified, chaotic = tolerances(errors)
    assert quiet == USUAL
    for kind, usual in kinds(USUAL).items():
        assert kinds(amplified)[kind] == max(usual, ROUNDING * 4e-6)
        assert kinds(chaotic)[kind] == MOST * usual <= 1.0001e-3


def evidence(gradients: list[torch.Tensor], reference_gradient: torch.Tensor) -> Evidence:
    """Evidence about one parameter, w, replicated over dp_replicate, with the norm and loss of one process."""

    def record(rank: int, gradient: torch.Tensor) -> RankRecord:
        parts = {"initial/w": torch.zeros_like(reference_gradient), "gradient/0/w": gradient}
        place = {"dp_replicate": rank, "dp_shard": 0, "pp": 0, "cp": 0, "tp": 0}
        slices = dict.fromkeys(parts, (slice(0, len(reference_gradient)),))
        return RankRecord(
            rank,
            place,
            [4.0],
            [float(reference_gradient.norm())],
            parts,
            slices,
            {"balanced": False},
        )

    single = record(0, reference_gradient)
    expected = Expected(single, Layout(("w",), "layers", ()))
    records = [record(rank, gradient) for rank, gradient in enumerate(gradients)]
    training = dataclasses.replace(
        Config().training, global_batch_size=4, local_batch_size=2, seq_len=16
    )
    run_config = dataclasses.replace(Config(), training=training)
    return Evidence(
        run_config,
        {"dp_replicate": 2},
        expected,
        records,
        First("gradient", 0, ["w"], 5e-5),
        single,
        USUAL,
    )


def test_a_cause_that_explains_nothing_is_not_named() -> None:
    """A gradient just outside the tolerance matches every hypothesis that reproduces the gradient of one process."""
    torch.manual_seed(0)
    reference_gradient = torch.randn(1000)
    noise = torch.randn(1000)
    e = evidence([reference_gradient + 5e-5 * noise] * 2, reference_gradient)

    assert causes.clipped_otherwise(e) is None
    assert causes.scaled(e) is None
    assert not e.explains("w", lambda _: reference_gradient)
    assert not e.explains_loss(4.0, 1e-6)

    for factor, message in ((0.5, "scaled by 1/2"), (2.0, "scaled by 2"), (1.01, "scaled by 1.01")):
        off = evidence([factor * reference_gradient + 5e-5 * noise] * 2, reference_gradient)
        assert message in str(causes.scaled(off))
        assert "clipped by another factor" in str(causes.clipped_otherwise(off))
        assert off.explains("w", lambda _, factor=factor: factor * reference_gradient)


@pytest.mark.nightly(
    "ranks with small differences",
    by=f"{BY.partition('::')[0]}::test_a_cause_that_explains_nothing_is_not_named",
)
@pytest.mark.parametrize("size", [2e-5, 1e-4])
@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_a_small_difference_is_detected_without_an_arithmetic_cause(
    make_bench, monkeypatch, mesh, size
) -> None:
    from shardtrain.ops.dtensor import local_tensor

    bench = make_bench((mesh,), "--model.overrides.num_kv_heads=8", steps=1)
    bench.shake()
    from shardtrain.distributed import grad_clip

    norm_of = grad_clip.gradient_norm

    def noisy(parameters, mesh_of_run):
        parameters = list(parameters)
        norm = norm_of(parameters, mesh_of_run)
        for parameter in parameters:
            gradient = local_tensor(parameter.grad)
            noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0))
            gradient.add_(noise * gradient.norm() / max(1.0, gradient.numel() ** 0.5), alpha=size)
        return norm

    monkeypatch.setattr(grad_clip, "gradient_norm", noisy)
    row = bench.run(mesh)

    assert row.verdict == "differs", row
    assert row.cause.startswith("no simple cause fits"), row


def make(make_bench, rounds: int, meshes=MESHES, steps: int = 2):
    arguments = (
        "--model.name",
        str(AMPLIFYING),
        "--model.flavor",
        "tiny",
        "--model.overrides.rounds",
        str(rounds),
    )
    return make_bench(meshes, *arguments, steps=steps)


@pytest.mark.nightly("on meshes", by=BY)
def test_a_correct_model_that_amplifies_rounding_causes_no_alarm(make_bench) -> None:
    bench = make(make_bench, 4)
    rows = [bench.run(mesh) for mesh in MESHES]
    assert [row.verdict for row in rows] == ["same"] * len(MESHES), rows

    amplified = [row for row in rows if row.rounding]
    assert amplified, rows
    assert all(row.gradient > USUAL.gradient or row.weights > USUAL.weights for row in amplified), (
        rows
    )
    assert verify_report.table(rows).count("this model amplifies rounding") == 1


@pytest.mark.nightly("on meshes", by=BY)
def test_if_rounding_determines_all_results_verify_reports_it_and_training_warns(
    make_bench, tmp_path
) -> None:
    row = make(make_bench, 20, ("tp=2",)).run("tp=2")
    assert row.verdict == "differs", row
    assert row.cause.startswith(verify_report.BLIND), row
    arguments = [
        "--model.name",
        str(AMPLIFYING),
        "--model.flavor",
        "tiny",
        "--model.overrides.rounds",
        "20",
    ]
    run_config = config.load(None, [*arguments, "--parallelism.tensor_parallel_degree", "2"]).config
    verdict = before_training.judge(run_config)

    assert not verdict.refused, verdict
    assert not verdict.compared, verdict
    assert verify_report.BLIND in verdict.left_out[0], verdict
