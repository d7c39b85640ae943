"""If the data end before the last step, all ranks stop at the same step, the run is saved, and the exit code is set."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from once import made_once
from ranks import run_ranks
from tiny import Ended, shallow_config, train_whole

from shardtrain.config.schema import Config
from shardtrain.utils.errors import ConfigError, DataError

STEPS = 10
"""Steps of a run that repeats the data, which end after four steps."""
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


def write_data(folder: Path) -> None:
    """Write the data of all runs, before ranks start: a rank would truncate the files while another one reads."""
    texts = [TEXT[start : start + 60] for start in range(0, len(TEXT), 60)]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "few.jsonl").write_text(json.dumps({"text": "x" * 100}) + "\n")


def config_of(folder: Path, data: dict[str, Any], **training: Any) -> Config:
    path = str(folder.parent / "data.jsonl")
    options = {
        "dataset": "jsonl",
        "dataset_path": path,
        "seq_len": 64,
        "local_batch_size": 4,
        "steps": 100,
    }
    return shallow_config(
        job={"dump_folder": str(folder)},
        training={**options, **training},
        data=data,
        checkpoint={"enable": True, "interval": 1000},
    )


def runs_of(rank: int, root: Path) -> dict[str, Ended]:
    kinds = {"memory": {}, "stream": {"mode": "stream", "readers": 3}}
    results = {}
    for kind, data in kinds.items():
        for policy in ("error", "stop"):
            config = config_of(root / f"{kind}-{policy}", data, on_data_end=policy)
            results[f"{kind} {policy}"] = train_whole(rank, config)
        continued = config_of(root / f"{kind}-stop", data, on_data_end="repeat", steps=STEPS)
        results[f"{kind} continues"] = train_whole(rank, continued)
        straight = config_of(root / f"{kind}-straight", data, on_data_end="repeat", steps=STEPS)
        results[f"{kind} straight"] = train_whole(rank, straight)
    # few rows: 102 tokens are two rows, and a step has eight
    path = str(root / "few.jsonl")
    training = {
        "dataset": "jsonl",
        "dataset_path": path,
        "seq_len": 64,
        "local_batch_size": 4,
        "steps": 5,
    }
    training["on_data_end"] = "stop"
    few = shallow_config(job={"dump_folder": str(root / "few")}, training=training)
    results["few"] = train_whole(rank, few)
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(
        tmp_path_factory, "data-end", lambda: make_root(tmp_path_factory.mktemp("data-end"))
    )


def make_root(root: Path) -> Path:
    write_data(root)
    for kind in ("memory", "stream"):
        for name in ("error", "stop", "straight"):
            (root / f"{kind}-{name}").mkdir()
    return root


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Ended]]:
    return made_once(tmp_path_factory, "data-end-runs", lambda: run_ranks(2, runs_of, root))


@pytest.mark.parametrize("kind", ["memory", "stream"])
def test_all_ranks_stop_at_the_same_step_and_the_last_state_is_saved(
    kind: str, root: Path, runs: list[dict[str, Ended]]
) -> None:
    # With the policy "error", data in memory are refused before the first step, so only test streams.
    for policy in ("error", "stop") if kind == "stream" else ("stop",):
        ended = [rank[f"{kind} {policy}"] for rank in runs]
        step = ended[0].state["step"]
        assert step == ended[1].state["step"] > 3
        facts = json.loads(
            (root / f"{kind}-{policy}/checkpoint/step-{step}/manifest.json").read_text()
        )["facts"]
        assert facts["state"] == ended[0].state
        for end in ended:
            if policy == "stop":
                assert end.error is None
            else:
                assert isinstance(end.error, DataError)
                assert end.error.exit_code == 3
                expected = (
                    f"the training data ended after step {step} of 100; use more data, or set training.on_data_end to "
                    '"repeat" (begin again) or "stop" (exit 0)'
                )
                assert str(end.error) == expected


def test_insufficient_data_in_memory_are_refused_before_the_first_step(
    root: Path, runs: list[dict[str, Ended]]
) -> None:
    step = runs[0]["memory stop"].state["step"]
    for rank in runs:
        end = rank["memory error"]
        assert isinstance(end.error, DataError)
        assert not end.losses
        assert str(end.error) == (
            f"training.steps=100 exceeds the {step} steps of training data; use more data, set "
            f'training.steps={step}, or set training.on_data_end to "repeat" (begin again) or "stop" (exit 0)'
        )

    assert not list((root / "memory-error/checkpoint").glob("step-*"))


@pytest.mark.parametrize("kind", ["memory", "stream"])
def test_every_row_is_read_once_before_the_end(kind: str, runs: list[dict[str, Ended]]) -> None:
    counts: Counter[int] = Counter()
    for rank in runs:
        for ids in rank[f"{kind} stop"].sample_ids:
            counts.update(i for i in ids if i >= 0)

    assert set(counts.values()) == {1}

    # 30 documents have 60 bytes, BOS and EOS. The first token of each of the
    # concatenated texts is not a target: one text in memory, and two as streams.
    tokens = runs[0][f"{kind} stop"].state["tokens_seen"]
    assert tokens == 30 * 62 - (1 if kind == "memory" else 2)


def test_ended_run_resumes_with_repeat(runs: list[dict[str, Ended]]) -> None:
    def sample_ids(name: str) -> list[int]:
        """Return the sample ids, ordered by step and then by rank."""
        result = []
        for step in zip(*(rank[name].sample_ids for rank in runs), strict=True):
            for ids in step:
                result += ids
        return result

    ended = runs[0]["memory stop"]
    continued = runs[0]["memory continues"]
    straight = runs[0]["memory straight"]

    assert continued.error is None
    assert straight.error is None
    assert len(continued.losses) == STEPS - ended.state["step"]

    # The last step before the end is not full. The resumed run starts with the first unread row.
    ids = [i for i in sample_ids("memory stop") if i >= 0] + sample_ids("memory continues")
    expected = sample_ids("memory straight")
    assert ids[: len(expected)] == expected[: len(ids)]

    assert runs[0]["stream continues"].error is None
    assert runs[0]["stream continues"].state["step"] == STEPS


def test_fewer_rows_than_ranks_are_one_step(runs: list[dict[str, Ended]]) -> None:
    few = [rank["few"] for rank in runs]
    assert sorted(i for end in few for i in end.sample_ids[0]) == [-1] * 6 + [0, 1]
    assert {end.state["step"] for end in few} == {1}
    assert {end.state["tokens_seen"] for end in few} == {101}


def other_data(rank: int, root: Path) -> list[Ended]:
    config = config_of(root / "changed", {}, steps=2)
    first = train_whole(rank, config)
    path = Path(str(config.training.dataset_path))
    changed = config_of(root / "changed", {}, steps=4)
    path.write_text(path.read_text().replace("fox", "cat"))
    return [first, train_whole(rank, changed)]


def test_changed_file_is_named_on_resume(tmp_path: Path) -> None:
    (tmp_path / "changed").mkdir()
    write_data(tmp_path)
    first, second = run_ranks(1, other_data, tmp_path)[0]

    assert first.error is None
    assert isinstance(second.error, ConfigError)
    assert second.error.exit_code == 2
    assert "data.jsonl differ); use the same" in str(second.error)


def only_prompts(rank: int, root: Path) -> list[Ended]:
    options = {
        "dataset": "jsonl",
        "dataset_path": str(root / "long.jsonl"),
        "seq_len": 64,
        "local_batch_size": 2,
    }
    return [
        train_whole(
            rank,
            shallow_config(
                job={"dump_folder": str(root / f"prompts-{steps}")},
                training={
                    **options,
                    "global_batch_size": 4,
                    "steps": steps,
                    "on_data_end": "repeat",
                },
                data={"format": "prompt_completion", "packing": "concat"},
            ),
        )
        for steps in (3, 12)
    ]


def test_run_without_target_tokens_fails(tmp_path: Path) -> None:
    row = {"prompt": "x" * 60_000, "completion": "in one of a thousand rows"}
    (tmp_path / "long.jsonl").write_text(json.dumps(row) + "\n")
    for name in ("prompts-3", "prompts-12"):
        (tmp_path / name).mkdir()

    for rank in run_ranks(2, only_prompts, tmp_path):
        for steps, ended in zip((3, 10), rank, strict=True):
            assert isinstance(ended.error, DataError)
            assert ended.state["step"] == steps
            assert f"the first {steps} steps had no target token" in str(ended.error)


def with_other_batches(rank: int, root: Path) -> list[Ended]:
    """Train two epochs: 6 steps of 4 sequences, then steps of 8. Resume the complete run once more."""
    ended = []
    for batch, stop_after in ((4, 6), (8, None), (8, None)):
        config = config_of(
            root / "batches", {}, epochs=2, local_batch_size=batch, global_batch_size=batch
        )
        accepted = ["training.global_batch_size"]
        config = replace(
            config, checkpoint=replace(config.checkpoint, interval=3, accept_changes=accepted)
        )
        ended.append(train_whole(rank, config, stop_after=stop_after))
    return ended


def test_epochs_are_complete_if_a_resume_changes_the_batch_size(tmp_path: Path) -> None:
    (tmp_path / "batches").mkdir()
    write_data(tmp_path)
    first, second, third = run_ranks(1, with_other_batches, tmp_path)[0]

    # 30 documents of 62 tokens are 1,859 targets, or 30 rows of 64. Two epochs have 60 rows. The first 6 steps read
    # 24 of them, 4 in each step, and the next 5 steps the other 36, 8 in each step but the last.
    assert (first.error, second.error, third.error) == (None, None, None)
    assert len(first.losses) == 6
    assert len(second.losses) == 5

    times_read: Counter[int] = Counter()
    for ended in (first, second):
        for ids_of_step in ended.sample_ids:
            times_read.update(sample for sample in ids_of_step if sample >= 0)
    assert times_read == Counter({sample: 2 for sample in range(30)})
    assert third.losses == []
    assert third.losses == []
    assert third.state == second.state
