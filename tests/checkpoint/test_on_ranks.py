"""Checkpoints of whole runs on two ranks: every rank refuses what one cannot read, and an export is the weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import Ended, text_file, tiny_config, train_whole
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardtrain.errors import CheckpointError, ConfigError


def run(rank: int, folder: Path, checkpoint: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Ended:
    training = {"steps": 3, "local_batch_size": 4, **sections.pop("training", {})}
    options = {"enable": True, "interval": 2, **(checkpoint or {})}
    return train_whole(
        rank, tiny_config(job={"dump_folder": str(folder)}, training=training, checkpoint=options, **sections)
    )


def spoil(rank: int, root: Path, name: str, how: Any) -> Path:
    """A copy of the good run with its newest checkpoint spoilt by the first rank."""
    folder = root / name
    if rank == 0:
        shutil.copytree(root / "good", folder)
        how(folder / "checkpoint/step-3")
    dist.barrier()
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def all_runs(rank: int, root: Path) -> dict[str, Ended]:
    longer = root / "longer.txt"
    if rank == 0:
        longer.write_text(Path(text_file()).read_text() + " mesh")
    dist.barrier()
    model, four = {"last_save_model_only": True}, {"training": {"steps": 4}}

    def nothing(path: Path) -> None:
        pass

    found = {"good": run(rank, root / "good")}
    for name, how in {
        "shard cut": lambda path: cut(path / "__1_0.distcp"),
        "shard missing": lambda path: (path / "__1_0.distcp").unlink(),
        "counters missing": lambda path: (path / "train_state.json").unlink(),
    }.items():
        found[name] = run(rank, spoil(rank, root, name, how), **four)
    same = spoil(rank, root, "same", nothing)
    found["other data"] = run(rank, same, training={"steps": 4, "dataset_path": str(longer)})
    found["other seed"] = run(rank, same, debug={"seed": 1}, **four)
    found["other width"] = run(rank, same, model={"overrides": {"ffn_dim": 64}}, **four)
    found["fewer layers"] = run(rank, same, model={"overrides": {"num_layers": 2}}, **four)
    found["more layers"] = run(rank, same, model={"overrides": {"num_layers": 5}}, **four)
    found["no such step"] = run(rank, same, {"load_step": 1}, **four)
    found["an older step"] = run(rank, same, {"load_step": 2})
    found["finished"] = run(rank, same)
    found["export"] = run(rank, root / "export", {**model, "export_dtype": "bfloat16"})
    found["export continued"] = run(rank, root / "export", model, **four)
    found["scaler missing"] = run(rank, same, training={"steps": 4, "mixed_precision_param": "float16"})
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(root: Path) -> list[dict[str, Ended]]:
    return run_ranks(2, all_runs, root)


REFUSED = {
    "shard cut": "cannot be loaded: rank",
    "shard missing": "__1_0.distcp",
    "counters missing": "train_state.json cannot be read",
    "other data": "was trained on other data",
    "other seed": "was trained on other data",
    "other width": "Size mismatch",
    "fewer layers": "tensors that this run has not, such as model.layers.2.",
    "more layers": "Missing key in checkpoint state_dict: model.layers.4.",
    "no such step": "checkpoint.load_step=1: ",
    "export continued": "holds weights only",
    "scaler missing": "loss scaler",
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses_in_one_line_and_before_a_step(runs: list[dict[str, Ended]], name: str) -> None:
    for rank in runs:
        error = rank[name].error
        # other data are a wrong configuration of this run; all else is the checkpoint
        kind, code = (ConfigError, 2) if name in ("other data", "other seed") else (CheckpointError, 5)
        assert isinstance(error, kind) and error.exit_code == code, error
        assert REFUSED[name] in str(error) and "\n" not in str(error)
        assert rank[name].losses == []


def test_a_run_goes_back_to_an_older_step(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        assert rank["an older step"].error is None
        assert rank["an older step"].losses == rank["good"].losses[2:]


def test_a_finished_run_that_is_started_again_has_nothing_to_do(runs: list[dict[str, Ended]]) -> None:
    for rank in runs:
        assert rank["finished"].error is None and rank["finished"].losses == []
        assert rank["finished"].state == rank["good"].state


def test_an_export_holds_the_weights_of_the_run(root: Path, runs: list[dict[str, Ended]]) -> None:
    dcp_to_torch_save(root / "export/checkpoint/step-3", root / "weights.pt")
    opened = torch.load(root / "weights.pt", weights_only=True)
    weights = runs[0]["export"].weights
    assert sorted(opened) == sorted(f"model.{name}" for name in weights)
    for name, weight in weights.items():
        assert torch.equal(opened[f"model.{name}"], weight.to(torch.bfloat16)), name
    # the other checkpoint of that run can still be continued
    assert (root / "export/checkpoint/step-2/.metadata").is_file()
