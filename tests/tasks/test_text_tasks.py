"""Masked, sequence-to-sequence and classification models of ``transformers``: equal numbers on every mesh."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from foreign import SHAPES, config_for, folder
from ranks import run_ranks
from tiers import cases
from tiny import assert_same_numbers, make_run, run_tiny, text_file
from torch.nn import functional as F

from shardtrain import data, tasks
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.ops.targets import IGNORE
from shardtrain.train.resume import resume
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")

TASKS = {
    "bert": "masked_language_model",
    "bart": "sequence_to_sequence",
    "t5": "sequence_to_sequence",
    "bart_classifier": "classification",
}


@functools.cache
def rows_file() -> str:
    """Write 24 rows of different lengths, with a text, a target text and a label. Return the path."""
    vocabulary = Path(text_file()).read_text().split()
    path = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / "rows.jsonl"
    rows = [
        {
            "text": " ".join(vocabulary[i : i + 1 + i % 4]),
            "prompt": vocabulary[i],
            "completion": vocabulary[-1 - i],
            "label": i % 3,
        }
        for i in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_of(name: str, output: Path, in_hf: bool = False, **sections: Any) -> Config:
    options = {"mask_token_id": 300, "mask_fraction": 0.3} if name == "bert" else {}
    training = {"dataset": "jsonl", "dataset_path": rows_file(), "on_data_end": "repeat"}
    return config_for(
        name,
        output,
        in_hf,
        **{
            **sections,
            "task": {
                "name": TASKS[name],
                "options": options,
                "num_labels": 3 if name == "bart_classifier" else 2,
            },
            "training": {**training, **sections.get("training", {})},
        },
    )


FIRST = ("bert", "t5")


@pytest.mark.parametrize(
    "name", cases(FIRST, nightly=[name for name in TASKS if name not in FIRST])
)
def test_meshes_change_no_number(name: str, tmp_path: Path) -> None:
    """Covers the end of an epoch, different padding, and gradient accumulation."""
    one_batch = config_of(name, tmp_path / "a", training={"local_batch_size": 8})
    expected = run_tiny(1, one_batch, 4)[0]

    for result in run_tiny(2, config_of(name, tmp_path / "b"), 4):
        assert_same_numbers(result, expected)


def losses(rank: int, name: str, config: Config) -> tuple[float, float]:
    """Return the mean loss of a batch computed by the runner, and by ``transformers``."""
    import transformers

    run = make_run(rank, config)
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    batch: Any = next(run.dataloader)
    loss = float(run.runner.evaluate(batch)) / batch.num_targets
    model = getattr(transformers, SHAPES[name][0]).from_pretrained(folder(name)).eval()
    total = 0.0
    for row, length in enumerate(batch["lengths_B"].tolist()):  # one row at a time, without padding
        tokens = batch["tokens_BT"][row : row + 1, :length]
        if TASKS[name] == "sequence_to_sequence":
            targets = batch["targets_BS"][row : row + 1]
            targets = targets[:, targets[0] != IGNORE]
            mean = model(input_ids=tokens, labels=targets).loss  # transformers shifts the labels
            total += float(mean) * targets.numel()
        elif TASKS[name] == "classification":
            total += float(
                F.cross_entropy(model(input_ids=tokens).logits, batch["labels_B"][row : row + 1])
            )
        else:
            logits = model(input_ids=tokens).logits[0]
            total += float(
                F.cross_entropy(logits, batch["targets_BT"][row, :length], reduction="sum")
            )
    return loss, total / batch.num_targets


@pytest.mark.parametrize("name", TASKS)
def test_loss_matches_transformers_row_by_row(name: str, tmp_path: Path) -> None:
    folder(name)
    loss, reference = run_ranks(1, losses, name, config_of(name, tmp_path, in_hf=True))[0]
    assert loss == pytest.approx(reference, abs=1e-5)  # float32 sums of padded rows


def opened(name: str, output: Path, **training: Any) -> data.DataLoader:
    task = tasks.open_task(config_of(name, output, training=training))
    return task.open_dataloader(batch_rank=0, num_batch_ranks=1, accumulation=1)


def test_masked_tokens_depend_on_row_and_epoch(tmp_path: Path) -> None:
    """80 % are replaced by the mask, 10 % by a random token, and 10 % are unchanged."""

    def epochs(batch_size: int) -> list[dict[int, tuple[list[int], list[int]]]]:
        stream = opened("bert", tmp_path, local_batch_size=batch_size, global_batch_size=batch_size)
        tokens_of_epochs = []
        for _ in range(2):
            rows = {}
            for _ in range(24 // batch_size):
                batch: Any = next(stream)
                for i, sample in enumerate(batch.sample_ids_B.tolist()):
                    length = int(batch["lengths_B"][i])
                    columns = (batch["tokens_BT"], batch["targets_BT"])
                    rows[sample] = tuple(column[i, :length].tolist() for column in columns)
            tokens_of_epochs.append(rows)
        return tokens_of_epochs  # type: ignore[return-value]

    first, second = epochs(8)

    assert [first, second] == epochs(4)
    assert len(first) == 24
    assert all(
        first[sample] != second[sample] for sample in range(24) if len(first[sample][0]) > 12
    )

    fates = {"mask": 0, "same": 0, "other": 0}
    for shown, targets in first.values():
        chosen = [
            (token, target)
            for token, target in zip(shown, targets, strict=True)
            if target != IGNORE
        ]

        assert len(chosen) == max(1, round(0.3 * (len(shown) - 2)))
        assert targets[0] == targets[-1] == IGNORE
        assert shown[0] == 256
        assert shown[-1] == 257

        for token, target in chosen:
            fates["mask" if token == 300 else "same" if token == target else "other"] += 1

    assert 0.7 < fates["mask"] / sum(fates.values()) < 0.9
    assert fates["same"]
    assert fates["other"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"task": "masked_language_model"}, "contains a causal network"),
        ("bert", {"task": "language_model"}, "contains a masked network"),
        ("bert", {"options": {}}, "has no mask_token"),
        (
            "bert",
            {"options": {"mask_token_id": 512}},
            "is not a token id of the model, whose vocabulary has 512 ids",
        ),
        (
            "bart_classifier",
            {"overrides": {"num_labels": 4}},
            "num_labels=4 must be 3, the number of labels",
        ),
    ],
)
def test_model_for_another_task_is_rejected(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder(name)
    config = config_of(
        name if name in TASKS else "bert", tmp_path, overrides=changes.get("overrides")
    )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, overrides={**config.model.overrides, "path": str(folder(name))}
        ),
    )
    task = dataclasses.replace(config.task, name=changes.get("task", config.task.name))
    if "options" in changes:
        task = dataclasses.replace(task, options=changes["options"])
    text = run_ranks(1, rejection, dataclasses.replace(config, task=task))[0]

    assert message in text


def rejection(rank: int, config: Config) -> str:
    try:
        make_run(rank, config)
    except ConfigError as error:
        return str(error)
    return ""
