"""The global gradient norm on any mesh, and clipping by it.

PyTorch's own clipping fails if parameters are on different meshes. With HSDP it has returned a norm that was
wrong by the number of replicas. Here each gradient's squares are summed over exactly the axes on which it is
split, so nothing is counted twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardtrain.distributed.mesh import Mesh
from shardtrain.ops import host_collectives
from shardtrain.ops.accelerator import Reading, sum_dtype
from shardtrain.ops.dtensor import local_tensor, split_axes, squared_norm


def gradient_norm(parameters: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """Return the L2 norm of all gradients of the model, a float64 scalar (a collective).

    The norm is the same on all ranks. Because clipping uses it, it must not depend on how tensors are split,
    see ``squared_norm``.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    squares = SquaredNorm(mesh)
    squares.add(*gradients)
    return squares.norm()


class SquaredNorm:
    """A running sum of squares of gradients, added in one or several calls of ``add``."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._by_axes: dict[tuple[str, ...], Tensor] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}

    def add(self, *gradients: Tensor) -> None:
        """Add the squares of this rank's parts of gradients. Not a collective."""
        by_axes: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            axes: tuple[str, ...] = ()
            if isinstance(gradient, DTensor):
                # Sum only over the axes on which the gradient is split. A sum over a replicated axis would
                # count each replica.
                mesh = gradient.device_mesh
                split = split_axes(gradient)
                names = mesh.mesh_dim_names or ()
                axes = tuple(names[axis] for axis in split)
                for axis in split:
                    self._groups[names[axis]] = mesh.get_group(axis)
            by_axes[axes].append(local_tensor(gradient))
        for axes, tensors in by_axes.items():
            squares = squared_norm(tensors).to(self._mesh.device)
            if axes in self._by_axes:
                squares = self._by_axes[axes] + squares
            self._by_axes[axes] = squares

    def norm(self) -> Tensor:
        """Return the square root of the sum over all ranks (a collective)."""
        total = torch.zeros((), dtype=sum_dtype(self._mesh.device), device=self._mesh.device)
        # All ranks must run the all-reduces in the same order, so sort the axes.
        for axes in sorted(self._by_axes):
            squares = self._by_axes[axes]
            for axis in axes:
                host_collectives.all_reduce(squares, group=self._groups[axis])
            total += squares
        return self._mesh.sum(total, over=("pp",)).sqrt()


NORMS_AGREE = 1e-5
"""Norms of two ranks count as equal within this relative tolerance.

Replicas compute the same bits. Ranks that add the same squares in a different order may differ by 1e-7.
"""


@dataclass(frozen=True)
class Agreed:
    """A step's global loss and gradient norm, the same on all ranks."""

    loss: float
    norm: float
    """Infinite if the norm of any rank is not finite."""
    same_norm: bool
    """True if all ranks computed the same norm. (``norm`` is the mean over ranks.)

    With more than about 10,000 ranks, rounding can make it False although the norms are equal. So
    ``replica_check.refuse_norms`` checks again.
    """
    applied: bool = False
    """True if the device has already decided to apply the update."""


class OnDevice(NamedTuple):
    """The decision whether to apply an update, computed on the device.

    The host queues the update before it knows the loss and the norm.
    """

    applies: Tensor
    """Boolean scalar: True if loss and norm are finite, and the norm is the same on all ranks."""
    factor: Tensor
    """Scalar factor for the gradients, which limits their norm to ``training.max_norm``."""


class Agreement:
    """Sums the loss over all ranks, and checks that all ranks computed the same norm.

    The constructor is a collective. All ranks must make the same decision on the update. If one rank
    skipped it while others apply it, the run would deadlock. Norms can differ after a bit flip: if it
    happens on one replica after the gradient reduction, only this replica's norm changes.
    """

    def __init__(self, loss: Tensor, norm: Tensor, mesh: Mesh) -> None:
        is_finite = torch.isfinite(norm)
        wide = sum_dtype(norm.device)
        local_norm = torch.where(is_finite, norm, 0.0).to(wide)
        # All tensor-parallel ranks of a group have the same loss. Count it only once.
        counts_loss = mesh.rank("tp") == 0
        local_loss = loss.to(wide) if counts_loss else torch.zeros_like(loss, dtype=wide)
        not_finite = (~is_finite).to(wide)
        summands = torch.stack([local_loss, not_finite, local_norm, local_norm.square()])
        self._sums_4 = mesh.sum_of_all(summands)
        self._num_ranks = mesh.device_mesh.size()

    def on_device(self, max_norm: float) -> OnDevice:
        """Decide on the device whether to apply the update, by the same rules as the host does after ``read``."""
        total_loss, not_finite, norms, squares = self._sums_4.unbind()
        mean = norms / self._num_ranks
        variance = (squares / self._num_ranks - mean * mean).clamp_min(0.0)
        norms_agree = (variance * self._num_ranks).sqrt() <= NORMS_AGREE * mean
        are_all_finite = torch.isfinite(total_loss) & torch.isfinite(mean) & (not_finite == 0)
        factor = (max_norm / (mean + 1e-6)).clamp_max(1.0)
        return OnDevice(are_all_finite & norms_agree, factor)

    def read(self, decision: OnDevice | None = None) -> Agreed:
        """Return loss and norm. This is the only point of a step where the host waits for an accelerator.

        ``applied`` is then the device's ``decision``, which the host does not compute again.
        """
        numbers = self._sums_4
        if decision is not None:
            # Copy the decision to the host together with the sums, because a second copy would wait again.
            numbers = torch.cat([numbers, decision.applies.to(numbers.dtype).unsqueeze(0)])
        total_loss, not_finite, norms, squares, *applied_flag = Reading(
            numbers, "loss and gradient norm"
        ).get()
        applied = applied_flag == [1.0]
        num_ranks = self._num_ranks
        if not_finite:
            return Agreed(total_loss, math.inf, not_finite == num_ranks, applied)
        mean = norms / num_ranks
        if num_ranks == 1:
            return Agreed(total_loss, mean, True, applied)
        # If all norms are equal, their variance is 0. If one of n norms is wrong by d, it is about d^2 / n.
        variance = max(0.0, squares / num_ranks - mean * mean)
        is_same = math.sqrt(variance * num_ranks) <= NORMS_AGREE * mean
        return Agreed(total_loss, mean, is_same, applied)


def scale_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply every gradient by a number, in place.

    The host does not read a factor that is a tensor, so it multiplies even if the factor is 1.
    """
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return
    if isinstance(factor, Tensor):
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    elif factor != 1.0:
        torch._foreach_mul_(gradients, factor)
