"""Recompute activations in backward to save memory (Chen et al. 2016; selective: Korthikanti et al.
2022).

A layer's ``forward`` is replaced, not wrapped, so parameter names never change. Must run before compile
and shard.
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
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardtrain.config.schema import ActivationCheckpoint, Config
from shardtrain.distributed import compile
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout, all_layers, matches
from shardtrain.ops import accelerator
from shardtrain.ops.dtensor import local_tensor

_LINEAR = ("aten.linear.default", "shardtrain.onednn_product.default")
"""Matmuls that receive the weight itself. All other matmuls receive its transpose."""
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
"""Attention and communication operations. "op" keeps their results and those of every second matmul."""


def _weight_shape(operation: Any, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the (out, in) shape of the weight of a matmul."""
    if operation in _operations(_LINEAR):
        return tuple(arguments[1].shape)
    # mm(x, weight^T), _scaled_mm(x, weight^T), addmm(bias, x, weight^T)
    index = 2 if operation is torch.ops.aten.addmm.default else 1
    return tuple(reversed(arguments[index].shape))


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Replace the forward of layers, which then recompute their activations in backward.

    ``[activation_checkpoint]`` selects the layers.
    """
    options = config.activation_checkpoint
    if options.mode == "none":
        return
    if options.mode == "memory_budget":
        _set_memory_budget(config)
        return
    # "op" selects operations within every layer. A number N selects every Nth layer.
    is_per_operation = options.mode == "selective" and options.selective_ac_option == "op"
    every_nth = 1
    if options.mode != "full" and options.selective_ac_option != "op":
        every_nth = int(options.selective_ac_option)
    if is_per_operation and config.compile.enable:
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_not_policy_warning)
    for index, (path, layer) in enumerate(all_layers(model, layout).items()):
        if index % every_nth:
            continue
        contexts = None
        if is_per_operation:
            # Not a closure: layers share compiled code if the arguments of their partials are equal, but
            # the compiler does not compare the variables of closures.
            contexts = functools.partial(_selective_contexts, _forced_shapes(layer, path, options))
        if compile.is_compiled_within(layer, path, layout, mesh, config):
            layer.forward = torch.compile(layer.forward, backend=config.compile.backend)
        _recompute(layer, options, contexts, pin_memory=accelerator.pins_memory(mesh.device))


def _set_memory_budget(config: Config) -> None:
    """Configure the compiler's own choice of activations to recompute."""
    import torch._functorch.config as compiler  # loads the compiler, which other modes do not need

    options = config.activation_checkpoint
    compiler.activation_memory_budget = options.memory_budget
    # The graph of a split layer contains process groups. They hold no tensors, but PyTorch 2.13 fails
    # because it does not know their size.
    if hasattr(compiler, "unsafe_treat_script_objects_as_zero_size"):
        compiler.unsafe_treat_script_objects_as_zero_size = True
    if options.visualize_memory_budget_pareto:
        compiler.visualize_memory_budget_pareto = True
        compiler.memory_budget_pareto_dir = f"{config.job.dump_folder}/memory_budget_pareto"


def _is_not_policy_warning(record: logging.LogRecord) -> bool:
    """Log filter that drops the warning that PyTorch logs for each compiled region with a policy.

    PyTorch warns because an in-place operation would change a kept result. Our layers never change a
    kept result in place. (RMSNorm adds eps in place, but to a mean of squares, which is not kept.)
    """
    return "Detected that context_fn is passed" not in str(record.msg)


def _recompute(
    layer: nn.Module,
    options: ActivationCheckpoint,
    contexts: Callable[[], Any] | None,
    pin_memory: bool,
) -> None:
    """Replace a layer's forward with a checkpointed one."""
    checkpoint_options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": options.preserve_rng_state,
        "determinism_check": options.determinism_check,
        "early_stop": options.early_stop,
        "debug": options.debug,
    }
    if contexts is not None:
        checkpoint_options["context_fn"] = contexts
    forward = layer.forward

    # Use a function: the compiler silently compiles nothing inside a functools.partial.
    def recomputed(*inputs: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *inputs, **checkpoint_options, **keywords)

    layer.forward = recomputed
    if options.cpu_offload:
        layer.forward = _with_inputs_on_cpu(layer, recomputed, pin_memory)


