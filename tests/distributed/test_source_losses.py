"""``metrics.per_source_loss``: the loss of each source on every mesh, and their sum, the loss of the step."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from tiers import cases
from tiny import make_run, text_file, tiny_config, train_whole

from shardtrain.config import Loaded
from shardtrain.config.rules import check
from shardtrain.config.schema import Config
from shardtrain.config.schema.data_options import DataSource
from shardtrain.ops import cross_entropy
from shardtrain.ops.cross_entropy import cross_entropy_sum
from shardtrain.ops.grouped_loss import GroupedLoss
from shardtrain.ops.targets import IGNORE

STEPS = 3
NAMES = ("letters", "words")
SMOOTHING = {"label_smoothing": 0.1}
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, {}),
    "fsdp with accumulation": (2, {"data_parallel_shard_degree": 2}, {"local_batch_size": 2}),
    "tp": (2, {"tensor_parallel_degree": 2}, {}),
    "tp without loss parallelism": (
        2,
        {"tensor_parallel_degree": 2, "disable_loss_parallel": True},
        {},
    ),
    "pp": (2, {"pipeline_parallel_degree": 2}, {}),
    "cp": (2, {"context_parallel_degree": 2}, {}),
    "cp tp": (4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}, {}),
}


def sources(folder: Path) -> dict[str, DataSource]:
    """Two sources with different texts, whose losses differ after a few steps. One has short documents."""
    letters = folder / "letters.jsonl"
    drawn = random.Random(1)
    rows = []
    for _ in range(300):
        text = "".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(5, 90)))
        rows.append(json.dumps({"text": text}))
    letters.write_text("\n".join(rows))
    return {
        "letters": DataSource(dataset="jsonl", dataset_path=str(letters), weight=0.3),
        "words": DataSource(dataset="text", dataset_path=text_file(), weight=0.7),
    }


def mixed(folder: Path, mesh: str = "one", log_freq: int = 1, **data: Any) -> Config:
    _, parallelism, training = MESHES[mesh]
    files = folder.parent / "files"
    files.mkdir(exist_ok=True)
    return tiny_config(
        job={"dump_folder": str(folder)},
        parallelism=parallelism,
        data={"sources": sources(files), **data},
        training={
            "dataset": "python_stdlib",
            "dataset_path": None,
            "steps": STEPS,
            "local_batch_size": 8,
            **training,
        },
        metrics={"log_freq": log_freq, "per_source_loss": True},
    )


def records(config: Config, ranks: int = 1) -> list[dict[str, float]]:
    """Train, and return the lines of metrics.jsonl."""
    for ended in run_ranks(ranks, train_whole, config):
        assert ended.error is None, ended.error
    folder = Path(config.job.dump_folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_parts_add_up(record: dict[str, float], targets: int | None = None) -> None:
    losses = [record[f"loss_of/{name}"] * record[f"targets_of/{name}"] for name in NAMES]
    counts = [record[f"targets_of/{name}"] for name in NAMES]
    assert sum(losses) / sum(counts) == pytest.approx(record["loss"], abs=1e-6)
    if targets is not None:
        assert sum(counts) == targets


def by_hand(rank: int, config: Config) -> dict[str, float]:
    """Return the losses of the sources in the first step, without the package's loss code."""
    run = make_run(rank, config)
    sums = dict.fromkeys(NAMES, 0.0)
    counts = dict.fromkeys(NAMES, 0)
    batch = next(run.dataloader)
    documents = {} if batch.documents_BT is None else {"documents_BT": batch.documents_BT}
    with torch.no_grad():
        logits_BTV = run.runner.parts[0](batch.tokens_BT, batch.positions_BT, **documents)
    for row, sample in enumerate(batch.sample_ids_B.tolist()):
        name = NAMES[sample >> 48]
        targets_T = batch.targets_BT[row]
        loss = F.cross_entropy(
            logits_BTV[row].double(), targets_T, ignore_index=IGNORE, reduction="sum"
        )
        sums[name] += loss.item()
        counts[name] += int((targets_T != IGNORE).sum())
    return {name: sums[name] / counts[name] for name in NAMES}


@functools.cache
def in_one_process(folder: Path) -> list[dict[str, float]]:
    return records(mixed(folder / "one"))


@pytest.mark.parametrize(
    "data", [{}, {"packing": "first_fit"}], ids=["concatenated rows", "packed documents"]
)
def test_losses_are_those_of_the_rows_of_each_source(data: dict[str, Any], tmp_path: Path) -> None:
    config = mixed(tmp_path / "run", **data)
    (expected,) = run_ranks(1, by_hand, config)
    first = records(config)[0]

    for name in NAMES:
        assert first[f"loss_of/{name}"] == pytest.approx(expected[name], abs=1e-5)
    assert_parts_add_up(first)
    assert abs(first["loss_of/letters"] - first["loss_of/words"]) > 1e-3


