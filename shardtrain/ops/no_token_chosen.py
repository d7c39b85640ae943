"""Let networks that select the tokens of each expert by value run on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoTokenChosen(TorchDispatchMode):
    """Let ``nonzero`` of a tensor on the meta device return no position. No expert then has a token.

    Lists of experts in ``transformers`` 4 loop over the experts that have tokens. Experts compute each
    token by itself, so a pass that looks for other dependencies does not need them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return torch.empty((0, args[0].ndim), dtype=torch.int64, device="meta")
        return func(*args, **(kwargs or {}))
