"""The objects of a run, the results of a step, and the constants that metrics need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from shardtrain import data, optim
from shardtrain.checkpoint.manifest import AVERAGES_PREFIX, WEIGHTS_PREFIX
from shardtrain.checkpoint.snapshots import Snapshots
from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.data.file_hashes import Contents
from shardtrain.distributed import LOSS_AXES, Mesh, Runner
from shardtrain.distributed.process_group import World
from shardtrain.facts.lr_schedules import Schedule
from shardtrain.lora.spec import Spec
from shardtrain.metrics import Reduce, RunFacts
from shardtrain.ops import accelerator
from shardtrain.ops.dtensor import local_tensor
from shardtrain.optim import lr_scheduler
from shardtrain.optim.moving_average import MovingAverage, restored
from shardtrain.resilience.resilience import Resilience
from shardtrain.utils.best_effort import BestEffort


@dataclass
class Run:
    """All objects that a training step uses."""

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
    """Mean over all tokens of the data. With a sequence ramp, that of the longest sequences."""
    resilience: Resilience = field(default_factory=Resilience)
    flops_of_lengths: dict[int, float] = field(default_factory=dict)
    """FLOPs per token by the tokens per sequence. Empty without a sequence ramp."""
    names: tuple[str, ...] = ()
    """Names of all parameters of the unsharded model, in the model's order."""
    adapters: Spec | None = None
    moving_average: MovingAverage | None = None
    """Averages of the trained weights. None without ``training.ema_decay``."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Facts about adapters for checkpoints; see ``base_weights.py``."""
    contents: Contents = field(default_factory=Contents)
    """Hashes of the data files that have been computed so far. Only rank 0 has them."""
    optional_metrics: BestEffort = field(
        default_factory=lambda: BestEffort("additional metrics of a step")
    )
    """Calls functions that compute optional metrics. An error in one is logged once and does not end the run.
    """
    files: dict[str, str] = field(default_factory=dict)
    """For each option that names a user's Python file: the file's hash when the run was built. See
    ``config/changes.py``.
    """
    accepted_changes: list[dict[str, Any]] = field(default_factory=list)
    """Changes of options that the user accepted when the run was resumed before. Checkpoints record them, see
    ``compatibility.py``.
    """
    certificate: dict[str, Any] | None = None
    """Path, SHA-256 and state of ``job.certificate`` when the run started. Checkpoints record them."""
    snapshots: Snapshots | None = None
    """Snapshots in host memory. None without ``checkpoint.snapshot_interval``."""
    owes_validation: bool = False
    """True if a request to stop cancelled the validation after this step. The resumed run repeats it."""

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return all parameters, including frozen ones, and buffers by their names in checkpoints."""
        return model_state_dict(self.runner)

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors by their names in checkpoints."""
        states = optim.state_tensors(self.optimizer, self.runner.optimizer_parameters().items())
        return {f"optimizer.{name}": tensor for name, tensor in states.items()}

    def averages_state_dict(self) -> dict[str, Tensor]:
        """Return the averages of the weights by their names in checkpoints. Empty without averages."""
        if self.moving_average is None:
            return {}
        averages = self.moving_average.averages
        return {f"{AVERAGES_PREFIX}{name}": tensor for name, tensor in averages.items()}

    @contextmanager
    def evaluation_weights(self) -> Iterator[dict[str, Tensor]]:
        """Replace the weights by the evaluation weights of the optimizer inside the block (a collective).

        The block must not train. Yields the training weights by name, or nothing if an optimizer trains the
        weights that it evaluates.
        """
        if not self.has_evaluation_weights:
            yield {}
            return
        with restored(self._trained_parameters()) as training_weights:
            self.runner.replace_weights(self.optimizer.evaluation_weights)  # type: ignore[attr-defined]
            yield training_weights

    @property
    def has_evaluation_weights(self) -> bool:
        """True if the optimizer computes separate weights for evaluation. See ``own_optimizer.py``."""
        return hasattr(self.optimizer, "evaluation_weights")

    def load_training_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy training weights of a checkpoint into the parameters."""
        parameters = self._trained_parameters()
        with torch.no_grad():
            for name, weight in weights.items():
                local_tensor(parameters[name]).copy_(local_tensor(weight))

    def empty_training_weights(self) -> dict[str, Tensor]:
        """Return tensors to load training weights into, by name. Empty without evaluation weights."""
        if not self.has_evaluation_weights:
            return {}
        empty = {}
        for name, parameter in self._trained_parameters().items():
            empty[name] = torch.empty_like(parameter.detach())
        return empty

    def _trained_parameters(self) -> dict[str, Parameter]:
        trained = {}
        for name, parameter in self.runner.parameters().items():
            if parameter.requires_grad:
                trained[name] = parameter
        return trained

    @cached_property
    def decides_on_device(self) -> bool:
        """True if the host queues the update before it knows whether the update may be applied.

        The device then decides by the same rules, and the host can prepare the next step while the device
        computes. This is not possible if only the host can decide: the policies for loss spikes need the
        losses of earlier steps.
        """
        training = self.config.training
        if not accelerator.is_accelerator(self.mesh.device) or training.enable_cpu_offload:
            return False
        if training.spike_policy not in ("off", "log"):
            return False
        # Other dtypes would round the clipping factor, which is a tensor here.
        if training.dtype != "float32":
            return False
        if self.config.optimizer.early_step_in_backward:
            return False
        return optim.decides_on_device(self.optimizer)

    @cached_property
    def schedule(self) -> Schedule:
        """The learning-rate schedule. It is cached, because a user's file must be executed only once."""
        return lr_scheduler.find(self.config.lr_scheduler.name)

    def measures(self) -> dict[str, float]:
        """Return additional metrics of a logged step (a collective)."""
        # Do not catch errors of the runner's measures: they are a collective, which a rank must not leave.
        measures: dict[str, float] = dict(self.runner.measures())
        measures["skipped_updates"] = self.state.step - self.state.updates
        # These metrics need no communication, so an error in them must not end the run.
        no_metrics: dict[str, float] = {}
        measures |= self.optional_metrics.call(self._rows_per_source, no_metrics)
        measures |= self.optional_metrics.call(self.resilience.measures, no_metrics)
        return measures

    def _rows_per_source(self) -> dict[str, float]:
        return {f"rows_of/{name}": rows for name, rows in self.dataloader.rows_of_sources.items()}


