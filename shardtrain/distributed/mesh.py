"""The device mesh, whose axes have torchtitan's order, and reductions of small tensors over axes."""

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
from shardtrain.ops import accelerator, host_collectives

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""All axes, outermost first. Ranks of a tensor-parallel group are consecutive, so they use the fastest links."""
BATCH_AXES = ("dp_replicate", "dp_shard")
"""Axes along which ranks read different samples."""
LOSS_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes along which ranks hold different target tokens."""


@dataclass(frozen=True)
class Mesh:
    """All ranks, arranged in a grid with the axes ``AXES``.

    ``device_mesh`` omits axes of size 1, except dp_shard, which FSDP always needs.
    """

    device_mesh: DeviceMesh
    sizes: Mapping[str, int]
    device: torch.device
    expert_meshes: dict[int, DeviceMesh] = field(default_factory=dict, compare=False, repr=False)
    """Cache of ``expert_parallel.mesh_of_experts``: expert-parallel degree -> mesh with an expert axis."""

    def size(self, *axes: str) -> int:
        """Return the product of the axes' sizes."""
        product = 1
        for axis in axes:
            product *= self.sizes[axis]
        return product

    def rank(self, *axes: str) -> int:
        """Return this rank's index along the given axes, flattened into one. The last axis varies fastest."""
        index = 0
        existing_axes = self.device_mesh.mesh_dim_names or ()
        for axis in axes:
            # an axis of size 1 does not exist, and adds nothing to the index
            if axis in existing_axes:
                index = index * self.sizes[axis] + self.device_mesh.get_local_rank(axis)
        return index

    def submesh(self, *axes: str) -> DeviceMesh:
        """Return the DeviceMesh of the axes. Each must have more than one rank or be dp_shard."""
        if len(axes) == 1:
            return self.device_mesh[axes[0]]
        return self.device_mesh[axes]

    def data_mesh(self) -> DeviceMesh:
        """Return the mesh for FSDP: dp_shard and cp flattened to one axis.

        With several replicas, dp_replicate is an additional first axis.
        """
        has_replicas = self.sizes["dp_replicate"] > 1
        if self.sizes["cp"] == 1 and has_replicas:
            return self.submesh("dp_replicate", "dp_shard")
        if self.sizes["cp"] == 1:
            return self.submesh("dp_shard")
        # Context-parallel ranks hold the same weights, so FSDP shards over them as well.
        shard_and_cp = self.submesh("dp_shard", "cp")
        flattened = gloo_sockets.private(lambda: shard_and_cp._flatten("dp_shard_cp"))
        if not has_replicas:
            return flattened
        with warnings.catch_warnings():
            # torch 2.13 warns when a flattened axis is sliced, but has no public way to combine it with
            # another axis.
            warnings.filterwarnings("ignore", message="Slicing a flattened dim")
            return self.submesh("dp_replicate", "dp_shard_cp")

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of this rank and its peers along one axis."""
        return self.device_mesh.get_group(axis)

    def sum(self, tensor: Tensor, over: tuple[str, ...]) -> Tensor:
        """Return the sum of a small tensor over the ranks of the axes (a collective)."""
        return self._reduce(tensor, over, dist.ReduceOp.SUM)

    def sum_of_all(self, tensor: Tensor) -> Tensor:
        """Return the sum of a small tensor over all ranks, in a single collective.

        In a run on accelerators, gloo sums tensors that are on the CPU.
        """
        if self.device_mesh.size() > 1:
            tensor = tensor.clone()
            host_collectives.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor, over: tuple[str, ...]) -> Tensor:
        """Return the elementwise maximum of a small tensor over the ranks of the axes (a collective)."""
        return self._reduce(tensor, over, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, over: tuple[str, ...], op: dist.ReduceOp.RedOpType) -> Tensor:
        axes = [axis for axis in over if self.sizes[axis] > 1]
        if axes:
            tensor = tensor.clone()  # all_reduce works in place
        for axis in axes:
            host_collectives.all_reduce(tensor, op, self.group(axis))
        return tensor


def sizes_of(config: Config, world_size: int) -> dict[str, int]:
    """Return the number of ranks along each axis of AXES."""
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
    """Build the mesh of all ranks (a collective)."""
    sizes = sizes_of(config, world.size)
    # Axes of size 1 are omitted, because each would cost every rank a separate process group.
    names = tuple(axis for axis in AXES if sizes[axis] > 1 or axis == "dp_shard")
    shape = tuple(sizes[name] for name in names)
    # PyTorch's meshes support only devices with collectives, and Apple's GPU has none.
    device_type = "cpu" if accelerator.is_apple(world.device) else world.device.type
    device_mesh = gloo_sockets.private(
        lambda: init_device_mesh(device_type, shape, mesh_dim_names=names)
    )
    return Mesh(device_mesh, sizes, world.device)
