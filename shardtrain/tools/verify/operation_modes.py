"""Dispatch modes that locate the module that draws random numbers or uses a short dtype."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardtrain.tools.verify import dropout


def seed_generators(seed: int) -> None:
    """Seed the global generators of PyTorch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def generator_states() -> tuple[Any, ...]:
    """Return the states of the global generators of PyTorch, Python and NumPy, in a form that can
    be compared.
    """
    numpy_state: Any = np.random.get_state()
    return _torch_state(), random.getstate(), (numpy_state[1].tobytes(), numpy_state[2])


def _torch_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


class LocatingMode(TorchDispatchMode):
    """Base class of modes that locate the current operation in the model. Call ``remove`` after use."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._stack: list[str] = []
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(
                module.register_forward_pre_hook(lambda *_, path=path: self._stack.append(path)),
            )
            self._handles.append(module.register_forward_hook(self._leave))

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    @property
    def path(self) -> str:
        """Path of the innermost running module, or "" for the model itself."""
        return self._stack[-1] if self._stack else ""

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()


class DrawRecorder(LocatingMode):
    """Record (module path, generator state) for each random draw and for each call of a disabled dropout."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.draws: list[tuple[str, bytes]] = []
        dropout.listeners.append(self._record_dropout)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = _torch_state()
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        # Compare generator states instead of names of operations, because attention kernels draw
        # only with dropout.
        if before != _torch_state() or kwargs.get("generator") is not None:
            self.draws.append((self.path, before))
        return result

    def remove(self) -> None:
        """Remove the hooks, and stop recording."""
        super().remove()
        dropout.listeners.remove(self._record_dropout)

    def _record_dropout(self, _name: str, _input: Tensor) -> None:
        self.draws.append((self.path, _torch_state()))


class ShortDtypeFinder(LocatingMode):
    """Mode that finds the first operation that returns a floating-point dtype of less than 32 bits.

    ``first`` is (module path, dtype name), or None.
    """

    first: tuple[str, str] | None = None

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if self.first is not None or not isinstance(leaf, Tensor):
                continue
            is_narrow = leaf.is_floating_point() and leaf.element_size() < 4
            if is_narrow and leaf.numel():
                dtype = str(leaf.dtype).removeprefix("torch.")
                self.first = (self.path, dtype)
        return result
