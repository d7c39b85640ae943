"""``training.last_batch``: an incomplete last step of an epoch is joined with the next epoch, smaller, or discarded."""

from __future__ import annotations

import dataclasses
import math
from itertools import chain

import pytest
import torch
from reviews import config
from tiers import cases
from tiny import assert_same_numbers, run_tiny

from shardtrain.config import Loaded, check
from shardtrain.config.schema import Config, DataLoaderOptions
from shardtrain.data.loader import RankSlice
from shardtrain.data.row_stream import RowDataLoader, RowFeed
from shardtrain.tasks import RowTask
from shardtrain.utils.errors import ConfigError


def stream(
    rows: int,
    batch: int,
    epochs: int | None,
    last: str,
    rank: int = 0,
    ranks: int = 1,
    accumulation: int = 1,
) -> RowDataLoader:
    feed = RowFeed(list(range(rows)), 1, epochs)
    share = RankSlice(batch, rank, ranks, accumulation)
    task = RowTask(Config())
    return RowDataLoader(
        feed, lambda rows_of_batch: {"rows": torch.tensor(rows_of_batch)}, task.num_targets, task.lengths, share,
        DataLoaderOptions(), 0, last,
    )  # fmt: skip


def steps(of: list[RowDataLoader]) -> list[list[int]]:
    """Return the rows of each step, in the order of ranks."""
    steps_read: list[list[int]] = []
    while True:
        step: list[int] = []
        for loader in of:
            for _ in range(loader.accumulation):
                batch = next(loader, None)
                if batch is None:
                    return steps_read
                step += [row for row in batch.sample_ids_B.tolist() if row >= 0]
                assert batch.num_targets == len(
                    [row for row in batch.sample_ids_B.tolist() if row >= 0]
                )
        steps_read.append(step)


@pytest.mark.parametrize(
    ("rows", "batch", "ranks", "accumulation"),
    [(67, 8, 1, 1), (67, 4, 2, 1), (67, 2, 2, 2), (64, 8, 1, 1), (7, 8, 1, 1)],
)
def test_separate_epochs_contain_each_row_once(
    rows: int, batch: int, ranks: int, accumulation: int
) -> None:
    size = batch * ranks * accumulation
    steps_kept = steps(
        [stream(rows, batch, 3, "keep", rank, ranks, accumulation) for rank in range(ranks)]
    )
    per_epoch = math.ceil(rows / size)

    assert len(steps_kept) == 3 * per_epoch

    epochs = [
        list(chain.from_iterable(steps_kept[e * per_epoch : (e + 1) * per_epoch])) for e in range(3)
    ]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert rows < 8 or epochs[0] != epochs[1]

    if rows >= size:
        steps_discarded = steps(
            [stream(rows, batch, 3, "discard", rank, ranks, accumulation) for rank in range(ranks)]
        )
        assert steps_discarded == [step for step in steps_kept if len(step) == size]


def test_number_of_steps_matches_the_closed_form() -> None:
    """67,349 rows in batches of 2 x 256 for 3 epochs: 132 x 3 steps with separate epochs, 395 with joined ones."""
    with_keep, with_rollover, with_discard = (
        stream(67_349, 256, 3, last, 0, 2) for last in ("keep", "rollover", "discard")
    )
    assert [loader.steps_left for loader in (with_keep, with_rollover, with_discard)] == [
        132 * 3,
        math.ceil(3 * 67_349 / 512),
        131 * 3,
    ]


@pytest.mark.parametrize("last", ["keep", "discard"])
def test_run_resumes_from_any_step_of_any_epoch(last: str) -> None:
    all_steps = steps([stream(29, 4, 3, last)])
    for done in range(len(all_steps)):
        later = stream(29, 4, 3, last)
        later.seek(4 * done)
        assert steps([later]) == all_steps[done:]

    # with another batch size, a position of the data means a different row
    assert stream(29, 4, 3, last).fingerprint != stream(29, 2, 3, last).fingerprint


def test_repeated_data_logs_a_new_epoch(caplog: pytest.LogCaptureFixture) -> None:
    endless = stream(10, 4, None, "keep")
    assert [len(next(endless).sample_ids_B) for _ in range(7)] == [4, 4, 2, 4, 4, 2, 4]
    assert [record.getMessage()[-9:] for record in caplog.records] == ["(epoch 2)"]


def test_too_few_rows_to_discard_stop_the_run() -> None:
    with pytest.raises(ConfigError, match="discards all 7 rows"):
        stream(7, 8, 1, "discard")


@pytest.mark.parametrize(
    ("last", "sizes"),
    [("keep", [3, 1, 3, 1]), ("discard", [3, 3]), ("rollover", [3, 3, 2])],
    ids=["keep", "discard", "rollover"],
)
def test_steps_of_four_rows_in_two_epochs_on_one_rank_and_on_three(
    last: str, sizes: list[int]
) -> None:
    expected = steps([stream(4, 3, 2, last)])
    assert [len(step) for step in expected] == sizes
    assert steps([stream(4, 1, 2, last, rank, 3) for rank in range(3)]) == expected


MESHES = {
    "1 rank": (1, {}),
    "2 ranks, accumulation": (2, {"local_batch_size": 2}),
    "4 ranks": (4, {"local_batch_size": 2}),
}


@pytest.mark.parametrize(
    ("mesh", "rows"),
    cases(
        [("1 rank", 20), ("2 ranks, accumulation", 20), ("4 ranks", 7)], nightly=[("4 ranks", 20)]
    ),
)
def test_smaller_last_step_is_equal_on_every_mesh(mesh: str, rows: int) -> None:
    ranks, training = MESHES[mesh]
    options = {"global_batch_size": 8, "epochs": 2, "last_batch": "keep"}
    number = 2 * math.ceil(rows / 8)
    reference = run_tiny(1, config(rows, training={"local_batch_size": 8, **options}), number)[0]

    for result in run_tiny(ranks, config(rows, training={**options, **training}), number):
        assert_same_numbers(result, reference, loss=3e-5)


def test_last_batch_is_rejected_for_documents() -> None:
    rows_config = config(training={"last_batch": "keep"})
    language = dataclasses.replace(
        rows_config, task=dataclasses.replace(rows_config.task, name="language_model")
    )
    problems = [
        str(problem) for problem in check(Loaded(language, {"training.last_batch": "file"}))
    ]

    assert any("training.last_batch" in line and "packs documents" in line for line in problems)
