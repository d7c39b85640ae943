"""The start of a run: the resolved configuration file, and the header of the log."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardtrain import __version__
from shardtrain import config as configs
from shardtrain.config import Loaded
from shardtrain.config.json_schema import json_schema
from shardtrain.config.schema import Config, Job, Training
from shardtrain.distributed.mesh import AXES, Mesh
from shardtrain.tools.runs.run_files import RunFolder
from shardtrain.train import run_folder
from shardtrain.utils.errors import StorageError


def mesh(**sizes: int) -> Mesh:
    """Return a mesh of the given sizes, without process groups."""
    product = 1
    for size in sizes.values():
        product *= size
    return Mesh(SimpleNamespace(size=lambda: product), {**dict.fromkeys(AXES, 1), **sizes}, None)  # type: ignore[arg-type]


def test_resolved_configuration_names_its_origin_and_round_trips(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[training]\nsteps = 7\n[model.overrides]\ndim = 128\n[job]\nsave_config_file = "copy.toml"\n'
    )
    loaded = configs.load(file, ["--optimizer.lr", "3e-5", "--job.description", "tab\there"])
    folder = tmp_path / "new/outputs"
    run_folder.write_resolved_config(loaded, folder, 4)
    text = (folder / "config.resolved.toml").read_text()

    assert text == (folder / "copy.toml").read_text()
    assert text.startswith(
        f"#:schema ./shardtrain.schema.json\n# {run_folder.versions()}, 4 ranks, started from {file}\n"
    )
    assert RunFolder(folder).world_size() == 4
    assert json.loads((folder / "shardtrain.schema.json").read_text()) == json_schema()
    assert configs.load(folder / "config.resolved.toml").config == loaded.config
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.resolved.toml", "copy.toml", "shardtrain.schema.json"
    ]  # fmt: skip


def test_second_start_replaces_the_file(tmp_path: Path) -> None:
    for steps in (3, 5):
        run_folder.write_resolved_config(
            Loaded(Config(training=Training(steps=steps))), tmp_path, 1
        )
    assert configs.load(tmp_path / run_folder.RESOLVED_CONFIG).config.training.steps == 5


def test_unwritable_folder_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match=r"^cannot write .*file.*, or set job\.dump_folder to another folder$"
    ) as caught:
        run_folder.write_resolved_config(Loaded(Config()), tmp_path / "file" / "outputs", 1)
    assert caught.value.exit_code == 8


def test_header_shows_the_arithmetic_of_the_batch() -> None:
    config = Config(
        training=Training(local_batch_size=2, global_batch_size=32, seq_len=64, steps=10)
    )
    grid = mesh(dp_replicate=2, dp_shard=4, tp=2)
    parallelism = dataclasses.replace(
        config.parallelism, data_parallel_replicate_degree=2, tensor_parallel_degree=2
    )
    config = dataclasses.replace(config, parallelism=parallelism)
    lines = run_folder.describe(Loaded(config), grid, 1_500_000, 10, 160)

    assert lines[1].endswith(", 1.50M parameters")
    assert lines[2] == "mesh: 16 ranks, dp_replicate 2 x dp_shard 4 x tp 2"
    assert lines[3] == (
        "batch: 2 sequences x 2 accumulation x 8 data ranks"
        " = 32 sequences x 64 = 2048 tokens per step"
    )
    assert lines[4] == "data: python_stdlib, packed by concat; 10 steps = 2.00 epochs of 160 rows"
    assert lines[5] == (
        "precision: parameters float32, compute bfloat16, gradient reduction float32; seed 42"
    )
    assert lines[6] == "folder: ./outputs; no checkpoints (checkpoint.enable=false)"
    assert len(lines) == 7


def test_header_of_one_process_and_print_config() -> None:
    config = Config(job=Job(print_config=True))
    lines = run_folder.describe(Loaded(config), mesh(), 10, 10, 10)
    assert lines[2] == "mesh: 1 rank, no parallelism"
    assert lines[7:] == configs.resolved_toml(config).splitlines()


def test_versions_are_one_line() -> None:
    assert re.fullmatch(
        rf"shardtrain {re.escape(__version__)}( \([0-9a-f]+\))?, torch \S+, Python \S+",
        run_folder.versions(),
    )


def test_package_without_a_checkout_or_git_has_no_commit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert run_folder.versions().startswith(f"shardtrain {__version__}, torch")
