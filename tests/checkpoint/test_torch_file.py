"""One file of torch.save with torchtitan's names comes in as its folder does, and nothing in it is run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from dcp_folders import saved_one, words
from hostile_files import bombs
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from shardtrain import cli
from shardtrain.checkpoint.torch_file import FlatFile
from shardtrain.tools.dcp.stored import DcpFolder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, and beside it what dcp_to_torch makes of it."""
    folder = saved_one(tmp_path_factory.mktemp("good") / "step-3")
    dcp_to_torch_save(str(folder), str(folder.with_name("checkpoint.pt")))
    return folder


def test_a_file_of_dcp_to_torch_is_the_folder_it_was_made_of(good: Path, tmp_path: Path, capsys: Any) -> None:
    for source in (good, good.with_name("checkpoint.pt")):
        assert cli.main(["checkpoint", "from-dcp", str(source), str(tmp_path / source.stem), *words()]) == 0
        assert "weights and the optimizer's state" in capsys.readouterr().out
    assert cli.main(["checkpoint", "diff", str(tmp_path / "step-3"), str(tmp_path / "checkpoint")]) == 0


@pytest.mark.parametrize("form", ["model", "flat", "parameters", "old optimizer"])
def test_weights_that_torch_save_wrote_come_in_whatever_table_holds_them(
    form: str, good: Path, tmp_path: Path, capsys: Any
) -> None:
    folder = DcpFolder(good)
    model = {name: folder.tensor(name) for name in folder.tensors if not name.startswith(("optim", "train"))}
    saved: Any = {"model": model}
    if form == "flat":
        saved = model
    elif form == "parameters":
        saved = {"model": {name: torch.nn.Parameter(tensor) for name, tensor in model.items()}}
    elif form == "old optimizer":
        saved = {"model": model, "optimizer": {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"lr": 1.0}]}}
    torch.save(saved, tmp_path / "old.pt")
    out = tmp_path / "ours"
    assert cli.main(["checkpoint", "from-dcp", str(tmp_path / "old.pt"), str(out), *words()]) == 0
    assert cli.main(["checkpoint", "from-dcp", str(good), str(tmp_path / "same"), "--optimizer=false", *words()]) == 0
    capsys.readouterr()
    assert cli.main(["checkpoint", "diff", str(out), str(tmp_path / "same")]) in (0, 1)  # the step differs
    assert ": equal" in (told := capsys.readouterr().out) and "0 of 21 tensors differ" in told


@pytest.mark.parametrize("name", ["pickle-0", "pickle-2", "pickle-5", "torch-zip", "7z", "old format", "twice", "text"])
def test_a_strangers_file_runs_nothing_and_is_one_line(name: str, tmp_path: Path, capfd: Any) -> None:
    file, canary = tmp_path / "checkpoint.pt", tmp_path / "canary"
    table = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    if name == "old format":
        torch.save(table, file, _use_new_zipfile_serialization=False)
    elif name == "twice":
        torch.save(table, file)
    else:
        file.write_bytes(b"text" if name == "text" else bombs(canary)[name])
    assert cli.main(["checkpoint", "from-dcp", str(file), str(tmp_path / "out"), *words()]) == 5
    error = capfd.readouterr().err
    assert len(error.strip().splitlines()) == 1 and "checkpoint.pt" in error
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_names_of_tables_and_lists_are_joined_by_dots(tmp_path: Path) -> None:
    torch.save({"a": {"b": [torch.zeros(2), 3]}, "c": "text", "d": []}, tmp_path / "x.pt")
    found = FlatFile(tmp_path / "x.pt")
    assert list(found.tensors) == ["a.b.0"] and list(found.objects) == ["a.b.1", "c", "d"]
    assert found.value("a.b.1") == 3 and found.value("c") == "text" and found.value("d") is None


def test_training_from_what_torchtitan_wrote_names_the_way(good: Path, tmp_path: Path) -> None:
    """As the first weights, in a folder and as one file, and as a step of the run's own folder."""
    titan = tmp_path / "run" / "checkpoint" / "step-3"
    shutil.copytree(good, titan)
    small = [
        "--model.hf_assets_path=bytes",
        "--checkpoint.enable",
        "--training.seq_len=16",
        "--training.device=cpu",
        "--nproc=1",
        *words(),
    ]
    file = good.with_name("checkpoint.pt")
    starts = {
        file: [f"--checkpoint.initial_load_path={file}", "--job.dump_folder=out"],
        good: [f"--checkpoint.initial_load_path={good}", "--job.dump_folder=out"],
        titan: [f"--job.dump_folder={tmp_path / 'run'}"],
    }
    for place, options in starts.items():
        line = [sys.executable, "-m", "shardtrain", "train", "debug", *small, *options]
        done = forked.run(line, cwd=tmp_path, capture_output=True, text=True)
        told = [line for line in done.stderr.splitlines() if line.startswith("error")]
        assert done.returncode == 5 and len(told) == 1, done.stderr[-2000:]
        assert f"`shardtrain checkpoint from-dcp {place} NEW`" in told[0] and told[0].count("use another") <= 1
