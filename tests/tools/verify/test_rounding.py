"""Rounding is told from faults: a model that amplifies it is not accused, its faults are still seen, and no cause is
named that changes nothing.

``amplifying_model.py`` doubles what its state is off by in each of ``rounds``: with 4 of them a mesh is off by more
than the usual tolerance, with 20 its numbers are decided by rounding alone.
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
from shardtrain.tools.verify.compare import MOST, ROUNDING, USUAL, Errors, Expected, First, tolerances
from shardtrain.tools.verify.evidence import Evidence
from shardtrain.tools.verify.verify_rank import RankRecord

AMPLIFYING = Path(__file__).parent / "amplifying_model.py"
MESHES = ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2", "dp_replicate=2,dp_shard=2")
BY = "tests/tools/verify/test_rounding.py::test_rounding_allows_what_it_does_to_one_process_and_a_thousandth_at_most"


def kinds(errors: Errors) -> dict[str, float]:
    return dataclasses.asdict(errors)


def test_rounding_allows_what_it_does_to_one_process_and_a_thousandth_at_most() -> None:
    none, some, all_of_it = (Errors(size, size, size, size) for size in (0.0, 4e-6, math.inf))
    quiet, amplified, chaotic = tolerances([none, some, all_of_it])
    assert quiet == USUAL
    for kind, usual in kinds(USUAL).items():
        assert kinds(amplified)[kind] == max(usual, ROUNDING * 4e-6)
        assert kinds(chaotic)[kind] == MOST * usual <= 1.0001e-3


def evidence(gradients: list[torch.Tensor], theirs: torch.Tensor) -> Evidence:
    """One parameter, w, of which the ranks of dp_replicate have copies, with the norm and loss of one process."""

    def record(rank: int, gradient: torch.Tensor) -> RankRecord:
        parts = {"initial/w": torch.zeros_like(theirs), "gradient/0/w": gradient}
        place = {"dp_replicate": rank, "dp_shard": 0, "pp": 0, "cp": 0, "tp": 0}
        whole = dict.fromkeys(parts, (slice(0, len(theirs)),))
        return RankRecord(rank, place, [4.0], [float(theirs.norm())], parts, whole, {"balanced": False})

    alone = record(0, theirs)
    expected = Expected(alone, Layout(("w",), "layers", ()))
    records = [record(rank, gradient) for rank, gradient in enumerate(gradients)]
    training = dataclasses.replace(Config().training, global_batch_size=4, local_batch_size=2, seq_len=16)
    asked = dataclasses.replace(Config(), training=training)
    return Evidence(asked, {"dp_replicate": 2}, expected, records, First("gradient", 0, ["w"], 5e-5), alone, USUAL)


def test_a_cause_that_changes_nothing_is_not_named() -> None:
    """A gradient that is off by a little more than is tolerated fits every hypothesis that gives one process's."""
    torch.manual_seed(0)
    theirs, noise = torch.randn(1000), torch.randn(1000)
    e = evidence([theirs + 5e-5 * noise] * 2, theirs)
    assert causes.clipped_otherwise(e) is None
    assert causes.scaled(e) is None
    assert not e.explains("w", lambda _: theirs)
    assert not e.explains_loss(4.0, 1e-6)
    for factor, told in ((0.5, "scaled by 1/2"), (2.0, "scaled by 2"), (1.01, "scaled by 1.01")):
        off = evidence([factor * theirs + 5e-5 * noise] * 2, theirs)
        assert told in str(causes.scaled(off)) and "clipped by another factor" in str(causes.clipped_otherwise(off))
        assert off.explains("w", lambda _, factor=factor: factor * theirs)


@pytest.mark.nightly(
    "ranks that are off by a little", by=f"{BY.partition('::')[0]}::test_a_cause_that_changes_nothing_is_not_named"
)
@pytest.mark.parametrize("size", [2e-5, 1e-4])
@pytest.mark.parametrize("mesh", ["dp_shard=2", "tp=2"])
def test_a_small_difference_is_seen_and_given_no_cause_of_arithmetic(make_bench, monkeypatch, mesh, size) -> None:
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
    assert row.verdict == "differs" and row.cause.startswith("no simple cause fits"), row


def make(make_bench, rounds: int, meshes=MESHES, steps: int = 2):
    words = ("--model.name", str(AMPLIFYING), "--model.flavor", "tiny", "--model.overrides.rounds", str(rounds))
    return make_bench(meshes, *words, steps=steps)


@pytest.mark.nightly("on meshes", by=BY)
def test_a_right_model_that_amplifies_rounding_is_not_accused(make_bench) -> None:
    bench = make(make_bench, 4)
    rows = [bench.run(mesh) for mesh in MESHES]
    assert [row.verdict for row in rows] == ["same"] * len(MESHES), rows
    told = [row for row in rows if row.rounding]
    assert told and all(row.gradient > USUAL.gradient or row.weights > USUAL.weights for row in told), rows
    assert verify_report.table(rows).count("this model amplifies rounding") == 1


@pytest.mark.nightly("on meshes", by=BY)
def test_where_rounding_decides_all_numbers_that_is_said_and_training_warns(make_bench, tmp_path) -> None:
    row = make(make_bench, 20, ("tp=2",)).run("tp=2")
    assert row.verdict == "differs" and row.cause.startswith(verify_report.BLIND), row
    words = ["--model.name", str(AMPLIFYING), "--model.flavor", "tiny", "--model.overrides.rounds", "20"]
    asked = config.load(None, [*words, "--parallelism.tensor_parallel_degree", "2"]).config
    verdict = before_training.judge(asked)
    assert not verdict.refused and not verdict.compared and verify_report.BLIND in verdict.left_out[0], verdict
