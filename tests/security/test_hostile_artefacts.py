"""Opening a hostile artefact runs no code, accesses nothing outside, and is either read or refused with an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import once
import patience
import pytest

TESTS = Path(__file__).resolve().parents[1]
MAX_GROWTH_BYTES = 600 * 2**20
"""Limit for all artefacts together. The largest allowed object is a text of 64 Mi characters."""


@pytest.fixture(scope="module")
def opened(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, Any], subprocess.CompletedProcess[str]]:
    pytest.importorskip("datasets")
    pytest.importorskip("sentencepiece")
    pytest.importorskip("tiktoken")
    folder, done = once.made_once(
        tmp_path_factory, "hostile", lambda: open_all(tmp_path_factory.mktemp("hostile"))
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "results.json").read_text()), done


def open_all(folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}",
        "HF_HUB_OFFLINE": "1",
    }
    # -B: writing the bytecode of a module would be a forbidden event
    command = [sys.executable, "-B", "-W", "ignore", str(TESTS / "hostile_child.py"), str(folder)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patience.seconds(390)
    )
    return folder, done


def test_every_kind_has_enough_artefacts(opened: Any) -> None:
    names = {(result["kind"], result["name"]) for result in opened[1]["results"]}
    counts = Counter(kind for kind, _ in names)
    assert len(names) >= 100, counts
    assert min(counts.values()) >= 8, counts


def test_no_artefact_runs_code(opened: Any) -> None:
    folder, _, _ = opened
    assert not list(folder.rglob("canary"))
    assert not Path("canary").exists()


def test_no_artefact_causes_a_forbidden_audit_event(opened: Any) -> None:
    events = []
    for result in opened[1]["results"]:
        events += [(result["kind"], result["name"], event) for event in result["events"]]
    assert not events, "\n".join(map(str, events))


def test_every_artefact_is_read_or_refused_with_a_shardtrain_error(opened: Any) -> None:
    results = opened[1]["results"]
    assert not [result for result in results if result["end"] not in ("refused", "read")]
    assert len([result for result in results if result["end"] == "refused"]) > 100


def test_memory_stays_bounded(opened: Any) -> None:
    assert opened[1]["grown_bytes"] < MAX_GROWTH_BYTES
