"""Refuse dropout where every tensor-parallel rank holds the same activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from shardtrain.config.schema import Config
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout, style_of
from shardtrain.utils.errors import ConfigError, Problem


def refuse_replicated_dropout(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Refuse dropout of replicated activations: each rank would drop other elements, and ranks would diverge.

    Random numbers differ between ranks (``seeding.seed_step``), as split activations need. Activations are known to be
    replicated if they are such a DTensor or the output of a "replicate" module. What a model computes from these is not
    tracked; a wrong result shows where ``train`` compares a model file before its first step (``verify.judge``).
    """

    def refuse(path: str) -> None:
        rule = f"drops {path}, where every tensor-parallel rank holds the same activations, and would drop others"
        fix = "drop after the rowwise linear, where ranks hold different tokens, or set the degree to 1"
        raise ConfigError(Problem("parallelism.tensor_parallel_degree", mesh.size("tp"), rule, fix))

    for path, module in model.named_modules():
        if not isinstance(module, nn.modules.dropout._DropoutNd) or module.p == 0:
            continue

        def check_input(_: nn.Module, inputs: tuple[Any, ...], path: str = path) -> None:
            if _is_replicated(inputs[0]):
                refuse(f"in {path}")

        module.register_forward_pre_hook(check_input)
    # attributes of tensors and a TorchFunctionMode would break the compiler's graphs
    if not config.compile.enable:
        for path, module in model.named_modules():
            if style_of(layout, path) == "replicate":
                module.register_forward_hook(_mark_replicated)
        _check_dropout_calls(model, refuse)


def _mark_replicated(_: nn.Module, _inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        output.is_whole_on_each_rank = True  # type: ignore[attr-defined]


def _is_replicated(x: Any) -> bool:
    """Whether a tensor is known to be replicated over tensor-parallel ranks."""
    if isinstance(x, DTensor):
        return not any(place.is_shard() for place in x.placements)
    return getattr(x, "is_whole_on_each_rank", False)


def _check_dropout_calls(model: nn.Module, refuse: Callable[[str], None]) -> None:
    """Check calls of dropout as a function, in the first forward pass alone: later passes do the same."""
    seen = []

    class DropoutWatch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            values = [*args, *(kwargs or {}).values()]
            name = getattr(function, "__name__", "")
            is_on = next((value for value in values[2:3] if isinstance(value, bool)), True)
            if "dropout" in name and is_on and values and isinstance(values[0], Tensor) and _is_replicated(values[0]):
                seen.append(name)
            return function(*args, **(kwargs or {}))

    # hooks enter the mode for the first forward pass and exit it after that: it slows every call of PyTorch
    waiting = [DropoutWatch()]
    watching = []

    def begin(*_: Any) -> None:
        if waiting:
            watching.append(waiting.pop())
            watching[0].__enter__()

    def end(*_: Any) -> None:
        if watching:
            watching.pop().__exit__(None, None, None)
            if seen:
                refuse(f"by a call of {seen[0]}")

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)
