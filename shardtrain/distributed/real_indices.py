"""Run operations on positions and masks for real, within a trace on fake tensors.

Networks that read images find the places of image tokens, and read the sizes of images as Python numbers.
The batch of a dry run has real tensors, so operations on them have results. Only operations with a fake
tensor, such as a weight, are fake.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_MAX_NUMEL = 1 << 22
"""Larger real tensors, such as pixels, become fake."""
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
_aten = torch.ops.aten
_COUNTERS = (_aten.arange, _aten.linspace)
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)


class RealIndices(TorchDispatchMode):
    """Enter this mode inside a ``FakeTensorMode`` with ``allow_non_fake_inputs``."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(kind, FakeTensor) or kind in _PLAIN for kind in types):
            return NotImplemented
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if _has_real_result(func, tensors, kwargs):
            with _disable_current_modes():
                return func(*args, **kwargs)

        # Masks are real, so the shapes that depend on them are known.
        packet = func.overloadpacket
        if packet in _INDEXED:
            args = (args[0], _without_masks(args[1]), *args[2:])
        elif packet is _aten.masked_select and not isinstance(args[1], FakeTensor):
            with _disable_current_modes():
                num_selected = int(args[1].expand(args[0].shape).sum())
            return args[0].new_empty(num_selected)
        elif packet is _aten.masked_scatter_backward:
            return args[0].new_empty(args[2])
        return func(*args, **kwargs)


def _has_real_result(func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """True for an operation on small real tensors, and for a new tensor of integers or positions."""
    for tensor in tensors:
        is_real = type(tensor) is Tensor and not tensor.is_meta
        if not is_real or tensor.numel() > _MAX_NUMEL:
            return False
    if tensors:
        return True
    # The operation creates a tensor.
    dtype = kwargs.get("dtype")
    is_integer = dtype is not None and not dtype.is_floating_point
    return is_integer or func.overloadpacket in _COUNTERS


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Replace real masks by the positions of their true elements."""
    replaced: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
            replaced.append(index)
            continue
        with _disable_current_modes():
            replaced += index.nonzero(as_tuple=True)
    return replaced
