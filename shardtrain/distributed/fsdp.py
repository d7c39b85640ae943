"""Data parallelism by FSDP2. Sharding, replication (DDP) and both (HSDP) differ only in the mesh's sizes.

FSDP also implements mixed precision: parameters are stored in ``training.dtype`` and gathered in the
compute dtype, and gradients are reduced in the reduce dtype. One process, and meshes with only tensor
parallelism, cast without FSDP (compute_copies.py). ``apply`` must run last, because FSDP must see the final
parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.distributed import compute_copies, expert_parallel
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout, all_layers, mtp_modules
from shardtrain.ops import accelerator
from shardtrain.ops.tied import tied_names
from shardtrain.utils.errors import ConfigError, Problem


def is_needed(parts: Sequence[nn.Module], mesh: Mesh, config: Config) -> bool:
    """True if FSDP is needed: for several ranks, a cast or CPU offload, except ``derived.does_without_fsdp``."""
    size = mesh.device_mesh.size()
    has_cast = derived.compute_dtype(config) != config.training.dtype
    if size == 1 and not has_cast and not offloads(config, mesh.device):
        return False
    return not derived.does_without_fsdp(
        config, size, expert_parallel.are_sharded_separately(parts, config)
    )


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Shard a model in place. Each layer, the first modules, and the last modules become one unit each."""
    _prepare_forward(model, layout, mesh, config)
    if not is_needed([model], mesh, config):
        return
    _check_parameters(model, layout)
    options: dict[str, Any] = {
        "mesh": mesh.data_mesh(),
        "mp_policy": precision_policy(config),
        "offload_policy": OffloadPolicy(),
    }
    if offloads(config, mesh.device):
        options["offload_policy"] = CPUOffloadPolicy(
            pin_memory=accelerator.pins_memory(mesh.device)
        )
    reshard = _reshard_after_forward(config, mesh)
    layers = list(all_layers(model, layout).values())

    # Shard each layer. Backward needs the last layer again immediately, so by default its parameters stay
    # gathered.
    keeps_last = config.parallelism.fsdp_reshard_after_forward == "default"
    for layer in layers:
        is_kept = keeps_last and layer is layers[-1]
        layer_options = {**options, "reshard_after_forward": reshard and not is_kept}
        # Shard the experts first. The layer's unit then excludes them, because they are already units.
        expert_parallel.shard(layer, mesh, config, layer_options)
        fully_shard(layer, **layer_options)

    # Shard the first and the last modules. A parameter can belong to only one unit. So if first and last
    # modules share parameters, both stay in the root, which remains gathered for the entire pass.
    first = [getattr(model, name) for name in layout.first]
    last = [getattr(model, name) for name in layout.last]
    # Evaluation does not call the embedding of multi-token prediction, so it must be a separate unit.
    mtp_embed = [getattr(model, name) for name in mtp_modules(model, layout)[:1]]
    is_tied = _share_parameters(first, [*last, *mtp_embed]) or _share_parameters(mtp_embed, last)
    if not is_tied and not getattr(model, "ends_are_read", False):
        _shard_together(first, reshard_after_forward=reshard, **options)
        _shard_together(mtp_embed, reshard_after_forward=reshard, **options)
        _shard_together(last, reshard_after_forward=reshard and not keeps_last, **options)

    # Shard the root, which contains the remaining parameters.
    fully_shard(model, reshard_after_forward=reshard and not keeps_last, **options)
    if accelerator.is_accelerator(mesh.device):
        gather_ahead(model, layout)
    sums_over_ranks = options["mesh"].size() > 1 or expert_parallel.are_sharded_separately(
        [model], config
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed, not averaged: the loss was divided once, by the global number of
            # tokens. With a divide factor of 1, FSDP would use PREMUL_SUM, which gloo lacks. So force plain
            # sums first.
            module.set_force_sum_reduction_for_comms(True)
            # If no unit sums over ranks, leave the factor unset. FSDP would divide all gradients by it,
            # which takes time and changes nothing.
            if sums_over_ranks:
                module.set_gradient_divide_factor(1.0)
    if mesh.device.type == "cpu" and dist.get_backend() == "gloo":
        # a run on an accelerator does not import it
        from shardtrain.distributed.cpu import (
            shared_memory,
        )

        shared_memory.use(model)


def sum_embedding_gradients_in_float32(model: nn.Module, mesh: Mesh, config: Config) -> None:
    """Replace the forward of embeddings, in place, if a CPU would sum their gradients in a narrow dtype.

    This must precede tensor parallelism. Its styles wrap the forward, and would be lost with it. It also runs
    in a single process, whose results must equal those of any mesh.
    """
    dtypes = {derived.compute_dtype(config), config.training.dtype}
    if mesh.device.type != "cpu" or not dtypes & {"bfloat16", "float16"}:
        return
    for module in model.modules():
        if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            module.forward = partial(_embedding_summed_in_float32, module)  # type: ignore[method-assign]


def _prepare_forward(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Replace or hook forward methods.

    This also runs in a single process, whose results must equal those of any mesh.
    """
    has_experts = expert_parallel.are_sharded_separately([model], config)
    if derived.computes_with_copies(config, mesh.device_mesh.size(), has_experts):
        compute_copies.use(model, getattr(torch, derived.compute_dtype(config)))
    # If an FSDP unit returns a view, an in-place operation on it removes FSDP's hook, and backward runs
    # without the gathered weights. (With tensor parallelism, autograd raises an error instead.) The models
    # of this package have no such operation, so FSDP's warning is suppressed. A user's model may have one,
    # so its units return copies instead of views.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if config.model.name.endswith(".py"):
        for unit in (*model.children(), *getattr(model, layout.layers).values()):
            unit.register_forward_hook(_without_views)


def _shard_together(modules: list[nn.Module], **options: Any) -> None:
    """Make one unit of all modules that have parameters."""
    with_parameters = [module for module in modules if list(module.parameters())]
    if with_parameters:
        fully_shard(with_parameters, **options)


def _without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Forward hook that copies each view in a module's output. Must be registered before FSDP's."""
    return tree_map_only(Tensor, _copy_of_view, output)


def _copy_of_view(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor._is_view() else tensor


def gather_ahead(model: nn.Module, layout: Layout) -> None:
    """Make each FSDP unit prefetch: it starts the all-gather of the next layer before it computes.

    By default FSDP starts a unit's all-gather in forward when the pass reaches the unit. That is early enough
    only if the host runs ahead of the device. The host falls behind if layers are short, or if it waits for
    the device, as for the number of rows per expert. Prefetching needs memory for one more gathered layer in
    forward, which backward needs anyway. It gains nothing on CPUs, which have no separate stream for
    collectives.
    """
    layers = [f"{layout.layers}.{name}" for name in getattr(model, layout.layers)]
    mtp_layers = all_layers(model, layout).keys() - layers
    order = []
    for name in (*layout.first, *layers, *layout.last, *sorted(mtp_layers)):
        units = _units(model.get_submodule(name))
        if units:
            order.append(units)
    for unit, following in pairwise(order):
        unit[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(unit)


def _units(module: nn.Module) -> list[FSDPModule]:
    """Return the FSDP unit of a module and the units inside it.

    Empty if the module belongs to another unit.
    """
    if not isinstance(module, FSDPModule):
        return []
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


def _embedding_summed_in_float32(module: nn.Embedding, ids_BT: Tensor) -> Tensor:
    """``nn.Embedding`` whose gradient is rounded once.

    PyTorch's CPU kernel adds the gradients of a token in the dtype of the weight. In bfloat16 a token
    that occurs 4,096 times with a gradient of 1 gets a gradient of 256, because 256 + 1 is rounded to
    256.
    """
    weight = module.weight
    if not torch.is_grad_enabled():
        return F.embedding(ids_BT, weight, module.padding_idx)
    rows = F.embedding(ids_BT, weight.float(), module.padding_idx)
    return rows.to(weight.dtype)


def _check_parameters(model: nn.Module, layout: Layout) -> None:
    """Raise ConfigError for parameters that FSDP2 would silently untie, or reject without naming them.

    Layers must not share parameters with other modules, every parameter needs a dimension, and all trainable
    parameters of a unit must have the same dtype.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            rule = f"the 0-dimensional parameter {name}, which cannot be sharded"
            raise _refusal(rule, "make it torch.empty(1)")
    # Parameters may be tied only within one FSDP unit. Each layer is a unit, and so are all first and last
    # modules together.
    for names in tied_names(model):
        units = set()
        for name in names:
            is_in_layer = name.startswith(f"{layout.layers}.")
            units.add(".".join(name.split(".")[:2]) if is_in_layer else "")
        if len(units) > 1:
            rule = f"the same parameter as {names[0]} and {names[-1]}, but each layer is sharded separately"
            raise _refusal(rule, "give each layer its own parameters")
    paths = {id(parameter): name for name, parameter in model.named_parameters()}
    ends = nn.ModuleList(getattr(model, name) for name in (*layout.first, *layout.last))
    for unit in (*all_layers(model, layout).values(), ends):
        trained = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        for parameter in trained[1:]:
            if parameter.dtype == trained[0].dtype:
                continue
            first = _with_dtype(trained[0], paths)
            other = _with_dtype(parameter, paths)
            rule = f"{first} and {other}, which are sharded together"
            raise _refusal(rule, "use one dtype for all parameters")


def _with_dtype(parameter: nn.Parameter, paths: Mapping[int, str]) -> str:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return f"{paths[id(parameter)]} of {dtype}"


def _refusal(rule: str, fix: str) -> ConfigError:
    return ConfigError(
        Problem("model.name", None, f"has {rule}", f"{fix}, or train on one process")
    )


def precision_policy(config: Config) -> MixedPrecisionPolicy:
    """Return the dtypes of gathered parameters and reduced gradients.

    Inputs of modules are not cast, because rotary angles must stay in float32.
    """
    compute = getattr(torch, derived.compute_dtype(config))
    reduce = getattr(torch, config.training.mixed_precision_reduce)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)


def set_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Reduce gradients in the next backward pass if ``sync``. Otherwise accumulate them without communication."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)


def gather(model: nn.Module) -> None:
    """All-gather the parameters of all units. Each unit frees them after its next forward or backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def free_gathered(model: nn.Module) -> None:
    """Free gathered parameters and compute copies after forward passes without a backward."""
    compute_copies.drop(model)
    if not isinstance(model, FSDPModule):
        return
    # Newer versions of PyTorch have this method, which reshards and also forgets the order of the forward
    # pass. FSDP's next backward would prefetch in that order.
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _reshard_after_forward(config: Config, mesh: Mesh) -> bool:
    policy = config.parallelism.fsdp_reshard_after_forward
    if policy == "default":
        # A single shard is never gathered. Resharding would only free the copy in the compute dtype, and
        # backward would need this copy again.
        return mesh.size("dp_shard", "cp") > 1 and mesh.size("pp") == 1
    return policy == "always"


def offloads(config: Config, device: torch.device) -> bool:
    """True if parameters are offloaded to host memory. Always False on a CPU."""
    return config.training.enable_cpu_offload and accelerator.is_accelerator(device)


def _share_parameters(first: list[nn.Module], last: list[nn.Module]) -> bool:
    first_ids = {id(parameter) for parameter in nn.ModuleList(first).parameters()}
    return any(id(parameter) in first_ids for parameter in nn.ModuleList(last).parameters())
