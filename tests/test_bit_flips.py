"""A flipped bit in any file of a run is detected before the file is used, or has no effect."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import storage_faults
from small_checkpoint import world_of_one
from tiers import cases
from tiny import tiny_config

from shardtrain.checkpoint.best import POINTER, read_pointer
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.data.file_hashes import NOTES, Contents, FileToHash
from shardtrain.metrics.sinks.metrics_jsonl import JsonlFile, read_records
from shardtrain.utils.errors import CheckpointError

FLIPS = int(os.environ.get("SHARDTRAIN_RUN_FLIPS", "20"))
"""Number of flipped bits per case. 167 per case are 1,503 in total."""
SEED = os.environ.get("SHARDTRAIN_CAMPAIGN_SEED", "")
"""Seed that selects the bits."""
STEPS = 4


def config_of(folder: Path, mode: str, store: str) -> Config:
    data = folder.with_name("rows.txt")
    data.write_text("a token and another " * 2000)
    return tiny_config(
        job={"dump_folder": str(folder)},
        model={
            "overrides": {
                "num_layers": 1,
                "dim": 32,
                "num_heads": 2,
                "num_kv_heads": 2,
                "ffn_dim": 32,
            }
        },
        training={
            "dataset_path": str(data),
            "seq_len": 16,
            "local_batch_size": 1,
            "global_batch_size": 4,
            "steps": STEPS,
        },
        data={"mode": "stream"},
        validation={
            "enable": True,
            "dataset": "text",
            "dataset_path": str(data),
            "freq": 2,
            "steps": 1,
        },
        checkpoint={
            "enable": True,
            "interval": 2,
            "async_mode": mode,
            "keep_best": "validation.loss",
            **({"folder": store} if store else {}),
        },
    )


def flip(path: Path, chosen: random.Random) -> tuple[bytes, str]:
    """Flip a random bit of a file. Return its original content and a description of the bit."""
    data = path.read_bytes()
    at = chosen.randrange(len(data))
    bit = chosen.randrange(8)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
    return data, f"{path.name}: bit {bit} of byte {at}"


def newest(config: Config) -> str:
    """Return the checkpoint from which a start would resume, or an empty string if it would fail."""
    checkpoints = Checkpoints(config)
    try:
        return str(checkpoints.to_continue() or "")
    except CheckpointError:
        return ""
    finally:
        checkpoints.close()


def judge(config: Config, path: Path, original: dict[str, Any]) -> str:
    """Describe the effect of a flipped bit that was not detected. Empty if there is no effect."""
    folder = Path(config.job.dump_folder)
    checkpoint = newest(config)
    if path.parent.name.startswith("step-"):
        return f"resumes from {checkpoint}" if checkpoint.endswith(str(path.parent)) else ""
    if checkpoint != original["newest"]:
        return f"resumes from {checkpoint!r}"
    if path.name.endswith(".jsonl"):
        return judge_records(path, original[path.name])
    if path.name == POINTER:
        read_pointer(path.parent)
        best = path.parent / f"step-{original['best']['step']}"
        return "" if best.is_dir() else "the best checkpoint was deleted"
    contents = Contents([FileToHash("rows.txt", config.training.dataset_path or "", "o")], folder)
    contents.check_now()
    return "" if contents.record() == original["contents"] else f"the data are {contents.record()}"


def judge_records(path: Path, written_records: list[dict[str, Any]]) -> str:
    """Describe a wrong record that a resumed run kept in a file. Empty if all records are right."""
    JsonlFile(path, STEPS).close()
    records = read_records(path)
    written = {record["step"]: record for record in written_records}
    for record in records:
        written_record = written.get(record["step"])
        if written_record is None or not written_record.items() <= record.items():
            return f"records {records}"

    # A flipped bit may lose one record, or two records if it changes a line break.
    steps = [record["step"] for record in records]
    if steps != sorted(set(steps)) or len(steps) < len(written) - 2:
        return f"rows {steps}"
    return ""


ON_DISK = [
    (1, "disabled", False),
    (1, "async", False),
    (2, "disabled", False),
    (4, "disabled", False),
    (4, "async", False),
]
IN_A_STORE = [(1, "disabled", True), (2, "async", True), (4, "disabled", True)]


@pytest.mark.parametrize(
    ("ranks", "mode", "in_store"), cases([(2, "async", False)], nightly=[*ON_DISK, *IN_A_STORE])
)
def test_no_flipped_bit_is_used(ranks: int, mode: str, in_store: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoint = tmp_path / "bucket" if in_store else folder / "checkpoint"
    store = f"bucket://{checkpoint}" if in_store else ""
    config = config_of(folder, mode, store)
    code, output = storage_faults.run(config, ranks, None)

    assert code == 0, output

    draw = random.Random(f"flips {SEED}{ranks} {mode}{store and ' store'}")
    failures = []
    contents = Contents([FileToHash("rows.txt", config.training.dataset_path or "", "o")], folder)
    contents.check_now()
    with world_of_one():
        original = {
            "newest": newest(config),
            "metrics.jsonl": read_records(folder / "metrics.jsonl"),
            "validation.jsonl": read_records(folder / "validation.jsonl"),
            "best": read_pointer(checkpoint),
            "contents": contents.record(),
        }
        # Check that the undamaged run has all results. A missing result below is then due to a flipped bit.
        assert original["newest"] == f"{store or checkpoint}/step-{STEPS}"
        assert original["best"]
        assert original["contents"]
        assert len(original["metrics.jsonl"]) == STEPS
        assert original["validation.jsonl"]

        files = [path for path in checkpoint.glob("step-*/*") if path.is_file()]
        files = sorted(path for path in files if path.stat().st_size)
        files += [folder / "metrics.jsonl", folder / "validation.jsonl"]
        files += [checkpoint / POINTER, folder / NOTES]
        assert len(files) > 4 + ranks

        for _ in range(FLIPS):
            path = draw.choice(files)
            content, bit = flip(path, draw)
            effect = judge(config, path, original)
            if effect:
                failures.append(f"{bit}: {effect}")
            path.write_bytes(content)

    assert not failures, "\n".join(failures)
