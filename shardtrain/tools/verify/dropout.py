"""Dropout is switched off where numbers are compared: which numbers are dropped is a function of the mesh, and meant to
be. It is switched off where all spellings of it meet, in ``torch.nn.functional``: modules, functions and attention's p.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

FUNCTIONS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
"""What ``nn.Dropout`` and its siblings call, and what a model may call itself."""

listeners: list[Callable[[str, Tensor], None]] = []
"""Called with what would drop, "dropout with p=0.1", and the tensor of which it would."""

used: list[str] = []
"""What would have dropped in this process since ``switch_off``, each once: "dropout with p=0.1"."""


def switch_off() -> None:
    """From now on nothing in this process drops; batch statistics and all else that ``training`` means stay as is.

    For processes that end soon: those of ranks and of the judge. Call it before a model file is imported, which may
    take a function by name.
    """
    used.clear()
    if hasattr(F.dropout, "drops_nothing"):
        return
    for name in FUNCTIONS:
        setattr(F, name, _identity(name, getattr(F, name)))
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"):
        setattr(torch, name, _identity(name, getattr(torch, name)))
    F.scaled_dot_product_attention = _attention(F.scaled_dot_product_attention)


def _note(name: str, p: float, dropped: Tensor) -> None:
    sentence = f"{name} with p={p:g}"
    for listener in listeners:
        listener(sentence, dropped)
    if sentence not in used:
        used.append(sentence)


def _identity(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def keep(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **other: Any) -> Tensor:
        if training and other.get("train", True) and p:
            _note(name, p, input)
        return input

    keep.drops_nothing = True  # type: ignore[attr-defined]
    return keep


def _attention(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *causal: bool,
        **keywords: Any,
    ) -> Tensor:
        if dropout_p:
            _note("attention dropout", dropout_p, query)
        return original(query, key, value, attn_mask, 0.0, *causal, **keywords)

    return attend
