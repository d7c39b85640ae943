"""torch.compile, layer by layer and in place, so that names never change. Must run after recompute, before shard."""

from __future__ import annotations

import torch
from torch import nn

from shardtrain.config.schema import Config
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout, matches, word_of
from shardtrain.ops.cross_entropy import ChunkFunction, chunk_loss_without_scatter


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Compile each layer; with tensor parallelism or experts, each layer's attention and feed-forward apart.

    Experts themselves stay eager: how many rows each gets is not known before it runs.
    """
    if not (config.compile.enable and "model" in config.compile.components):
        return
    if mesh.size("tp") > 1:
        # Backward is traced again in each process instead of being read from the compiler's cache on disk. That cache
        # does not tell all placements of DTensors apart: with sequence parallelism an entry of another run has given
        # norm weights the gradient of one rank's tokens alone, without an error (torch 2.13). Kernels stay cached.
        import torch._functorch.config as autograd

        autograd.enable_autograd_cache = False
    for name, layer in getattr(model, layout.layers).items():
        for part in _parts(layer, f"{layout.layers}.{name}", layout, mesh):
            part.compile(backend=config.compile.backend)


def _parts(layer: nn.Module, path: str, layout: Layout, mesh: Mesh) -> list[nn.Module]:
    # A whole layer with sequence parallelism fails in backward when compiled: 'Tensor' object has no attribute
    # '_local_tensor' (torch 2.13). The modules whose input is gathered compile well by themselves.
    inner = [f"{path}.{name}" for name, _ in layer.named_modules()]
    has_experts = layout.expert and any(matches(name, layout.expert) for name in inner)
    if mesh.size("tp") == 1 and not has_experts:
        return [layer]
    return [child for name, child in layer.named_children() if word_of(layout, f"{path}.{name}") == "gather"]


def compiled_chunk_loss(config: Config) -> ChunkFunction | None:
    """The loss of one chunk of tokens as one compiled kernel, or None when it is not to be compiled."""
    if not (config.compile.enable and "loss" in config.compile.components):
        return None
    return torch.compile(chunk_loss_without_scatter, backend=config.compile.backend)  # type: ignore[no-any-return]
