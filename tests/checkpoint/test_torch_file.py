"""Import of torch.save files with torchtitan's names: same result as for the DCP folder, and no code in it runs."""

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
    """A DCP folder, and next to it checkpoint.pt, which dcp_to_torch_save wrote from it."""
    folder = saved_one(tmp_path_factory.mktemp("good") / "step-3")
    dcp_to_torch_save(str(folder), str(folder.with_name("checkpoint.pt")))
    return folder


def test_file_of_dcp_to_torch_imports_like_its_folder(
    good: Path, tmp_path: Path, capsys: Any
) -> None:
    for source in (good, good.with_name("checkpoint.pt")):
        arguments = ["checkpoint", "from-dcp", str(source), str(tmp_path / source.stem), *words()]
        assert cli.main(arguments) == 0
        assert "weights and the optimizer's state" in capsys.readouterr().out

    from_folder = str(tmp_path / "step-3")
    from_file = str(tmp_path / "checkpoint")
    assert cli.main(["checkpoint", "diff", from_folder, from_file]) == 0


@pytest.mark.parametrize("form", ["model", "flat", "parameters", "old optimizer"])
def test_weights_in_any_layout_of_torch_save_are_imported(
    form: str, good: Path, tmp_path: Path, capsys: Any
) -> None:
    folder = DcpFolder(good)
    model = {}
    for name in folder.tensors:
        if not name.startswith(("optim", "train")):
            model[name] = folder.tensor(name)
    saved: Any = {"model": model}
    if form == "flat":
        saved = model
    elif form == "parameters":
        saved = {"model": {name: torch.nn.Parameter(tensor) for name, tensor in model.items()}}
    elif form == "old optimizer":
        state = {"state": {0: {"step": torch.ones(())}}, "param_groups": [{"lr": 1.0}]}
        saved = {"model": model, "optimizer": state}
    old_file = tmp_path / "old.pt"
    torch.save(saved, old_file)
    from_file = str(tmp_path / "ours")
    from_folder = str(tmp_path / "same")

    # Import the file, and the weights of the folder.
    import_command = ["checkpoint", "from-dcp"]
    assert cli.main([*import_command, str(old_file), from_file, *words()]) == 0
    options = ["--optimizer=false", *words()]
    assert cli.main([*import_command, str(good), from_folder, *options]) == 0

    # The recorded steps may differ (exit status 1), but all tensors must be equal.
    capsys.readouterr()
    assert cli.main(["checkpoint", "diff", from_file, from_folder]) in (0, 1)
    output = capsys.readouterr().out
    assert ": equal" in output
    assert "0 of 21 tensors differ" in output


@pytest.mark.parametrize(
    "name", ["pickle-0", "pickle-2", "pickle-5", "torch-zip", "7z", "old format", "twice", "text"]
)
def test_hostile_file_runs_no_code_and_is_rejected_in_one_line(
    name: str, tmp_path: Path, capfd: Any
) -> None:
    file = tmp_path / "checkpoint.pt"
    canary = tmp_path / "canary"
    table = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    if name == "old format":
        torch.save(table, file, _use_new_zipfile_serialization=False)
    elif name == "twice":
        torch.save(table, file)
    else:
        file.write_bytes(b"text" if name == "text" else bombs(canary)[name])

    assert cli.main(["checkpoint", "from-dcp", str(file), str(tmp_path / "out"), *words()]) == 5

    error = capfd.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert "checkpoint.pt" in error
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_names_in_nested_tables_and_lists_are_joined_by_dots(tmp_path: Path) -> None:
    torch.save({"a": {"b": [torch.zeros(2), 3]}, "c": "text", "d": []}, tmp_path / "x.pt")
    file = FlatFile(tmp_path / "x.pt")
    assert list(file.tensors) == ["a.b.0"]
    assert list(file.objects) == ["a.b.1", "c", "d"]
    assert file.value("a.b.1") == 3
    assert file.value("c") == "text"
    assert file.value("d") is None


def test_training_from_a_torchtitan_checkpoint_names_the_import_command(
    good: Path, tmp_path: Path
) -> None:
    """Test initial weights from the folder or the file, and a checkpoint in the run's own folder."""
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
        errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
        assert done.returncode == 5 and len(errors) == 1, done.stderr[-2000:]
        assert f"`shardtrain checkpoint from-dcp {place} NEW`" in errors[0]
        assert errors[0].count("use another") <= 1
