"""Let networks of ``transformers`` before version 5 run on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Autocast: Any = torch.autocast


class _AutocastOnMeta(_Autocast):  # type: ignore[misc]
    """``torch.autocast`` that treats the meta device as a CPU."""

    def __init__(self, device_type: str, *arguments: Any, **keywords: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *arguments, **keywords)


@contextmanager
def meta_autocast() -> Iterator[None]:
    """Accept ``torch.autocast("meta", enabled=False)`` in the block.

    Rotary embeddings switch autocast off for the device of their input, and PyTorch 2.13 raises RuntimeError for meta.
    """
    torch.autocast = _AutocastOnMeta  # type: ignore[misc]
    try:
        yield
    finally:
        torch.autocast = _Autocast  # type: ignore[misc]
