"""Optimizer state split over replicas (ZeRO stage 1, Rajbhandari et al. 2020), on top of replicated parameters.

Each replica updates one slice of each parameter, and the slices are then gathered. The parameter stays the truth: a
slice is taken from it before each update. The optimizer sees the slices as DTensors split over dp_replicate, so
checkpoints reshard like any other.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from shardtrain.distributed.mesh import Mesh
from shardtrain.ops.dtensor import local_tensor, sharded_dim

AXIS = "dp_replicate"


class SplitStates:
    """The slices of replicated parameters that this replica updates.

    ``block`` columns of a matrix stay together, because their state has one scale.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, block: int = 1) -> None:
        self._group = mesh.group(AXIS)
        self._replicas = mesh.size(AXIS)
        self._replica = mesh.rank(AXIS)
        self._parameters = parameters
        self._dims = {name: _free_dim(parameter, self._replicas, block) for name, parameter in parameters.items()}
        self.slices = {name: self._slice(name, parameter) for name, parameter in parameters.items()}

    def before_update(self) -> None:
        """Give each slice its part of the parameter and of the reduced gradient."""
        for name, piece in self.slices.items():
            parameter = self._parameters[name]
            if piece is parameter or parameter.grad is None:
                continue
            assert isinstance(piece, DTensor)
            local_tensor(piece).detach().copy_(self._part(name, local_tensor(parameter).detach()))
            part = self._part(name, local_tensor(parameter.grad)).contiguous()
            piece.grad = DTensor.from_local(
                part, piece.device_mesh, piece.placements, shape=piece.shape, stride=piece.stride()
            )

    def after_update(self) -> None:
        """Gather the updated slices into the whole parameters on every replica, one collective per type."""
        names = [name for name, dim in self._dims.items() if dim is not None]
        # a dict and not a set: every rank must take the types in the same order
        for dtype in dict.fromkeys(self._parameters[name].dtype for name in names):
            self._gather([name for name in names if self._parameters[name].dtype == dtype])
        for name in names:
            self.slices[name].grad = None

    def _gather(self, names: list[str]) -> None:
        # Parts differ in size by rank where a dimension does not divide, so each is sent padded to the largest.
        wholes = [local_tensor(self._parameters[name]).detach() for name in names]
        parts = [_chunks(whole, self._dims[name], self._replicas) for name, whole in zip(names, wholes, strict=True)]
        padded = sum(chunks[0].numel() for chunks in parts)
        sent = wholes[0].new_zeros(padded)
        offset = 0
        for name, chunks in zip(names, parts, strict=True):
            mine = local_tensor(self.slices[name]).detach()
            sent[offset : offset + mine.numel()].copy_(mine.flatten())
            offset += chunks[0].numel()
        received = [torch.empty_like(sent) for _ in range(self._replicas)]
        dist.all_gather(received, sent, group=self._group)
        offset = 0
        for chunks in parts:
            for replica, chunk in enumerate(chunks):
                chunk.copy_(received[replica][offset : offset + chunk.numel()].view(chunk.shape))
            offset += chunks[0].numel()

    def _slice(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        dim = self._dims[name]
        if dim is None:
            return parameter  # no free dimension to split: every replica keeps this state whole
        assert isinstance(parameter, DTensor)
        axis = list(parameter.device_mesh.mesh_dim_names or ()).index(AXIS)
        placements = list(parameter.placements)
        placements[axis] = Shard(dim)
        # A copy: the fused AdamW kernel reads memory in a row and silently does wrong to a slice with gaps (torch 2.13)
        piece = DTensor.from_local(
            self._part(name, parameter.to_local().detach()).clone(memory_format=torch.contiguous_format),
            parameter.device_mesh,
            placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(piece)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        return _chunks(whole, self._dims[name], self._replicas)[self._replica]


def _free_dim(parameter: Tensor, replicas: int, block: int) -> int | None:
    """The first dimension that no axis with several ranks splits, that gives each replica a part and cuts no block."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    # FSDP has split some dimensions already; replicas split one of the others
    taken = {sharded_dim(p) for axis, p in enumerate(parameter.placements) if mesh.size(axis) > 1}
    free = [d for d in range(parameter.ndim) if d not in taken and parameter.shape[d] >= replicas]
    columns = parameter.ndim - 1
    if columns > 0 and -(-parameter.shape[columns] // replicas) % block:
        free = [d for d in free if d != columns]
    return next(iter(free), None)


def _chunks(whole: Tensor, dim: int | None, replicas: int) -> list[Tensor]:
    """Views of ``torch.chunk``'s parts, with empty ones at the end where there are fewer parts than replicas."""
    assert dim is not None
    chunks = list(whole.chunk(replicas, dim))
    return chunks + [whole.narrow(dim, whole.size(dim), 0)] * (replicas - len(chunks))
