"""Opening an artefact runs no code of it, reaches nothing outside, and ends in our own error or in a defined read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import once
import patience
import pytest

TESTS = Path(__file__).resolve().parents[1]
MAX_GROWTH_BYTES = 600 * 2**20
"""All artefacts together; the largest thing that one may make is a text of 64 Mi characters."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], subprocess.CompletedProcess[str]]:
    pytest.importorskip("datasets")
    pytest.importorskip("sentencepiece")
    pytest.importorskip("tiktoken")
    folder, done = once.made_once(tmp_path_factory, "hostile", lambda: open_all(tmp_path_factory.mktemp("hostile")))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads((folder / "results.json").read_text()), done


def open_all(folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "HF_HUB_OFFLINE": "1"}
    # -B: bytecode of a module that is imported meanwhile would be a file written
    command = [sys.executable, "-B", "-W", "ignore", str(TESTS / "hostile_child.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience.seconds(390))
    return folder, done


def test_there_are_enough_artefacts_of_every_kind(opened: Any) -> None:
    names = {(one["kind"], one["name"]) for one in opened[1]["results"]}
    kinds = {kind: sum(found == kind for found, _ in names) for kind, _ in names}
    assert len(names) >= 100 and min(kinds.values()) >= 8, kinds


def test_no_artefact_runs_code(opened: Any) -> None:
    folder, _, _ = opened
    assert not list(folder.rglob("canary")) and not Path("canary").exists()


def test_no_artefact_causes_an_event_that_opening_data_should_not(opened: Any) -> None:
    events = [(one["kind"], one["name"], event) for one in opened[1]["results"] for event in one["events"]]
    assert not events, "\n".join(map(str, events))


def test_every_artefact_is_refused_by_an_error_of_ours_or_read(opened: Any) -> None:
    assert not [one for one in opened[1]["results"] if one["end"] not in ("refused", "read")]
    refused = [one for one in opened[1]["results"] if one["end"] == "refused"]
    assert len(refused) > 100


def test_memory_stays_bounded(opened: Any) -> None:
    assert opened[1]["grown_bytes"] < MAX_GROWTH_BYTES
