"""Rows with few, many or no targets: ranks have different counts, and numbers equal those of one process."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import make_run, tiny_config
from torch import Tensor
from torch.nn import functional as F

from shardtrain.config.schema import Config
from shardtrain.data.batch import IGNORE, Batch
from shardtrain.train import trainer
from shardtrain.train import validation as evaluate

SEQ_LEN = 32
PROMPT = "ask"
COMPLETIONS = ["a" if row % 2 else "abcdefgh" for row in range(7)]
"""Including EOS, these rows have 2 and 9 targets."""


def rows_of(folder: Path) -> str:
    path = folder / "rows.jsonl"
    rows = ({"prompt": PROMPT, "completion": completion} for completion in COMPLETIONS)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(
    folder: Path, rows: int = 1, parallelism: dict[str, Any] | None = None, **training: Any
) -> Config:
    source = {"dataset": "jsonl", "dataset_path": rows_of(folder), "seq_len": SEQ_LEN}
    return tiny_config(
        training={**source, "on_data_end": "repeat", **training},
        data={"format": "prompt_completion", "packing": "padded"},
        validation={"enable": True, **source, "local_batch_size": rows},
        parallelism=parallelism or {},
    )


# -- evaluation --------------------------------------------------------------------------------------------------------


def evaluated(rank: int, run_config: Config) -> tuple[float, int]:
    run = make_run(rank, run_config)
    evaluation = evaluate.evaluate(
        run.runner,
        evaluate.open_dataloader(run_config, run.mesh),
        run.mesh,
        run_config.validation.steps,
    )
    return evaluation.loss, evaluation.tokens


def reference_evaluation(rank: int, run_config: Config) -> tuple[float, int]:
    """Return the evaluation from logits of one row at a time, without the package's data and loss code."""
    model = make_run(rank, run_config).runner.parts[0]
    total = 0.0
    count = 0
    for completion in COMPLETIONS:
        tokens = torch.tensor([256, *f"{PROMPT}{completion}".encode(), 257])
        with torch.no_grad():
            logits = model(tokens[None, :-1], torch.arange(len(tokens) - 1)[None])[0].double()
        targets = len(completion) + 1
        total += F.cross_entropy(logits[-targets:], tokens[-targets:], reduction="sum").item()
        count += targets
    return total / count, count


@pytest.mark.parametrize(
    ("ranks", "rows"),
    cases(
        [(1, 3), (2, 1), (4, 3)], nightly=[pair for pair in itertools.product((1, 2, 4), (1, 3, 8))]
    ),
)
def test_evaluation_is_the_mean_over_all_targets(ranks: int, rows: int, tmp_path: Path) -> None:
    loss, count = run_ranks(1, reference_evaluation, config(tmp_path))[0]
    for evaluation in run_ranks(ranks, evaluated, config(tmp_path, rows)):
        assert evaluation == (pytest.approx(loss, abs=1e-6), count)  # float32 rounding


# -- training ----------------------------------------------------------------------------------------------------------


def trained(rank: int, run_config: Config, masked_rows: set[int]) -> list[tuple[int, float]]:
    """Return targets and gradient norm of two steps in which ``masked_rows`` have no targets."""
    run = make_run(rank, run_config)
    stream = run.dataloader

    class Masked:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def __next__(self) -> Batch:
            batch = next(stream)
            return dataclasses.replace(batch, targets_BT=_without(batch, masked_rows))

    run.dataloader = Masked()  # type: ignore[assignment]
    outcomes = [trainer.step(run) for _ in range(2)]
    return [(outcome.global_tokens, outcome.grad_norm) for outcome in outcomes]


def _without(batch: Batch, masked_rows: set[int]) -> Tensor:
    is_masked_B = torch.tensor([row in masked_rows for row in batch.sample_ids_B.tolist()])
    return batch.targets_BT.masked_fill(is_masked_B[:, None], IGNORE)


def order_of(rank: int, run_config: Config) -> list[int]:
    return next(make_run(rank, run_config).dataloader).sample_ids_B.tolist()


@pytest.mark.parametrize(
    "parallelism",
    cases([{}], nightly=[{"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2}]),
)
def test_rank_without_targets_changes_no_number(
    parallelism: dict[str, Any], tmp_path: Path
) -> None:
    batch = {"global_batch_size": 4}
    one_process = config(tmp_path, local_batch_size=4, **batch)
    first_rank = set(run_ranks(1, order_of, one_process)[0][:2])
    expected = run_ranks(1, trained, one_process, first_rank)[0]
    divided = config(tmp_path, parallelism=parallelism, local_batch_size=2, **batch)
    ranks = 4 if parallelism else 2

    for results in run_ranks(ranks, trained, divided, first_rank):
        for (count, norm), (expected_count, expected_norm) in zip(results, expected, strict=True):
            assert count == expected_count
            assert norm == pytest.approx(expected_norm, rel=1e-6)  # float32 rounding
