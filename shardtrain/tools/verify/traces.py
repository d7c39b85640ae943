"""Record the inputs and outputs of every module in a forward pass, and find where two passes begin to differ.

The culprit is the module whose inputs agree in both passes but whose output differs. Calls are compared in the
order in which they end, children before parents, so the innermost module is found. If the difference arises in
the code of a parent between its children, the parent is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Pick = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor] | None"]
"""Function that selects the parts of two tensors that must be equal. It returns None if there are no such parts."""


@dataclass
class Call:
    """One call of a module: its path, and copies of its input and output tensors.

    ``changed`` is True if the module has modified an input in place.
    """

    path: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    changed: bool = False


@dataclass
class Trace:
    """One forward pass: the calls in the order in which they ended, and the model's output."""

    calls: list[Call] = field(default_factory=list)
    out: Any = None


def tensors_of(value: Any) -> list[Tensor]:
    """Copy all tensors in a nested structure of arguments or results."""
    return [leaf.detach().clone() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@torch.no_grad()
def trace(
    model: nn.Module,
    *arguments: Any,
    replay: Mapping[str, Sequence[Any]] | None = None,
    fit: Any = None,
) -> Trace:
    """Run the model and record every call of a module.

    Args:
        model: The model to run with ``arguments``.
        replay: Recorded outputs by module path, one entry per call (see ``outputs_of``). They replace the
            outputs of these modules.
        fit: Function that returns the replacement for an output from (recorded, output), with the structure
            and shapes of ``output``.
    """
    recording = Trace()
    # Calls that have not ended: path, input tensors, and copies of them.
    open_calls: list[tuple[str, list[Tensor], list[Tensor]]] = []
    num_replayed = Counter[str]()
    handles = []

    def before(path: str) -> Callable[..., None]:
        def open_call(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            inputs = [leaf for leaf in tree_leaves((positional, named)) if isinstance(leaf, Tensor)]
            open_calls.append((path, inputs, tensors_of(inputs)))

        return open_call

    def after(path: str) -> Callable[..., Any]:
        def close_call(_: nn.Module, _positional: Any, _named: Any, output: Any) -> Any:
            opened_path, inputs, copies = open_calls.pop()
            assert opened_path == path
            if replay is not None and path in replay:
                output = fit(replay[path][num_replayed[path]], output)
                num_replayed[path] += 1
            # A tensor with NaN never equals its own copy, so it cannot show a change.
            changed = False
            for tensor, copied in zip(inputs, copies, strict=True):
                if not tensor.isnan().any() and not torch.equal(tensor, copied):
                    changed = True
            recording.calls.append(Call(path, copies, tensors_of(output), changed))
            return output

        return close_call

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
        handles.append(module.register_forward_hook(after(path), with_kwargs=True))
    try:
        recording.out = model(*arguments)
    finally:
        for handle in handles:
            handle.remove()
    return recording


def outputs_of(recording: Trace, paths: Sequence[str]) -> dict[str, list[list[Tensor]]]:
    """Return the outputs of the modules at ``paths``, one list per call, for the argument
    ``replay`` of ``trace``.
    """
    outputs: dict[str, list[list[Tensor]]] = {path: [] for path in paths}
    for call in recording.calls:
        if call.path in outputs:
            outputs[call.path].append(call.outputs)
    return outputs


def differs(mine: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """True if any element differs by more than ``tolerance`` times the largest finite element of ``theirs``.

    Tensors without floating-point numbers must be equal. Infinities and NaN at the same position
    count as equal.
    """
    if mine.shape != theirs.shape:
        return True
    if not mine.is_floating_point():
        return not torch.equal(mine, theirs)
    mine = mine.double()
    theirs = theirs.double()
    distance = (mine - theirs).abs()
    # The difference of two equal infinities is NaN.
    distance[(mine == theirs) | (mine.isnan() & theirs.isnan())] = 0.0
    if not distance.numel():
        return False
    finite = theirs[theirs.isfinite()]
    largest = 0.0
    if finite.numel():
        largest = float(finite.abs().max())
    # Negate the comparison, because a distance of NaN must count as a difference.
    return not bool(distance.max() <= tolerance * max(largest, 1e-30))


def blame(
    one: Trace,
    other: Trace,
    pick: Pick,
    tolerance: float,
    skip: Callable[[str], bool] = lambda _: False,
) -> str | None:
    """Return the path of the first module whose inputs agree in both passes but whose outputs differ, or None.

    Modules for which ``skip(path)`` is True are ignored.
    """
    # A module may be called several times, so its calls are matched by number.
    num_calls: Counter[str] = Counter()
    calls_of_one: dict[tuple[str, int], Call] = {}
    for call in one.calls:
        calls_of_one[call.path, num_calls[call.path]] = call
        num_calls[call.path] += 1
    num_calls.clear()
    for call in other.calls:
        counterpart = calls_of_one.get((call.path, num_calls[call.path]))
        num_calls[call.path] += 1
        if counterpart is None or skip(call.path):
            continue
        # Name a module only with proof: its inputs agree and its outputs differ. Incomparable tensors prove
        # neither.
        if not _agree(counterpart.inputs, call.inputs, pick, tolerance):
            continue
        if _agree(counterpart.outputs, call.outputs, pick, tolerance) is False:
            return call.path
    return None


def _agree(
    ones: Sequence[Tensor], others: Sequence[Tensor], pick: Pick, tolerance: float
) -> bool | None:
    """True if all tensors agree. None if all comparable tensors agree but at least one is not comparable."""
    if len(ones) != len(others):
        return False
    are_all_comparable = True
    for one, other in zip(ones, others, strict=True):
        pair = pick(one, other)
        if pair is None:
            are_all_comparable = False
            continue
        picked_one, picked_other = pair
        if differs(picked_other, picked_one, tolerance):
            return False
    if not are_all_comparable:
        return None
    return True
