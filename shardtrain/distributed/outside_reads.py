"""Find weights that a user's model reads outside the module that owns them.

An example is a head that reads the embedding's weight.

If two modules register the same parameter, it has two names, and ``tied_names`` finds it. But a module may
also reach another module's parameter through a Python reference, and such a parameter has only one name.
FSDP and tensor parallelism gather a weight only while its owner runs, so the other module would read a shard.
A forward pass on the meta device shows which module reads which weight.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import suppress
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
    """Set ``model.ends_are_read`` if other modules read weights of the first or last modules.

    ``fsdp`` then keeps the first and last modules in the root unit. Does nothing on one rank. With pipeline
    stages, ``chain.check`` finds such weights instead.

    Raises:
        ConfigError: another module reads the weight of a layer. With tensor parallelism, another module
            reads any weight.
    """
    if mesh.device_mesh.size() == 1 or mesh.size("pp") > 1:
        return
    readers = read_elsewhere(model, layout)
    for name, reader in readers.items():
        if mesh.size("tp") > 1:
            rule = f"does not support that {reader} reads {name}, which is split over ranks"
            fix = "register the parameter in both modules (self.head.weight = self.embed.weight), or use two parameters"
            option = "parallelism.tensor_parallel_degree"
            raise ConfigError(Problem(option, mesh.size("tp"), rule, fix))
        if name.startswith(f"{layout.layers}."):
            rule = f"reads {name} in {reader}, but FSDP gathers a layer's weights only while the layer runs"
            fix = "give each layer its own parameters"
            raise ConfigError(Problem("model.name", config.model.name, rule, fix))
    model.ends_are_read = bool(readers)  # type: ignore[assignment]


def read_elsewhere(model: nn.Module, layout: Layout) -> dict[str, str]:
    """Return the parameters that are read while none of the units that hold them is running.

    Units are the modules that FSDP gathers: the first and last modules, and each layer. If the forward fails
    on the meta device, only the reads before the failure are found.

    Returns:
        Parameter name -> path of the module that reads it.
    """
    # The trace replaces methods and adds hooks, so run it on a copy.
    model = copy.deepcopy(model)
    if len(inspect.signature(model.forward).parameters) < 2:
        return {}
    layers = [f"{layout.layers}.{key}" for key in getattr(model, layout.layers)]
    # id of a parameter -> the units that hold it, and its path for messages
    holders: dict[int, set[str]] = {}
    paths: dict[int, str] = {}
    for unit in (*layout.first, *layers, *layout.last):
        for path, parameter in model.get_submodule(unit).named_parameters(prefix=unit):
            holders.setdefault(id(parameter), set()).add(unit)
            paths.setdefault(id(parameter), path)
    running: list[str] = []
    readers: dict[str, str] = {}

    def note_reads(arguments: Any) -> None:
        for leaf in tree_leaves(arguments):
            if not isinstance(leaf, nn.Parameter) or id(leaf) not in holders:
                continue
            # The read is allowed if a unit that holds the parameter is running, because it is gathered then.
            if not holders[id(leaf)] & set(running):
                reader = running[-1] if running else "the model's own forward"
                readers.setdefault(paths[id(leaf)], reader)

    class ReadWatch(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                note_reads([args, kwargs])
            return out

    for path, module in model.named_modules():
        if path:
            _track_calls(path, module, running)
    token = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    # Some forwards need the values of tensors and fail here. Ignore errors: the first step reports real ones.
    with suppress(Exception), trial(model), torch.no_grad(), torch.device("meta"), ReadWatch():
        model(token, token)
    return readers


def _track_calls(path: str, module: nn.Module, running: list[str]) -> None:
    """Keep ``path`` in ``running`` while the module runs."""

    def enter(*_: Any) -> None:
        running.append(path)

    def leave(*_: Any) -> None:
        running.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
