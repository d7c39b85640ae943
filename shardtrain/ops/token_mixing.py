"""Where tokens meet outside of the attention core, or are counted: on a part of a sequence that gives other numbers.

A forward pass on the meta device is watched, where shapes alone are known. The row has a number of tokens that no
weight has, so a dimension of that size is the tokens'.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardtrain.layout import Layout, matches, style_of
from shardtrain.ops.attention_core import Broken
from shardtrain.ops.user_state import trial

_LENGTHS = (13, 17, 19, 23, 29, 31, 37)
_ALONG = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "softmax", "log_softmax", "flip", "roll", "sort")
"""Functions that mix along one dimension: their second argument, or ``dim``; roll's third, or ``dims``."""
_ALWAYS = ("conv1d", "scaled_dot_product_attention")


def outside_of_cores(whole: nn.Module, layout: Layout) -> Broken | None:
    """The first place where a model mixes tokens outside of its attention cores, or counts them, as cp cannot have it.

    None too where the model does not run without numbers, or where a weight has every length that could be tried.
    """
    modules = dict(whole.named_modules())
    cores = {path for path in modules if matches(path, layout.context)}
    kinds = {type(modules[path]) for path in cores}
    for path, module in modules.items():
        if type(module) in kinds and path not in cores:
            name = type(module).__name__
            return Broken(
                f"has {path}, of the class {name} of its cores, which LAYOUT.context does not name", "name it"
            )
    return _first_mix(whole, layout, cores, "the attention core", "do it in the core")


def outside_of_gathered(whole: nn.Module, layout: Layout) -> Broken | None:
    """The same for modules in which a tensor-parallel rank has all tokens: the word "gather" says which."""
    gathered = {path for path, _ in whole.named_modules() if style_of(layout, path) == "gather"}
    return _first_mix(whole, layout, gathered, 'modules with the word "gather"', "do it in one of these")


def _first_mix(whole: nn.Module, layout: Layout, allowed: set[str], where: str, fix: str) -> Broken | None:
    sizes = {size for parameter in whole.parameters() for size in parameter.shape}
    length = next((length for length in _LENGTHS if not any(size % length == 0 for size in sizes)), None)
    if length is None:
        return None

    # A copy whose cores and experts do nothing, and whose modules say when they are entered and left
    model = copy.deepcopy(whole)
    watch = _Watch(length, allowed, where, fix)

    def enter(path: str) -> None:
        watch.stack.append(path)

    def leave(*_: Any) -> None:
        watch.stack.pop()

    for path, module in model.named_modules():
        if layout.context and matches(path, layout.context):
            module.forward = lambda q, *_, **__: torch.empty_like(q)  # type: ignore[method-assign]
        elif layout.expert and matches(path, layout.expert):  # their work depends on numbers, and is each token's own
            module.forward = lambda x, *_, **__: x  # type: ignore[method-assign]
        module.register_forward_pre_hook(lambda *_, path=path: enter(path))
        module.register_forward_hook(leave, always_call=True)

    # Tokens and positions are zeros: no number is looked at
    row_1T = torch.zeros(1, length, dtype=torch.int64, device="meta")
    try:
        with trial(model), torch.no_grad(), torch.device("meta"), watch:
            model(row_1T, row_1T)
    except Exception:  # what cannot run without numbers shows when it runs with them
        pass
    return watch.found


class _Watch(TorchFunctionMode):
    def __init__(self, length: int, allowed: set[str], where: str, fix: str) -> None:
        super().__init__()
        self._allowed = allowed
        self._where = where
        self._fix = fix
        self.found: Broken | None = None
        self.stack: list[str] = []
        self._length = length

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.found is None and self._allowed.isdisjoint(self.stack):
            self._look(getattr(function, "__name__", ""), args, kwargs or {}, result)
        return result

    def _look(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        given = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        # The model's own forward has all tokens under tensor parallelism, and may count them
        may_not_count = "core" in self._where or len(self.stack) > 1
        place = f"in {self.stack[-1]}" if self.stack and self.stack[-1] else "in the model's forward"
        if made and not given and any(self._length in x.shape for x in made) and may_not_count:
            rule = f"counts the tokens that it is given, by {name} {place}: a rank has a part of them"
            self.found = Broken(rule, "take positions from the argument of forward")
        floats = [x for x in given if x.is_floating_point() and self._length in x.shape]
        if floats and made and self._mixes(name, floats[0], args, kwargs, made):
            rule = f"mixes tokens outside of {self._where}, by {name} {place}: a rank has a part of them"
            self.found = Broken(rule, self._fix)

    def _mixes(self, name: str, x: Tensor, args: Any, kwargs: dict[str, Any], made: list[Tensor]) -> bool:
        if name in _ALWAYS:
            return True
        if name.startswith("new_"):  # of its type and device alone
            return False
        if name == "pad":  # pairs from the last dimension on
            pads = list(args[1] if len(args) > 1 else kwargs.get("pad", ()))
            return any(pad and x.shape[-1 - i // 2] == self._length for i, pad in enumerate(pads))
        if name in _ALONG:
            place = 2 if name == "roll" else 1
            dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else None))
            if isinstance(dims, int):
                dims = [dims]
            elif not isinstance(dims, tuple | list):
                dims = []
            return any(isinstance(dim, int) and x.shape[dim] == self._length for dim in dims)
        results = [y for y in made if y.is_floating_point()]
        # Tokens that are summed or left out, or a product of tokens with tokens
        lost = any(not any(size and size % self._length == 0 for size in y.shape) for y in results)
        return lost or any(list(y.shape).count(self._length) > 1 for y in results)
