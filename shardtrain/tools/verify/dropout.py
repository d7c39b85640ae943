"""Disable dropout while numbers are compared, because the dropped elements depend on the mesh by design.

Replaces functions of ``torch.nn.functional``, which modules, direct calls and attention with dropout all use.
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
"""Functions of ``torch.nn.functional`` that ``nn.Dropout`` and similar modules call."""

listeners: list[Callable[[str, Tensor], None]] = []
"""Functions that are called for each disabled dropout with its description, such as "dropout with
p=0.1", and input.
"""

used: list[str] = []
"""Distinct descriptions of all dropouts that ran in this process since ``switch_off``, such as
"dropout with p=0.1".
"""


def switch_off() -> None:
    """Disable dropout in this process until it ends. Other effects of ``training``, such as batch
    statistics, remain.

    Must be called before a model file is imported, because the file may import a function by name.
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
    """Report a disabled dropout of ``dropped`` with probability ``p``."""
    description = f"{name} with p={p:g}"
    for listener in listeners:
        listener(description, dropped)
    if description not in used:
        used.append(description)


def _identity(name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that has the signature of a dropout but returns its input."""

    @functools.wraps(original)
    def keep(
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        **other: Any,
    ) -> Tensor:
        # The argument is named "train" in the functions of ``torch`` and "training" in those of
        # ``torch.nn.functional``.
        if training and other.get("train", True) and p:
            _note(name, p, input)
        return input

    keep.drops_nothing = True  # type: ignore[attr-defined]
    return keep


def _attention(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return scaled dot-product attention with a dropout probability of 0."""

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
