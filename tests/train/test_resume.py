"""A resumed run equals an uninterrupted one: bitwise on the same mesh, and up to rounding on another.

Three launches serve all tests here: two ranks that write, two new ranks that resume, like a real restart, and one
process that does both. They make the runs of the selected cases.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from histories import computed_metrics
from once import made_once
from ranks import run_ranks
from tiers import cases, chosen
from tiny import Ended, assert_bitwise, tiny_config, train_whole

from shardtrain.config.schema import Config

STEPS = 6
SAVED = 3
KILLED = 5
"""Steps of the run, of the checkpoint, and when the first start ends: two steps are lost and repeated."""

MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tp": {"tensor_parallel_degree": 2},
    "pp": {"pipeline_parallel_degree": 2},
    "zero": {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True},
}
SAME = cases(["fsdp", "one"], nightly=["tp", "pp"])
CHANGES = cases(
    ["tp to fsdp", "fsdp to pp", "fsdp to one"],
    nightly=["pp to fsdp", "zero to fsdp", "fsdp to tp"],
)
SAME_LOSS = 1e-6
"""The loss is about 6 and float32 has 7 digits. After loading on another mesh, only the order of sums differs."""
SAME_LATER = 1e-5
"""Tolerance after three updates on another mesh; see test_same_numbers.py."""


def config(folder: Path, mesh: str | None, **training: Any) -> Config:
    return tiny_config(
        job={"dump_folder": str(folder)},
        parallelism=MESHES[mesh] if mesh else {},
        # All runs have a global batch of 8: two ranks with 4 rows each, or ranks that read the same 8 rows.
        training={
            "steps": STEPS,
            "local_batch_size": 8 if mesh in ("tp", "pp") else 4,
            "global_batch_size": -1,
            **training,
        },
        checkpoint={"enable": True, "interval": SAVED},
    )


def copy_run(folder: Path, name: str, rank: int) -> Path:
    """Copy the folder of the killed run, as the start of another one. Rank 0 copies."""
    import torch.distributed as dist

    new = folder.with_name(name)
    if rank == 0:
        shutil.copytree(folder, new)
    dist.barrier()
    return new


def write(
    rank: int, root: Path, same: list[str], changes: list[tuple[str, str]]
) -> dict[str, Ended]:
    """Uninterrupted runs of the meshes ``same``, and killed runs of all meshes that are resumed later."""
    ended = {}
    for mesh in same:
        ended[f"{mesh} straight"] = train_whole(rank, config(root / f"{mesh}-straight", mesh))
    saved_meshes = [saved for saved, _ in changes]
    for mesh in dict.fromkeys([*same, *saved_meshes]):
        ended[f"{mesh} killed"] = train_whole(rank, config(root / mesh, mesh), stop_after=KILLED)
    return ended


def resume_killed_runs(
    rank: int, root: Path, same: list[str], changes: list[tuple[str, str]]
) -> dict[str, Ended]:
    ended = {}
    for saved, now in changes:
        folder = copy_run(root / saved, f"{saved}-to-{now}", rank)
        ended[f"{saved} to {now}"] = train_whole(rank, config(folder, now))
    for mesh in same:
        ended[f"{mesh} resumed"] = train_whole(rank, config(root / mesh, mesh))
    return ended


def one_process(rank: int, root: Path) -> dict[str, Ended]:
    """Results of one process, some of which start from checkpoints of other meshes."""
    one = {"local_batch_size": 8}
    folder = copy_run(root / "fsdp", "fsdp-to-one", rank)

    # Two runs that start from the weights of a checkpoint, and read other parts of it or not.
    anew = config(root / "anew", None, **one)
    anew = dataclasses.replace(
        anew,
        checkpoint=dataclasses.replace(
            anew.checkpoint,
            initial_load_path=str(root / "fsdp/checkpoint/step-3"),
            exclude_from_loading=["optimizer"],
        ),
    )
    excluding = dataclasses.replace(
        anew.checkpoint, exclude_from_loading=["lr_scheduler", "dataloader"]
    )
    excluding = dataclasses.replace(excluding, initial_load_model_only=False)
    excluding = dataclasses.replace(
        anew,
        checkpoint=excluding,
        job=dataclasses.replace(anew.job, dump_folder=str(root / "excluding")),
    )

    return {
        "fsdp to one": train_whole(rank, config(folder, None, **one)),
        "one straight": train_whole(rank, config(root / "one-straight", None, **one)),
        "one killed": train_whole(rank, config(root / "one", None, **one), stop_after=KILLED),
        "one resumed": train_whole(rank, config(root / "one", None, **one)),
        "anew": train_whole(rank, anew, stop_after=1),
        "excluding": train_whole(rank, excluding, stop_after=4),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "resume", lambda: tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def runs(
    root: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Ended]]:
    """Runs by name, for each rank."""
    same = [mesh for mesh in MESHES if mesh == "fsdp" or mesh in chosen(request, "mesh")]
    changes = [
        (saved, now)
        for saved, _, now in map(str.split, sorted(chosen(request, "change")))
        if now != "one"
    ]
    return made_once(tmp_path_factory, "resume-runs", lambda: make_runs(root, same, changes))


def make_runs(
    root: Path, same: list[str], changes: list[tuple[str, str]]
) -> list[dict[str, Ended]]:
    written = run_ranks(2, write, root, same, changes)
    one = run_ranks(1, one_process, root)[0]
    continued = run_ranks(2, resume_killed_runs, root, same, changes)
    return [{**first, **second, **one} for first, second in zip(written, continued, strict=True)]


@pytest.mark.parametrize("mesh", SAME)
def test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(
    runs: list[dict[str, Ended]], mesh: str
) -> None:
    for rank in runs:
        straight, killed, resumed = (
            rank[f"{mesh} {name}"] for name in ("straight", "killed", "resumed")
        )
        for field in ("losses", "grad_norms", "lrs", "sample_ids"):
            uninterrupted = getattr(straight, field)
            assert len(uninterrupted) == STEPS
            assert getattr(killed, field) == uninterrupted[:KILLED], field
            assert getattr(resumed, field) == uninterrupted[SAVED:], field

        assert straight.state == resumed.state
        assert_bitwise(resumed.weights, straight.weights)
        assert_bitwise(resumed.optimizer, straight.optimizer)


def test_final_state_counts_steps_samples_and_tokens(runs: list[dict[str, Ended]]) -> None:
    expected = {
        "step": 6,
        "updates": 6,
        "samples_consumed": 48,
        "tokens_seen": 48 * 64,
        "nonfinite_skips": 0,
    }
    hashes = set()
    for name in ("fsdp straight", "fsdp resumed", "fsdp to one"):
        assert runs[0][name].state == runs[1][name].state
        hashes.add(runs[0][name].state["order_hash"])
        assert {**runs[0][name].state, "order_hash": 0} == {**expected, "order_hash": 0}

    assert len(hashes) == 1, "data must be equal on any mesh and after any resume"
    assert hashes != {0}, "data must be equal on any mesh and after any resume"


@pytest.mark.parametrize("mesh", SAME)
def test_metrics_on_disk_have_each_step_once(
    root: Path, runs: list[dict[str, Ended]], mesh: str
) -> None:
    history = computed_metrics(root / mesh)
    assert history == computed_metrics(root / f"{mesh}-straight")
    assert [record["step"] for record in history] == list(range(1, STEPS + 1))
    assert [record["loss"] for record in history] == runs[0][f"{mesh} straight"].losses


@pytest.mark.parametrize("change", CHANGES)
def test_run_resumes_on_another_mesh(runs: list[dict[str, Ended]], change: str) -> None:
    straight = runs[0]["fsdp straight"]
    for rank in runs:
        resumed = rank[change]
        assert resumed.error is None
        assert len(resumed.losses) == STEPS - SAVED
        assert abs(resumed.losses[0] - straight.losses[SAVED]) <= SAME_LOSS
        for resumed_loss, expected_loss in zip(
            resumed.losses, straight.losses[SAVED:], strict=True
        ):
            assert abs(resumed_loss - expected_loss) <= SAME_LATER
        assert resumed.lrs == straight.lrs[SAVED:]


@pytest.mark.parametrize("change", CHANGES)
def test_every_sample_is_read_once_in_the_same_order_on_any_mesh(
    runs: list[dict[str, Ended]], change: str
) -> None:
    # ranks of tensor or pipeline parallelism read the same rows, and a single process reads all rows
    ranks_read_the_same = change.endswith(("tp", "pp", "one"))
    for step in range(STEPS):
        expected = runs[0]["one straight"].sample_ids[step]
        first, second = (rank["fsdp straight"].sample_ids[step] for rank in runs)
        assert first + second == expected

        if step >= SAVED:
            first, second = (rank[change].sample_ids[step - SAVED] for rank in runs)
            if ranks_read_the_same:
                assert first == second == expected
            else:
                assert first + second == expected


def test_checkpoints_exist_for_the_expected_steps(root: Path, runs: list[dict[str, Ended]]) -> None:
    for name in {
        "fsdp",
        "one",
        "fsdp-straight",
        "fsdp-to-one",
        *(path.name for path in root.glob("*-to-*")),
    }:
        assert sorted(path.name for path in (root / name / "checkpoint").iterdir()) == [
            "step-3",
            "step-6",
        ]
    for name in ("tp", "zero"):
        if f"{name} killed" in runs[0] and f"{name} resumed" not in runs[0]:
            assert [path.name for path in (root / name / "checkpoint").glob("step-*")] == ["step-3"]


def test_new_run_starts_from_only_the_weights_of_a_checkpoint(
    root: Path, runs: list[dict[str, Ended]]
) -> None:
    anew = runs[0]["anew"]
    straight = runs[0]["one straight"]
    assert anew.error is None
    assert anew.state["step"] == 1
    assert anew.state["samples_consumed"] == 8
    assert anew.lrs == straight.lrs[:1]
    assert anew.sample_ids == straight.sample_ids[:1]
    # The loaded weights were trained for three steps, so the first loss is lower.
    assert anew.losses[0] < straight.losses[0] - 0.1
    assert all(
        float(count) == 1 for name, count in anew.optimizer.items() if name.endswith(".step")
    )


def test_schedule_and_data_can_restart(runs: list[dict[str, Ended]]) -> None:
    excluding = runs[0]["excluding"]
    straight = runs[0]["one straight"]
    assert excluding.error is None
    assert excluding.state["step"] == 4
    assert excluding.state["updates"] == 1
    assert excluding.lrs == straight.lrs[:1]
    assert excluding.sample_ids == straight.sample_ids[:1]
    assert all(
        float(count) == 4 for name, count in excluding.optimizer.items() if name.endswith(".step")
    )
