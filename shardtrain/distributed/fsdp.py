"""Data parallelism by FSDP2: sharded, replicated (DDP) and both (HSDP) are one mesh with different sizes.

Mixed precision is here too: parameters are stored in ``training.dtype``, gathered in the compute type, and their
gradients reduced in the reduce type. One process and tensor-parallel peers alone cast without FSDP (compute_copies.py).
Must run last: it must see the final parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.distributed import compute_copies, expert_parallel
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout
from shardtrain.ops import accelerator
from shardtrain.ops.tied import tied_names
from shardtrain.utils.errors import ConfigError, Problem


def is_needed(parts: Sequence[nn.Module], mesh: Mesh, config: Config) -> bool:
    """Whether FSDP is needed: several ranks, a cast or CPU offload, and ``derived`` does not do without it."""
    size = mesh.device_mesh.size()
    casts = derived.compute_dtype(config) != config.training.dtype
    has_work = size > 1 or casts or offloads(config, mesh.device)
    return has_work and not derived.does_without_fsdp(config, size, expert_parallel.has_experts(parts))


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Shard each layer, the embedding, and the norm with the head, each as one unit, in place."""
    # also for one process, which must give the numbers of any mesh
    half = {derived.compute_dtype(config), config.training.dtype} & {"bfloat16", "float16"}
    if half and mesh.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
                module.forward = partial(_embedding_summed_in_float32, module)  # type: ignore[method-assign]
    if derived.computes_with_copies(config, mesh.device_mesh.size(), expert_parallel.has_experts([model])):
        compute_copies.use(model, getattr(torch, derived.compute_dtype(config)))
    # An in-place operation on an output that is a view drops FSDP's hook, and backward then lacks the gathered weights;
    # on a view from tensor parallelism, autograd rejects it. Models of this package have no such operation. A user's
    # model may, so its units return no views
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if config.model.name.endswith(".py"):
        for unit in (*model.children(), *getattr(model, layout.layers).values()):
            unit.register_forward_hook(_without_views)
    if not is_needed([model], mesh, config):
        return
    _check_parameters(model, layout)
    options: dict[str, Any] = {
        "mesh": mesh.data_mesh(),
        "mp_policy": precision_policy(config),
        "offload_policy": CPUOffloadPolicy(pin_memory=accelerator.pins_memory(mesh.device))
        if offloads(config, mesh.device)
        else OffloadPolicy(),
    }
    reshard = _reshard_after_forward(config, mesh)
    layers = list(getattr(model, layout.layers).values())

    # layers; backward needs the last one again at once, so by default its parameters stay gathered
    keep_last = config.parallelism.fsdp_reshard_after_forward == "default"
    for layer in layers:
        policy = {**options, "reshard_after_forward": reshard and not (keep_last and layer is layers[-1])}
        expert_parallel.shard(layer, mesh, config, policy)  # before the layer, whose unit then excludes the experts
        fully_shard(layer, **policy)

    # the ends, and the root with what is left
    first = [getattr(model, name) for name in layout.first]
    last = [getattr(model, name) for name in layout.last]
    # a parameter belongs to one unit: tied ends stay in the root, which is gathered for the whole pass
    if not _share_parameters(first, last) and not getattr(model, "ends_are_read", False):
        for ends, keep in ((first, False), (last, keep_last)):
            with_parameters = [module for module in ends if any(True for _ in module.parameters())]
            if with_parameters:
                fully_shard(with_parameters, reshard_after_forward=reshard and not keep, **options)
    fully_shard(model, reshard_after_forward=reshard and not keep_last, **options)
    if accelerator.is_accelerator(mesh.device):
        gather_ahead(model, layout)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed, not averaged: the loss was divided once, by the global number of tokens. A divide
            # factor of 1 would use PREMUL_SUM, which gloo lacks, so plain sums are forced first.
            module.set_force_sum_reduction_for_comms(True)
            # where no unit sums over ranks no factor is needed, and FSDP would divide all gradients by it
            if options["mesh"].size() > 1 or expert_parallel.has_experts([model]):
                module.set_gradient_divide_factor(1.0)
    if mesh.device.type == "cpu" and dist.get_backend() == "gloo":
        from shardtrain.distributed.cpu import shared_memory  # a run on an accelerator does not import it

        shared_memory.use(model)


