"""Optimizers, parameter groups, optimizer state by name, learning rates, and the loss scale of float16."""

from shardtrain.optim.grad_scaler import LossScaler
from shardtrain.optim.lr_scheduler import set_learning_rate
from shardtrain.optim.muon import Muon
from shardtrain.optim.optimizer_builder import build, decides_on_device, state_tensors
from shardtrain.optim.own_optimizer import check as check_own
from shardtrain.optim.param_groups import parameter_groups

__all__ = [
    "LossScaler",
    "Muon",
    "build",
    "check_own",
    "decides_on_device",
    "parameter_groups",
    "set_learning_rate",
    "state_tensors",
]
