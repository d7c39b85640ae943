"""What a run is made of, and what a step reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardtrain import data, optim
from shardtrain.checkpoint.async_save import Saving
from shardtrain.config.schema import Config
from shardtrain.data.file_hashes import Contents
from shardtrain.distributed import Mesh, Runner
from shardtrain.lora.spec import Spec
from shardtrain.resilience import signals
from shardtrain.resilience.goodput.ledger import Ledger
from shardtrain.resilience.guards.history import Guard
from shardtrain.resilience.phases import Phases
from shardtrain.train.state import TrainState


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
    stop: signals.StopRequest = field(default_factory=signals.current)
    phases: Phases = field(default_factory=Phases)
    saving: Saving = field(default_factory=Saving)
    ledger: Ledger = field(default_factory=Ledger)
    guard: Guard = field(default_factory=Guard)
    names: tuple[str, ...] = ()
    """Of all parameters of the whole model, in its order."""
    adapters: Spec | None = None
    lora: dict[str, Any] = field(default_factory=dict)  # what checkpoints say of adapters, see lora/base_weights.py
    stop_flag: float = 0.0
    """Not 0, on all ranks, when one of them was asked to stop before the step that was to come."""
    compares_norms: bool = True
    """Whether a step stops where ranks found different gradient norms; verify lets it continue, and finds the cause."""
    contents: Contents = field(default_factory=Contents)
    """What the files of the data hold, as far as it is known; the first rank's alone."""
    accepted_changes: list[dict[str, Any]] = field(default_factory=list)
    """Options that the user changed on the way, as the checkpoints record them; see ``compatibility.py``."""

    def measures(self) -> dict[str, float]:
        """Counts since the start of the run, for the metrics."""
        skipped = self.state.step - self.state.updates
        return {"skipped_updates": skipped, "spikes": self.guard.spikes, "rewinds": len(self.guard.rewinds)}


@dataclass(frozen=True)
class Outcome:
    """What a step reports: sums of this rank, and what all ranks agree on."""

    loss_sum: Tensor
    local_tokens: int
    global_tokens: int
    grad_norm: float
    own_grad_norm: Tensor
    """As this rank found it, before ranks agreed on one."""
    lr: float
    data_seconds: float

    def measures(self) -> dict[str, Any]:
        """What the metrics record of it."""
        return {name: value for name, value in vars(self).items() if name != "own_grad_norm"}
