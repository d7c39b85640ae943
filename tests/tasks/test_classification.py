"""Classification: reading of rows, one loss on every mesh, and each row evaluated once on any number of ranks."""

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

DECODER = {
    "name": "llama3",
    "overrides": {key: value for key, value in SHAPE.items() if key != "dropout"},
}
MESHES = {
    "dp_shard 2": (2, {}, {}),
    "dp_shard 2, accumulation": (2, {}, {"local_batch_size": 1}),
    "dp_replicate 2 x dp_shard 2": (4, {"data_parallel_replicate_degree": 2}, {}),
    "tp 2": (
        2,
        {"tensor_parallel_degree": 2, "disable_loss_parallel": True},
        {"local_batch_size": 4},
    ),
}


@functools.cache
def reference(model: str) -> Result:
    run_config = config(
        training={"local_batch_size": 8}, **({"model": DECODER} if model == "decoder" else {})
    )
    return run_tiny(1, run_config, 4)[0]


@pytest.mark.parametrize(
    ("model", "mesh"),
    [*(("encoder", mesh) for mesh in MESHES), ("decoder", "dp_shard 2, accumulation")],
)
def test_meshes_change_no_number_despite_different_padding(model: str, mesh: str) -> None:
    ranks, parallelism, training = MESHES[mesh]
    sections: dict[str, Any] = {"model": DECODER} if model == "decoder" else {}
    results = run_tiny(ranks, config(parallelism=parallelism, training=training, **sections), 4)

    for result in results:
        # gradient norms reach 20: a rounding of 1e-7 in a weight becomes 1e-5 in the loss two updates later
        assert_same_numbers(result, reference(model), loss=3e-5)


@pytest.mark.parametrize(
    ("model", "labels", "ranks"),
    cases(
        [("decoder", 3, 2)],
        nightly=[("encoder", 3, 2), ("encoder", 5, 4), ("decoder", 3, 4), ("decoder", 5, 4)],
    ),
)
def test_tensor_parallelism_supports_any_number_of_labels(
    model: str, labels: int, ranks: int
) -> None:
    body = {**(DECODER["overrides"] if model == "decoder" else SHAPE), "num_kv_heads": 4}  # type: ignore[dict-item]
    task = {"label_field": "1", "num_labels": labels}
    sections: dict[str, Any] = {
        "model": {**(DECODER if model == "decoder" else {}), "overrides": body},
        "task": task,
    }
    one_process = run_tiny(1, config(training={"local_batch_size": 8}, **sections), 4)[0]
    mesh = {"tensor_parallel_degree": ranks, "disable_loss_parallel": True}

    for result in run_tiny(
        ranks, config(training={"local_batch_size": 8}, parallelism=mesh, **sections), 4
    ):
        assert_same_numbers(result, one_process, loss=3e-5)


