"""Dion: orthonormal updates of low rank (Ahn et al. 2025, arXiv 2504.05295).

One step of power iteration approximates the momentum M of a matrix by P R^T, where P has orthonormal columns.
Q is R with columns of length 1, and the update is P Q^T. M then loses a share of P R^T (error feedback). Ranks
exchange P and Q, which are smaller than M.

``optimizer.muon_momentum`` is the decay of M. ``optimizer.muon_adamw_patterns`` selects the parameters that use
AdamW. The learning rate of a matrix is ``optimizer.lr`` times the root of rows / columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import zeros as distributed_zeros

from shardtrain.ops.dtensor import local_slices, local_tensor, sharded_dim
from shardtrain.optim.muon import MUON, Muon, muon_groups
from shardtrain.optim.sum_over_shards import sum_over_shards

EPS = 1e-8
BOTH = (-2, -1)


@dataclass
class Optimizer:
    dion_rank_fraction: float = 0.25
    """Rank of the updates, as a fraction of the smaller side of a matrix, 0..1."""
    dion_lr_factor: float = 1.0
    """Multiplies the learning rate of matrices."""


@dataclass
class JobConfig:
    optimizer: Optimizer = field(default_factory=Optimizer)


class Dion(Muon):
    def __init__(self, groups, options):
        super().__init__(groups, options)
        self.momentum = options.muon_momentum
        # The options only have these fields if job.custom_config_module names this file.
        self.rank_fraction = getattr(options, "dion_rank_fraction", Optimizer.dion_rank_fraction)
        self.lr_factor = getattr(options, "dion_lr_factor", Optimizer.dion_lr_factor)
        if not 0 < self.rank_fraction <= 1:
            raise ValueError(
                f"optimizer.dion_rank_fraction={self.rank_fraction} must be above 0 and at most 1"
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.zero_state(parameter, group)

    def zero_state(self, parameter, group):
        state = super().zero_state(parameter, group)
        if group["algorithm"] == MUON:
            smaller_side = min(parameter.shape[-2:])
            rank = math.ceil(self.rank_fraction * smaller_side)
            state["q"] = random_q(parameter, rank)
        return state

    def update_matrices(self, parameters, group):
        # Each rank has a block of each matrix: some of its rows and columns.
        places = [local_slices(parameter)[-2:] for parameter in parameters]

        # Add the gradient to the momentum, and gather Q.
        momenta = []
        full_q = []
        for parameter in parameters:
            momentum = local_tensor(self.state[parameter]["momentum"])
            momentum.add_(local_tensor(parameter.grad))
            momenta.append(momentum)
            q = self.state[parameter]["q"]
            full = empty_rows(momentum, q.size(-2), q.size(-1))
            full[..., local_slices(q)[-2], :] = local_tensor(q)
            full_q.append(full)
        sum_over_shards(full_q, parameters, BOTH)

        # P = orthonormal columns that span M Q. Each rank computes its rows for its columns of M.
        p = []
        for momentum, q, parameter, (rows, columns) in zip(
            momenta, full_q, parameters, places, strict=True
        ):
            full = empty_rows(momentum, parameter.size(-2), q.size(-1))
            full[..., rows, :] = momentum @ q[..., columns, :]
            p.append(full)
        sum_over_shards(p, parameters, BOTH)
        p = [orthonormal(matrix) for matrix in p]

        # R = M^T P, in the same way.
        r = []
        for momentum, full_p, parameter, (rows, columns) in zip(
            momenta, p, parameters, places, strict=True
        ):
            full = empty_rows(momentum, parameter.size(-1), full_p.size(-1))
            full[..., columns, :] = momentum.mT @ full_p[..., rows, :]
            r.append(full)
        sum_over_shards(r, parameters, BOTH)

        for i, parameter in enumerate(parameters):
            rows, columns = places[i]
            # Error feedback: subtract a share of the approximation from the momentum.
            share = 1 - self.momentum
            approximation = p[i][..., rows, :] @ r[i][..., columns, :].mT
            momenta[i].sub_(share * approximation)

            # Store Q for the next step.
            q = r[i] / (r[i].norm(dim=-2, keepdim=True) + EPS)
            stored = self.state[parameter]["q"]
            local_tensor(stored).copy_(q[..., local_slices(stored)[-2], :])

            # Update the block of the weights.
            scale = self.lr_factor * math.sqrt(parameter.size(-2) / parameter.size(-1))
            update = p[i][..., rows, :] @ q[..., columns, :].mT
            local = local_tensor(parameter)
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update.to(local), alpha=-group["lr"] * scale)


def orthonormal(matrix):
    """Return orthonormal columns with the same span, computed in float32 or float64."""
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    q, _ = torch.linalg.qr(matrix.to(dtype))
    return q.to(matrix.dtype)


def empty_rows(local, rows, columns):
    """Return zeros (..., rows, columns), with the leading dims of this rank's block of a stack."""
    return local.new_zeros(*local.shape[:-2], rows, columns)


def random_q(parameter, rank):
    """Return a random Q (columns of the parameter, rank), equal on every mesh."""
    shape = (*parameter.shape[:-2], parameter.size(-1), rank)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator)
    if not isinstance(parameter, DTensor):
        return values.to(parameter)
    # A mesh axis that shards a leading dim of a stack shards the same dim of Q. An axis that shards the rows or
    # columns of matrices shards the rows of Q.
    placements = []
    for placement in parameter.placements:
        dim = sharded_dim(placement)
        if dim is None:
            placements.append(Replicate())
        else:
            placements.append(Shard(min(dim, parameter.ndim - 2)))
    q = distributed_zeros(
        *shape,
        dtype=parameter.dtype,
        device_mesh=parameter.device_mesh,
        placements=placements,
    )
    local_tensor(q).copy_(values[local_slices(q)])
    return q


def build(param_groups, options):
    named = []
    for group in param_groups:
        named.extend(zip(group["param_names"], group["params"], strict=True))
    return Dion(muon_groups(named, options), options)
