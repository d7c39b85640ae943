"""A run folder written by an earlier version is verified, resumed and exported by this one.

The folder ``tests/fixtures/run_of_22_november_2026`` was written by two FSDP ranks before the package's modules
were moved, and looks as if the run had been killed after step 3 of 6.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import forked
import pytest
from safetensors.torch import load_file

from shardtrain import cli

EARLIER = Path(__file__).parents[1] / "fixtures" / "run_of_22_november_2026"
EXPORT_SHA256 = "da3290d4a5bfe42ebb8a4837176f14a9b1f4212b947e0e68b17d610d16b2811a"
"""Hash of model.safetensors as exported from step 3 by that version (float32 weights, copied unchanged)."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "earlier"
    shutil.copytree(EARLIER, copy)
    monkeypatch.chdir(copy)
    return copy


def losses(run: Path) -> dict[int, float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.mark.parametrize("ranks", [1, 2])
def test_run_of_an_earlier_version_is_resumed(folder: Path, ranks: int) -> None:
    """Resume on two ranks, the mesh that wrote the checkpoint, and on a single rank."""
    losses_text = (EARLIER / "losses.json").read_text()
    earlier = {int(step): loss for step, loss in json.loads(losses_text).items()}
    command = [sys.executable, "-m", "shardtrain", "train", "run.toml", "--nproc", str(ranks)]
    done = forked.run(command, cwd=folder, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr

    logged = losses(folder / "run")
    assert sorted(logged) == [1, 2, 3, 4, 5, 6]
    # The resumed run keeps the losses that the earlier version logged.
    for step in (1, 2, 3):
        assert logged[step] == earlier[step]
    # Processors round float32 sums differently, so later losses are only close.
    assert logged == pytest.approx(earlier, rel=1e-5)
    assert (folder / "run" / "checkpoint" / "step-6" / "manifest.json").exists()


def test_checkpoint_of_an_earlier_version_exports_to_the_same_bytes(folder: Path, capfd) -> None:
    assert cli.main(["export", "run", "--to", "out", "--check", "weights"]) == 0, (
        capfd.readouterr().err
    )

    weights = folder / "out" / "model.safetensors"
    assert load_file(weights)["model.embed_tokens.weight"].shape == (272, 16)
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == EXPORT_SHA256


def test_checkpoint_of_an_earlier_version_passes_verification(folder: Path, capfd) -> None:
    assert cli.main(["checkpoint", "verify", "run/checkpoint/step-3"]) == 0, capfd.readouterr().err
