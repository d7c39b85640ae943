"""Classification: rows as they are read, one loss on every mesh, and each row evaluated once at any number of ranks."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from reviews import LENGTH, SHAPE, config, file_of, rows
from tiers import cases
from tiny import Result, assert_same_numbers, make_run, run_tiny, train_whole
from torch.nn import functional as F

from shardtrain import tasks
from shardtrain.config.schema import Config
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks.classification import Classification, Example
from shardtrain.train import validation
from shardtrain.utils.errors import DataError

DECODER = {"name": "llama3", "overrides": {key: value for key, value in SHAPE.items() if key != "dropout"}}
MESHES = {
    "dp_shard 2": (2, {}, {}),
    "dp_shard 2, accumulation": (2, {}, {"local_batch_size": 1}),
    "dp_replicate 2 x dp_shard 2": (4, {"data_parallel_replicate_degree": 2}, {}),
    "tp 2": (2, {"tensor_parallel_degree": 2, "disable_loss_parallel": True}, {"local_batch_size": 4}),
}


@functools.cache
def reference(model: str) -> Result:
    one = config(training={"local_batch_size": 8}, **({"model": DECODER} if model == "decoder" else {}))
    return run_tiny(1, one, 4)[0]


@pytest.mark.parametrize(
    ("model", "mesh"), [*(("encoder", mesh) for mesh in MESHES), ("decoder", "dp_shard 2, accumulation")]
)
def test_meshes_change_no_number_though_batches_are_padded_differently(model: str, mesh: str) -> None:
    ranks, parallelism, training = MESHES[mesh]
    sections: dict[str, Any] = {"model": DECODER} if model == "decoder" else {}
    results = run_tiny(ranks, config(parallelism=parallelism, training=training, **sections), 4)
    for result in results:
        # gradient norms up to 20: what rounding leaves in a weight, some 1e-7, is 1e-5 of the loss two updates later
        assert_same_numbers(result, reference(model), loss=3e-5)


@pytest.mark.parametrize(
    ("model", "labels", "ranks"),
    cases([("decoder", 3, 2)], nightly=[("encoder", 3, 2), ("encoder", 5, 4), ("decoder", 3, 4), ("decoder", 5, 4)]),
)
def test_tensor_parallelism_takes_any_number_of_labels(model: str, labels: int, ranks: int) -> None:
    body = {**(DECODER["overrides"] if model == "decoder" else SHAPE), "num_kv_heads": 4}  # type: ignore[dict-item]
    task = {"label_field": "1", "num_labels": labels}
    sections: dict[str, Any] = {"model": {**(DECODER if model == "decoder" else {}), "overrides": body}, "task": task}
    alone = run_tiny(1, config(training={"local_batch_size": 8}, **sections), 4)[0]
    mesh = {"tensor_parallel_degree": ranks, "disable_loss_parallel": True}
    for result in run_tiny(ranks, config(training={"local_batch_size": 8}, parallelism=mesh, **sections), 4):
        assert_same_numbers(result, alone, loss=3e-5)


def plain(rank: int, one: Config) -> float:
    """The loss of the first step's rows one by one, unpadded, with no part of the task but the reading of files."""
    run = make_run(rank, one)
    wanted = next(run.dataloader).sample_ids_B.tolist()
    texts = [rows(200)[i] for i in wanted]
    losses = []
    for text, label in texts:
        tokens = torch.tensor([[256, *text.encode(), 257]])[:, :LENGTH]
        if len(text.encode()) > LENGTH - 2:
            tokens[0, -1] = 257
        scores = run.runner.parts[0](tokens, torch.arange(tokens.size(1))[None])[0, -1]
        losses.append(F.cross_entropy(scores.double(), torch.tensor(label)).item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("model", ["encoder", "decoder"])
def test_the_loss_is_the_mean_over_rows_each_read_without_padding(model: str) -> None:
    one = config(training={"local_batch_size": 8}, **({"model": DECODER} if model == "decoder" else {}))
    assert reference(model).losses[0] == pytest.approx(run_ranks(1, plain, one)[0], abs=1e-6)


def evaluated(rank: int, sizes: tuple[int, ...]) -> list[Any]:
    found = []
    run = make_run(rank, config())
    for size in sizes:
        one = config(dev=size)
        result = validation.evaluate(run.runner, validation.open_dataloader(one, run.mesh), run.mesh)
        assert result is not None
        found.append((result.rows, dict(result.metrics), {k: v.tolist() for k, v in result.predictions.items()}))
        assert run.runner.parts[0].training
    return found


@functools.cache
def alone() -> list[Any]:
    return run_ranks(1, evaluated, (872, 7))[0]


@pytest.mark.parametrize("ranks", cases([3], nightly=[2, 4]))
def test_each_row_is_evaluated_once_and_predictions_keep_the_order_of_the_file(ranks: int) -> None:
    for result in run_ranks(ranks, evaluated, (872, 7)):
        assert result == alone()
    for size, (count, metrics, predictions) in zip((872, 7), alone(), strict=True):
        labels = [label for _, label in rows(size, 1)]
        assert count == size and predictions["label"] == labels
        right = sum(a == b for a, b in zip(predictions["prediction"], labels, strict=True))
        assert metrics["accuracy"] == right / size


def test_macro_f1_is_the_mean_of_each_labels_own() -> None:
    task = Classification(config(task={"labels": ["a", "b", "c"]}))
    rows = {"prediction": torch.tensor([0, 0, 1, 1]), "label": torch.tensor([0, 1, 1, 1])}
    found = task.metrics(rows)
    assert found == {"accuracy": 0.75, "macro_f1": pytest.approx((2 / 3 + 4 / 5) / 2)}  # c never occurs


def test_a_long_row_loses_its_end_and_keeps_eos() -> None:
    task = Classification(config(training={"seq_len": 6}))
    short, long = task.read_rows("train")[0], max(task.read_rows("train"), key=lambda row: len(row.tokens))
    assert len(long.tokens) == 6 and long.tokens[0] == 256 and long.tokens[-1] == 257
    assert list(short.tokens).count(257) == 1


def test_a_batch_is_as_wide_as_its_longest_row() -> None:
    task = Classification(config())
    batch = task.collate([Example(np.array([256, 97, 257]), 1), Example(np.array([256, 97, 98, 99, 257]), IGNORE)])
    assert batch["tokens_BT"].tolist() == [[256, 97, 257, 0, 0], [256, 97, 98, 99, 257]]
    assert batch["lengths_B"].tolist() == [3, 5] and task.num_targets(batch) == 1


def test_the_second_text_of_a_pair_follows_the_first(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"a": "x", "b": "y", "label": "yes"}) + "\n")
    one = config(
        data={"text_field": "a"},
        task={"label_field": "label", "pair_field": "b", "labels": ["no", "yes"]},
        training={"dataset": "jsonl", "dataset_path": str(path)},
    )
    (row,) = tasks.open_task(one).read_rows("train")
    assert row.tokens.tolist() == [256, ord("x"), 257, ord("y"), 257] and row.label == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fine\t7", "label '7' in column '1' is not one of 0, 1"),
        ("fine\t", "label '' in column '1' is not one of 0, 1"),
        ("fine", "has another number of fields than there are columns"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "train"
    path.write_text(f"good\t1\n{line}\nbad\t0\n")
    with pytest.raises(DataError) as error:
        Classification(config(training={"dataset_path": str(path)})).read_rows("train")
    assert f"{path}:2: {said}" in str(error.value)


@pytest.mark.parametrize(
    ("label", "number"), [(1, 1), (1.0, 1), (0.0, 0), ("1", 1), (0.5, None), (True, None), (None, None), ("1.0", None)]
)
def test_a_whole_number_is_a_label_in_any_type(tmp_path: Path, label: Any, number: int | None) -> None:
    """Integer columns that hold nulls arrive as floats."""
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"text": "good", "label": label}) + "\n")
    one = config(
        data={"text_field": "text"},
        task={"label_field": "label"},
        training={"dataset": "jsonl", "dataset_path": str(path)},
    )
    if number is not None:
        assert [row.label for row in Classification(one).read_rows("train")] == [number]
        return
    with pytest.raises(DataError, match="in column 'label' is not one of 0, 1"):
        Classification(one).read_rows("train")


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tscore\ngood\t1\n")
    one = config(data={"text_field": "sentence"}, task={"label_field": "label"}, training={"dataset_path": str(path)})
    with pytest.raises(DataError, match=r"train.tsv:2: has no column 'label'; its columns are sentence, score"):
        Classification(one).read_rows("train")


