"""The global gradient norm over every mesh axis, and clipping by it.

PyTorch's own clip fails on parameters of different meshes and, under HSDP, has been off by the number of replicas.
Here each gradient's squares are summed over exactly the axes on which it is split, so nothing is counted twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardtrain.distributed.mesh import Mesh
from shardtrain.ops.dtensor import local_tensor, split_axes, squared_norm


def gradient_norm(parameters: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """L2 norm of all gradients of the whole model, a float64 scalar, equal on all ranks (a collective).

    It decides how far clipped weights move, so it must not depend on how tensors are split: see ``squared_norm``.
    """
    by_axes: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    groups: dict[str, dist.ProcessGroup] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        axes: tuple[str, ...] = ()
        if isinstance(gradient, DTensor):
            names = gradient.device_mesh.mesh_dim_names or ()
            axes = tuple(names[axis] for axis in split_axes(gradient))
            groups |= {names[axis]: gradient.device_mesh.get_group(axis) for axis in split_axes(gradient)}
        by_axes[axes].append(local_tensor(gradient))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    # by name and in one order, or ranks would meet in different sums: group objects are not the same from call to call
    for axes in sorted(by_axes):
        squares = squared_norm(by_axes[axes]).to(mesh.device)
        for axis in axes:
            dist.all_reduce(squares, group=groups[axis])
        total += squares
    return mesh.sum(total, over=("pp",)).sqrt()


NORMS_AGREE = 1e-5
"""Relative difference from which two ranks' norms are not the same number. Replicas hold equal bits; groups of ranks
that add them in another order may differ by 1e-7."""


@dataclass(frozen=True)
class Agreed:
    """A step's global loss and gradient norm as all ranks see them alike."""

    loss: float
    norm: float
    """Infinite where the norm of any rank is not finite."""
    same_norm: bool
    """Whether all ranks found the same norm; ``norm`` is their mean. Beyond some 10,000 ranks it may be False for
    rounding alone: ``guards.replicas.refuse_norms`` looks again."""


def agree(loss: Tensor, norm: Tensor, mesh: Mesh) -> Agreed:
    """Sum this rank's part of the loss over all ranks, and find whether all have the same norm (one collective).

    Ranks must not decide differently: a bit that flipped on one replica after the reduction makes one norm another, or
    not finite, and a rank that skips an update while others apply it waits for them in vain.
    """
    is_finite = torch.isfinite(norm)
    own_norm = torch.where(is_finite, norm, 0.0).double()
    # tensor-parallel peers hold the same loss
    own_loss = loss.double() if mesh.rank("tp") == 0 else torch.zeros_like(loss, dtype=torch.float64)
    own = torch.stack([own_loss, (~is_finite).double(), own_norm, own_norm.square()])
    total_loss, not_finite, norms, squares = mesh.sum_of_all(own).tolist()
    if not_finite:
        return Agreed(total_loss, math.inf, not_finite == mesh.device_mesh.size())
    num_ranks = mesh.device_mesh.size()
    mean = norms / num_ranks
    # a sum carries both questions: of equal numbers the variance is zero, and one of n that is off by d has d^2 / n
    variance = max(0.0, squares / num_ranks - mean * mean)
    return Agreed(total_loss, mean, math.sqrt(variance * num_ranks) <= NORMS_AGREE * mean)


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient by a number, in place."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
