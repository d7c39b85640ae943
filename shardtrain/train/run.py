"""What a run is made of, what a step reports, and what the metrics need to know of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardtrain import data, optim
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.data.file_hashes import Contents
from shardtrain.distributed import LOSS_AXES, Mesh, Runner
from shardtrain.distributed.process_group import World
from shardtrain.facts.lr_schedules import Schedule
from shardtrain.lora.spec import Spec
from shardtrain.metrics import Reduce, RunFacts
from shardtrain.ops import accelerator
from shardtrain.optim import lr_scheduler
from shardtrain.resilience.resilience import Resilience
from shardtrain.train.state import TrainState
from shardtrain.utils.best_effort import BestEffort


@dataclass
class Run:
    """Everything that a step touches."""

    config: Config
    mesh: Mesh
    runner: Runner
    optimizer: torch.optim.Optimizer
    scaler: optim.LossScaler | None
    dataloader: data.DataLoader
    state: TrainState
    total_steps: int
    num_params: int
    flops_per_token: float
    resilience: Resilience = field(default_factory=Resilience)
    names: tuple[str, ...] = ()
    """Of all parameters of the whole model, in its order."""
    adapters: Spec | None = None
    lora: dict[str, Any] = field(default_factory=dict)  # what checkpoints say of adapters, see lora/base_weights.py
    contents: Contents = field(default_factory=Contents)
    """What the files of the data hold, as far as it is known; the first rank's alone."""
    counting: BestEffort = field(default_factory=lambda: BestEffort("counting beside a step"))
    accepted_changes: list[dict[str, Any]] = field(default_factory=list)
    """Options that the user changed on the way, as the checkpoints record them; see ``compatibility.py``."""

    owes_validation: bool = False
    """A request to stop cancelled the validation after this step."""

    def model_state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers by the names that checkpoints give them, frozen ones too."""
        return model_state_dict(self.runner)

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """The optimizer's tensors by the names that checkpoints give them."""
        states = optim.state_tensors(self.optimizer, self.runner.optimizer_parameters().items())
        return {f"optimizer.{name}": tensor for name, tensor in states.items()}

    @cached_property
    def decides_on_device(self) -> bool:
        """Whether a step gives the device its update before the host knows that it is to be applied.

        The device then decides by the same numbers, and works while the host, which waits for them, gets ready for the
        next step. Not where the host alone can decide: a spike's policy looks at the steps before.
        """
        config = self.config
        return (
            accelerator.is_accelerator(self.mesh.device)
            and config.training.spike_policy in ("off", "log")
            and not config.training.enable_cpu_offload
            and not config.optimizer.early_step_in_backward
            and config.training.dtype == "float32"  # the factor of clipping is rounded to the type of the gradients
            and optim.decides_on_device(self.optimizer)
        )

    @cached_property
    def schedule(self) -> Schedule:
        """The learning-rate schedule; a user's file is run once."""
        return lr_scheduler.find(self.config.lr_scheduler.name)

    def measures(self) -> dict[str, float]:
        """What the record of a logged step has beside the step's own numbers."""
        skipped = {"skipped_updates": self.state.step - self.state.updates}
        # the runner's measures are a collective: a failure there is one of all ranks, and not to be swallowed
        measures: dict[str, float] = {**self.runner.measures(), **skipped}
        # what is counted on this rank alone may be missing
        nothing: dict[str, float] = {}
        measures |= self.counting.call(
            lambda: {f"rows_of/{name}": rows for name, rows in self.dataloader.rows_of_sources.items()}, nothing
        )
        return measures | self.counting.call(self.resilience.measures, nothing)


def model_state_dict(runner: Runner) -> dict[str, Tensor]:
    """All parameters and buffers of a model by the names that checkpoints give them."""
    tensors: dict[str, Tensor] = {**runner.parameters(), **runner.buffers()}
    return {f"{WEIGHTS_PREFIX}{name}": tensor.detach() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Outcome:
    """What a step reports: sums of this rank, and what all ranks agree on."""

    loss_sum: Tensor
    local_tokens: int
    global_tokens: int
    """Target tokens over all ranks."""
    computed_tokens: int
    """Tokens over all ranks that the model computes with, without filler."""
    grad_norm: float
    own_grad_norm: Tensor
    """As this rank found it, before ranks agreed on one."""
    lr: float
    data_seconds: float


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
        model=derived.model_label(config.model, run.num_params).replace(" ", "/"),
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