def reference_loss(rank: int, run_config: Config) -> float:
    """Return the mean loss of the rows of the first step, which are computed one at a time without padding."""
    run = make_run(rank, run_config)
    model = run.runner.parts[0]
    all_rows = rows(200)
    losses = []
    for sample_id in next(run.dataloader).sample_ids_B.tolist():
        text, label = all_rows[sample_id]
        tokens = torch.tensor([[256, *text.encode(), 257]])[:, :LENGTH]
        tokens[0, -1] = 257  # a truncated text ends with EOS too
        positions = torch.arange(tokens.size(1))[None]
        scores = model(tokens, positions)[0, -1]
        losses.append(F.cross_entropy(scores.double(), torch.tensor(label)).item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("model", ["encoder", "decoder"])
def test_loss_is_the_mean_over_unpadded_rows(model: str) -> None:
    sections = {"model": DECODER} if model == "decoder" else {}
    run_config = config(training={"local_batch_size": 8}, **sections)
    (expected,) = run_ranks(1, reference_loss, run_config)

    # float32 sums of padded and unpadded rows
    assert reference(model).losses[0] == pytest.approx(expected, abs=1e-6)


def evaluated(rank: int, sizes: tuple[int, ...]) -> list[Any]:
    results = []
    run = make_run(rank, config())
    for size in sizes:
        run_config = config(dev=size)
        result = validation.evaluate(
            run.runner, validation.open_dataloader(run_config, run.mesh), run.mesh
        )
        assert result is not None
        results.append(
            (
                result.rows,
                dict(result.metrics),
                {k: v.tolist() for k, v in result.predictions.items()},
            )
        )
        assert run.runner.parts[0].training
    return results


@functools.cache
def one_process() -> list[Any]:
    return run_ranks(1, evaluated, (872, 7))[0]


@pytest.mark.parametrize("ranks", cases([3], nightly=[2, 4]))
def test_each_row_is_evaluated_once_and_predictions_keep_the_order_of_the_file(ranks: int) -> None:
    for result in run_ranks(ranks, evaluated, (872, 7)):
        assert result == one_process()

    for size, (count, metrics, predictions) in zip((872, 7), one_process(), strict=True):
        labels = [label for _, label in rows(size, 1)]
        assert count == size
        assert predictions["label"] == labels

        num_correct = 0
        for prediction, label in zip(predictions["prediction"], labels, strict=True):
            num_correct += prediction == label
        assert metrics["accuracy"] == num_correct / size


def test_macro_f1_is_the_mean_over_labels() -> None:
    task = Classification(config(task={"labels": ["a", "b", "c"]}))
    rows = {"prediction": torch.tensor([0, 0, 1, 1]), "label": torch.tensor([0, 1, 1, 1])}
    metrics = task.metrics(rows)

    # label c never occurs
    assert metrics == {
        "accuracy": 0.75,
        "macro_f1": pytest.approx((2 / 3 + 4 / 5) / 2),
    }


def test_long_row_is_truncated_and_keeps_eos() -> None:
    task = Classification(config(training={"seq_len": 6}))
    short = task.read_rows("train")[0]
    long = max(task.read_rows("train"), key=lambda row: len(row.tokens))

    assert len(long.tokens) == 6
    assert long.tokens[0] == 256
    assert long.tokens[-1] == 257
    assert list(short.tokens).count(257) == 1


def test_batch_is_as_wide_as_its_longest_row() -> None:
    task = Classification(config())
    batch = task.collate(
        [Example(np.array([256, 97, 257]), 1), Example(np.array([256, 97, 98, 99, 257]), IGNORE)]
    )
    assert batch["tokens_BT"].tolist() == [[256, 97, 257, 0, 0], [256, 97, 98, 99, 257]]
    assert batch["lengths_B"].tolist() == [3, 5]
    assert task.num_targets(batch) == 1


def test_second_text_of_a_pair_follows_the_first(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"a": "x", "b": "y", "label": "yes"}) + "\n")
    run_config = config(
        data={"text_field": "a"},
        task={"label_field": "label", "pair_field": "b", "labels": ["no", "yes"]},
        training={"dataset": "jsonl", "dataset_path": str(path)},
    )
    (row,) = tasks.open_task(run_config).read_rows("train")

    assert row.tokens.tolist() == [256, ord("x"), 257, ord("y"), 257]
    assert row.label == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fine\t7", "label '7' in column '1' is not one of 0, 1"),
        ("fine\t", "label '' in column '1' is not one of 0, 1"),
        ("fine", "has a different number of fields than columns"),
    ],
)
def test_invalid_row_is_reported_with_file_and_line(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "train"
    path.write_text(f"good\t1\n{line}\nbad\t0\n")
    with pytest.raises(DataError) as error:
        Classification(config(training={"dataset_path": str(path)})).read_rows("train")
    assert f"{path}:2: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("label", "number"),
    [(1, 1), (1.0, 1), (0.0, 0), ("1", 1), (0.5, None), (True, None), (None, None), ("1.0", None)],
)
def test_integer_is_a_label_in_any_type(tmp_path: Path, label: Any, number: int | None) -> None:
    """Integer columns with nulls are read as floats."""
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"text": "good", "label": label}) + "\n")
    run_config = config(
        data={"text_field": "text"},
        task={"label_field": "label"},
        training={"dataset": "jsonl", "dataset_path": str(path)},
    )
    if number is not None:
        assert [row.label for row in Classification(run_config).read_rows("train")] == [number]
        return

    with pytest.raises(DataError, match="in column 'label' is not one of 0, 1"):
        Classification(run_config).read_rows("train")


