"""Undo what a trial forward pass leaves behind in the code of a user's model.

Checks run a model on other devices and lengths than training does. A mask that its code caches meanwhile, on a class,
in a global or by ``functools.lru_cache``, must not reach the next check or the training.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = set(vars(nn.Module())) - {"_buffers"}
_PACKAGE = Path(__file__).parents[1]


class UserState:
    """Snapshot of the Python state that a model's own code can change.

    It covers attributes and buffers of modules, attributes of their classes and of other objects of the user's, globals
    of the user's files, and the caches of functions, as far as they can be reached from the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._installed = type(model).__module__.partition(".")[0]  # the model's own package, if it was installed
        self._attributes: list[tuple[str, Any, dict[str, Any]]] = []
        self._contents: list[tuple[str, Any, Any]] = []
        self._caches: list[tuple[str, Any, int]] = []
        self._tensors: list[tuple[str, Tensor, Tensor]] = []
        self._seen: set[int] = set()
        for path, module in model.named_modules():
            self._visit(path, module)

    def changed(self) -> list[str]:
        """Return the names of what has another value now, such as "Core.mask"."""
        names = []
        for label, owner, before in self._attributes:
            now = _variables(owner)
            differing = [name for name in {**before, **now} if now.get(name) is not before.get(name)]
            names += [f"{label}.{name}".lstrip(".") for name in differing]
        names += [
            *(label for label, container, before in self._contents if not _same_items(container, before)),
            *(label for label, function, misses in self._caches if function.cache_info().misses != misses),
            *(label for label, tensor, before in self._tensors if _other_numbers(tensor, before)),
        ]
        return [name.replace("._buffers", "") for name in names]

    @torch.no_grad()
    def restore(self) -> None:
        """Put every value back, and empty the caches of functions that were filled."""
        for _, owner, before in self._attributes:
            for name in _variables(owner).keys() - before.keys():
                delattr(owner, name)
            for name, value in before.items():
                if _variables(owner).get(name) is not value:
                    setattr(owner, name, value)
        for _, container, before in self._contents:
            if not _same_items(container, before):
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(before)
        for _, function, misses in self._caches:
            if function.cache_info().misses != misses:
                function.cache_clear()
        for _, tensor, copied in self._tensors:
            if _other_numbers(tensor, copied):
                tensor.copy_(copied)

    def _visit(self, label: str, value: Any) -> None:
        """Note a value and everything of the user's that can be reached from it."""
        if id(value) in self._seen or isinstance(value, nn.Parameter | str | int | float | bool | None):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._tensors.append((label, value, value.detach().clone()))
        elif isinstance(value, dict | list | set):
            self._contents.append((label, value, copy.copy(value)))
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self._visit(f"{label}.{key}", item)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._caches.append((label, value, value.cache_info().misses))
        elif isinstance(value, ModuleType) and self._is_users(value.__name__):
            self._note(label, value)
        elif isinstance(value, FunctionType | type) and self._is_users(str(value.__module__)):
            self._note(value.__name__, value)
            if isinstance(value, FunctionType):
                for kept in (*inspect.getclosurevars(value).nonlocals.values(), *(value.__defaults__ or ())):
                    self._visit(value.__name__, kept)
            self._visit("", sys.modules.get(value.__module__))
        elif self._is_users(type(value).__module__) and hasattr(value, "__dict__"):
            self._note(label, value)
            for kind in type(value).__mro__:
                self._visit(kind.__name__, kind)

    def _note(self, label: str, owner: Any) -> None:
        attributes = _variables(owner)
        self._attributes.append((label, owner, attributes))
        for name, value in attributes.items():
            self._visit(f"{label}.{name}".lstrip("."), value)

    def _is_users(self, module_name: str) -> bool:
        """True for a module that is neither Python's, nor this package's, nor that of an installed library."""
        top = module_name.partition(".")[0]
        file = getattr(sys.modules.get(module_name), "__file__", None)
        if top in sys.stdlib_module_names or file is None or _PACKAGE in Path(file).parents:
            return False
        return top == self._installed or not {"site-packages", "dist-packages"} & set(Path(file).parts)


@contextmanager
def trial(model: nn.Module) -> Iterator[UserState]:
    """Restore the state of the model's own code when the block ends, also after an error."""
    state = UserState(model)
    try:
        yield state
    finally:
        state.restore()


def _variables(owner: Any) -> dict[str, Any]:
    """Return the attributes that user code sets, without those that every class and ``nn.Module`` has."""
    skipped = _OF_EVERY_MODULE if isinstance(owner, nn.Module) else set()
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in skipped and not (name.startswith("__") and name.endswith("__"))
    }


def _other_numbers(tensor: Tensor, before: Tensor) -> bool:
    """True if a tensor was written into."""
    return not tensor.is_meta and not torch.equal(tensor, before)


def _same_items(one: Any, other: Any) -> bool:
    """True if two containers have the same objects in the same order."""
    if isinstance(one, dict):
        return _same_items(list(one), list(other)) and _same_items(list(one.values()), list(other.values()))
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