def named_training_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return training weights by their names in checkpoints, where they belong to the optimizer's state."""
    return {f"optimizer.{name}.training_weight": tensor for name, tensor in weights.items()}


def model_state_dict(runner: Runner) -> dict[str, Tensor]:
    """Return all parameters and buffers of a model by their names in checkpoints."""
    tensors: dict[str, Tensor] = {**runner.parameters(), **runner.buffers()}
    return {f"{WEIGHTS_PREFIX}{name}": tensor.detach() for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Outcome:
    """Results of a step. Some are sums over this rank's tokens, and others are equal on all ranks."""

    loss_sum: Tensor
    """Sum of the loss over this rank's target tokens."""
    local_tokens: int
    """Number of this rank's target tokens."""
    global_tokens: int
    """Number of target tokens on all ranks."""
    computed_tokens: int
    """Number of tokens on all ranks without padding, whether they are targets or not."""
    grad_norm: float
    own_grad_norm: Tensor
    """Gradient norm that this rank computed, for comparison with other ranks."""
    lr: float
    data_seconds: float
    flops_per_token: float
    source_sums: Tensor | None = None
    """Sums of losses and numbers of target tokens of this rank by data source, (2, sources)."""


def run_facts(run: Run, world: World) -> RunFacts:
    """Return the constants that metrics need. They are valid until the run ends or rolls back."""
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
        sources=tuple(config.data.sources),
    )


class ReduceOverMesh(Reduce):
    """Reduces metrics over all ranks with different target tokens, and over pipeline stages."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._axes = ("pp", *LOSS_AXES)

    def sum(self, tensor: Tensor) -> Tensor:
        return self._mesh.sum(tensor, over=self._axes)

    def max(self, tensor: Tensor) -> Tensor:
        return self._mesh.max(tensor, over=self._axes)
