"""Refuse dropout of activations that are replicated over tensor-parallel ranks."""

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
    """Raise ConfigError in the first forward pass that applies dropout to replicated activations.

    Ranks draw different random numbers (``seeding.seed_step``), which is right for split activations. But
    each rank would drop different elements of replicated activations, and the ranks would diverge.

    Activations count as replicated if they are a replicated DTensor or the output of a "replicate" module.
    Tensors that a model computes from them are not tracked. ``train`` finds dropout of such a tensor when it
    compares a model file's results before its first step (``verify.judge``).
    """

    def refuse(place: str) -> None:
        rule = f"applies dropout {place} to replicated activations, and each rank would drop different elements"
        fix = "drop after the rowwise linear, where ranks hold different tokens, or set the degree to 1"
        raise ConfigError(Problem("parallelism.tensor_parallel_degree", mesh.size("tp"), rule, fix))

    for path, module in model.named_modules():
        if not isinstance(module, nn.modules.dropout._DropoutNd) or module.p == 0:
            continue

        def check_input(_: nn.Module, inputs: tuple[Any, ...], path: str = path) -> None:
            if _is_replicated(inputs[0]):
                refuse(f"in {path}")

        module.register_forward_pre_hook(check_input)
    # Skip the rest for compiled models: attributes on tensors and a TorchFunctionMode break the graph.
    if not config.compile.enable:
        for path, module in model.named_modules():
            if style_of(layout, path) == "replicate":
                module.register_forward_hook(_mark_replicated)
        _check_dropout_calls(model, refuse)


def _mark_replicated(_: nn.Module, _inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        output.is_replicated = True  # type: ignore[attr-defined]


def _is_replicated(x: Any) -> bool:
    """True if a tensor is known to be replicated over tensor-parallel ranks."""
    if isinstance(x, DTensor):
        return not any(placement.is_shard() for placement in x.placements)
    return getattr(x, "is_replicated", False)


def _check_dropout_calls(model: nn.Module, refuse: Callable[[str], None]) -> None:
    """Check calls of dropout functions during the first forward pass. Later passes make the same calls."""
    names_of_refused: list[str] = []

    class DropoutWatch(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(function, "__name__", "")
            if "dropout" in name and _drops_replicated([*args, *(kwargs or {}).values()]):
                names_of_refused.append(name)
            return function(*args, **(kwargs or {}))

    # The mode slows down every call of a PyTorch function. So enter it only for the first forward pass.
    modes_to_enter = [DropoutWatch()]
    active_modes: list[DropoutWatch] = []

    def begin(*_: Any) -> None:
        if modes_to_enter:
            mode = modes_to_enter.pop()
            active_modes.append(mode)
            mode.__enter__()

    def end(*_: Any) -> None:
        if active_modes:
            active_modes.pop().__exit__(None, None, None)
            if names_of_refused:
                refuse(f"by a call of {names_of_refused[0]}")

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


def _drops_replicated(arguments: list[Any]) -> bool:
    """True if dropout called with these arguments (input, p, training) changes a replicated tensor."""
    if not arguments:
        return False
    is_evaluation = len(arguments) > 2 and arguments[2] is False
    if is_evaluation:
        return False
    x = arguments[0]
    return isinstance(x, Tensor) and _is_replicated(x)
