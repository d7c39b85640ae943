"""NorMuon: Muon with a learning rate per neuron (Li et al. 2025, arXiv 2510.05491).

Each row of an orthogonalized update is divided by the root of a running mean of its squares. The update is
then scaled to the root mean square ``optimizer.muon_update_rms``. All options of Muon apply. Parameters that
are not matrices use AdamW.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardtrain.ops.dtensor import local_tensor, sharded_dim
from shardtrain.optim.muon import MUON, Muon, muon_groups
from shardtrain.optim.sum_over_shards import sum_over_shards

EPS = 1e-8


@dataclass
class Optimizer:
    normuon_beta2: float = 0.95
    """Decay of the mean square of each row."""


@dataclass
class JobConfig:
    optimizer: Optimizer = field(default_factory=Optimizer)


class NorMuon(Muon):
    def __init__(self, groups, options):
        super().__init__(groups, options)
        self.update_rms = options.muon_update_rms
        # The options only have this field if job.custom_config_module names this file.
        self.beta2 = getattr(options, "normuon_beta2", Optimizer.normuon_beta2)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.zero_state(parameter, group)

    def zero_state(self, parameter, group):
        state = super().zero_state(parameter, group)
        if group["algorithm"] == MUON:
            state["mean_square"] = zero_rows(parameter)
        return state

    def apply_updates(self, parameters, updates, group):
        # Sum the squares of each full row, because a shard may have only some of its columns.
        row_squares = []
        for update in updates:
            row_squares.append(update.square().sum(-1, keepdim=True))
        sum_over_shards(row_squares, parameters, dims=(-1,))

        # Update the mean square of each row. It determines the scale of the row.
        scales = []
        squared_norms = []
        for parameter, row_square in zip(parameters, row_squares, strict=True):
            mean_square = local_tensor(self.state[parameter]["mean_square"])
            current = row_square / parameter.size(-1)
            mean_square.lerp_(current.to(mean_square), 1 - self.beta2)
            scale = 1 / (mean_square.sqrt().to(row_square) + EPS)
            scales.append(scale)
            squared_norms.append((row_square * scale.square()).sum(-2, keepdim=True))
        # Sum the squared Frobenius norm of each full matrix, because a shard may have only some of its rows.
        sum_over_shards(squared_norms, parameters, dims=(-2,))

        # Scale each matrix to the wanted root mean square, and update the weights.
        lr = group["lr"]
        for i, parameter in enumerate(parameters):
            numel = parameter.size(-2) * parameter.size(-1)
            norm = squared_norms[i].sqrt().clamp_min(EPS)
            size = self.update_rms * math.sqrt(numel) / norm
            update = updates[i] * scales[i] * size
            local = local_tensor(parameter)
            local.mul_(1 - lr * group["weight_decay"])
            local.add_(update.to(local), alpha=-lr)


def zero_rows(parameter):
    """Return a zero for each row, sharded like the rows of the parameter."""
    local = local_tensor(parameter.detach())
    zeros = local.new_zeros(*local.shape[:-1], 1)
    if not isinstance(parameter, DTensor):
        return zeros
    placements = []
    for placement in parameter.placements:
        splits_columns = sharded_dim(placement) == parameter.ndim - 1
        placements.append(Replicate() if splits_columns else placement)
    shape = torch.Size([*parameter.shape[:-1], 1])
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=strides
    )


def build(param_groups, options):
    named = []
    for group in param_groups:
        named.extend(zip(group["param_names"], group["params"], strict=True))
    return NorMuon(muon_groups(named, options), options)
