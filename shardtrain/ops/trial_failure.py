"""Explain why a network fails in a test pass before ranks start, whose tensors have shapes and no values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

_NEEDS_VALUES = (
    "no data",
    "meta tensor",
    "item()",
    "data-dependent",
    "aten::nonzero",
    "aten::equal",
)
"""Parts of PyTorch's messages about a tensor without values."""


def failure_of(
    error: Exception, model: nn.Module, copies: Mapping[str, nn.Module] | None = None
) -> str:
    """Return the module in which a test pass failed, and the reason, as a phrase for an error message.

    The phrase follows the name of the network. ``copies`` are modules that run instead of those of the model, by
    their paths in the model.
    """
    place = _innermost_module(error, {"": model, **(copies or {})})
    where = f"in {place}" if place else "in its forward"
    text = (str(error).splitlines() or [""])[0]
    if any(part in text for part in _NEEDS_VALUES):
        return f"reads values of tensors {where}, but the test before ranks start has only shapes"
    return f"fails {where} in a test before ranks start: {type(error).__name__}: {text}"


def _innermost_module(error: Exception, parts: Mapping[str, nn.Module]) -> str:
    """Return the path of the innermost module whose method raised the error, or ""."""
    paths = {}
    for prefix, part in parts.items():
        for path, module in part.named_modules(prefix=prefix):
            paths[id(module)] = path
    innermost = ""
    traceback = error.__traceback__
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        innermost = paths.get(id(owner), "") or innermost
        traceback = traceback.tb_next
    return innermost
