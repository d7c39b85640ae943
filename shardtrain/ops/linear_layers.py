"""Predicates that recognize plain linear layers, for code that replaces or inspects them."""

from __future__ import annotations

from torch import nn


def is_plain_linear(module: nn.Module) -> bool:
    """True for ``nn.Linear`` and ``OneDnnLinear``, which only differ in the library that multiplies."""
    return type(module) is nn.Linear or type(module).__dict__.get("is_plain_linear", False)


def computes_linear(module: nn.Module) -> bool:
    """True if a module multiplies like ``nn.Linear``, including classes that FSDP derives."""
    is_unchanged = type(module).forward is nn.Linear.forward or getattr(
        type(module), "is_plain_linear", False
    )
    return is_unchanged and "forward" not in module.__dict__