def _without_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Copy each view in a module's output. A forward hook, which must be registered before FSDP's."""
    return tree_map_only(Tensor, _copy_of_view, output)


def _copy_of_view(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor._is_view() else tensor


def gather_ahead(model: nn.Module, layout: Layout) -> None:
    """Prefetch: each FSDP unit starts the all-gather of the next layer, with its experts, before it computes itself.

    By default FSDP starts an all-gather in forward when its unit is reached. That is early enough only while the host
    runs ahead of the device, which fails where layers are short or wait for the device, as for the row counts of
    experts. It costs the memory of one more gathered layer in forward, as backward does anyway, and gains nothing on
    CPUs, where collectives have no stream of their own.
    """
    named = [*layout.first, *(f"{layout.layers}.{name}" for name in getattr(model, layout.layers)), *layout.last]
    order = [units for name in named if (units := _units(model.get_submodule(name)))]
    for unit, following in pairwise(order):
        unit[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(unit)


def _units(module: nn.Module) -> list[FSDPModule]:
    """The FSDP unit of a module and the units inside it; empty where the module belongs to another unit."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)] if isinstance(module, FSDPModule) else []


def _embedding_summed_in_float32(module: nn.Embedding, ids_BT: Tensor) -> Tensor:
    """``nn.Embedding`` whose gradient is rounded once.

    PyTorch's CPU kernel adds the gradients of a token in the type of the weight: in bfloat16 a token that occurs 4,096
    times with a gradient of 1 each has one of 256, because 256 + 1 is 256 there.
    """
    if not torch.is_grad_enabled():
        return F.embedding(ids_BT, module.weight, module.padding_idx)
    return F.embedding(ids_BT, module.weight.float(), module.padding_idx).to(module.weight.dtype)


def _check_parameters(model: nn.Module, layout: Layout) -> None:
    """Refuse parameters that FSDP2 cannot shard: it would untie them silently, or fail without naming them.

    Only the first and last modules may share parameters with other units. Trainable parameters of a unit have one type.
    """

    def refuse(rule: str, fix: str) -> ConfigError:
        return ConfigError(Problem("model.name", None, f"has {rule}", f"{fix}, or train on one process"))

    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise refuse(f"the parameter {name} without dimensions, which cannot be sharded", "make it torch.empty(1)")
    layers: nn.ModuleDict = getattr(model, layout.layers)
    for names in tied_names(model):
        tops = {".".join(name.split(".")[:2]) for name in names if name.startswith(f"{layout.layers}.")}
        if tops and len(tops | {name for name in names if not name.startswith(f"{layout.layers}.")}) > 1:
            rule = f"one parameter as {names[0]} and {names[-1]}, and each layer is sharded by itself"
            raise refuse(rule, "give each layer parameters of its own")
    units = [*layers.values(), nn.ModuleList(getattr(model, name) for name in (*layout.first, *layout.last))]
    paths = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in units:
        trained = [parameter for parameter in unit.parameters() if parameter.requires_grad]
        other = next((parameter for parameter in trained if parameter.dtype != trained[0].dtype), None)
        if other is not None:
            types = " and ".join(
                f"{paths[id(odd)]} of {str(odd.dtype).removeprefix('torch.')}" for odd in (trained[0], other)
            )
            raise refuse(f"{types}, which are sharded together", "make all parameters of one type")


def precision_policy(config: Config) -> MixedPrecisionPolicy:
    """The types of gathered parameters and reduced gradients. Inputs are not cast, so rotary angles stay float32."""
    compute = getattr(torch, derived.compute_dtype(config))
    reduce = getattr(torch, config.training.mixed_precision_reduce)
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)


def set_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Reduce gradients in the next backward, or accumulate them without communication."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sync)


def gather(model: nn.Module) -> None:
    """All-gather the parameters of all units; each unit frees them after its next forward or backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def free_gathered(model: nn.Module) -> None:
    """After forward passes without a backward, free gathered or copied parameters, so that each rank holds its own."""
    compute_copies.drop(model)
    if not isinstance(model, FSDPModule):
        return
    if hasattr(model, "reset_iter_state"):  # also drops the recorded order of forward, by which backward would prefetch
        model.reset_iter_state()
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _reshard_after_forward(config: Config, mesh: Mesh) -> bool:
    policy = config.parallelism.fsdp_reshard_after_forward
    if policy == "default":
        # with one shard only the copy in the compute type would be freed, and backward would copy again
        return mesh.size("dp_shard", "cp") > 1 and mesh.size("pp") == 1
    return policy == "always"


def offloads(config: Config, device: torch.device) -> bool:
    """Whether parameters are offloaded to host memory, which means nothing on a CPU."""
    return config.training.enable_cpu_offload and accelerator.is_accelerator(device)


def _share_parameters(first: list[nn.Module], last: list[nn.Module]) -> bool:
    def ids(modules: list[nn.Module]) -> set[int]:
        return {id(parameter) for module in modules for parameter in module.parameters()}

    return bool(ids(first) & ids(last))
