"""What the metrics need to know about a run, and sums over ranks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from shardtrain.config import derived
from shardtrain.distributed import LOSS_AXES, Mesh
from shardtrain.distributed.process_group import World
from shardtrain.metrics import Reduce, RunFacts
from shardtrain.ops import accelerator

if TYPE_CHECKING:
    from shardtrain.train.run import Run


def run_facts(run: Run, world: World) -> RunFacts:
    """Facts that stay the same from the first step of this process to the last, or until it goes back."""
    config = run.config
    return RunFacts(
        rank=world.rank,
        world_size=world.size,
        is_writer=world.rank == 0,
        start_step=run.state.step,
        total_steps=run.total_steps,
        num_params=run.num_params,
        flops_per_token=run.flops_per_token,
        device_type=world.device.type,
        device_name=accelerator.name(world.device),
        compute_dtype=derived.compute_dtype(config),
        description=config.job.description,
        model=f"{config.model.name}/{config.model.flavor}",
    )


class ReduceOverMesh(Reduce):
    """Sums and maxima over the ranks that hold different target tokens, and those that wait for a pipeline's loss."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._axes = ("pp", *LOSS_AXES)

    def sum(self, tensor: Tensor) -> Tensor:
        return self._mesh.sum(tensor, over=self._axes)

    def max(self, tensor: Tensor) -> Tensor:
        return self._mesh.max(tensor, over=self._axes)
