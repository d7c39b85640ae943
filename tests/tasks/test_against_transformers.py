"""Losses of ten steps match ``transformers.Trainer`` and peft on the same weights and rows, within 1e-4."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from against import STEPS, assert_close, config_for, folder, options, ours, pairs, theirs

from shardtrain import data

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
LORA = {"enable": True, "rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj"]}


def texts() -> list[dict[str, Any]]:
    return [{"text": row["prompt"] + row["completion"] + row["chosen"]} for row in pairs()]


def sequences(tmp_path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sequences that shardtrain reads in each step. Each ends with the target of its last token."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = data.open_dataloader(
        config_for(tmp_path), batch_rank=0, num_batch_ranks=1, accumulation=1
    )
    sequences_read = []
    for _ in range(STEPS):
        batch = next(stream)
        last_B1 = batch.targets_BT[:, -1:].clamp_min(0)
        tokens_BT = torch.cat((batch.tokens_BT, last_B1), dim=1)
        labels_BT = torch.cat((torch.full_like(last_B1, -100), batch.targets_BT), dim=1)
        for tokens_T, labels_T in zip(tokens_BT, labels_BT, strict=True):
            sequences_read.append({"input_ids": tokens_T.tolist(), "labels": labels_T.tolist()})
    return sequences_read


def trainer(model: Any, rows: list[dict[str, Any]]) -> Any:
    args = options(transformers.TrainingArguments, remove_unused_columns=False)
    return transformers.Trainer(
        model, args, train_dataset=rows, data_collator=transformers.default_data_collator
    )


def test_full_training_matches_the_trainer(tmp_path: Path) -> None:
    rows = texts()
    rows_of_steps = sequences(tmp_path, rows)
    assert_close(ours(rows), theirs(lambda model, _: trainer(model, rows_of_steps)))


def test_adapters_train_as_in_peft(tmp_path: Path) -> None:
    """Starting from nonzero adapters written by peft."""
    rows = texts()
    adapters = Path(tempfile.mkdtemp(prefix="shardtrain-tests-"))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)
    shape = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    with_adapters = peft.get_peft_model(model, shape)
    # PEFT starts these factors at zero, which would hide errors in the others.
    with torch.no_grad():
        for name, parameter in with_adapters.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    with_adapters.save_pretrained(adapters)
    rows_of_steps = sequences(tmp_path, rows)

    def make(model: Any, _: Any) -> Any:
        adapted = peft.PeftModel.from_pretrained(model, adapters, is_trainable=True)
        return trainer(adapted, rows_of_steps)

    ended = ours(rows, lora={**LORA, "initial_load_path": str(adapters)})
    assert_close(ended, theirs(make))
