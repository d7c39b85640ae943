"""Count the bytes that forward and backward keep alive, using fake tensors (shapes without memory).

PyTorch's own trackers are private, and count the gathered parameters of FSDP2 incorrectly. Here each
storage counts from the operation that creates it until it is freed. Storages of FSDP, and copies in the
compute dtype (compute_copies.py), are counted separately, because their size changes while they live.
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
    """Count the live bytes of all tensors created while the mode is active, inside a ``FakeTensorMode``.

    Attributes:
        activations: live bytes outside FSDP's buffers.
        most_activations: peak of ``activations`` + ``absent_activations``.
        most_gathered: peak of ``gathered`` + ``absent_gathered``.
        absent_activations: bytes that the layers that are not run would keep alive now. The caller sets
            it.
        absent_gathered: like ``absent_activations``, for FSDP's buffers.
        scalar: if not None, the result of operations that read a number from a tensor, such as
            ``.item()``. Otherwise they fail on fake tensors.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """Start with zero bytes.

        Args:
            parameters: the sharded parameters. FSDP allocates their gradients too, and these must
                not count as buffers.
        """
        super().__init__()
        self.activations = 0
        self.most_activations = 0
        self.most_gathered = 0
        self.absent_activations = 0
        self.absent_gathered = 0
        self.scalar: int | None = None
        self._parameters = list(parameters)
        self._seen: dict[int, int] = {}
        self._buffers: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def gathered(self) -> int:
        """Current bytes of FSDP's buffers: gathered parameters, and gradients before their reduction.

        FSDP frees a buffer by resizing it to zero.
        """
        return self._without_gradients(self._buffer_bytes())

    def _buffer_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._buffers)

    def _without_gradients(self, total: int) -> int:
        """Subtract the bytes of the parameters' gradients from ``total``, the bytes of FSDP's storages."""
        storages = {}
        for parameter in self._parameters:
            if parameter.grad is None:
                continue
            local_gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            if local_gradient is not None:
                storage = local_gradient.untyped_storage()
                storages[id(storage)] = storage
        return total - sum(
            storage.nbytes() for storage in storages.values() if storage in self._buffers
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count the tensors that it creates.

        It declines operations on subclasses such as DTensor. The subclass then calls the operation again on
        plain tensors.
        """
        if not all(issubclass(kind, FakeTensor) or kind in _PLAIN for kind in types):
            return NotImplemented
        # Fake tensors have no values, so an ``item()`` returns the number that the caller has set.
        if self.scalar is not None and func is torch.ops.aten._local_scalar_dense.default:
            return self.scalar
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._see(tensor, is_result=False)
        result = _run(func, args, kwargs)
        for tensor in _tensors(result):
            self._see(tensor, is_result=True)
        self.most_activations = max(
            self.most_activations, self.activations + self.absent_activations
        )
        if self._buffers:
            total = self._buffer_bytes()
            # Subtracting the gradients is slow, so skip it if the total cannot be a new peak.
            if total + self.absent_gathered > self.most_gathered:
                gathered = self._without_gradients(total) + self.absent_gathered
                self.most_gathered = max(self.most_gathered, gathered)
        return result

    def _see(self, tensor: Tensor, is_result: bool) -> None:
        """Count the storage of a tensor when it appears for the first time.

        A storage that appears first as an argument existed before this mode, and counts as zero.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = 0
        caller = _caller() if is_result else ""
        if caller in FSDP:
            self._buffers.add(storage)
        elif is_result and caller != SHAPES:
            size = storage.nbytes()
        self._seen[key] = size
        self.activations += size
        # The storage counts until its last tensor is freed.
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.activations -= self._seen.pop(key, 0)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on fake tensors."""
    is_grouped_mm = func is torch.ops.aten._grouped_mm.default
    if not (is_grouped_mm and isinstance(args[0], FakeTensor) and args[0].dtype == torch.float32):
        return func(*args, **kwargs)
    # Fake tensors support grouped_mm only in bfloat16 (torch 2.13), but the CPU kernel also takes
    # float32. A cast to bfloat16 would not help, because narrow matrices would fail PyTorch's check of
    # 16-byte alignment. So compute the shape of the result here.
    a, b = args[:2]
    # If one operand has a group dimension, the result has none.
    groups: list[int] = []
    if a.ndim == b.ndim == 2:
        # both operands are split along the inner dimension, so each group has its own result matrix
        offsets = args[2] if len(args) > 2 else kwargs["offs"]
        groups = [offsets.numel()]
    elif a.ndim == b.ndim:
        groups = list(a.shape[:-2])
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _caller() -> str:
    """Return the entry of ``FSDP`` or ``SHAPES`` whose code is on the call stack, or an empty string.

    FSDP works in hooks, so it is never on the stack of a layer's own operations. In ``SHAPES``, DTensor runs
    an operation on meta tensors to find the shape of its result. Such tensors need no memory in a real run.
    """
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        for caller in (*FSDP, SHAPES):
            if name.startswith(caller):
                return caller
        frame = frame.f_back  # type: ignore[assignment]
    return ""
