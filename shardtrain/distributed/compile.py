"""torch.compile, layer by layer and in place, so that names never change. Must run after recompute, before shard."""

from __future__ import annotations

import torch
from torch import nn

from shardtrain.config.schema import Config
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout, matches, word_of
from shardtrain.ops.cross_entropy import ChunkFunction, chunk_loss_without_scatter

RECOMPILE_LIMIT = 64


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Compile each layer; with tensor parallelism or experts, each layer's attention and feed-forward apart.

    Experts themselves stay eager: how many rows each gets is not known before it runs. Where sequences are split,
    layers that recompute have been compiled already, see ``is_compiled_within``.
    """
    if not _compiles_layers(config):
        return
    if mesh.size("tp") > 1:
        # Backward is traced again in each process instead of being read from the compiler's cache on disk. That cache
        # does not tell all placements of DTensors apart: with sequence parallelism an entry of another run has given
        # norm weights the gradient of one rank's tokens alone, without an error (torch 2.13). Kernels stay cached.
        import torch._functorch.config as autograd

        autograd.enable_autograd_cache = False
    # Layers share the compiler's cache of one function, whatever their kind; each kind takes a graph for fixed and one
    # for any lengths, with gradients and, in validation, without. Beyond the limit (8) layers would run eagerly.
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    for name, layer in getattr(model, layout.layers).items():
        path = f"{layout.layers}.{name}"
        if "forward" in vars(layer) and is_compiled_within(layer, path, layout, mesh, config):
            continue
        for part in _parts(layer, path, layout, mesh):
            part.compile(backend=config.compile.backend)


def _compiles_layers(config: Config) -> bool:
    return config.compile.enable and "model" in config.compile.components


def left_out(config: Config) -> str | None:
    """Why PyTorch has left out something of what has run so far, in a line; None where all layers were compiled.

    Where a graph breaks within a region that recomputes, all of the layer runs eagerly.
    """
    if not _compiles_layers(config):
        return None
    from torch._dynamo.utils import counters

    reasons = [str(why) for why in counters["graph_break"] if "SplitAttentionCore" not in str(why)]
    if not reasons:
        return None
    what = "the rest of" if config.activation_checkpoint.mode in ("none", "memory_budget") else "all or the rest of"
    why = " ".join(reasons[0].split())[:200]
    return f"compile.enable: {what} some layers is not compiled: {why} (TORCH_LOGS=graph_breaks says where)"


def is_compiled_within(layer: nn.Module, path: str, layout: Layout, mesh: Mesh, config: Config) -> bool:
    """Whether a layer that recomputes is compiled inside of what is recomputed, not around it.

    The attention core of a split sequence stays eager, and around a recomputed region that it cannot see whole the
    compiler leaves out everything, without a word. Inside it breaks the graph at the core alone.
    """
    return _compiles_layers(config) and mesh.size("cp") > 1 and _parts(layer, path, layout, mesh) == [layer]


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