def test_missing_column_is_reported_with_the_existing_ones(tmp_path: Path) -> None:
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tscore\ngood\t1\n")
    run_config = config(
        data={"text_field": "sentence"},
        task={"label_field": "label"},
        training={"dataset_path": str(path)},
    )

    with pytest.raises(
        DataError, match=r"train.tsv:2: has no column 'label'; its columns are sentence, score"
    ):
        Classification(run_config).read_rows("train")


@pytest.mark.nightly(
    "three epochs",
    by="tests/tasks/test_custom_task.py::test_two_epochs_of_the_template_learn",
)
def test_three_epochs_learn_labels_decided_by_one_word_and_keep_the_best(tmp_path: Path) -> None:
    run_config = config(
        job={"dump_folder": str(tmp_path)},
        training={"epochs": 6, "local_batch_size": 8, "global_batch_size": -1},
        validation={"per_epoch": 1},
        optimizer={"lr": 3e-3, "eps": 1e-8},
        checkpoint={
            "enable": True,
            "interval": 1000,
            "keep_best": "validation.accuracy",
            "keep_latest_k": 2,
        },
    )
    run_ranks(2, train_whole, run_config)
    lines = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]

    # 200 rows in steps of 16: 12.5 steps per epoch
    assert [line["step"] for line in lines] == [
        13,
        25,
        38,
        50,
        63,
        75,
    ]

    best = max(lines, key=lambda line: line["accuracy"])
    assert best["accuracy"] > 0.9
    pointer = json.loads((tmp_path / "checkpoint" / "best.json").read_text())
    assert pointer == {
        "step": best["step"],
        "metric": "validation.accuracy",
        "mode": "max",
        "value": best["accuracy"],
    }
    assert (tmp_path / "checkpoint" / f"step-{best['step']}").is_dir()


def continued(rank: int, first: Config, second: Config) -> tuple[Any, Any]:
    uninterrupted = train_whole(rank, first)
    train_whole(rank, second, stop_after=3)
    return uninterrupted, train_whole(rank, second)


def test_run_resumes_at_the_row_where_it_stopped(tmp_path: Path) -> None:
    training = {"steps": 6, "local_batch_size": 4}
    checkpoint = {"enable": True, "interval": 3}

    def config_in(name: str) -> Config:
        return config(
            job={"dump_folder": str(tmp_path / name)},
            training=training,
            checkpoint=checkpoint,
            validation={"enable": False},
            model={"overrides": {**SHAPE, "dropout": 0.1}},
        )

    configs = [config_in("uninterrupted"), config_in("resumed")]

    for uninterrupted, resumed in run_ranks(2, continued, *configs):
        assert resumed.sample_ids == uninterrupted.sample_ids[3:]
        assert resumed.losses == uninterrupted.losses[3:]
        assert resumed.state == uninterrupted.state


def test_workers_prepare_the_same_batches() -> None:
    run_config = config()
    dataloader = dataclasses.replace(run_config.training.dataloader, num_workers=2)
    worker_config = dataclasses.replace(
        run_config, training=dataclasses.replace(run_config.training, dataloader=dataloader)
    )

    def three_batches(config: Config) -> list[Any]:
        stream = tasks.open_task(config).open_dataloader(
            batch_rank=0, num_batch_ranks=1, accumulation=1
        )
        return [next(stream) for _ in range(3)]

    for a, b in zip(three_batches(run_config), three_batches(worker_config), strict=True):
        assert torch.equal(a["tokens_BT"], b["tokens_BT"])
        assert torch.equal(a.sample_ids_B, b.sample_ids_B)


def test_file_without_labels_is_allowed_only_as_test_set() -> None:
    run_config = config(
        validation={"enable": True}, task={"test_dataset_path": file_of(7, 2, labels=False)}
    )
    task = tasks.open_task(run_config)
    assert not task.is_labelled("test")
    assert [row.label for row in task.read_rows("test")] == [IGNORE] * 7
