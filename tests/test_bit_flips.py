"""A bit that flips in any file that a run leaves is found before it is used, or changes nothing that is used."""

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
from shardtrain.data.file_hashes import NOTES, Contents, WholeFile
from shardtrain.metrics.sinks.metrics_jsonl import JsonlFile, read_records
from shardtrain.utils.errors import CheckpointError

FLIPS = int(os.environ.get("SHARDTRAIN_RUN_FLIPS", "20"))
"""Flipped bits of each case; 167 are 1,503 in all."""
SEED = os.environ.get("SHARDTRAIN_CAMPAIGN_SEED", "")
"""Another one flips other bits."""
STEPS = 4


def config_of(folder: Path, mode: str, store: str) -> Config:
    data = folder.with_name("rows.txt")
    data.write_text("a word and another " * 2000)
    return tiny_config(
        job={"dump_folder": str(folder)},
        model={"overrides": {"num_layers": 1, "dim": 32, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 32}},
        training={
            "dataset_path": str(data),
            "seq_len": 16,
            "local_batch_size": 1,
            "global_batch_size": 4,
            "steps": STEPS,
        },
        data={"mode": "stream"},
        validation={"enable": True, "dataset": "text", "dataset_path": str(data), "freq": 2, "steps": 1},
        checkpoint={
            "enable": True,
            "interval": 2,
            "async_mode": mode,
            "keep_best": "validation.loss",
            **({"folder": store} if store else {}),
        },
    )


def flip(path: Path, chosen: random.Random) -> tuple[bytes, str]:
    """Flip a random bit of a file; gives what it held, and which bit."""
    data = path.read_bytes()
    at, bit = chosen.randrange(len(data)), chosen.randrange(8)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
    return data, f"{path.name}: bit {bit} of byte {at}"


def newest(config: Config) -> str:
    """The checkpoint that a start would continue from; empty where it would stop."""
    kept = Checkpoints(config)
    try:
        return str(kept.to_continue() or "")
    except CheckpointError:
        return ""
    finally:
        kept.close()


def judge(config: Config, path: Path, whole: dict[str, Any]) -> str:
    """What is silently wrong after a flip in a file; empty where nothing is."""
    folder = Path(config.job.dump_folder)
    found = newest(config)
    if path.parent.name.startswith("step-"):
        return f"continues from {found}" if found.endswith(str(path.parent)) else ""
    if found != whole["newest"]:
        return f"continues from {found!r}"
    if path.name.endswith(".jsonl"):
        JsonlFile(path, STEPS).close()
        records = read_records(path)
        steps = [record["step"] for record in records]
        written = {record["step"]: record for record in whole[path.name]}
        if any(not written.get(record["step"], {"": 0}).items() <= record.items() for record in records):
            return f"records {records}"
        return "" if steps == sorted(set(steps)) and len(steps) >= len(written) - 2 else f"rows {steps}"
    if path.name == POINTER:
        read_pointer(path.parent)
        return "" if (path.parent / f"step-{whole['best']['step']}").is_dir() else "the best one is gone"
    contents = Contents([WholeFile("rows.txt", config.training.dataset_path or "", "o")], folder)
    contents.look()
    return "" if contents.record() == whole["contents"] else f"the data are {contents.record()}"


ON_DISK = [
    (1, "disabled", False),
    (1, "async", False),
    (2, "disabled", False),
    (4, "disabled", False),
    (4, "async", False),
]
IN_A_STORE = [(1, "disabled", True), (2, "async", True), (4, "disabled", True)]


@pytest.mark.parametrize(("ranks", "mode", "in_store"), cases([(2, "async", False)], nightly=[*ON_DISK, *IN_A_STORE]))
def test_no_flipped_bit_is_used(ranks: int, mode: str, in_store: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoint = tmp_path / "bucket" if in_store else folder / "checkpoint"
    store = f"bucket://{checkpoint}" if in_store else ""
    config = config_of(folder, mode, store)
    code, told = storage_faults.run(config, ranks, None)
    assert code == 0, told
    chosen, wrong = random.Random(f"flips {SEED}{ranks} {mode}{store and ' store'}"), []
    contents = Contents([WholeFile("rows.txt", config.training.dataset_path or "", "o")], folder)
    contents.look()
    with world_of_one():
        whole = {
            "newest": newest(config),
            "metrics.jsonl": read_records(folder / "metrics.jsonl"),
            "validation.jsonl": read_records(folder / "validation.jsonl"),
            "best": read_pointer(checkpoint),
            "contents": contents.record(),
        }
        assert whole["newest"] == f"{store or checkpoint}/step-{STEPS}" and whole["best"] and whole["contents"]
        assert len(whole["metrics.jsonl"]) == STEPS and whole["validation.jsonl"]
        files = sorted(path for path in checkpoint.glob("step-*/*") if path.is_file() and path.stat().st_size)
        files += [folder / "metrics.jsonl", folder / "validation.jsonl", checkpoint / POINTER, folder / NOTES]
        assert len(files) > 4 + ranks
        for _ in range(FLIPS):
            path = chosen.choice(files)
            held, what = flip(path, chosen)
            if told := judge(config, path, whole):
                wrong.append(f"{what}: {told}")
            path.write_bytes(held)
    assert not wrong, "\n".join(wrong)
