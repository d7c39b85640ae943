"""Weights that a model's code reads outside of the module that holds them, such as a head that keeps the embedding.

A parameter that two modules register is known by its names (``tied``). One that is reached by a reference of Python has
one name, and FSDP and tensor parallelism see its owner's calls alone: what others read would be a shard. A pass on the
meta device tells who reads what.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardtrain.config.schema import Config
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout
from shardtrain.ops.user_state import trial
from shardtrain.utils.errors import ConfigError, Problem

_TOKENS = 4


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Let weights of the ends that others read stay with the whole model; refuse other such weights.

    Sets ``model.ends_are_read``, which ``fsdp`` obeys. Pipelines find the same by following their chain.
    """
    if mesh.device_mesh.size() == 1 or mesh.size("pp") > 1:
        return
    readers = read_elsewhere(model, layout)
    for name, reader in readers.items():
        rule = f"reads {name} in {reader}, where it is"
        fix = "register it there as well (self.head.weight = self.embed.weight), or give each its own"
        if mesh.size("tp") > 1:
            degree = mesh.size("tp")
            raise ConfigError(Problem("parallelism.tensor_parallel_degree", degree, f"{rule} split over ranks", fix))
        if name.startswith(f"{layout.layers}."):
            fix = "give each layer parameters of its own"
            raise ConfigError(Problem("model.name", config.model.name, f"{rule} a shard of its layer's", fix))
    model.ends_are_read = bool(readers)  # type: ignore[assignment]


def read_elsewhere(whole: nn.Module, layout: Layout) -> dict[str, str]:
    """Parameters that are read while no module that holds them runs, each with the module that reads it.

    Only what FSDP gathers apart counts: an end, or a layer. A forward that does not run on the meta device is followed
    as far as it comes.
    """
    model = copy.deepcopy(whole)
    names = [*layout.first, *(f"{layout.layers}.{key}" for key in getattr(model, layout.layers)), *layout.last]
    # by the identity of each parameter: the units that hold it, and a name for messages
    holders: dict[int, set[str]] = {}
    paths: dict[int, str] = {}
    for unit in names:
        for path, parameter in model.get_submodule(unit).named_parameters(prefix=unit):
            holders.setdefault(id(parameter), set()).add(unit)
            paths.setdefault(id(parameter), path)
    running: list[str] = []
    found: dict[str, str] = {}

    class ReadWatch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                for leaf in tree_leaves([args, kwargs]):
                    units = holders.get(id(leaf)) if isinstance(leaf, nn.Parameter) else None
                    if units and not units & set(running):
                        found.setdefault(paths[id(leaf)], running[-1] if running else "the model's own forward")
            return out

    for path, module in model.named_modules():
        if path:
            module.register_forward_pre_hook(lambda *_, path=path: running.append(path))
            module.register_forward_hook(lambda *_: running.pop() and None, always_call=True)
    token = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    if len(inspect.signature(model.forward).parameters) < 2:
        return {}
    try:
        with trial(model), torch.no_grad(), torch.device("meta"), ReadWatch():
            model(token, token)
    except Exception:  # some forwards need numbers; the first step tells of theirs
        return found
    return found
