"""Undo side effects of a trial forward pass on the code of a user's model.

Checks run a model on different devices and lengths than training. A mask that the model's code caches
during a check, in a class, a global or ``functools.lru_cache``, must not affect the next check or the
training.
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
_LIBRARIES = ("torch", "transformers")
"""Installed libraries, also if they are installed outside of site-packages, as with ``pip install --editable``."""


class UserState:
    """Snapshot of the Python state that a model's own code can change.

    It covers everything that can be reached from the model: attributes and buffers of modules, attributes
    of the user's classes and objects, globals of the user's files, and caches of functions.
    """

    def __init__(self, model: nn.Module) -> None:
        # Package of the model. Its state is included even if the package is installed.
        self._installed = type(model).__module__.partition(".")[0]
        self._attributes: list[tuple[str, Any, dict[str, Any]]] = []
        self._contents: list[tuple[str, Any, Any]] = []
        self._caches: list[tuple[str, Any, int]] = []
        self._tensors: list[tuple[str, Tensor, Tensor]] = []
        self._seen: set[int] = set()
        for path, module in model.named_modules():
            self._visit(path, module)

    def changed(self) -> list[str]:
        """Return the names of attributes, containers, caches and tensors that have changed, such as "Core.mask"."""
        names = []
        for label, owner, before in self._attributes:
            now = _variables(owner)
            for name in {**before, **now}:
                if now.get(name) is not before.get(name):
                    names.append(f"{label}.{name}".lstrip("."))
        for label, container, items in self._contents:
            if not _same_items(container, items):
                names.append(label)
        for label, function, misses in self._caches:
            if function.cache_info().misses != misses:
                names.append(label)
        for label, tensor, copied in self._tensors:
            if _is_overwritten(tensor, copied):
                names.append(label)
        return [name.replace("._buffers", "") for name in names]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all values. Clear function caches that have new entries."""
        for _, owner, before in self._attributes:
            for name in _variables(owner).keys() - before.keys():
                delattr(owner, name)
            for name, value in before.items():
                if _variables(owner).get(name) is not value:
                    setattr(owner, name, value)
        # Refill the same container, because other code may refer to it.
        for _, container, before in self._contents:
            if not _same_items(container, before):
                container.clear()
                refill = container.extend if isinstance(container, list) else container.update
                refill(before)
        for _, function, misses in self._caches:
            if function.cache_info().misses != misses:
                function.cache_clear()
        for _, tensor, copied in self._tensors:
            if _is_overwritten(tensor, copied):
                tensor.copy_(copied)

    def _visit(self, label: str, value: Any) -> None:
        """Record a value, and all user state that can be reached from it."""
        if id(value) in self._seen or isinstance(
            value, nn.Parameter | str | int | float | bool | None
        ):
            return
        # Objects can refer to each other, so visit each object once.
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._tensors.append((label, value, value.detach().clone()))
        elif isinstance(value, dict | list | set):
            # A dictionary may overwrite its methods to compute or import values, so read the stored ones
            if isinstance(value, dict):
                copied: Any = dict(dict.items(value))
                items = list(copied.items())
            else:
                copied = copy.copy(value)
                items = list(enumerate(value))
            self._contents.append((label, value, copied))
            for key, item in items:
                self._visit(f"{label}.{key}", item)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._caches.append((label, value, value.cache_info().misses))
        elif isinstance(value, ModuleType) and self._is_users(value.__name__):
            self._note(label, value)
        elif isinstance(value, FunctionType | type) and self._is_users(str(value.__module__)):
            self._note(value.__name__, value)
            # A function can also keep values in its closure and its default arguments.
            if isinstance(value, FunctionType):
                variables = inspect.getclosurevars(value).nonlocals.values()
                defaults = value.__defaults__ or ()
                for captured in (*variables, *defaults):
                    self._visit(value.__name__, captured)
            # Its file's globals can be changed by any function of the file.
            self._visit("", sys.modules.get(value.__module__))
        elif self._is_users(type(value).__module__) and hasattr(value, "__dict__"):
            self._note(label, value)
            # Include class attributes, also those of base classes.
            for kind in type(value).__mro__:
                self._visit(kind.__name__, kind)

    def _note(self, label: str, owner: Any) -> None:
        """Record the attributes of a module, class, function or object, and visit their values."""
        attributes = _variables(owner)
        self._attributes.append((label, owner, attributes))
        for name, value in attributes.items():
            self._visit(f"{label}.{name}".lstrip("."), value)

    def _is_users(self, module_name: str) -> bool:
        """True for modules outside of the standard library, this package and installed libraries."""
        package = module_name.partition(".")[0]
        file = getattr(sys.modules.get(module_name), "__file__", None)
        if package in sys.stdlib_module_names or file is None or _PACKAGE in Path(file).parents:
            return False
        # An installed package belongs to the user only if it contains the model.
        if package == self._installed:
            return True
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
        return not is_installed and package not in _LIBRARIES


@contextmanager
def trial(model: nn.Module) -> Iterator[UserState]:
    """Restore the state of the model's own code at the end of the block, also after an error."""
    state = UserState(model)
    try:
        yield state
    finally:
        state.restore()


def _variables(owner: Any) -> dict[str, Any]:
    """Return the attributes that user code sets, without the attributes of every class or of ``nn.Module``."""
    skipped = _OF_EVERY_MODULE if isinstance(owner, nn.Module) else set()
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in skipped and not (name.startswith("__") and name.endswith("__"))
    }


def _is_overwritten(tensor: Tensor, before: Tensor) -> bool:
    """True if a tensor differs from the recorded values. False on the meta device, which has no values."""
    return not tensor.is_meta and not torch.equal(tensor, before)


def _same_items(one: Any, other: Any) -> bool:
    """True if two containers have identical objects in the same order."""
    if isinstance(one, dict):
        has_same_keys = _same_items(list(dict.keys(one)), list(dict.keys(other)))
        return has_same_keys and _same_items(list(dict.values(one)), list(dict.values(other)))
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
