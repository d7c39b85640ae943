"""Constants of 8-bit matrix multiplication: names of converters and recipes, and sizes of scaled blocks."""

from __future__ import annotations

from typing import Literal

OPTION = "model.converters"
"""Option that lists converters."""

LINEAR = "quantize.linear.float8"
MX = "quantize.linear.mx"
GROUPED = "quantize.grouped_mm.float8"
CONVERTERS = (LINEAR, MX, GROUPED, "quantize.grouped_mm.mx")
"""Values of the option, each of which is also the name of its section."""

# How scales are chosen.
Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
MXRecipe = Literal["mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated"]

FLOAT8_MULTIPLE = 16
"""Devices multiply in float8 only if all dimensions of both matrices are multiples of this."""

MX_BLOCK = 32
"""Elements that share a scale in MX."""
