"""Checkpoints of all earlier format versions load; a later format is rejected with the version that wrote it.

A new format version adds a folder to ``fixtures/golden``. Existing folders are never rewritten.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_checkpoint import checkpoints, world_of_one

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.tools import checkpoint_command
from shardtrain.utils.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "fixtures" / "golden"


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with world_of_one():
        yield


def test_every_format_version_has_a_golden_checkpoint() -> None:
    versions = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
    assert versions == [f"version-{number}" for number in range(1, manifest.VERSION + 1)]


@pytest.mark.parametrize(
    "folder", sorted(path for path in GOLDEN.iterdir() if path.is_dir()), ids=lambda p: p.name
)
def test_checkpoint_of_each_format_version_loads_bitwise(folder: Path, tmp_path: Path) -> None:
    weights = {
        "model.matrix": torch.zeros(3, 4),
        "model.half": torch.zeros(2, dtype=torch.bfloat16),
        "model.scalar": torch.tensor(0),
    }
    optimizer_state = {
        "optimizer.matrix.exp_avg": torch.zeros(3, 4),
        "optimizer.matrix.step": torch.tensor(0.0),
    }
    facts = checkpoints(tmp_path, load_only=True).load(folder, weights, optimizer_state)

    assert torch.equal(weights["model.matrix"], torch.arange(12.0).reshape(3, 4) / 8)
    assert torch.equal(weights["model.half"], torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
    assert int(weights["model.scalar"]) == 7
    assert torch.equal(optimizer_state["optimizer.matrix.exp_avg"], torch.full((3, 4), 0.25))
    assert float(optimizer_state["optimizer.matrix.step"]) == 3

    state = TrainState()
    state.load(facts["state"])
    assert state.step == 3
    assert state.samples_consumed == 24
    assert state.tokens_seen == 1536
    assert state.order_hash == 12345

    assert checkpoint_command.main(["verify", str(folder)]) == 0
    exported = str(tmp_path / "weights.safetensors")
    assert checkpoint_command.main(["weights", str(folder), exported]) == 0


@pytest.mark.parametrize("version", [manifest.VERSION + 1, 999, 0, "2", None, True])
def test_unsupported_version_is_rejected_with_its_writer_and_the_newest_supported_one(
    version: object, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint/step-3"
    shutil.copytree(GOLDEN / "version-1", folder)
    # The hash at the start of a manifest covers the rest, so a changed version needs a new hash.
    body = json.loads((folder / "manifest.json").read_bytes())
    del body["sha256"]
    signed_text = (
        "\n" + json.dumps({**body, "version": version, "created_by": "shardtrain 9.8"})[1:] + "\n"
    ).encode()
    (folder / "manifest.json").write_bytes(
        b'{"sha256": "%s",' % hashlib.sha256(signed_text).hexdigest().encode() + signed_text
    )

    with pytest.raises(CheckpointError) as caught:
        checkpoints(tmp_path, load_only=True, load_step=3).to_continue()
    assert caught.value.exit_code == 5
    assert "\n" not in str(caught.value)

    # Only a version that is a number is compared with the newest supported one.
    if isinstance(version, int) and not isinstance(version, bool):
        message = (
            f"has format version {version}, written by shardtrain 9.8; "
            f"this program reads up to {manifest.VERSION}"
        )
        assert message in str(caught.value)
