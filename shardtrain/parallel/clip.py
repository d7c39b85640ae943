"""The global gradient norm over every mesh axis, and clipping by it.

PyTorch's own clip fails on parameters of different meshes and, under HSDP, has been off by the number of replicas.
Here each gradient's squares are summed over exactly the axes on which it is split, so nothing is counted twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardtrain.parallel.mesh import Mesh
from shardtrain.shards import local_tensor, split_axes, squared_norm


def gradient_norm(parameters: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """L2 norm of all gradients of the whole model, a float32 scalar, equal on all ranks (a collective)."""
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
    total = torch.zeros((), dtype=torch.float32, device=mesh.device)
    # by name and in one order, or ranks would meet in different sums: group objects are not the same from call to call
    for axes in sorted(by_axes):
        squares = squared_norm(by_axes[axes]).to(mesh.device)
        for axis in axes:
            dist.all_reduce(squares, group=groups[axis])
        total += squares
    return mesh.sum(total, over=("pp",)).sqrt()


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient by a number, in place."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
