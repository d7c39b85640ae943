"""``checkpoint.keep_best`` and ``validation.patience``: keep the best checkpoint, end a run without improvement."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from small_checkpoint import facts, rest, weights, world_of_one
from tiny import Ended, assert_bitwise, shallow_config, text_file, train_whole

from shardtrain.checkpoint import choice, files, manifest
from shardtrain.checkpoint.best import Best, read_pointer
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Checkpoint, Config, Job, Validation
from shardtrain.tools import checkpoint_command
from shardtrain.train import shutdown
from shardtrain.train.run import Run
from shardtrain.train.validation import Evaluation, Validator
from shardtrain.utils.errors import CheckpointError, ConfigError
from shardtrain.utils.log import logger

NAN = math.nan
INF = math.inf


@pytest.fixture
def group() -> Iterator[None]:
    with world_of_one():
        yield


def config(root: Path, patience: int = 0, **options: Any) -> Config:
    checkpoint = Checkpoint(
        enable=True, **{"keep_best": "validation.loss", "keep_latest_k": 2, **options}
    )
    return Config(
        job=Job(dump_folder=str(root)),
        checkpoint=checkpoint,
        validation=Validation(patience=patience),
    )


VALUES = st.lists(st.sampled_from([NAN, INF, -INF, 1.0, 2.0, 3.0, -1.5]), max_size=12)


@settings(max_examples=200)
@given(VALUES, st.sampled_from(["min", "max"]), st.integers(0, 12), st.integers(0, 4))
def test_best_is_the_first_step_with_the_best_finite_value_also_across_a_resume(
    values: list[float], mode: str, cut: int, patience: int
) -> None:
    options = Config(
        checkpoint=Checkpoint(keep_best="validation.loss", best_mode=mode),
        validation=Validation(patience=patience),
    )  # type: ignore[arg-type]
    best = Best(options)
    for step, value in enumerate(values):
        # The run resumes at this step. Its state passes through JSON, as in a checkpoint.
        if step == cut:
            resumed = Best(options)
            resumed.load(json.loads(json.dumps(best.to_dict())), Path("/nowhere"))
            best = resumed
        best.observe(step, {"loss": value})

        finite_values = [v for v in values[: step + 1] if math.isfinite(v)]
        expected = -1
        if finite_values:
            best_value = min(finite_values) if mode == "min" else max(finite_values)
            expected = values.index(best_value)
        assert best.step == expected
        assert best.is_new(step) == (expected == step)
        assert best.without_improvement == step - expected
        assert best.exhausted == bool(patience and step - expected >= patience)


def save(manager: Checkpoints, step: int, loss: float | None = None) -> None:
    if loss is not None:
        manager.best.observe(step, {"loss": loss})
    manager.save(
        step, weights(step), rest(step), {**facts(step), "best": manager.best.to_dict()}, last=False
    )
    manager.finish()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_best_checkpoint_is_not_deleted_until_a_better_one_exists(
    tmp_path: Path, group: None, mode: Any, capsys: Any
) -> None:
    manager = Checkpoints(config(tmp_path, async_mode=mode))
    folder = tmp_path / "checkpoint"
    for step, loss, expected in (
        (1, 3.0, [1]),
        (2, 2.0, [1, 2]),
        (3, 2.5, [2, 3]),
        (4, None, [2, 3, 4]),
        (5, 2.0, [2, 4, 5]),  # a tie: the earlier step remains the best
        (6, NAN, [2, 5, 6]),
        (7, 1.5, [6, 7]),
        (8, 1.6, [7, 8]),
        (9, 1.6, [7, 8, 9]),
    ):
        save(manager, step, loss)
        assert manager.steps() == expected, step

    assert read_pointer(folder) == {
        "step": 7,
        "metric": "validation.loss",
        "mode": "min",
        "value": 1.5,
    }

    checkpoint_command.main(["ls", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert [("best: validation.loss 1.5" in line) for line in lines] == [True, False, False]

    # A resumed run continues with the best value that the last checkpoint recorded.
    manager.close()
    resumed = Checkpoints(config(tmp_path))
    saved_best = manifest.read(folder / "step-9").facts["best"]
    resumed.to_continue()
    resumed.best.load(saved_best, folder)
    for step in (10, 11, 12):
        save(resumed, step, 1.55)

    assert resumed.steps() == [7, 11, 12]

    resumed.close()


def test_stale_or_broken_pointer_is_rewritten(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = Checkpoints(config(tmp_path))
    folder = tmp_path / "checkpoint"
    save(manager, 1, 3.0)
    # The pointer to step 2 cannot be written: it stays at step 1, and both checkpoints are kept.
    with monkeypatch.context() as patch:

        def refuse(path: Path, data: bytes) -> None:
            raise OSError(28, "No space left on device", str(path))

        patch.setattr(files, "replace_durable", refuse)
        save(manager, 2, 2.0)
    assert read_pointer(folder)["step"] == 1
    assert manager.steps() == [1, 2]
    assert "cannot write" in caplog.text

    # Step 3 is not better, but its save writes the pointer to step 2 that is missing.
    save(manager, 3, 2.5)
    assert read_pointer(folder)["step"] == 2
    assert manager.steps() == [2, 3]

    # A broken pointer is read as no pointer, and the next save writes it again.
    for text in (
        "",
        "{}",
        "[]",
        '{"step": "x"}',
        "[" * 3000,
        '{"step": 2, "metric": 3, "value": 1}',
    ):
        (folder / "best.json").write_text(text)
        assert read_pointer(folder) == {}
    save(manager, 4, 2.5)

    assert read_pointer(folder)["step"] == 2
    assert not list(folder.glob("best.json.*"))

    manager.close()


def test_run_whose_pointer_could_not_be_written_ends_without_an_error(
    tmp_path: Path, group: None, caplog: pytest.LogCaptureFixture
) -> None:
    manager = Checkpoints(config(tmp_path))
    save(manager, 1, 3.0)
    run = cast("Run", SimpleNamespace(config=config(tmp_path), state=SimpleNamespace(step=1)))
    with caplog.at_level("INFO", logger=logger.name):
        shutdown.log_best_step(run, manager)
        assert "best step: 1 (validation.loss 3)" in caplog.text
        caplog.clear()
        (tmp_path / "checkpoint/best.json").unlink()
        shutdown.log_best_step(run, manager)

    assert not caplog.text

    manager.close()


@pytest.mark.parametrize(
    "state",
    [
        3,
        [],
        {},
        {"metric": "validation.loss"},
        {"step": "1"},
        {"step": True, "kept": 1, "without_improvement": 0},
    ],
)
def test_invalid_state_of_best_is_reported_and_ignored(
    state: Any, tmp_path: Path, caplog: Any
) -> None:
    best = Best(config(tmp_path))
    best.load(state, tmp_path)
    assert best.step == -1
    assert "starting without one" in caplog.text


def test_state_of_another_metric_is_ignored(tmp_path: Path, caplog: Any) -> None:
    best = Best(config(tmp_path))
    best.observe(4, {"loss": 1.0})
    other = Best(config(tmp_path, best_mode="max"))
    other.load(best.to_dict(), tmp_path)

    assert other.step == -1
    assert "this run compares validation.loss (max)" in caplog.text


def test_last_two_and_every_fourth_step_are_kept(tmp_path: Path, group: None) -> None:
    manager = Checkpoints(config(tmp_path, keep_best="", keep_every_n_steps=4))
    for step in range(1, 12):
        save(manager, step)

    assert manager.steps() == [4, 8, 10, 11]

    manager.close()


# -- entire runs -------------------------------------------------------------------------------------------------------

LOSSES = [3.0, 2.0, 2.5, NAN, 2.0, 1.0, 9.0, 9.0, 9.0, 9.0]
"""Validation losses after steps 1, 2, ...: at step 5, there was no improvement for three validations."""


def run(
    rank: int,
    root: Path,
    losses: list[float],
    patience: int = 3,
    stop_after: int | None = None,
    **options: Any,
) -> Ended:
    def scripted(self: Validator, step: int) -> Evaluation:
        self._last_step = step
        return Evaluation(losses[step - 1] + 1e-9 * rank, 1, 1)

    checkpoint = {
        "enable": True,
        "interval": 100,
        "keep_best": "validation.loss",
        "async_mode": "async",
        **options,
    }
    validation = {
        "enable": True,
        "dataset": "text",
        "dataset_path": text_file(),
        "freq": 1,
        "seq_len": 64,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Validator, "run", scripted)
        return train_whole(
            rank,
            shallow_config(
                job={"dump_folder": str(root)},
                training={"steps": 10, "local_batch_size": 4},
                checkpoint=checkpoint,
                validation={**validation, "patience": patience},
            ),
            stop_after,
        )


def runs(rank: int, root: Path) -> dict[str, Ended]:
    runs_by_name = {"once": run(rank, root / "once", LOSSES)}
    runs_by_name["again"] = run(rank, root / "once", LOSSES)
    runs_by_name["cut"] = run(rank, root / "cut", LOSSES, stop_after=4, interval=3)
    runs_by_name["resumed"] = run(rank, root / "cut", LOSSES, interval=3)
    runs_by_name["more"] = run(rank, root / "once", LOSSES, patience=5)
    return runs_by_name


def test_run_without_improvement_saves_and_ends_on_all_ranks_also_after_a_resume(
    tmp_path: Path,
) -> None:
    for answer in run_ranks(2, runs, tmp_path):
        assert all(ended.error is None for ended in answer.values()), answer
        assert answer["once"].state["step"] == 5
        assert answer["again"].state["step"] == 5 and not answer["again"].losses, (
            "the run had ended already"
        )
        assert answer["resumed"].state["step"] == 5
        assert_bitwise(answer["resumed"].weights, answer["once"].weights)
        assert answer["more"].state["step"] == 10, (
            "with more patience the run continues, and step 6 is better"
        )

    folder = tmp_path / "once/checkpoint"
    assert read_pointer(folder)["step"] == 6
    assert {path.name for path in folder.glob("step-*")} == {
        "step-1",
        "step-2",
        "step-5",
        "step-6",
        "step-10",
    }
    assert read_pointer(tmp_path / "cut/checkpoint")["step"] == 2


def seeds(rank: int, root: Path) -> dict[str, Ended]:
    """Run with a seed checkpoint: write it, start from it, and request it after training steps.

    Return the result of each run by name.
    """

    def start(name: str, **checkpoint: Any) -> Ended:
        return train_whole(
            rank,
            shallow_config(
                job={"dump_folder": str(root / name)},
                training={"steps": 2, "local_batch_size": 4},
                checkpoint={"enable": True, **checkpoint},
            ),
        )

    runs_by_name = {
        "plain": start("plain"),
        "seed": start("seed", create_seed_checkpoint=True, async_mode="async"),
    }
    runs_by_name["from seed"] = start("seed")
    runs_by_name["too late"] = start("seed", create_seed_checkpoint=True)
    return runs_by_name


def test_seed_checkpoint_is_the_state_before_the_first_step(tmp_path: Path) -> None:
    (answer,) = run_ranks(1, seeds, tmp_path)
    assert answer["seed"].error is None
    assert answer["seed"].losses == []
    assert {path.name for path in (tmp_path / "seed/checkpoint").glob("step-*")} == {
        "step-0",
        "step-2",
    }
    assert answer["from seed"].losses == answer["plain"].losses
    assert_bitwise(answer["from seed"].weights, answer["plain"].weights)
    assert isinstance(answer["too late"].error, ConfigError)
    assert "this one is at step 2" in str(answer["too late"].error)
    assert not list((tmp_path / "seed").rglob("*.tmp-*"))


def test_damaged_pointer_is_reported_before_another_step_is_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a damaged best.json, falling back to the latest step would silently use other weights."""
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "manifest.json").touch()
    (tmp_path / "best.json").touch()

    def verify(path: Any) -> Any:
        return "a manifest", ""

    with caplog.at_level("WARNING"):
        assert choice.choose(tmp_path, None, verify).path == tmp_path / "step-2"
    assert "best.json is not JSON" in caplog.text
    assert "using the latest step" in caplog.text
    with pytest.raises(CheckpointError, match=r"best\.json is not JSON"):
        choice.choose(tmp_path, "best", verify)
    (tmp_path / "best.json").write_text('{"step": 9, "metric": "loss", "value": 1.0}')
    with pytest.raises(CheckpointError, match="names step 9, which does not exist"):
        choice.choose(tmp_path, "best", verify)
