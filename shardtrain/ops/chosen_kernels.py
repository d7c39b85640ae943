"""Choice of the CPU kernels for the models of this process. The kernels read it.

The fastest kernel depends on the processor. ``kernel_speed.py`` measures it.
All ranks of a run use rank 0's choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORTH_IT = 1.05
"""Minimum speedup over PyTorch's kernel. Slower kernels are not used."""
NARROW_HEAD = 32
"""Features per narrow head. Narrow and wide heads are measured separately, because the speedup of attention by blocks
in float32 depends on the width."""
WIDE_HEAD = 128
"""Features per head in the measurement of wide heads."""
LONG_ROW = 1024
"""Number of tokens in a row, without documents and windows, above which the flash kernel is as fast as blocks."""
FAILED = -1.0
"""Value of a failed measurement: the kernel, or PyTorch's kernel for the comparison, raised an error."""


@dataclass(frozen=True)
class Kernels:
    """Speedup of each alternative kernel over PyTorch's kernel.

    The value is 0 if this build of PyTorch lacks the operators, and FAILED if the measurement raised an
    error.

    Attributes:
        onednn_linear: Linear layers in float32 with oneDNN: the forward pass and the gradient of the input.
        onednn_weight_gradient: Gradients of the weights of linear layers in float32 with oneDNN.
        blocked_attention: Attention in bfloat16 by matrix products.
        blocked_attention_float32: Attention in float32 for heads of at most NARROW_HEAD features.
        blocked_attention_float32_wide: Attention in float32 for wider heads, measured with WIDE_HEAD
            features.
        rms_norm: RMSNorm in chunks of rows.
        packed_linear: Linear layers in bfloat16 with few rows and a packed weight, for generation.
        packed_linear_float32: Linear layers in float32 with few rows and a packed weight.
    """

    onednn_linear: float = 0.0
    onednn_weight_gradient: float = 0.0
    blocked_attention: float = 0.0
    blocked_attention_float32: float = 0.0
    blocked_attention_float32_wide: float = 0.0
    rms_norm: float = 0.0
    packed_linear: float = 0.0
    packed_linear_float32: float = 0.0

    def uses(self, name: str) -> bool:
        """True if a kernel is fast enough to be used. ``name`` is the name of its field."""
        return bool(getattr(self, name) >= WORTH_IT)

    def describe(self) -> str:
        """Return a line for the training log. It omits packed weights, which training does not use."""
        phrases = {
            "onednn_linear": "linear layers in float32 by oneDNN",
            "onednn_weight_gradient": "gradients of their weights too",
            "blocked_attention": "blocked bfloat16 attention",
            "blocked_attention_float32": "blocked float32 attention with narrow heads",
            "blocked_attention_float32_wide": "blocked float32 attention with wide heads",
            "rms_norm": "RMSNorm by rows",
        }
        taken = [
            f"{words} ({getattr(self, name):.1f} x as fast)"
            for name, words in phrases.items()
            if self.uses(name)
        ]
        failed = [words for name, words in phrases.items() if getattr(self, name) == FAILED]
        sentence = (
            f"CPU kernels: {', '.join(taken)}"
            if taken
            else "CPU kernels: PyTorch's (none of shardtrain's is faster)"
        )
        if failed:
            sentence += f"; failed when measured, so PyTorch's own: {', '.join(failed)}"
        return sentence


PYTORCH = Kernels()
"""Only PyTorch's kernels."""
_chosen = PYTORCH


def chosen() -> Kernels:
    """Return the kernels that the models of this process use."""
    return _chosen


def use(kernels: Kernels) -> None:
    """Set the kernels of this process. Models that are already built keep their linear layers."""
    global _chosen
    _chosen = kernels


def attends_in_blocks(q_BTNH: Tensor) -> bool:
    """True on a CPU if blocks of matrix products were measured to be faster than PyTorch's flash kernel."""
    if q_BTNH.device.type != "cpu":
        return False
    if q_BTNH.dtype == torch.float32:
        is_narrow = q_BTNH.size(-1) <= NARROW_HEAD
        return _chosen.uses(
            "blocked_attention_float32" if is_narrow else "blocked_attention_float32_wide"
        )
    return q_BTNH.dtype == torch.bfloat16 and _chosen.uses("blocked_attention")
