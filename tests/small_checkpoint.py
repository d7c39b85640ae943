"""A checkpoint of a few hundred bytes from a single rank, whose content is a function of its step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Checkpoint, Config, Job


@contextmanager
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def checkpoints(root: Path, **options: Any) -> Checkpoints:
    return Checkpoints(
        Config(job=Job(dump_folder=str(root)), checkpoint=Checkpoint(enable=True, **options))
    )


def weights(step: int, numel: int = 24) -> dict[str, Tensor]:
    return {
        "model.a": torch.arange(numel, dtype=torch.float32) + step,
        "model.b": torch.tensor(float(step)),
    }


def rest(step: int) -> dict[str, Tensor]:
    return {
        "optimizer.a.exp_avg": torch.full((6, 4), step / 3),
        "optimizer.a.step": torch.tensor(float(step)),
    }


def facts(step: int) -> dict[str, Any]:
    return {"state": {"step": step}, "data_fingerprint": "ab", "data_cursors": [[step, 0, 1]]}


def save(storage: Checkpoints, step: int, numel: int = 24) -> None:
    storage.save(step, weights(step, numel), rest(step), facts(step), last=False)


def assert_is_of_its_step(path: Path, numel: int = 24) -> int:
    """Load a checkpoint and compare every element with the expected content of its step. Return the step."""
    step = int(path.name.removeprefix("step-"))
    loaded_weights = weights(-1, numel)
    loaded_rest = rest(-1)
    loaded_facts = checkpoints(path.parents[1], load_only=True).load(
        path, loaded_weights, loaded_rest
    )
    assert loaded_facts["state"] == {"step": step}
    for tensors, expected in ((loaded_weights, weights(step, numel)), (loaded_rest, rest(step))):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    return step
