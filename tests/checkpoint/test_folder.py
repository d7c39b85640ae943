"""Folder of checkpoints: listing, choice of the one to resume, retention, and rejected checkpoints (one process)."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from shardtrain.checkpoint import files, manifest, retention, weights_file
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.storage import place
from shardtrain.config.schema import Checkpoint, Config, Job
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.tools import checkpoint_command
from shardtrain.utils.errors import CheckpointError, StorageError

FACTS: dict[str, Any] = {"state": {"step": 3}, "data_fingerprint": "ab"}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Process group with a single rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpoints(root: Path, **options: Any) -> Checkpoints:
    return Checkpoints(
        Config(job=Job(dump_folder=str(root)), checkpoint=Checkpoint(enable=True, **options))
    )


def weights(value: float = 0.0, rows: int = 6) -> dict[str, Tensor]:
    return {
        "model.a": torch.full((rows, 4), float(value)),
        "model.b": torch.full((3,), value + 0.1),
    }


def rest(value: float = 0.0) -> dict[str, Tensor]:
    return {
        "optimizer.a.exp_avg": torch.full((6, 4), float(value)),
        "optimizer.a.step": torch.tensor(float(value)),
    }


def save(root: Path, *steps: int, last: bool = False, **options: Any) -> Checkpoints:
    manager = checkpoints(root, **options)
    for step in steps:
        manager.save(step, weights(step), rest(step), FACTS, last)
    return manager


def folder(root: Path) -> list[str]:
    """Names in the checkpoint folder, without the lease and without renamed checkpoints, which a thread removes."""
    names = (path.name for path in (root / "checkpoint").iterdir())
    return sorted(name for name in names if name != "lease.json" and ".trash-" not in name)


def refusal(
    root: Path, into: dict[str, Tensor] | None = None, other: dict[str, Tensor] | None = None
) -> str:
    """Check that loading step 3 raises a CheckpointError, and return its one-line message."""
    with pytest.raises(CheckpointError) as caught:
        checkpoints(root).load(
            root / "checkpoint/step-3", into or weights(), rest() if other is None else other
        )
    assert caught.value.exit_code == 5
    assert "\n" not in str(caught.value)
    assert "step-3" in str(caught.value)
    return str(caught.value)


def test_tensors_are_loaded_in_place(tmp_path: Path) -> None:
    save(tmp_path, 3)
    model_weights = weights()
    optimizer_state = rest()
    facts = checkpoints(tmp_path).load(
        tmp_path / "checkpoint/step-3", model_weights, optimizer_state
    )

    assert facts == {**FACTS, "weights_only": False, "replicas_compared": 0}
    for loaded, expected in ((model_weights, weights(3)), (optimizer_state, rest(3))):
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert folder(tmp_path) == ["step-3"]


def test_optimizer_state_can_be_omitted(tmp_path: Path) -> None:
    save(tmp_path, 3)
    into = weights()
    checkpoints(tmp_path).load(tmp_path / "checkpoint/step-3", into, {})
    assert torch.equal(into["model.a"], weights(3)["model.a"])


def test_save_is_due_at_intervals_after_the_last_step_and_optionally_the_first() -> None:
    def due(**options: Any) -> list[int]:
        manager = Checkpoints(Config(checkpoint=Checkpoint(**options)))
        return [step for step in range(1, 11) if manager.is_due(step, 10)]

    assert due(enable=True, interval=4) == [4, 8, 10]
    assert due(enable=True, interval=500) == [10]
    assert due(enable=True, interval=5, enable_first_step_checkpoint=True) == [1, 5, 10]
    assert due(enable=True, interval=1, load_only=True) == []
    assert due(enable=False, interval=1) == []


def test_fresh_run_has_no_checkpoint_to_continue_from(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).to_continue() is None
    (tmp_path / "checkpoint").mkdir(exist_ok=True)
    assert checkpoints(tmp_path).to_continue() is None


def test_highest_step_is_continued(tmp_path: Path) -> None:
    manager = save(tmp_path, 5, 20, 100, keep_latest_k=0)
    assert manager.steps() == [5, 20, 100]
    assert manager.to_continue() == tmp_path / "checkpoint/step-100"


def test_incomplete_checkpoints_are_ignored(tmp_path: Path) -> None:
    manager = save(tmp_path, 20)
    for name in ("step-30", "step-40.tmp", "step-50", "step-x", "step-60-old"):
        (tmp_path / "checkpoint" / name).mkdir()
    (tmp_path / "checkpoint/step-50/rank-00000.bin").write_bytes(b"a part")
    (tmp_path / "checkpoint/step-40.tmp/manifest.json").touch()
    (tmp_path / "checkpoint/step-70").write_text("a file")

    assert manager.steps() == [20]
    assert manager.to_continue() == tmp_path / "checkpoint/step-20"


def test_disabled_checkpointing_finds_nothing(tmp_path: Path) -> None:
    save(tmp_path, 3)
    off = Checkpoints(Config(job=Job(dump_folder=str(tmp_path))))
    assert off.to_continue() is None


def test_step_can_be_chosen_and_a_missing_one_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, 0, 5, 10)
    assert checkpoints(tmp_path, load_step=5).to_continue() == tmp_path / "checkpoint/step-5"
    assert checkpoints(tmp_path, load_step=0).to_continue() == tmp_path / "checkpoint/step-0"
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.load_step=7: .* no such step; use one of 0, 5, 10"
    ):
        checkpoints(tmp_path, load_step=7).to_continue()
    with pytest.raises(CheckpointError, match="has no such step, nor any other"):
        checkpoints(tmp_path / "empty", load_step=7).to_continue()


def test_resuming_an_earlier_step_logs_that_later_ones_remain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 5, 10, 15)
    with caplog.at_level(logging.WARNING, logger="shardtrain"):
        checkpoints(tmp_path, load_step=5).to_continue()

    assert "steps 10, 15 stay in" in caplog.text

    caplog.clear()
    checkpoints(tmp_path, load_step=15).to_continue()
    assert "stay in" not in caplog.text


def test_newest_k_checkpoints_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep_latest_k=2)
    assert folder(tmp_path) == ["step-4", "step-5"]
    save(tmp_path / "all", *range(1, 14), keep_latest_k=0)
    assert len(folder(tmp_path / "all")) == 13


def test_run_resumed_from_an_earlier_step_keeps_its_new_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 9, 10, keep_latest_k=0).close()
    manager = checkpoints(tmp_path, load_step=2, keep_latest_k=2)
    manager.to_continue()
    for step in (3, 4):
        manager.save(step, weights(step), rest(step), FACTS, False)

    assert folder(tmp_path) == ["step-10", "step-3", "step-4", "step-9"]


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    manager = save(tmp_path, 3)
    manager.save(3, weights(8), rest(8), FACTS, False)
    into = weights()
    checkpoints(tmp_path).load(tmp_path / "checkpoint/step-3", into, rest())

    assert torch.equal(into["model.a"], weights(8)["model.a"])
    assert folder(tmp_path) == ["step-3"]


def entries(root: Path) -> list[str]:
    """Names in the checkpoint folder, without the random suffix of entries that were moved aside."""
    return sorted(
        name.partition(".aside")[0] + ".aside" * (".aside" in name) for name in folder(root)
    )


def without_origin(path: Path) -> None:
    """Rewrite the manifest as an earlier version did, without the id of the run."""
    stored = manifest.read(path)
    (path / "manifest.json").write_bytes(dataclasses.replace(stored, origin="").to_bytes())


def continue_run(root: Path, *steps: int, **options: Any) -> None:
    """Resume the run of a folder and save these steps."""
    manager = checkpoints(root, **options)
    manager.to_continue()
    for step in steps:
        manager.save(step, weights(step), rest(step), FACTS, False)
    manager.close()


def test_retention_deletes_only_checkpoints_of_its_run(tmp_path: Path) -> None:
    """Checkpoints of another run that were copied into the folder are neither deleted nor counted."""
    save(tmp_path / "other", 1, 4, 8, keep_latest_k=0).close()
    save(tmp_path / "run", 2, 3, keep_latest_k=0).close()
    for step in (1, 4):
        shutil.copytree(
            tmp_path / f"other/checkpoint/step-{step}", tmp_path / f"run/checkpoint/step-{step}"
        )
    # Steps 5, 6 and 7 remove all of this run's checkpoints but the last two.
    continue_run(tmp_path / "run", 5, 6, 7, keep_latest_k=2, load_step=3)

    assert folder(tmp_path / "run") == ["step-1", "step-4", "step-6", "step-7"]

    continue_run(tmp_path / "run", 8, keep_latest_k=2)
    assert folder(tmp_path / "run") == ["step-1", "step-4", "step-7", "step-8"], (
        "the id of the run survives restarts"
    )


@pytest.mark.parametrize("how", ["renamed", "copied"])
def test_run_with_a_renamed_or_copied_folder_deletes_its_own_checkpoints(
    tmp_path: Path, how: str
) -> None:
    save(tmp_path / "old", 1, 2, 3, keep_latest_k=0).close()
    (shutil.move if how == "renamed" else shutil.copytree)(tmp_path / "old", tmp_path / "new")
    continue_run(tmp_path / "new", 4, keep_latest_k=2)

    assert folder(tmp_path / "new") == ["step-3", "step-4"]
    assert how == "renamed" or folder(tmp_path / "old") == ["step-1", "step-2", "step-3"]


def test_run_of_an_earlier_version_deletes_its_checkpoints_and_none_with_a_run_id(
    tmp_path: Path,
) -> None:
    save(tmp_path / "other", 1).close()
    save(tmp_path / "run", 2, 3, 4, keep_latest_k=0).close()
    for step in (2, 3, 4):
        without_origin(tmp_path / f"run/checkpoint/step-{step}")
    shutil.copytree(tmp_path / "other/checkpoint/step-1", tmp_path / "run/checkpoint/step-1")
    continue_run(tmp_path / "run", 5, keep_latest_k=2)
    continue_run(tmp_path / "run", 6, keep_latest_k=2)

    assert folder(tmp_path / "run") == ["step-1", "step-5", "step-6"]


def test_retention_in_an_object_store_deletes_only_checkpoints_of_its_run(tmp_path: Path) -> None:
    for step, origin in ((1, "other"), (2, "mine"), (3, "mine"), (4, "other"), (5, "mine")):
        save(tmp_path, step).close()
        path = tmp_path / f"checkpoint/step-{step}"
        (path / "manifest.json").write_bytes(
            dataclasses.replace(manifest.read(path), origin=origin).to_bytes()
        )
    stored = place(f"file://{tmp_path}/checkpoint")
    retention.delete_old(
        stored, saved=5, keep=2, forever=0, spare=-1, origin="mine", removals=retention.Removals()
    )

    assert retention.steps(stored) == [1, 3, 4, 5]


def a_file(path: Path) -> str:
    path.write_text("no checkpoint")
    return "is not a folder"


def a_link_to_nothing(path: Path) -> str:
    path.symlink_to(path.with_name("gone"))
    return f"is a link to {path.with_name('gone')}, which is not a checkpoint"


def a_link_to_a_file(path: Path) -> str:
    path.with_name("notes").write_text("no checkpoint")
    path.symlink_to(path.with_name("notes"))
    return f"is a link to {path.with_name('notes')}, which is not a checkpoint"


def a_link_to_a_folder(path: Path) -> str:
    path.with_name("elsewhere").mkdir()
    path.symlink_to(path.with_name("elsewhere"))
    return f"is a link to {path.with_name('elsewhere')}, which is not a checkpoint"


def an_empty_folder(path: Path) -> str:
    path.mkdir()
    return "has no manifest.json"


ENTRIES = [a_file, a_link_to_nothing, a_link_to_a_file, a_link_to_a_folder, an_empty_folder]


@pytest.mark.parametrize("entry", ENTRIES)
def test_stray_entry_is_logged_at_start_and_moved_aside_by_a_save_of_its_step(
    entry: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 9).close()
    path = tmp_path / "checkpoint/step-12"
    description = entry(path)

    assert checkpoint_command.main(["ls", str(tmp_path)]) == 0
    assert f"step-12  cannot be used: checkpoint {path}" in capsys.readouterr().out

    manager = checkpoints(tmp_path)
    assert manager.to_continue() == tmp_path / "checkpoint/step-9"
    assert f"step-12 {description}: skipped, continuing from step-9" in caplog.text

    # A save of step 12 needs the name, so it renames the stray entry first.
    manager.save(12, weights(12), rest(12), FACTS, False)
    manager.close()
    assert checkpoints(tmp_path).to_continue() == path
    assert not path.is_symlink()
    assert [name for name in entries(tmp_path) if name.startswith("step-12")] == [
        "step-12",
        "step-12.aside",
    ]
    assert "does not belong to this run: renamed to step-12.aside-" in caplog.text


@pytest.mark.parametrize("entry", ENTRIES)
def test_run_with_only_a_stray_entry_does_not_start_from_scratch(
    entry: Any, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint").mkdir()
    description = entry(tmp_path / "checkpoint/step-12")
    with pytest.raises(
        CheckpointError, match=f"no checkpoint in .* can be used: step-12 {description}; fix it"
    ):
        checkpoints(tmp_path).to_continue()


def test_checkpoint_of_another_run_is_moved_aside_by_a_save_of_its_step(tmp_path: Path) -> None:
    save(tmp_path / "other", 3).close()
    save(tmp_path / "run", 2).close()
    shutil.copytree(tmp_path / "other/checkpoint/step-3", tmp_path / "run/checkpoint/step-3")
    continue_run(tmp_path / "run", 3, load_step=2)

    assert entries(tmp_path / "run") == ["step-2", "step-3", "step-3.aside"]


def test_leftovers_of_an_interrupted_save_are_ignored_and_deleted_after_an_hour(
    tmp_path: Path,
) -> None:
    partial = tmp_path / "checkpoint/step-3.tmp-0123"
    partial.mkdir(parents=True)
    (partial / "rank-00007.bin").write_bytes(b"of eight ranks")
    save(tmp_path, 3)

    assert sorted(p.name for p in (tmp_path / "checkpoint/step-3").iterdir()) == [
        "manifest.json",
        "rank-00000.bin",
    ]
    assert folder(tmp_path) == ["step-3", "step-3.tmp-0123"], "another run may still be writing it"

    # A restart within the hour does not delete the draft either.
    checkpoints(tmp_path).to_continue()
    assert folder(tmp_path) == ["step-3", "step-3.tmp-0123"]

    for path in (partial, *partial.iterdir()):
        os.utime(path, (path.stat().st_mtime - 3700,) * 2)
    checkpoints(tmp_path).to_continue()

    assert folder(tmp_path) == ["step-3"], "after an hour nobody is writing it"


def test_failed_save_keeps_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = save(tmp_path, 3)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_durable", full_disk)
    with pytest.raises(
        StorageError, match=r"^cannot write checkpoint.* No space left on device .*; free space"
    ) as caught:
        manager.save(6, weights(), rest(), FACTS, False)
    assert caught.value.exit_code == 8
    assert manager.steps() == [3]


def test_unwritable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot write checkpoint .*job\.dump_folder"):
        save(tmp_path, 3)


# -- weights only ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_last_save_can_contain_only_weights_in_a_safetensors_file(
    tmp_path: Path, dtype: str
) -> None:
    manager = save(tmp_path, 1, last_save_model_only=True, export_dtype=dtype)
    manager.save(3, weights(1 / 3), rest(3), FACTS, True)
    weights_file.write(tmp_path / "checkpoint/step-3", tmp_path / "weights.safetensors")
    opened = load_file(tmp_path / "weights.safetensors")
    expected = {}
    for name, tensor in weights(1 / 3).items():
        expected[name.removeprefix("model.")] = tensor.to(getattr(torch, dtype))

    assert opened.keys() == expected.keys()
    for name, tensor in expected.items():
        assert opened[name].dtype == tensor.dtype
        assert torch.equal(opened[name], tensor)

    torch.save(opened, tmp_path / "weights.pt")  # the conversion to .pt in docs/checkpoints.md
    assert torch.load(tmp_path / "weights.pt", weights_only=True).keys() == expected.keys()

    assert manifest.read(tmp_path / "checkpoint/step-3").facts["weights_only"] is True
    # steps before the last are full checkpoints
    assert manifest.read(tmp_path / "checkpoint/step-1").facts["weights_only"] is False


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_only_checkpoint_initializes_a_run_of_any_dtype(tmp_path: Path, dtype: str) -> None:
    save(tmp_path, 3, last=True, last_save_model_only=True, export_dtype=dtype)
    into = weights()
    checkpoints(tmp_path).load(tmp_path / "checkpoint/step-3", into, {})

    assert into["model.b"].dtype == torch.float32
    assert torch.equal(into["model.b"], weights(3)["model.b"].to(getattr(torch, dtype)).float())


def test_weights_only_checkpoint_cannot_be_resumed(tmp_path: Path) -> None:
    save(tmp_path, 3, last=True, last_save_model_only=True)
    message = refusal(tmp_path)
    assert "contains only weights" in message
    assert "checkpoint.initial_load_path" in message


# -- rejected --------------------------------------------------------------------------------------------------


def test_missing_folder_is_rejected(tmp_path: Path) -> None:
    assert "does not exist; use an existing checkpoint" in refusal(tmp_path)


def test_missing_manifest_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "checkpoint/step-3/manifest.json").unlink()
    assert "manifest.json cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"state": 3}', "\xff"])
def test_invalid_manifest_is_rejected(tmp_path: Path, text: str) -> None:
    save(tmp_path, 3)
    (tmp_path / "checkpoint/step-3/manifest.json").write_bytes(text.encode("latin-1"))
    assert "manifest.json" in refusal(tmp_path)


def test_missing_shard_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "checkpoint/step-3/rank-00000.bin").unlink()
    assert "rank-00000.bin cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("name", ["rank-00000.bin", "manifest.json"])
def test_truncated_file_is_rejected(tmp_path: Path, name: str, share: float) -> None:
    save(tmp_path, 3)
    path = tmp_path / "checkpoint/step-3" / name
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert name in refusal(tmp_path)


def test_different_shape_is_rejected_with_the_name_of_the_tensor(tmp_path: Path) -> None:
    save(tmp_path, 3)
    message = refusal(tmp_path, into=weights(rows=7))
    assert "model.a" in message
    assert "[6, 4]" in message
    assert "[7, 4]" in message


def test_missing_tensor_is_rejected_with_its_name(tmp_path: Path) -> None:
    save(tmp_path, 3)
    assert "model.c" in refusal(tmp_path, into={**weights(), "model.c": torch.zeros(1)})


def test_model_with_fewer_tensors_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, 3)
    message = refusal(tmp_path, into={"model.a": torch.zeros(6, 4)})
    assert "contains 1 tensors that this run does not have, such as model.b" in message
