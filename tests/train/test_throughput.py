"""Throughput and FLOPs count all tokens that a step computes, with or without loss, but no padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny import tiny_config, train_whole

from shardtrain import models, tasks
from shardtrain.utils.checked_json import record_of

PROMPT = "hello world " * 2
COMPLETION = "!"
NUM_ROWS = 4
LENGTH = len(PROMPT) + len(COMPLETION) + 2
"""Tokens of a row: bytes, BOS and EOS."""


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
def test_equal_texts_have_equal_token_counts(
    tmp_path: Path, ranks: int, data: dict[str, Any], targets: int
) -> None:
    record = trained(tmp_path, ranks, data)
    num_tokens = record["tokens_per_second"] * record["step_seconds"]
    num_targets = record["targets_per_second"] * record["step_seconds"]

    # the last token of a row is a target only
    assert num_tokens == pytest.approx(NUM_ROWS * (LENGTH - 1), rel=1e-6)
    assert num_targets == pytest.approx(NUM_ROWS * targets, rel=1e-6)
    assert record["target_share"] == pytest.approx(targets / (LENGTH - 1))
    assert record["tps"] == pytest.approx(record["tokens_per_second"] / ranks)
    assert record["tokens_seen"] == NUM_ROWS * targets


# -- tasks on rows -----------------------------------------------------------------------------------------------------

SHORT = "ab"
LONG = "hello world " * 2
SPECIAL = 2
"""Number of BOS and EOS tokens."""
LENGTHS = {
    "classification": [len(SHORT) + SPECIAL, len(LONG) + SPECIAL],
    "masked_language_model": [len(SHORT) + SPECIAL, len(LONG) + SPECIAL],
    # The last token of an answer is only a target. A reward model reads it as input too.
    "preference": [len(answer) + 1 + 1 for answer in (SHORT, LONG) for _ in range(2)],
    "orpo": [len(answer) + 1 + 1 for answer in (SHORT, LONG) for _ in range(2)],
    "reward_model": [len(answer) + 1 + SPECIAL for answer in (SHORT, LONG) for _ in range(2)],
    "kto": [len(answer) + 1 + 1 for answer in (SHORT, LONG)],
}
"""Lengths of the sequences that the model computes with gradients, for two rows."""
OPTIONS = {
    "classification": {"num_labels": 2},
    "kto": {"group_size": 2},
    "masked_language_model": {"options": {"mask_token_id": 300, "mask_fraction": 0.3}},
}


@pytest.mark.parametrize("seq_len", [64, 512])
@pytest.mark.parametrize("task", LENGTHS)
def test_task_on_rows_counts_tokens_and_flops_of_its_rows(
    tmp_path: Path, task: str, seq_len: int
) -> None:
    """FLOPs are 6 N per token plus 12 L H head_dim l for a sequence of l tokens, regardless of ``seq_len``."""
    rows = []
    for label, text in enumerate((SHORT, LONG)):
        answers = {"prompt": "?", "completion": text, "chosen": text, "rejected": text[::-1]}
        rows.append({"text": text, "label": bool(label) if task == "kto" else label, **answers})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batch = 1 if task == "kto" else 2
    training = {
        "dataset": "jsonl", "dataset_path": str(tmp_path / "rows.jsonl"), "seq_len": seq_len, "steps": 1,
        "local_batch_size": batch, "global_batch_size": batch, "on_data_end": "repeat",
    }  # fmt: skip
    name = "encoder" if task == "masked_language_model" else "llama3"
    sizes = {
        "vocab_size": 512,
        "dim": 64,
        "num_layers": 1,
        "num_heads": 4,
        "head_dim": 16,
        "ffn_dim": 128,
    }
    config = tiny_config(
        job={"dump_folder": str(tmp_path / "run")}, training=training, metrics={"log_freq": 1},
        model={"name": name, "overrides": sizes},
        task={"name": task, **OPTIONS.get(task, {})},
    )  # fmt: skip
    run_ranks(1, train_whole, config)
    record = dict(record_of((tmp_path / "run/metrics.jsonl").read_bytes().splitlines()[0]))
    lengths = LENGTHS[task]

    assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(
        sum(lengths), rel=1e-6
    )

    module, shape = models.configured(config.model)
    model = tasks.open_task(config).adapt(models.build(module, shape), module.LAYOUT)
    N = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("embed."))
    flops = sum(6 * N * length + 12 * 1 * 4 * 16 * length**2 for length in lengths)

    assert record["tflops"] * record["step_seconds"] == pytest.approx(flops / 1e12, rel=1e-6)
