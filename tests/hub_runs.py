"""Runs that start from a Hugging Face folder, as one rank of a mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from tiny import make_run, tiny_config, whole
from torch import Tensor

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.hf.hub_model import recognise
from shardtrain.train.resume import resume
from shardtrain.utils.errors import CheckpointError, ConfigError

MESHES: dict[str, dict[str, int]] = {
    "fsdp=2 tp=2": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    "pp=2": {"pipeline_parallel_degree": 2, "data_parallel_shard_degree": 1},
    "one": {},
}
EXPERTS = {"fsdp=4 ep=2": {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}}


def config_for(folder: Path, output: Path, mesh: str) -> Config:
    hub_model = recognise(folder)
    config = tiny_config(
        job={"dump_folder": str(output)},
        parallelism={**MESHES, **EXPERTS}[mesh],
        training={"seq_len": 16},
        checkpoint={"enable": True, "initial_load_path": str(folder), "initial_load_in_hf": True},
    )
    overrides = dataclasses.asdict(hub_model.config)
    overrides.pop("norm_type", None)
    model = dataclasses.replace(
        config.model, name=hub_model.name, flavor=hub_model.flavor, overrides=overrides
    )
    return dataclasses.replace(config, model=model)


def start(rank: int, config: Config) -> dict[str, Tensor]:
    run = make_run(rank, config)
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    assert run.state.step == 0
    return whole(run)


def refused(rank: int, config: Config) -> Any:
    try:
        start(rank, config)
    except (CheckpointError, ConfigError) as error:
        return type(error).__name__, str(error)
    return None
