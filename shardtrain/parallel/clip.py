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
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            groups = (
                tuple(gradient.device_mesh.get_group(axis) for axis in split_axes(gradient))
                if isinstance(gradient, DTensor)
                else ()
            )
            by_groups[groups].append(local_tensor(gradient))
    total = torch.zeros((), dtype=torch.float32, device=mesh.device)
    for groups, gradients in by_groups.items():
        squares = squared_norm(gradients).to(mesh.device)
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    return mesh.sum(total, over=("pp",)).sqrt()


def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient by a number, in place."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
