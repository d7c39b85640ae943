"""Interface between a run and its guards. ``train.run.Run`` implements it, so resilience does not import train."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from shardtrain.checkpoint.train_state import TrainState
from shardtrain.config.schema import Config
from shardtrain.distributed import Mesh, Runner
from shardtrain.optim import LossScaler


class WatchedRun(Protocol):
    """The parts of a run that guards read."""

    config: Config
    mesh: Mesh
    runner: Runner
    scaler: LossScaler | None
    state: TrainState
    names: tuple[str, ...]
    """Names of all parameters of the unsharded model, in its order."""

    def model_state_dict(self) -> dict[str, Tensor]:
        """Return all parameters and buffers, by their names in checkpoints."""

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors, by their names in checkpoints."""
