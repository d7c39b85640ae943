"""Hidden tokens, texts from texts, and labels by networks of ``transformers``: their own numbers, on every mesh."""

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
    """24 rows of different lengths: a text, what follows from it, and a label."""
    words = Path(text_file()).read_text().split()
    path = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / "rows.jsonl"
    rows = [
        {"text": " ".join(words[i : i + 1 + i % 4]), "prompt": words[i], "completion": words[-1 - i], "label": i % 3}
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
            "task": {"name": TASKS[name], "options": options, "num_labels": 3 if name == "bart_classifier" else 2},
            "training": {**training, **sections.get("training", {})},
        },
    )


FIRST = ("bert", "t5")


@pytest.mark.parametrize("name", cases(FIRST, nightly=[name for name in TASKS if name not in FIRST]))
def test_meshes_change_no_number(name: str, tmp_path: Path) -> None:
    """Over the end of an epoch, with rows padded to other lengths and other accumulation."""
    alone = run_tiny(1, config_of(name, tmp_path / "a", training={"local_batch_size": 8}), 4)[0]
    for result in run_tiny(2, config_of(name, tmp_path / "b"), 4):
        assert_same_numbers(result, alone)


def losses(rank: int, name: str, config: Config) -> tuple[float, float]:
    """The mean loss of a batch by the runner, and by ``transformers`` from what the batch says."""
    import transformers

    run, checkpoints = make_run(rank, config), Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    batch: Any = next(run.dataloader)
    mine = float(run.runner.evaluate(batch)) / batch.num_targets
    model = getattr(transformers, SHAPES[name][0]).from_pretrained(folder(name)).eval()
    total = 0.0
    for row, length in enumerate(batch["lengths_B"].tolist()):  # one by one: nothing is padded
        tokens = batch["tokens_BT"][row : row + 1, :length]
        if TASKS[name] == "sequence_to_sequence":
            targets = batch["targets_BS"][row : row + 1]
            targets = targets[:, targets[0] != IGNORE]
            mean = model(input_ids=tokens, labels=targets).loss  # it shifts them itself
            total += float(mean) * targets.numel()
        elif TASKS[name] == "classification":
            total += float(F.cross_entropy(model(input_ids=tokens).logits, batch["labels_B"][row : row + 1]))
        else:
            logits = model(input_ids=tokens).logits[0]
            total += float(F.cross_entropy(logits, batch["targets_BT"][row, :length], reduction="sum"))
    return mine, total / batch.num_targets


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_is_that_of_transformers_row_by_row(name: str, tmp_path: Path) -> None:
    folder(name)
    mine, theirs = run_ranks(1, losses, name, config_of(name, tmp_path, in_hf=True))[0]
    assert mine == pytest.approx(theirs, abs=1e-5)


def opened(name: str, output: Path, **training: Any) -> data.DataLoader:
    task = tasks.open_task(config_of(name, output, training=training))
    return task.open_dataloader(batch_rank=0, num_batch_ranks=1, accumulation=1)


def test_tokens_are_hidden_by_row_and_epoch(tmp_path: Path) -> None:
    """80 % by the mask, 10 % by any token, 10 % not at all; as many of each row as the fraction says."""

    def epochs(batch_size: int) -> list[dict[int, tuple[list[int], list[int]]]]:
        stream, found = opened("bert", tmp_path, local_batch_size=batch_size, global_batch_size=batch_size), []
        for _ in range(2):
            rows = {}
            for _ in range(24 // batch_size):
                batch: Any = next(stream)
                for i, sample in enumerate(batch.sample_ids_B.tolist()):
                    length = int(batch["lengths_B"][i])
                    columns = (batch["tokens_BT"], batch["targets_BT"])
                    rows[sample] = tuple(column[i, :length].tolist() for column in columns)
            found.append(rows)
        return found  # type: ignore[return-value]

    first, second = epochs(8)
    assert [first, second] == epochs(4) and len(first) == 24
    assert all(first[sample] != second[sample] for sample in range(24) if len(first[sample][0]) > 12)
    fates = {"mask": 0, "same": 0, "other": 0}
    for shown, targets in first.values():
        chosen = [(token, target) for token, target in zip(shown, targets, strict=True) if target != IGNORE]
        assert len(chosen) == max(1, round(0.3 * (len(shown) - 2)))
        assert targets[0] == targets[-1] == IGNORE and shown[0] == 256 and shown[-1] == 257
        for token, target in chosen:
            fates["mask" if token == 300 else "same" if token == target else "other"] += 1
    assert 0.7 < fates["mask"] / sum(fates.values()) < 0.9 and fates["same"] and fates["other"]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama", {"task": "masked_language_model"}, "contains a causal network"),
        ("bert", {"task": "language_model"}, "contains a masked network"),
        ("bert", {"options": {}}, "has no mask_token"),
        ("bert", {"options": {"mask_token_id": 512}}, "is not an id of the model, which has 512"),
        ("bart_classifier", {"overrides": {"num_labels": 4}}, "num_labels=4 must be 3, the number of labels"),
    ],
)
def test_a_network_for_another_task_is_refused(name: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder(name)
    config = config_of(name if name in TASKS else "bert", tmp_path, overrides=changes.get("overrides"))
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, overrides={**config.model.overrides, "path": str(folder(name))})
    )
    task = dataclasses.replace(config.task, name=changes.get("task", config.task.name))
    if "options" in changes:
        task = dataclasses.replace(task, options=changes["options"])
    text = run_ranks(1, refused, dataclasses.replace(config, task=task))[0]
    assert said in text


def refused(rank: int, config: Config) -> str:
    try:
        make_run(rank, config)
    except ConfigError as error:
        return str(error)
    return ""