def _with_inputs_on_cpu(
    layer: nn.Module, forward: Callable[..., Any], pin_memory: bool
) -> Callable[..., Any]:
    """Move the inputs of a recomputed layer to host memory between forward and backward.

    An eager recomputed layer saves only its inputs. A compiled layer also saves weights for its
    backward. These stay on the device, because moving them would free no memory.
    """
    host = torch.autograd.graph.save_on_cpu(pin_memory=pin_memory)  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hooks() -> AbstractContextManager[Any]:
        weight_storages = {
            _storage_id(weight) for weight in (*layer.parameters(), *layer.buffers())
        }

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def pack(tensor: Tensor) -> Any:
            return tensor if _storage_id(tensor) in weight_storages else host.pack_hook(tensor)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unpack(packed: Any) -> Any:
        return packed if isinstance(packed, Tensor) else host.unpack_hook(packed)

    # Only the layer inside is compiled. The compiler cannot trace hooks, and would break its graph at them.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def offloaded(*inputs: Any, **keywords: Any) -> Any:
        with hooks():
            return forward(*inputs, **keywords)

    return offloaded  # type: ignore[no-any-return]


def _storage_id(tensor: Tensor) -> int:
    """Return an id of a tensor's storage. Also works for tensors without data in a dry run."""
    return local_tensor(tensor).untyped_storage()._cdata


@functools.cache
def _operations(names: tuple[str, ...]) -> frozenset[Any]:
    """Look up operations by name, and skip names that do not exist.

    Some versions of PyTorch lack an operation, and CPU kernels are registered only in a CPU run.
    Results are cached, so the first call must come after kernels are registered, when layers run.
    """
    operations = []
    for name in names:
        namespace, operation, overload = name.split(".")
        packet = getattr(getattr(torch.ops, namespace), operation, None)
        if packet is not None and hasattr(packet, overload):
            operations.append(getattr(packet, overload))
    return frozenset(operations)


def _forced_shapes(
    layer: nn.Module, path: str, options: ActivationCheckpoint
) -> tuple[tuple[int, ...], ...]:
    """Return the weight shapes of the matmuls that "op" must always recompute."""
    patterns = options.per_op_sac_force_recompute_mm_shapes_by_fqns
    shapes = set()
    for name, module in layer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if any(_names(f"{path}.{name}", pattern) for pattern in patterns):
            shapes.add(tuple(module.weight.shape))
    return tuple(sorted(shapes))


def _selective_contexts(
    forced_shapes: tuple[tuple[int, ...], ...],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return checkpoint contexts that keep the results of expensive operations and of every second matmul."""
    # Matmuls so far in the first pass and in recomputation. Each pass counts separately from 0, because
    # the policy must make the same decisions in both.
    num_matmuls: Counter[bool] = Counter()

    def policy(ctx: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        if operation in _operations(_MATMULS):
            # The policy sees operations, not modules. So recognize a matmul by the shape of its weight.
            if _weight_shape(operation, arguments) in forced_shapes:
                return CheckpointPolicy.PREFER_RECOMPUTE
            num_matmuls[ctx.is_recompute] += 1
            is_kept = num_matmuls[ctx.is_recompute] % 2 == 1
        else:
            is_kept = operation in _operations(_EXPENSIVE)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return, no-untyped-call]


def _names(path: str, pattern: str) -> bool:
    # torchtitan's patterns match the end of a path: "moe.router.gate" is that module in any layer
    return matches(path, pattern) or path.endswith(f".{pattern}")
