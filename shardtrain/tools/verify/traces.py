"""What every module of a model was given and gave in one forward pass, and which module it is that first differs.

A module is to blame whose inputs agree with those of another pass, and whose output does not. Modules are asked in the
order in which they end, children before parents, so the innermost is found; what a parent computes itself between its
children is then the parent's.
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
"""What of one pass's tensor and of the other's is to be equal; None where nobody can say."""


@dataclass
class Call:
    """One call of a module: its path, tensors in and out; ``changed`` where it wrote into what it was given."""

    path: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    changed: bool = False


@dataclass
class Trace:
    """One forward pass: the calls in the order in which they ended, and what the model gave."""

    calls: list[Call] = field(default_factory=list)
    out: Any = None


def tensors_of(value: Any) -> list[Tensor]:
    """Copies of the tensors among arguments or results, however they are nested."""
    return [leaf.detach().clone() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@torch.no_grad()
def trace(
    model: nn.Module, *arguments: Any, replay: Mapping[str, Sequence[Any]] | None = None, fit: Any = None
) -> Trace:
    """Run a model and note every call. What the modules of ``replay`` give is replaced, call by call, by what is there;
    ``fit(replacement, own output)`` cuts the replacement to size."""
    found = Trace()
    open_calls: list[tuple[str, list[Tensor], list[Tensor]]] = []  # path, tensors given, copies of them
    counts = Counter[str]()
    handles = []

    def before(path: str) -> Callable[..., None]:
        def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            kept = [leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, Tensor)]
            open_calls.append((path, kept, tensors_of(kept)))

        return note

    def after(path: str) -> Callable[..., Any]:
        def note(_: nn.Module, _given: Any, _named: Any, output: Any) -> Any:
            own, kept, inputs = open_calls.pop()
            assert own == path
            if replay is not None and path in replay:
                output = fit(replay[path][counts[path]], output)
                counts[path] += 1
            # a tensor with NaN is never equal to its own copy, and says nothing
            changed = any(not torch.equal(a, b) for a, b in zip(kept, inputs, strict=True) if not a.isnan().any())
            found.calls.append(Call(path, inputs, tensors_of(output), changed))
            return output

        return note

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
        handles.append(module.register_forward_hook(after(path), with_kwargs=True))
    try:
        found.out = model(*arguments)
    finally:
        for handle in handles:
            handle.remove()
    return found


def outputs_of(found: Trace, paths: Sequence[str]) -> dict[str, list[list[Tensor]]]:
    """What the modules at ``paths`` gave, call by call: what ``replay`` takes."""
    kept: dict[str, list[list[Tensor]]] = {path: [] for path in paths}
    for call in found.calls:
        if call.path in kept:
            kept[call.path].append(call.outputs)
    return kept


def off(mine: Tensor, theirs: Tensor, close: float) -> bool:
    """Whether some number is further away than ``close`` times the largest."""
    if mine.shape != theirs.shape:
        return True
    if not mine.is_floating_point():
        return not torch.equal(mine, theirs)
    mine = mine.double()
    theirs = theirs.double()
    far = (mine - theirs).abs()
    far[(mine == theirs) | (mine.isnan() & theirs.isnan())] = 0.0  # an infinity that both have is not a difference
    if not far.numel():
        return False
    finite = theirs[theirs.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    # written so that a distance that is not a number counts as off
    return not bool(far.max() <= close * max(size, 1e-30))


def blame(
    one: Trace, other: Trace, pick: Pick, close: float, skip: Callable[[str], bool] = lambda _: False
) -> str | None:
    """The path of the first module whose inputs agree and whose output does not; None where there is none."""
    counts: Counter[str] = Counter()
    theirs: dict[tuple[str, int], Call] = {}
    for call in one.calls:
        theirs[call.path, counts[call.path]] = call
        counts[call.path] += 1
    counts.clear()
    for call in other.calls:
        same = theirs.get((call.path, counts[call.path]))
        counts[call.path] += 1
        if same is None or skip(call.path):
            continue
        if _agree(same.inputs, call.inputs, pick, close) and _agree(same.outputs, call.outputs, pick, close) is False:
            return call.path
    return None


def _agree(ones: Sequence[Tensor], others: Sequence[Tensor], pick: Pick, close: float) -> bool | None:
    """Whether all tensors agree; None where some cannot be compared and the others agree."""
    if len(ones) != len(others):
        return False
    known = True
    for one, other in zip(ones, others, strict=True):
        pair = pick(one, other)
        if pair is None:
            known = False
        elif off(pair[1], pair[0], close):
            return False
    return True if known else None