DEFAULT = ["tp", "pp", "cp"]


@pytest.mark.parametrize(
    "mesh",
    cases(DEFAULT, nightly=[name for name in MESHES if name not in (*DEFAULT, "one")]),
)
def test_meshes_change_no_loss_of_a_source(
    mesh: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = in_one_process(tmp_path_factory.getbasetemp())
    steps = records(mixed(tmp_path / "run", mesh), MESHES[mesh][0])
    for record, expected in zip(steps, alone, strict=True):
        assert_parts_add_up(record)
        for name in NAMES:
            assert record[f"targets_of/{name}"] == expected[f"targets_of/{name}"]
            assert record[f"loss_of/{name}"] == pytest.approx(expected[f"loss_of/{name}"], abs=1e-5)


def test_record_of_several_steps_has_means_over_them(tmp_path: Path) -> None:
    single = records(mixed(tmp_path / "single"))
    # the first step is always logged
    _, last = records(mixed(tmp_path / "window", log_freq=STEPS))
    for name in NAMES:
        num_targets = 0
        loss_sum = 0.0
        for record in single[1:]:
            count = record[f"targets_of/{name}"]
            num_targets += count
            loss_sum += count * record[f"loss_of/{name}"]
        assert last[f"targets_of/{name}"] == num_targets
        assert last[f"loss_of/{name}"] == pytest.approx(loss_sum / num_targets)


def test_option_changes_no_other_number(tmp_path: Path) -> None:
    on = mixed(tmp_path / "on")
    metrics = dataclasses.replace(on.metrics, per_source_loss=False)
    job = dataclasses.replace(on.job, dump_folder=str(tmp_path / "off"))
    with_losses = records(on)
    without = records(dataclasses.replace(on, metrics=metrics, job=job))

    for record, other in zip(with_losses, without, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert record["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-6)
        assert not any(name.startswith("loss_of/") for name in other)


def test_regularized_losses_add_up_to_the_training_loss(tmp_path: Path) -> None:
    config = mixed(tmp_path / "run", "tp")
    training = dataclasses.replace(config.training, **SMOOTHING)
    for record in records(dataclasses.replace(config, training=training), 2):
        assert_parts_add_up(record)


def test_validation_does_not_count(tmp_path: Path) -> None:
    config = mixed(tmp_path / "run")
    validation = dataclasses.replace(
        config.validation,
        enable=True,
        freq=1,
        dataset="text",
        dataset_path=text_file(),
        seq_len=64,
        steps=1,
        local_batch_size=2,
    )
    steps = records(dataclasses.replace(config, validation=validation))

    for record in steps:
        assert_parts_add_up(record, targets=8 * 64)


@pytest.mark.parametrize("numel", [7 * 5, 1 << 24], ids=["chunks of five tokens", "one chunk"])
def test_chunks_are_divided_where_the_group_changes(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_NUMEL", numel)
    torch.manual_seed(0)
    logits = torch.randn(4, 6, 7, dtype=torch.float32, requires_grad=True)
    targets = torch.randint(0, 7, (4, 6))
    targets[1, 2] = IGNORE
    sums = torch.zeros(2, dtype=torch.float64)
    # rows 0 and 3 have group 1, rows 1 and 2 group 0
    grouped = GroupedLoss([(6, 1), (18, 0), (24, 1)], sums)
    loss = cross_entropy_sum(logits, targets, grouped=grouped)
    loss.backward()

    plain = logits.detach().clone().requires_grad_()
    losses_N = F.cross_entropy(
        plain.flatten(0, 1).double(), targets.flatten(), ignore_index=IGNORE, reduction="none"
    )
    losses_N.sum().backward()
    expected_of_group_0 = losses_N[6:18].sum().detach()
    expected_of_group_1 = (losses_N[:6].sum() + losses_N[18:].sum()).detach()
    expected = torch.stack([expected_of_group_0, expected_of_group_1])

    # float32 rounding of sums of 12 losses
    torch.testing.assert_close(sums, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits.grad, plain.grad, atol=1e-6, rtol=0)
    assert loss.item() == pytest.approx(expected.sum().item(), abs=1e-4)


def test_one_source_and_other_tasks_are_refused(tmp_path: Path) -> None:
    several = mixed(tmp_path / "run")
    one_source = {"words": several.data.sources["words"]}
    single = dataclasses.replace(
        several, data=dataclasses.replace(several.data, sources=one_source)
    )
    distilled = dataclasses.replace(
        several, task=dataclasses.replace(several.task, name="distillation")
    )
    for config, message in (
        (single, "metrics.per_source_loss=true requires several [data.sources]"),
        (distilled, 'is not supported with task.name = "distillation"'),
    ):
        problems = [str(problem) for problem in check(Loaded(config))]
        assert any(message in problem and "\n" not in problem for problem in problems), problems
