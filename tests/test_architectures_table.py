"""The table of architectures by meshes has a result for each cell."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/architectures_cpu.json"


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    path = list(sys.path)
    import architectures

    sys.path[:] = path
    return architectures.columns()


def test_each_architecture_has_a_result_on_each_mesh(columns: list[str]) -> None:
    from hf_architectures import EXPERTS, installed

    cells = json.loads(RESULT.read_text())["cells"]
    assert {(cell["architecture"], cell["mesh"]) for cell in cells} >= {
        (name, mesh) for name in installed() for mesh in columns
    }

    for cell in cells:
        if cell["verdict"] == "refused":
            assert cell["option"] and cell["text"], cell
        assert (cell["verdict"] == "no experts") <= (cell["architecture"] not in EXPERTS), cell


def test_most_cells_equal_one_process_and_none_is_a_fault() -> None:
    cells = json.loads(RESULT.read_text())["cells"]
    counts = Counter(cell["verdict"] for cell in cells)
    assert counts.keys() == {"same", "refused", "no experts"}
    assert counts["same"] >= 0.8 * (counts["same"] + counts["refused"])
    assert all(
        cell["verdict"] == "same" for cell in cells if cell["mesh"] in ("one process", "dp_shard")
    )
