"""Small certificates of a tiny configuration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from shardtrain import config
from shardtrain.tools import verify
from shardtrain.tools.verify import certificate
from shardtrain.tools.verify.certificate import small_run
from shardtrain.tools.verify.certificate.certificate_table import DimensionResult
from shardtrain.tools.verify.certificate.mesh_engine import MeshEngine
from shardtrain.tools.verify.verify_request import VerifyOptions
from shardtrain.train import trainer

FIXTURES = Path(__file__).parents[3] / "fixtures" / "search"
SHORT_DOCUMENTS = (
    *("--training.dataset", "jsonl", "--training.dataset_path", str(FIXTURES / "documents.jsonl")),
    *("--training.seq_len", "32"),
)
DOCUMENTS = (*SHORT_DOCUMENTS, "--model.overrides.num_layers", "2")

ENGINE = MeshEngine(verify.comparable, verify.plan, verify.probe, verify.verify, verify.small_copy)
Check = Callable[..., DimensionResult]


def results_of(
    options: Sequence[str],
    folder: Path,
    dimensions: tuple[str, ...] = (),
    meshes: tuple[str, ...] = (),
    quick: bool = True,
) -> list[DimensionResult]:
    """Check the dimensions of a configuration, all of them by default, and print each comparison."""
    loaded = config.load(None, list(options))
    run = small_run.prepare(loaded, meshes, Path(tempfile.mkdtemp(dir=folder)), verify.small_copy)
    request = VerifyOptions(dimensions=dimensions, meshes=meshes, quick=quick)
    results = certificate.check_all(run, request, trainer, ENGINE)
    for result in results:
        for one in result.comparisons:
            print(f"\n{result.name}, {one.compared}: {one.verdict}: {one.first}; {one.cause}")
    return results


def verdicts_of(options: Sequence[str], folder: Path) -> dict[str, str]:
    """Return the verdict of each dimension of a configuration."""
    return {result.name: result.verdict for result in results_of(options, folder)}


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Return a function that checks one dimension of a configuration, given by its options."""

    def result_of(
        dimension: str,
        *options: str,
        meshes: tuple[str, ...] = (),
        quick: bool = True,
        data: tuple[str, ...] = DOCUMENTS,
    ) -> DimensionResult:
        results = results_of((*data, *options), tmp_path, (dimension,), meshes, quick)
        return next(result for result in results if result.name == dimension)

    return result_of
