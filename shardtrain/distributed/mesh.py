"""The device mesh: its axes in torchtitan's order, and sums over them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.distributed.process_group import World
from shardtrain.distributed.rendezvous import gloo_sockets

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: tensor-parallel peers are neighbours, on the fastest links."""
BATCH_AXES = ("dp_replicate", "dp_shard")
"""Ranks along these read different samples."""
LOSS_AXES = ("dp_replicate", "dp_shard", "cp")
"""Ranks along these hold different target tokens."""


@dataclass(frozen=True)
class Mesh:
    """All ranks as a grid. ``device_mesh`` has no axes of size 1, except dp_shard, which FSDP always needs."""

    device_mesh: DeviceMesh
    sizes: Mapping[str, int]
    device: torch.device
    expert_meshes: dict[int, DeviceMesh] = field(default_factory=dict, compare=False, repr=False)
    """The same ranks arranged for expert parallelism, by its degree; see ``expert_parallel.mesh_of_experts``."""

    def size(self, *axes: str) -> int:
        """Number of ranks along the axes together."""
        product = 1
        for axis in axes:
            product *= self.sizes[axis]
        return product

    def rank(self, *axes: str) -> int:
        """This rank's index along the axes flattened into one, the last axis running fastest."""
        index = 0
        existing = self.device_mesh.mesh_dim_names or ()
        for axis in axes:
            rank = self.device_mesh.get_local_rank(axis) if axis in existing else 0
            index = index * self.sizes[axis] + rank
        return index

    def submesh(self, *axes: str) -> DeviceMesh:
        """The DeviceMesh of the axes; each must have more than one rank or be dp_shard."""
        return self.device_mesh[axes if len(axes) > 1 else axes[0]]

    def data_mesh(self) -> DeviceMesh:
        """The mesh that FSDP shards over (dp_shard and cp as one axis), with replicas in front when there are any."""
        if self.sizes["cp"] == 1:
            return self.submesh(*(("dp_replicate",) if self.sizes["dp_replicate"] > 1 else ()), "dp_shard")
        # context-parallel ranks hold the same weights, so FSDP shards over them as well
        shard_and_cp = self.submesh("dp_shard", "cp")
        flattened = gloo_sockets.private(lambda: shard_and_cp._flatten("dp_shard_cp"))
        if self.sizes["dp_replicate"] == 1:
            return flattened
        with warnings.catch_warnings():
            # torch 2.13 warns of slicing a flattened axis, and has no public way to combine it with another
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.submesh("dp_replicate", "dp_shard_cp")

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank's peers along one axis."""
        return self.device_mesh.get_group(axis)

    def sum(self, tensor: Tensor, over: tuple[str, ...]) -> Tensor:
        """The sum of a small tensor over the ranks of the axes."""
        return self._reduce(tensor, over, dist.ReduceOp.SUM)

    def sum_of_all(self, tensor: Tensor) -> Tensor:
        """The sum of a small tensor over all ranks, in one collective; by gloo if the tensor is on the CPU."""
        if self.device_mesh.size() > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor, over: tuple[str, ...]) -> Tensor:
        """The elementwise maximum of a small tensor over the ranks of the axes."""
        return self._reduce(tensor, over, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, over: tuple[str, ...], op: dist.ReduceOp.RedOpType) -> Tensor:
        axes = [axis for axis in over if self.sizes[axis] > 1]
        tensor = tensor.clone() if axes else tensor
        for axis in axes:
            dist.all_reduce(tensor, op, group=self.group(axis))
        return tensor


def sizes_of(config: Config, world_size: int) -> dict[str, int]:
    """Ranks along each axis of AXES."""
    p = config.parallelism
    degrees = (
        p.pipeline_parallel_degree,
        p.data_parallel_replicate_degree,
        derived.shard_degree(config, world_size),
        p.context_parallel_degree,
        p.tensor_parallel_degree,
    )
    return dict(zip(AXES, degrees, strict=True))


def build(config: Config, world: World) -> Mesh:
    """Arrange all ranks in a mesh (a collective: every rank calls it)."""
    sizes = sizes_of(config, world.size)
    # axes of size 1 are left out: each would cost every rank a process group of its own
    names = tuple(axis for axis in AXES if sizes[axis] > 1 or axis == "dp_shard")
    shape = tuple(sizes[name] for name in names)
    device_type = world.device.type
    device_mesh = gloo_sockets.private(lambda: init_device_mesh(device_type, shape, mesh_dim_names=names))
    return Mesh(device_mesh, sizes, world.device)
