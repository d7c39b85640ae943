"""Optimizers, which parameters they decay, their state by name, and the loss scale of float16."""

from __future__ import annotations

from shardtrain.optim.build import build, set_learning_rate, state_tensors
from shardtrain.optim.groups import parameter_groups
from shardtrain.optim.muon import Muon
from shardtrain.optim.scaler import LossScaler

__all__ = ["LossScaler", "Muon", "build", "parameter_groups", "set_learning_rate", "state_tensors"]
