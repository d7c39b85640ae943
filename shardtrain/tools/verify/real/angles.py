"""Compare rotary angles at large positions in float32 with float64.

An angle is position times frequency. In float32, the product of a position near 2^17 and a frequency near one
has an error of 2^-8. ``transformers`` has the same error, and published models were trained with it, so this
package keeps it. The row shows the error, and fails if it is larger than this rounding explains.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardtrain import models
from shardtrain.config import Config
from shardtrain.models.layers import RotaryAngles


def lengths(config: Config) -> list[int]:
    """Return the sequence lengths to check at their last positions."""
    return sorted({config.training.seq_len, 1 << 17, 1 << 20})


def limit(length: int) -> float:
    """Return the maximum error of a cosine.

    Frequency and product are rounded, and the power that computes a frequency loses two bits.
    """
    return min(2.0, length * 2.0**-22)


class _Double(TorchFunctionMode):
    """Mode that replaces float32 by float64."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if function is torch.Tensor.float:
            return args[0].double()
        return function(*args, **kwargs)


def error(rank: int, num_ranks: int, config: Config, length: int) -> dict[str, Any]:
    """Return the largest error of a cosine or sine at the last 64 positions over all rotary
    modules, or None without any.
    """
    module = models.find(config.model.name)
    if getattr(module, "AS_IS", False):
        return {"error": None, "note": ""}
    shape = models.shape_of(
        module, config.model.flavor, config.model.overrides, config.model.norm_type
    )
    model = models.build(module, shape)
    ropes = [part for part in model.modules() if isinstance(part, RotaryAngles)]
    if not ropes:
        return {"error": None, "note": ""}
    # The largest angles have the largest errors, so look at the last positions.
    positions = torch.arange(max(0, length - 64), length)[None]
    largest_error = 0.0
    largest_angle = 0.0
    for rope in ropes:
        computed = rope(positions)
        with _Double():
            exact = rope(positions)
            angles = positions.double()[..., None, None] * rope.inverse_frequencies()
            widest = float(angles.abs().max())
        errors = [float((a.double() - b).abs().max()) for a, b in zip(computed, exact, strict=True)]
        largest_error = max(largest_error, *errors)
        largest_angle = max(largest_angle, widest)
    note = ""
    if largest_angle:
        spacing = 2.0 ** (math.floor(math.log2(largest_angle)) - 23)
        note = f"float32's own spacing at this angle is {spacing:.1e}"
    return {"error": largest_error, "note": note}
