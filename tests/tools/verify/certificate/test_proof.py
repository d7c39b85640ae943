"""A dimension holds only if its numbers were compared, and could have differed from those of a fault."""

from __future__ import annotations

import math

import pytest

from shardtrain.tools.verify.certificate import comparison
from shardtrain.tools.verify.certificate.certificate_table import DimensionResult
from shardtrain.tools.verify.certificate.comparison import VariantResult
from shardtrain.tools.verify.judge_precision import _summary
from shardtrain.tools.verify.precision import verdict_of
from shardtrain.tools.verify.verify_report import MeshResult, exit_code
from shardtrain.tools.verify.verify_request import VerifyOptions


def row_of(tolerance: float) -> MeshResult:
    """Return the result of a mesh with one gradient, whose error is half of its tolerance."""
    keys = ("loss/0", "norm/0", "weights/0/a")
    errors = {**dict.fromkeys(keys, 0.0), "gradient/0/a": tolerance / 2}
    allowed = {**dict.fromkeys(keys, 1e-3), "gradient/0/a": tolerance}
    fields = _summary(errors, allowed)
    return MeshResult("dp_shard=2", "", verdict_of(fields), **fields)


@pytest.mark.parametrize(
    ("tolerance", "verdict"), [(0.4, "holds"), (0.6, "not proven"), (7.6, "not proven")]
)
def test_a_gradient_that_rounding_may_replace_proves_nothing(
    tolerance: float, verdict: str
) -> None:
    """A missing gradient has a relative error of 1, so a tolerance of that size would not detect it."""
    row = row_of(tolerance)
    request = VerifyOptions(meshes=("dp_shard=2",), precision="own")
    assert exit_code([row], request) == (0 if verdict == "holds" else 4)

    result = comparison.of_mesh(row, has_measured_tolerances=True)
    assert comparison.verdict_of([result], accepts_impossible=True) == verdict
    assert ("1 of 1 gradients" in result.first) == (verdict == "not proven")
    assert DimensionResult("precision", verdict, [result]).holds == (verdict == "holds")


@pytest.mark.parametrize("verdict", ["not proven", "not checked", "differs", "failed"])
def test_such_a_dimension_does_not_hold(verdict: str) -> None:
    assert not DimensionResult("mesh", verdict).holds


@pytest.mark.parametrize(
    ("label", "axes"),
    [("tp=1,dp_shard=2", {"dp_shard"}), ("tp=2, 1F1B", {"tp"}), ("tp=10", {"tp"})],
)
def test_an_axis_of_one_rank_is_not_compared(label: str, axes: set[str]) -> None:
    assert DimensionResult("mesh", "holds", [VariantResult(label, "same")]).compared_axes == axes


def test_a_number_that_only_the_variant_has_is_a_difference() -> None:
    from shardtrain.tools.verify.certificate.trial import NumberError

    result = comparison.judge(
        "a variant", [NumberError("gradient", 1, "extra", math.inf)], True, None
    )
    assert result is not None
    assert result.verdict == "differs"
    assert "gradient of extra in step 1" in result.first
