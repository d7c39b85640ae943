"""Disable casts to float16 and bfloat16 in a model's own code while its numbers are compared.

Meshes sum in another order, which changes a number by about 1e-7. A cast to bfloat16 may then round
to the next representable number, 2^-8 away. Therefore a correct attention core in bfloat16 differs
by about 5e-5 on every mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SHORT = (torch.bfloat16, torch.float16)
SHORTER_THAN_FLOAT64 = (*SHORT, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)

used: list[str] = []
"""Names of the dtypes of all casts that this process has skipped since casts were disabled."""


@contextmanager
def off(wide: torch.dtype = torch.float32) -> Iterator[None]:
    """While the context is active, replace casts to dtypes narrower than ``wide`` with casts to ``wide``, in this
    process and its forks, even under autocast.

    For a model in float64, set ``wide`` to float64. This also disables casts to float32 and 8 bits.
    """
    short_dtypes = SHORT if wide == torch.float32 else SHORTER_THAN_FLOAT64
    used.clear()
    original_to = Tensor.to
    original_type = Tensor.type
    original_bfloat16 = Tensor.bfloat16
    original_half = Tensor.half
    original_float = Tensor.float
    original_autocast = torch.autocast.__init__

    @functools.wraps(original_to)
    def to(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        def replace_short(value: Any) -> Any:
            if isinstance(value, torch.dtype) and value in short_dtypes:
                _note_cast(self, value)
                return wide
            # ``to(other)`` takes dtype and device from another tensor.
            if isinstance(value, Tensor) and value.dtype in short_dtypes:
                _note_cast(self, value.dtype)
                return torch.empty((), dtype=wide, device=value.device)
            return value

        arguments = tuple(replace_short(value) for value in arguments)
        named = {name: replace_short(value) for name, value in named.items()}
        return original_to(self, *arguments, **named)

    @functools.wraps(original_type)
    def change_type(self: Tensor, dtype: Any = None, *arguments: Any, **named: Any) -> Any:
        if isinstance(dtype, torch.dtype):
            return self.to(dtype)
        if dtype is None:
            return original_type(self, *arguments, **named)
        return original_type(self, dtype, *arguments, **named)

    def disabled_autocast(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        *_: Any,
        **__: Any,
    ) -> None:
        if enabled:
            _note_cast(torch.zeros(()), dtype or torch.bfloat16)
        original_autocast(self, device_type, enabled=False)

    def bfloat16(self: Tensor, **_: Any) -> Tensor:
        return self.to(torch.bfloat16)

    def half(self: Tensor, **_: Any) -> Tensor:
        return self.to(torch.float16)

    def to_float32(self: Tensor, **_: Any) -> Tensor:
        return self.to(torch.float32)

    # Replace all functions that cast, because PyTorch's bfloat16() and type() do not call Tensor.to.
    Tensor.to = to  # type: ignore[method-assign, assignment]
    Tensor.type = change_type  # type: ignore[method-assign, assignment]
    torch.autocast.__init__ = disabled_autocast  # type: ignore[method-assign]
    Tensor.bfloat16 = bfloat16  # type: ignore[method-assign, assignment]
    Tensor.half = half  # type: ignore[method-assign, assignment]
    if wide != torch.float32:
        Tensor.float = to_float32  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Tensor.to = original_to  # type: ignore[method-assign]
        Tensor.type = original_type  # type: ignore[method-assign]
        Tensor.bfloat16 = original_bfloat16  # type: ignore[method-assign]
        Tensor.half = original_half  # type: ignore[method-assign]
        Tensor.float = original_float  # type: ignore[method-assign]
        torch.autocast.__init__ = original_autocast  # type: ignore[method-assign]


def _note_cast(tensor: Tensor, dtype: torch.dtype) -> None:
    """Record the dtype of a skipped cast of a floating-point tensor."""
    name = str(dtype).removeprefix("torch.")
    if tensor.is_floating_point() and name not in used:
        used.append(name)


def notes() -> list[str]:
    """Return a message for each dtype with skipped casts."""
    return [
        f"casts to {name} are disabled in the comparison, because their rounding differs between meshes"
        for name in used
    ]
