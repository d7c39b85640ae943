"""What the metrics are told about a run, and the sums over ranks that they need."""

from __future__ import annotations

import torch
from torch import Tensor

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.metrics import Reduce, RunFacts
from shardtrain.parallel import LOSS_AXES, Mesh
from shardtrain.parallel.world import World


def run_facts(
    config: Config, here: World, *, start_step: int, total_steps: int, num_params: int, flops_per_token: float
) -> RunFacts:
    """Facts that stay the same from the first step of this process to the last."""
    cuda = here.device.type == "cuda"
    return RunFacts(
        rank=here.rank,
        world_size=here.size,
        is_writer=here.rank == 0,
        start_step=start_step,
        total_steps=total_steps,
        num_params=num_params,
        flops_per_token=flops_per_token,
        device_type=here.device.type,
        device_name=torch.cuda.get_device_name(here.device) if cuda else "cpu",
        compute_dtype=derived.compute_dtype(config),
        description=config.job.description,
        model=f"{config.model.name}/{config.model.flavor}",
    )


class ReduceOverMesh(Reduce):
    """Sums and maxima over the ranks that hold different target tokens, and those that wait for a pipeline's loss."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._axes = mesh, ("pp", *LOSS_AXES)

    def sum(self, tensor: Tensor) -> Tensor:
        """See Reduce."""
        return self._mesh.sum(tensor, over=self._axes)

    def max(self, tensor: Tensor) -> Tensor:
        """See Reduce."""
        return self._mesh.max(tensor, over=self._axes)
