"""Casts to a type shorter than float32 that a model writes itself, switched off where its numbers are compared.

Such a cast rounds what meshes sum in another order, by 1e-7, to one or the other of two neighbours that lie 2^-8 apart:
an attention core in bfloat16 is some 5e-5 off on every mesh, and nothing is wrong with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SHORT = (torch.bfloat16, torch.float16)

used: list[str] = []
"""Types to which something would have been cast in this process since casts were switched off."""


@contextmanager
def off() -> Iterator[None]:
    """Within, float32 stays float32 in this process and those that are forked from it, under autocast too."""
    used.clear()
    plain_to = Tensor.to
    plain_type = Tensor.type
    plain_bfloat16 = Tensor.bfloat16
    plain_half = Tensor.half
    autocast = torch.autocast.__init__

    @functools.wraps(plain_to)
    def to(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        def keep(value: Any) -> Any:
            if isinstance(value, torch.dtype) and value in SHORT:
                return _keep(self, value)
            if isinstance(value, Tensor) and value.dtype in SHORT:  # another tensor's type and device
                return torch.empty((), dtype=_keep(self, value.dtype), device=value.device)
            return value

        return plain_to(self, *map(keep, arguments), **{name: keep(value) for name, value in named.items()})

    @functools.wraps(plain_type)
    def change(self: Tensor, dtype: Any = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(dtype, torch.dtype):
            return self.to(dtype)
        return plain_type(self, *([] if dtype is None else [dtype]), *arguments, **named)

    def disabled(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, *_: Any, **__: Any
    ) -> None:
        if enabled:
            _keep(torch.zeros(()), dtype or torch.bfloat16)
        autocast(self, device_type, enabled=False)

    # Each spelling is replaced by itself: PyTorch's own bfloat16() and type() do not come by Tensor.to.
    Tensor.to = to  # type: ignore[method-assign, assignment]
    Tensor.type = change  # type: ignore[method-assign, assignment]
    torch.autocast.__init__ = disabled  # type: ignore[method-assign]
    Tensor.bfloat16 = lambda self, **_: self.to(torch.bfloat16)  # type: ignore[method-assign]
    Tensor.half = lambda self, **_: self.to(torch.float16)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.to = plain_to  # type: ignore[method-assign]
        Tensor.type = plain_type  # type: ignore[method-assign]
        Tensor.bfloat16 = plain_bfloat16  # type: ignore[method-assign]
        Tensor.half = plain_half  # type: ignore[method-assign]
        torch.autocast.__init__ = autocast  # type: ignore[method-assign]


def _keep(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    if not tensor.is_floating_point():
        return torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in used:
        used.append(name)
    return torch.float32


def notes() -> list[str]:
    """A sentence for each type."""
    return [
        f"casts to {name} are off in the comparison: with them numbers differ between meshes by the rounding of {name}"
        for name in used
    ]
