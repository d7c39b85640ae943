"""The recipes of examples/launch have fields that the platforms know, and start the run on every node."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import patience
import pytest
import yaml

from shardtrain.launch import nodes

FOLDER = Path(__file__).parents[2] / "examples" / "launch"
# From the references of SkyPilot 0.14 (YAML spec) and dstack 0.22 (.dstack.yml, task).
SKYPILOT = {
    "": {"name", "workdir", "num_nodes", "resources", "file_mounts", "secrets", "envs", "setup", "run"},
    "resources": {"infra", "accelerators", "cpus", "memory", "disk_size", "network_tier", "use_spot"},
    "file_mounts./checkpoints": {"source", "mode", "name", "store"},
}  # fmt: skip
DSTACK = {
    "": {"type", "name", "nodes", "python", "image", "repos", "env", "commands", "volumes", "resources",
         "max_duration", "retry", "spot_policy"},
    "resources": {"gpu", "cpu", "memory", "shm_size", "disk"},
}  # fmt: skip


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize(("name", "known"), [("skypilot.yaml", SKYPILOT), ("dstack.yml", DSTACK)])
def test_fields_are_those_of_the_platform(name: str, known: dict[str, set[str]]) -> None:
    for path, fields in known.items():
        part = read(name)
        for key in filter(None, path.split(".")):
            part = part[key]
        assert set(part) <= fields, path


def arguments(script: str, tmp_path: Path, variables: dict[str, str]) -> list[str]:
    """Run the commands of a recipe with a program `shardtrain` that writes its arguments."""
    for program in ("shardtrain", "pip"):
        stub = tmp_path / program
        stub.write_text(f'#!/bin/sh\n[ {program} = pip ] || echo "$@"\n')
        stub.chmod(0o755)
    environment = {**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=patience.seconds(20),
    )
    return shlex.split(done.stdout)


def test_dstack_passes_the_place_of_each_node(tmp_path: Path) -> None:
    variables = {
        "DSTACK_NODES_NUM": "2",
        "DSTACK_NODE_RANK": "1",
        "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    }
    train_arguments = arguments("\n".join(read("dstack.yml")["commands"]), tmp_path, variables)

    assert train_arguments[:2] == ["train", "my_run.toml"]

    options = dict(zip(train_arguments[2::2], train_arguments[3::2], strict=True))
    assert options["--nnodes"] == "2"
    assert options["--node_rank"] == "1"
    assert options["--rdzv_endpoint"] == "10.0.0.1:29500"


def test_skypilot_needs_no_options_for_nodes(tmp_path: Path) -> None:
    recipe = read("skypilot.yaml")
    train_arguments = arguments(recipe["setup"] + recipe["run"], tmp_path, {})
    assert train_arguments[:2] == ["train", "my_run.toml"]
    assert not any(
        word.startswith(("--nnodes", "--node_rank", "--rdzv")) for word in train_arguments
    )
    # the variables that SkyPilot sets are known
    assert "SKYPILOT_NODE_RANK" in Path(nodes.__file__).read_text()
