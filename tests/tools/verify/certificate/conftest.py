"""Small certificates of a tiny configuration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
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
DOCUMENTS = (
    *("--training.dataset", "jsonl", "--training.dataset_path", str(FIXTURES / "documents.jsonl")),
    *("--training.seq_len", "32", "--model.overrides.num_layers", "2"),
)

ENGINE = MeshEngine(verify.comparable, verify.plan, verify.probe, verify.verify, verify.small_copy)
Check = Callable[..., DimensionResult]


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
        loaded = config.load(None, [*data, *options])
        run = small_run.prepare(
            loaded, meshes, Path(tempfile.mkdtemp(dir=tmp_path)), verify.small_copy
        )
        request = VerifyOptions(dimensions=(dimension,), meshes=meshes, quick=quick)
        results = certificate.check_all(run, request, trainer, ENGINE)
        result = next(result for result in results if result.name == dimension)
        for one in result.comparisons:
            print(f"\n{dimension}, {one.compared}: {one.verdict}: {one.first}; {one.cause}")
        return result

    return result_of
