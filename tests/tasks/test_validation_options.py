"""Training depends only on the options of training, not on those of validation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from against import pairs
from tiers import cases
from tiny import run_tiny, tiny_config

from shardtrain.config import load
from shardtrain.config.schema import Config, DataLoaderOptions, Task, Validation
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks.kto import KTO

SEQ_LEN = 24
"""Shorter than some rows, which are truncated."""
CHANGED: dict[str, Any] = {
    "dataset": "text", "dataset_path": "no/such/file", "split": "other", "local_batch_size": 3, "seq_len": 17,
    "freq": 3, "per_epoch": 2, "steps": 5, "patience": 4,
    "dataloader": DataLoaderOptions(num_workers=1, prefetch_factor=2),
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "language_model": {},
    "kto": {"beta": 0.3, "group_size": 3},
    "reward_model": {},
    "preference": {"beta": 0.3},
    "orpo": {"beta": 0.3},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "text": row["prompt"]}) + "\n" for row in pairs()))
    return path


def config(file: Path, task: str, **validation: Any) -> Config:
    training = {
        "dataset": "jsonl", "dataset_path": str(file), "seq_len": SEQ_LEN, "on_data_end": "repeat",
        "local_batch_size": 2, "global_batch_size": 2, "steps": 2,
    }  # fmt: skip
    run_config = tiny_config(model={"overrides": {"num_layers": 1}}, training=training)
    return dataclasses.replace(
        run_config, task=Task(name=task, **TASKS[task]), validation=Validation(**validation)
    )


def test_every_option_of_validation_is_changed() -> None:
    # use_ema requires training.ema_decay, which tests/train/test_averages_of_weights.py sets
    unchanged = {"enable", "use_ema"}
    assert set(CHANGED) == {field.name for field in dataclasses.fields(Validation)} - unchanged


@pytest.mark.parametrize("seq_len", [17, 999])
@pytest.mark.parametrize(
    "task", cases(["kto", "reward_model"], nightly=["language_model", "preference", "orpo"])
)
def test_options_of_validation_change_no_number_of_training(
    task: str, seq_len: int, file: Path
) -> None:
    expected = run_tiny(1, config(file, task), 2)[0]
    changed = run_tiny(1, config(file, task, **{**CHANGED, "seq_len": seq_len}), 2)[0]
    assert changed.losses == expected.losses
    assert changed.grad_norms == expected.grad_norms


def test_kto_exchanges_full_completions_before_truncation(file: Path) -> None:
    """As in TRL, a completion is truncated after the exchange: after a shorter prompt, more of it fits."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    by_text = {(row["prompt"] + row["completion"]): row for row in rows}
    task = KTO(config(file, "kto"))
    tokenizer = task.tokenizer
    bos = tokenizer.bos_id
    eos = tokenizer.eos_id
    num_longer = 0
    for group in task.read_rows("train"):
        originals = [by_text[tokenizer.decode(answer.side.all_tokens)] for answer in group]
        # The second half of a batch has each prompt with the completion of the row before.
        batch = task.collate([group])
        mixed = batch["tokens_BMT"][0, len(group) :]
        targets = batch["targets_BMT"][0, len(group) :]
        for number, row in enumerate(originals):
            prompt = [bos, *tokenizer.encode(row["prompt"]).tolist()]
            mismatched = [*tokenizer.encode(originals[number - 1]["completion"]).tolist(), eos]
            expected = [*prompt, *mismatched][: SEQ_LEN + 1]
            num_kept = len(expected) - 1

            assert mixed[number, :num_kept].tolist() == expected[:-1]

            learned = targets[number][targets[number] != IGNORE]
            assert learned.tolist() == expected[len(prompt) :]
            num_longer += len(prompt) + len(mismatched) > SEQ_LEN + 1

    assert num_longer, "no completion is truncated"


def test_validation_length_defaults_to_that_of_training() -> None:
    assert load(None, ["--training.seq_len", "40"]).config.validation.seq_len == 40
    assert (
        load(
            None, ["--training.seq_len", "40", "--validation.seq_len", "8"]
        ).config.validation.seq_len
        == 8
    )


def test_answer_of_a_reward_model_has_at_most_seq_len_tokens(file: Path) -> None:
    from shardtrain.tasks.reward_model import RewardModel

    task = RewardModel(config(file, "reward_model"))
    batch = task.collate(list(task.read_rows("train")))

    assert int(batch["lengths_B2"].max()) == SEQ_LEN
    assert torch.equal(batch["lengths_B2"], batch["lengths_B2"].clamp(max=SEQ_LEN))
