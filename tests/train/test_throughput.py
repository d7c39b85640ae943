"""Throughput counts the tokens that a step computes, whatever their share of targets, and no filler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny import tiny_config, train_whole

from shardtrain.utils.checked_json import record_of

PROMPT, COMPLETION = "hello world " * 2, "!"
NUM_ROWS = 4
LENGTH = len(PROMPT) + len(COMPLETION) + 2
"""Tokens of a row: bytes, bos and eos."""


def trained(folder: Path, ranks: int, data: dict[str, Any], seq_len: int = 64) -> dict[str, Any]:
    rows = [{"text": PROMPT + COMPLETION, "prompt": PROMPT, "completion": COMPLETION}] * NUM_ROWS
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {
        "dataset": "jsonl", "dataset_path": str(folder / "rows.jsonl"), "seq_len": seq_len, "steps": 1,
        "local_batch_size": NUM_ROWS // ranks, "global_batch_size": NUM_ROWS, "on_data_end": "repeat",
    }  # fmt: skip
    config = tiny_config(
        job={"dump_folder": str(folder / "run")}, training=training, data={"packing": "none", **data},
        metrics={"log_freq": 1}, model={"overrides": {"num_layers": 1}},
    )  # fmt: skip
    run_ranks(ranks, train_whole, config)
    return dict(record_of((folder / "run/metrics.jsonl").read_bytes().splitlines()[0]))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("data", "targets"),
    [({"format": "text"}, LENGTH - 1), ({"format": "prompt_completion"}, len(COMPLETION) + 1)],
    ids=["text", "prompt_completion"],
)
def test_the_same_texts_have_the_same_number_of_tokens(
    tmp_path: Path, ranks: int, data: dict[str, Any], targets: int
) -> None:
    record = trained(tmp_path, ranks, data)
    seconds = record["step_seconds"]
    computed = record["tokens_per_second"] * seconds
    # the last token of a row is only a target
    assert computed == pytest.approx(NUM_ROWS * (LENGTH - 1), rel=1e-6)
    assert record["targets_per_second"] * seconds == pytest.approx(NUM_ROWS * targets, rel=1e-6)
    assert record["target_share"] == pytest.approx(targets / (LENGTH - 1))
    assert record["tps"] == pytest.approx(record["tokens_per_second"] / ranks)
    assert record["tokens_seen"] == NUM_ROWS * targets
