"""Which kernels compute the models of this process on a CPU: the choice, which the kernels themselves ask for.

What is fastest depends on the processor; ``kernel_speed.py`` measures it. All ranks of a run take the first rank's
choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORTH_IT = 1.05
"""A kernel that is less than this much faster than PyTorch's own is not taken."""
NARROW_HEAD = 32
"""Features. The narrower the heads, the more blocks gain in float32 over the flash kernel, so both are measured."""
WIDE_HEAD = 128
LONG_ROW = 1024
"""Tokens. The flash kernel is as fast as blocks, or faster, on longer rows without documents and windows."""
FAILED = -1.0
"""In place of a speed: the kernel, or PyTorch's own beside it, raised an error when it was measured."""


@dataclass(frozen=True)
class Kernels:
    """For each kernel that can take the place of PyTorch's own, how many times as fast it is; 0 where this build of
    PyTorch has none, FAILED where it raised an error."""

    onednn_linear: float = 0.0
    """Linear layers in float32 by oneDNN, forward and the gradient of their input."""
    onednn_weight_gradient: float = 0.0
    """The gradient of their weight by oneDNN."""
    blocked_attention: float = 0.0
    """Attention in bfloat16 by matrix products."""
    blocked_attention_float32: float = 0.0
    """The same in float32, for heads of at most NARROW_HEAD features."""
    blocked_attention_float32_wide: float = 0.0
    """The same for wider heads, measured at WIDE_HEAD features."""
    rms_norm: float = 0.0
    """RMSNorm some rows at a time."""
    packed_linear: float = 0.0
    """Linear layers in bfloat16 with few rows and a packed weight: for generation."""
    packed_linear_float32: float = 0.0
    """The same in float32."""

    def uses(self, name: str) -> bool:
        """Whether a kernel, by the name of its field, is taken."""
        return bool(getattr(self, name) >= WORTH_IT)

    def describe(self) -> str:
        """Return a line for the log of training, which packs no weights."""
        phrases = {
            "onednn_linear": "linear layers in float32 by oneDNN",
            "onednn_weight_gradient": "gradients of their weights too",
            "blocked_attention": "attention in bfloat16 by blocks",
            "blocked_attention_float32": "attention in float32 with narrow heads by blocks",
            "blocked_attention_float32_wide": "attention in float32 with wide heads by blocks",
            "rms_norm": "RMSNorm by rows",
        }
        taken = [f"{words} ({getattr(self, name):.1f} x as fast)" for name, words in phrases.items() if self.uses(name)]
        failed = [words for name, words in phrases.items() if getattr(self, name) == FAILED]
        sentence = f"CPU kernels: {', '.join(taken)}" if taken else "CPU kernels: PyTorch's own, none here is faster"
        if failed:
            sentence += f"; failed when measured, so PyTorch's own: {', '.join(failed)}"
        return sentence


PYTORCH = Kernels()
"""PyTorch's own kernels alone."""
_chosen = PYTORCH


def chosen() -> Kernels:
    """Those that the models of this process compute with."""
    return _chosen


def use(kernels: Kernels) -> None:
    """Let the models of this process compute with these; what is built already keeps its linear layers."""
    global _chosen
    _chosen = kernels


def attends_in_blocks(q_BTNH: Tensor) -> bool:
    """True on a CPU if blocks of matrix products were measured to be faster than PyTorch's flash kernel."""
    if q_BTNH.device.type != "cpu":
        return False
    if q_BTNH.dtype == torch.float32:
        is_narrow = q_BTNH.size(-1) <= NARROW_HEAD
        return _chosen.uses("blocked_attention_float32" if is_narrow else "blocked_attention_float32_wide")
    return q_BTNH.dtype == torch.bfloat16 and _chosen.uses("blocked_attention")
