"""Find operations outside of cores that mix or count tokens. They are wrong on a part of a sequence.

A TorchFunctionMode observes a forward pass on the meta device. The number of tokens divides no dimension
of a weight, so a dimension of that size is the dimension of tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardtrain.layout import Layout, matches, style_of
from shardtrain.ops.attention_core import Broken
from shardtrain.ops.user_state import trial

_LENGTHS = (13, 17, 19, 23, 29, 31, 37)
_ALONG = (
    "cumsum",
    "cumprod",
    "logcumsumexp",
    "cummax",
    "cummin",
    "softmax",
    "log_softmax",
    "flip",
    "roll",
    "sort",
)
"""Functions that mix elements along a dimension. It is their second argument or ``dim``; for roll, the
third or ``dims``."""
_ALWAYS = ("conv1d", "scaled_dot_product_attention")
_COUNTING = ("arange", "linspace", "range")
_ALLOWED = "<allowed>"
"""Entry of the stack of running modules while everything is allowed."""


def outside_of_cores(model: nn.Module, layout: Layout) -> Broken | None:
    """Return the first place where a model mixes or counts tokens outside of its
    attention and recurrence cores.

    Context parallelism does not support such places. Return None if the model has no such place or does not
    run on the meta device, or if no test length is unique.
    """
    modules = dict(model.named_modules())
    cores = {path for path in modules if layout.context and matches(path, layout.context)}
    kinds = {type(modules[path]) for path in cores}
    for path, module in modules.items():
        if type(module) in kinds and path not in cores:
            name = type(module).__name__
            return Broken(
                f"has {path} of the same class {name} as its cores, which LAYOUT.context does not match",
                "add it",
            )
    cores |= {path for path in modules if layout.recurrence and matches(path, layout.recurrence)}
    return _first_mix(model, layout, cores, "the attention core", "move it to the core")


def outside_of_gathered(model: nn.Module, layout: Layout) -> Broken | None:
    """Return the first place where a model mixes tokens outside of modules with the style "gather".

    Only in these modules a tensor-parallel rank has all tokens.
    """
    gathered = {path for path, _ in model.named_modules() if style_of(layout, path) == "gather"}
    return _first_mix(
        model,
        layout,
        gathered,
        'modules with the style "gather"',
        "move it to one of these modules",
    )


def _first_mix(
    model: nn.Module, layout: Layout, allowed: set[str], where: str, fix: str
) -> Broken | None:
    """Run a copy of the model and return the first mix of tokens outside of the ``allowed`` modules.

    ``where`` and ``fix`` are parts of the message. None if no mix occurs, or if it cannot be detected.
    """
    length = _unique_length(model)
    if length is None:
        return None

    # In a copy of the model, replace cores and experts by no-ops, and record the running module.
    model = copy.deepcopy(model)
    watch = Watch(length, allowed, where, fix)
    watch.follow(model)
    for path, module in model.named_modules():
        if layout.context and matches(path, layout.context):
            module.forward = lambda q, *_, **__: torch.empty_like(q)  # type: ignore[method-assign]
        elif layout.expert and matches(path, layout.expert):
            # The shapes in experts depend on values. Experts do not mix tokens.
            module.forward = lambda x, *_, **__: x  # type: ignore[method-assign]

    # On the meta device, tokens and positions have no values.
    row_1T = torch.zeros(1, length, dtype=torch.int64, device="meta")
    try:
        with trial(model), torch.no_grad(), torch.device("meta"), watch:
            model(row_1T, row_1T)
    except Exception:
        # A forward pass that needs values fails here. Its errors are reported when it runs with values.
        pass
    return watch.found


def watch(model: nn.Module, where: str, fix: str) -> Watch | None:
    """Return a Watch on a model of which no module may mix tokens, except within ``allowing``.

    It only reports counted tokens that change activations, because models of ``transformers`` count
    tokens also where they do not use the numbers. None if no test length is unique.
    """
    length = _unique_length(model)
    if length is None:
        return None
    new = Watch(length, {_ALLOWED}, where, fix, finds_unused_counts=False)
    new.follow(model)
    return new


def _unique_length(model: nn.Module) -> int | None:
    """Return a number of tokens that divides no size of a weight, or None."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    return next((length for length in _LENGTHS if all(size % length for size in sizes)), None)