@pytest.mark.nightly(
    "three epochs",
    by="tests/tasks/test_custom_task.py::test_two_epochs_of_the_template_learn",
)
def test_three_epochs_learn_what_one_word_decides_and_keep_the_best(tmp_path: Path) -> None:
    one = config(
        job={"dump_folder": str(tmp_path)},
        training={"epochs": 6, "local_batch_size": 8, "global_batch_size": -1},
        validation={"per_epoch": 1},
        optimizer={"lr": 3e-3, "eps": 1e-8},
        checkpoint={"enable": True, "interval": 1000, "keep_best": "validation.accuracy", "keep_latest_k": 2},
    )
    run_ranks(2, train_whole, one)
    lines = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [13, 25, 38, 50, 63, 75]  # 200 rows in steps of 16: 12.5 an epoch
    best = max(lines, key=lambda line: line["accuracy"])
    assert best["accuracy"] > 0.9
    pointer = json.loads((tmp_path / "checkpoint" / "best.json").read_text())
    assert pointer == {"step": best["step"], "metric": "validation.accuracy", "mode": "max", "value": best["accuracy"]}
    assert (tmp_path / "checkpoint" / f"step-{best['step']}").is_dir()


def continued(rank: int, first: Config, second: Config) -> tuple[Any, Any]:
    whole = train_whole(rank, first)
    train_whole(rank, second, stop_after=3)
    return whole, train_whole(rank, second)


