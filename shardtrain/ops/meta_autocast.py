"""Let networks of older versions of ``transformers`` run on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Autocast: Any = torch.autocast
_is_autocast_enabled: Any = torch.is_autocast_enabled


class _AutocastOnMeta(_Autocast):  # type: ignore[misc]
    """``torch.autocast`` that treats the meta device as a CPU."""

    def __init__(self, device_type: str, *arguments: Any, **keywords: Any) -> None:
        super().__init__(_known(device_type), *arguments, **keywords)


def _is_enabled(*device_type: str) -> bool:
    return bool(_is_autocast_enabled(*map(_known, device_type)))


def _known(device_type: str) -> str:
    return "cpu" if device_type == "meta" else device_type


@contextmanager
def meta_autocast() -> Iterator[None]:
    """Let ``torch.autocast`` and ``torch.is_autocast_enabled`` accept the meta device in the block.

    Rotary embeddings switch autocast off for the device of their input, and PyTorch 2.13 raises RuntimeError for meta.
    """
    torch.autocast = _AutocastOnMeta  # type: ignore[misc]
    torch.is_autocast_enabled = _is_enabled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autocast = _Autocast  # type: ignore[misc]
        torch.is_autocast_enabled = _is_autocast_enabled