class Watch(TorchFunctionMode):
    """Function mode that records the first violation outside of the ``allowed`` modules.

    Attributes:
        found: The violation.
        length: Number of tokens of the test row.
        stack: Paths of the running modules, innermost last.
    """

    def __init__(
        self, length: int, allowed: set[str], where: str, fix: str, finds_unused_counts: bool = True
    ) -> None:
        super().__init__()
        self._allowed = allowed
        self._where = where
        self._fix = fix
        self._finds_unused_counts = finds_unused_counts
        self._counted: dict[int, Tensor] = {}
        """Tensors that were computed from counted tokens, by id. Keeping them keeps their ids unique."""
        self.found: Broken | None = None
        self.stack: list[str] = []
        self.length = length

    def follow(self, model: nn.Module) -> None:
        """Record which module of the model is running, by hooks on each."""
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: self.stack.append(path))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _leave(self) -> None:
        self.stack.pop()

    @contextmanager
    def allowing(self) -> Iterator[None]:
        """Allow everything for the duration of the block."""
        self.stack.append(_ALLOWED)
        try:
            yield
        finally:
            self.stack.pop()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.found is None and self._allowed.isdisjoint(self.stack):
            self._check(getattr(function, "__name__", ""), args, kwargs or {}, result)
        return result

    def _check(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        inputs = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        place = "in the model's forward"
        if self.stack and self.stack[-1]:
            place = f"in {self.stack[-1]}"

        if self._counts_tokens(name, inputs, outputs):
            rule = f"counts its tokens with {name} {place}, but a rank only has a part of them"
            fix = self._fix
            if self._finds_unused_counts:
                fix = "use the positions that forward receives"
            self.found = Broken(rule, fix)

        token_inputs = [x for x in inputs if x.is_floating_point() and self.length in x.shape]
        if token_inputs and outputs and self._mixes(name, token_inputs[0], args, kwargs, outputs):
            rule = f"mixes tokens outside of {self._where} with {name} {place}, but a rank only has a part of them"
            self.found = Broken(rule, self._fix)

    def _counts_tokens(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
        """True if the operation counts the tokens of a sequence, or uses their number."""
        if not self._finds_unused_counts:
            return self._uses_counts(name, inputs, outputs)
        # With tensor parallelism, the model's own forward has all tokens and may count them.
        may_count = "core" not in self._where and len(self.stack) <= 1
        if may_count or inputs:
            return False
        # A new tensor with the length of the sequence counts tokens.
        return any(self.length in x.shape for x in outputs)

    def _uses_counts(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
        """True if a function applies counted tokens to activations.

        Otherwise follow the counts to its outputs.
        """
        counted = [x for x in inputs if id(x) in self._counted]
        if counted:
            others = [x for x in inputs if id(x) not in self._counted]
            if any(x.is_floating_point() and self.length in x.shape for x in others):
                return True
        if counted or (name in _COUNTING and not inputs):
            self._counted |= {id(x): x for x in outputs if self.length in x.shape}
        return False

    def _mixes(
        self, name: str, x: Tensor, args: Any, kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> bool:
        """True if a function of ``x`` mixes its tokens, judged by its name and the shapes of its outputs."""
        if name in _ALWAYS:
            return True
        # new_zeros and similar functions only use the dtype and device of x.
        if name.startswith("new_"):
            return False
        if name == "pad":
            # Pairs of sizes, starting with the last dimension.
            pads = list(args[1] if len(args) > 1 else kwargs.get("pad", ()))
            return any(pad and x.shape[-1 - i // 2] == self.length for i, pad in enumerate(pads))
        if name in _ALONG:
            return any(x.shape[dim] == self.length for dim in _dims_of(name, args, kwargs))

        # An output without a dimension of tokens has summed or dropped them. Two such dimensions are a
        # product of tokens.
        for y in outputs:
            if not y.is_floating_point():
                continue
            has_tokens = any(size and size % self.length == 0 for size in y.shape)
            if not has_tokens or list(y.shape).count(self.length) > 1:
                return True
        return False


def _dims_of(name: str, args: Any, kwargs: dict[str, Any]) -> list[int]:
    """Return the dimensions that a call of a function of _ALONG works on."""
    index = 2 if name == "roll" else 1
    positional = args[index] if len(args) > index else None
    dims = kwargs.get("dim", kwargs.get("dims", positional))
    if isinstance(dims, int):
        return [dims]
    if not isinstance(dims, tuple | list):
        return []
    return [dim for dim in dims if isinstance(dim, int)]
