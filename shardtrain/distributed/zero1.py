"""ZeRO stage 1 (Rajbhandari et al. 2020): split optimizer states over data-parallel replicas.

Each replica updates one slice of each parameter, and then all replicas gather the slices. Before each update,
the slice is copied from the parameter, because the parameter may have changed, for example by loading a
checkpoint. The optimizer sees the slices as DTensors that are split over dp_replicate, so its checkpoints can
be resharded like all others.
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

    Attributes:
        slices: parameter name -> this replica's slice, or the parameter itself if it cannot be split.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, block: int = 1) -> None:
        """Create the slices.

        Args:
            parameters: the trained parameters, by name.
            mesh: the mesh. Slices are split over dp_replicate.
            block: number of matrix columns that must stay on one replica, because an 8-bit optimizer state
                has one scale for them.
        """
        self._group = mesh.group(AXIS)
        self._replicas = mesh.size(AXIS)
        self._replica = mesh.rank(AXIS)
        self._parameters = parameters
        self._dims: dict[str, int | None] = {}
        self.slices: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            self._dims[name] = _free_dim(parameter, self._replicas, block)
            self.slices[name] = self._slice(name, parameter)

    def copy_weights(self) -> None:
        """Copy each parameter to its slice."""
        for name, piece in self.slices.items():
            parameter = self._parameters[name]
            if piece is not parameter:
                part = self._part(name, local_tensor(parameter).detach())
                local_tensor(piece).detach().copy_(part)

    def before_update(self) -> None:
        """Copy the parameter and the reduced gradient to each slice."""
        self.copy_weights()
        for name, piece in self.slices.items():
            parameter = self._parameters[name]
            if piece is parameter or parameter.grad is None:
                continue
            assert isinstance(piece, DTensor)
            part = self._part(name, local_tensor(parameter.grad)).contiguous()
            piece.grad = DTensor.from_local(
                part, piece.device_mesh, piece.placements, shape=piece.shape, stride=piece.stride()
            )

    def after_update(self) -> None:
        """Gather the updated slices into the parameters on every replica, with one collective per dtype."""
        names = [name for name, dim in self._dims.items() if dim is not None]
        # a dict and not a set, because every rank must process the dtypes in the same order
        dtypes = dict.fromkeys(self._parameters[name].dtype for name in names)
        for dtype in dtypes:
            self._gather([name for name in names if self._parameters[name].dtype == dtype])
        for name in names:
            self.slices[name].grad = None

    def _gather(self, names: list[str]) -> None:
        """Gather the slices of parameters of one dtype."""
        chunks_by_name = {}
        for name in names:
            parameter = local_tensor(self._parameters[name]).detach()
            chunks_by_name[name] = _chunks(parameter, self._dims[name], self._replicas)
        # The last chunks may be smaller. All replicas send equal sizes, so pad each chunk to the size of the
        # first one, which is the largest.
        padded_numel = sum(chunks[0].numel() for chunks in chunks_by_name.values())
        first_chunk = chunks_by_name[names[0]][0]
        sent = first_chunk.new_zeros(padded_numel)
        offset = 0
        for name, chunks in chunks_by_name.items():
            updated = local_tensor(self.slices[name]).detach()
            sent[offset : offset + updated.numel()].copy_(updated.flatten())
            offset += chunks[0].numel()
        received = [torch.empty_like(sent) for _ in range(self._replicas)]
        dist.all_gather(received, sent, group=self._group)
        # The chunks are views of the parameters, so this updates the parameters.
        offset = 0
        for chunks in chunks_by_name.values():
            for chunk, flat in zip(chunks, received, strict=True):
                values = flat[offset : offset + chunk.numel()]
                chunk.copy_(values.view(chunk.shape))
            offset += chunks[0].numel()

    def _slice(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        dim = self._dims[name]
        if dim is None:
            return parameter  # without a free dimension, every replica keeps the full state
        assert isinstance(parameter, DTensor)
        axis = list(parameter.device_mesh.mesh_dim_names or ()).index(AXIS)
        placements = list(parameter.placements)
        placements[axis] = Shard(dim)
        # Make a contiguous copy, because the fused AdamW kernel silently fails on a non-contiguous slice
        # (torch 2.13).
        part = self._part(name, parameter.to_local().detach()).clone(
            memory_format=torch.contiguous_format
        )
        piece = DTensor.from_local(
            part,
            parameter.device_mesh,
            placements,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return nn.Parameter(piece)

    def _part(self, name: str, parameter: Tensor) -> Tensor:
        return _chunks(parameter, self._dims[name], self._replicas)[self._replica]


def _free_dim(parameter: Tensor, replicas: int, block: int) -> int | None:
    """Return the first dimension that can be split over the replicas, or None.

    The dimension must not be split already over another axis, and must have at least one index per replica.
    The split must not cut through a block of columns.
    """
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    # FSDP has already split some dimensions.
    split_dims = {
        sharded_dim(p) for axis, p in enumerate(parameter.placements) if mesh.size(axis) > 1
    }
    columns = parameter.ndim - 1
    for dim in range(parameter.ndim):
        if dim in split_dims or parameter.shape[dim] < replicas:
            continue
        rows_per_replica = -(-parameter.shape[dim] // replicas)
        cuts_blocks = dim == columns and columns > 0 and rows_per_replica % block != 0
        if not cuts_blocks:
            return dim
    return None


def _chunks(parameter: Tensor, dim: int | None, replicas: int) -> list[Tensor]:
    """Return one view per replica. The last views may be empty, because ``torch.chunk`` may return fewer chunks."""
    assert dim is not None
    chunks = list(parameter.chunk(replicas, dim))
    empty = parameter.narrow(dim, parameter.size(dim), 0)
    return chunks + [empty] * (replicas - len(chunks))
