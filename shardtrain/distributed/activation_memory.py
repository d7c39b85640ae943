"""Count the bytes that a forward and backward pass keeps alive, on tensors that have shapes and no memory.

PyTorch's own trackers are private and count the gathered parameters of FSDP2 badly; here a storage counts from the
operation that made it to its end, and those that FSDP made are counted apart, by their size of the moment. So are
copies in the compute type (compute_copies.py).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FSDP = ("torch.distributed.fsdp", "shardtrain.distributed.compute_copies")
SHAPES = "torch.distributed.tensor._sharding_prop"
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


class LiveMemory(TorchDispatchMode):
    """Bytes alive of what operations made while the mode was on, inside a ``FakeTensorMode``.

    ``activations`` and ``gathered`` are the bytes alive now: of everything but FSDP's buffers, and of those (parameters
    gathered by FSDP, gradients on their way). ``most_activations`` and ``most_gathered`` are the largest of each.
    What was left out of the pass but would be alive is in ``absent_activations`` and ``absent_gathered``, and counts in
    the two largest. ``parameters`` are those whose reduced gradients FSDP makes: gradients are not counted as buffers.
    ``scalar`` answers an operation that would read a number of a tensor, while it is set.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.activations = self.most_activations = self.most_gathered = 0
        self.absent_activations = self.absent_gathered = 0
        self.scalar: int | None = None
        self._parameters = list(parameters)
        self._seen: dict[int, int] = {}
        self._buffers: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def gathered(self) -> int:
        """Bytes of those buffers now: FSDP frees them by resizing them to nothing."""
        return self._gathered(sum(storage.nbytes() for storage in self._buffers))

    def _gathered(self, total: int) -> int:
        reduced = [getattr(p.grad, "_local_tensor", p.grad) for p in self._parameters if p.grad is not None]
        owned = {id(g.untyped_storage()): g.untyped_storage() for g in reduced if g is not None}
        return total - sum(storage.nbytes() for storage in owned.values() if storage in self._buffers)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let subclasses such as DTensor come down to plain tensors, then count what the operation made."""
        if not all(issubclass(kind, FakeTensor) or kind in _PLAIN for kind in types):
            return NotImplemented
        if self.scalar is not None and func is torch.ops.aten._local_scalar_dense.default:
            return self.scalar
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._see(tensor, made_here=False)
        result = _run(func, args, kwargs)
        for tensor in _tensors(result):
            self._see(tensor, made_here=True)
        self.most_activations = max(self.most_activations, self.activations + self.absent_activations)
        if self._buffers:
            total = sum(storage.nbytes() for storage in self._buffers)
            if total + self.absent_gathered > self.most_gathered:  # seldom; what is subtracted takes long to find
                self.most_gathered = max(self.most_gathered, self._gathered(total) + self.absent_gathered)
        return result

    def _see(self, tensor: Tensor, made_here: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = 0
        caller = _caller() if made_here else ""
        if caller in FSDP:
            self._buffers.add(storage)
        elif made_here and caller != SHAPES:
            size = storage.nbytes()
        self._seen[key] = size
        self.activations += size
        # a storage counts until the last tensor on it has gone
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.activations -= self._seen.pop(key, 0)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # grouped_mm without memory knows bfloat16 alone (torch 2.13), where the CPU's kernel takes float32 too, and rows of
    # 16 bytes are half as many numbers
    if (
        func is torch.ops.aten._grouped_mm.default
        and isinstance(args[0], FakeTensor)
        and args[0].dtype == torch.float32
    ):
        a, b = args[:2]
        groups: list[int] = []  # one of the two has a dimension of groups: the result has none
        if a.ndim == b.ndim == 2:  # both are cut along their inner dimension, and each group gives a matrix
            offsets = args[2] if len(args) > 2 else kwargs["offs"]
            groups = [offsets.numel()]
        elif a.ndim == b.ndim:
            groups = list(a.shape[:-2])
        return a.new_empty(*groups, a.shape[-2], b.shape[-1])
    return func(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _caller() -> str:
    """One of FSDP or SHAPES where it is among the callers.

    FSDP works in hooks, so a layer's own operations never have it there. DTensor asks for the shape of a result by an
    operation on whole tensors without memory: in a run too, they take none.
    """
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        for caller in (*FSDP, SHAPES):
            if name.startswith(caller):
                return caller
        frame = frame.f_back  # type: ignore[assignment]
    return ""
