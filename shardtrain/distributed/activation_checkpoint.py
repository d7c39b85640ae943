"""Recompute activations in backward to save memory (Chen et al. 2016; selective: Korthikanti et al. 2022).

A layer's ``forward`` is replaced, not wrapped, so parameter names never change. Must run before compile and shard.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardtrain.config.schema import ActivationCheckpoint, Config
from shardtrain.distributed import compile
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout, matches
from shardtrain.ops import accelerator
from shardtrain.ops.dtensor import local_tensor

_LINEAR = ("aten.linear.default", "shardtrain.onednn_product.default")
"""Matmuls that are given the weight as it is; the others are given its transpose."""
_MATMULS = ("aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default", *_LINEAR)
_EXPENSIVE = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_attention_math.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "shardtrain.document_attention.default",
    "shardtrain.blocked_attention.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.all_to_all_single.default",
)
"""Operations whose results are kept by "op", besides every second matmul: attention and communication."""


def _weight_shape(operation: Any, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """The (out, in) shape of the weight that a matmul multiplies by; one in float8 is given its transpose too."""
    if operation in _operations(_LINEAR):
        return tuple(arguments[1].shape)
    return tuple(reversed(arguments[2 if operation is torch.ops.aten.addmm.default else 1].shape))


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Make layers recompute as ``[activation_checkpoint]`` says, in place."""
    options = config.activation_checkpoint
    if options.mode == "none":
        return
    if options.mode == "memory_budget":
        import torch._functorch.config as compiler  # loads the compiler; needed by this mode alone

        compiler.activation_memory_budget = options.memory_budget
        # of split layers the graph has process groups, which hold no tensors: PyTorch 2.13 will not guess their size
        if hasattr(compiler, "unsafe_treat_script_objects_as_zero_size"):
            compiler.unsafe_treat_script_objects_as_zero_size = True
        if options.visualize_memory_budget_pareto:
            compiler.visualize_memory_budget_pareto = True
            compiler.memory_budget_pareto_dir = f"{config.job.dump_folder}/memory_budget_pareto"
        return
    # "op" looks at each operation of every layer; a number makes every so many layers recompute as a whole
    every = 1 if options.mode == "full" or options.selective_ac_option == "op" else int(options.selective_ac_option)
    per_operation = options.mode == "selective" and options.selective_ac_option == "op"
    if per_operation and config.compile.enable:
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_news)
    for index, (name, layer) in enumerate(getattr(model, layout.layers).items()):
        if index % every == 0:
            path = f"{layout.layers}.{name}"
            # a partial: layers share what is compiled where its arguments are equal, and a closure's are not looked at
            forced = _forced_shapes(layer, path, options) if per_operation else ()
            contexts = functools.partial(_selective_contexts, forced) if per_operation else None
            if compile.is_compiled_within(layer, path, layout, mesh, config):
                layer.forward = torch.compile(layer.forward, backend=config.compile.backend)
            _recompute(layer, options, contexts, pin_memory=accelerator.pins_memory(mesh.device))


def _is_news(record: logging.LogRecord) -> bool:
    # PyTorch warns of every compiled region with a policy, whatever is in it: operations in place would change what is
    # kept. Layers have none on results that are kept (RMSNorm adds its eps in place, to a mean of squares).
    return "Detected that context_fn is passed" not in str(record.msg)


def _recompute(
    layer: nn.Module, options: ActivationCheckpoint, contexts: Callable[[], Any] | None, pin_memory: bool
) -> None:
    how: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": options.preserve_rng_state,
        "determinism_check": options.determinism_check,
        "early_stop": options.early_stop,
        "debug": options.debug,
    }
    if contexts is not None:
        how["context_fn"] = contexts
    forward = layer.forward

    # A function, not functools.partial: the compiler does not look into that, and compiles nothing, without a word.
    def recomputed(*inputs: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *inputs, **how, **keywords)

    layer.forward = _with_inputs_on_cpu(layer, recomputed, pin_memory) if options.cpu_offload else recomputed


def _with_inputs_on_cpu(layer: nn.Module, forward: Callable[..., Any], pin_memory: bool) -> Callable[..., Any]:
    # Recomputation keeps a layer's inputs alone; those are what save_on_cpu then moves. A compiled layer keeps the
    # weights that its backward reads beside them: they are where they are anyway, and stay there.
    host = torch.autograd.graph.save_on_cpu(pin_memory=pin_memory)  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hooks() -> AbstractContextManager[Any]:
        weights = {_memory(weight) for weight in (*layer.parameters(), *layer.buffers())}

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def pack(tensor: Tensor) -> Any:
            return tensor if _memory(tensor) in weights else host.pack_hook(tensor)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(kept: Any) -> Any:
        return kept if isinstance(kept, Tensor) else host.unpack_hook(kept)

    # What is compiled is the layer within: the compiler cannot look into hooks, and would break its graph at them.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def offloaded(*inputs: Any, **keywords: Any) -> Any:
        with hooks():
            return forward(*inputs, **keywords)

    return offloaded  # type: ignore[no-any-return]


def _memory(tensor: Tensor) -> int:
    """Which memory a tensor is in; of one without data, in a dry run, too."""
    return local_tensor(tensor).untyped_storage()._cdata


@functools.cache
def _operations(names: tuple[str, ...]) -> frozenset[Any]:
    """Operations by their names, without those that do not exist.

    This version of PyTorch may lack one, and kernels of a CPU are only registered in a run on a CPU. Called when layers
    run, because their kernels are registered before.
    """
    operations = []
    for name in names:
        namespace, operation, overload = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), operation, None)
        if packet is not None and hasattr(packet, overload):
            operations.append(getattr(packet, overload))
    return frozenset(operations)


def _forced_shapes(layer: nn.Module, path: str, options: ActivationCheckpoint) -> tuple[tuple[int, ...], ...]:
    """Shapes of the weights whose products are recomputed whatever "op" says of them."""
    shapes = {
        tuple(module.weight.shape)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
        and any(_names(f"{path}.{name}", pattern) for pattern in options.per_op_sac_force_recompute_mm_shapes_by_fqns)
    }
    return tuple(sorted(shapes))


def _selective_contexts(
    forced_shapes: tuple[tuple[int, ...], ...],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts that keep expensive operations; matmuls alternate, so that half of them is recomputed."""
    matmuls: Counter[bool] = Counter()  # counted apart in forward and in recomputation

    def policy(ctx: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        if operation in _operations(_MATMULS):
            # the policy sees operations and no modules: a product is known by the shape of its weight
            if _weight_shape(operation, arguments) in forced_shapes:
                return CheckpointPolicy.PREFER_RECOMPUTE
            matmuls[ctx.is_recompute] += 1
            keep = matmuls[ctx.is_recompute] % 2 == 1
        else:
            keep = operation in _operations(_EXPENSIVE)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return, no-untyped-call]


def _names(path: str, pattern: str) -> bool:
    # torchtitan's patterns name the end of a path: "moe.router.gate" is that module of any layer
    return matches(path, pattern) or path.endswith(f".{pattern}")