def test_a_run_continues_at_the_row_where_it_stopped(tmp_path: Path) -> None:
    training = {"steps": 6, "local_batch_size": 4}
    checkpoint = {"enable": True, "interval": 3}
    both = [
        config(
            job={"dump_folder": str(tmp_path / name)},
            training=training,
            checkpoint=checkpoint,
            validation={"enable": False},
            model={"overrides": {**SHAPE, "dropout": 0.1}},
        )
        for name in ("whole", "cut")
    ]
    for whole, rest in run_ranks(2, continued, *both):
        assert rest.sample_ids == whole.sample_ids[3:]
        assert rest.losses == whole.losses[3:] and rest.state == whole.state


def test_workers_make_the_same_batches() -> None:
    one = config()
    worker = dataclasses.replace(
        one,
        training=dataclasses.replace(
            one.training, dataloader=dataclasses.replace(one.training.dataloader, num_workers=2)
        ),
    )
    mine, theirs = (
        [next(stream) for _ in range(3)]
        for stream in (
            tasks.open_task(c).open_dataloader(batch_rank=0, num_batch_ranks=1, accumulation=1) for c in (one, worker)
        )
    )
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a["tokens_BT"], b["tokens_BT"]) and torch.equal(a.sample_ids_B, b.sample_ids_B)


def test_a_file_without_labels_is_a_test_set_alone() -> None:
    one = config(validation={"enable": True}, task={"test_dataset_path": file_of(7, 2, labels=False)})
    task = tasks.open_task(one)
    assert not task.is_labelled("test") and [row.label for row in task.read_rows("test")] == [IGNORE] * 7
