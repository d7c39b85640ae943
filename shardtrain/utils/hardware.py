"""Dense peak speed of accelerators by device name and type of number, from the vendors' data sheets.

Vendors print the figure with 2:4 sparsity, twice the dense one; training cannot use it. Every figure here is dense.
A device that is not in the table has no peak: nothing is guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """Dense peaks of one device in TFLOP/s; None where the device has no such unit or the vendor no such figure."""

    pattern: str
    """Regular expression searched in the name that the driver reports."""
    bfloat16: float | None
    float16: float | None
    float32: float | None
    """Without TF32 on NVIDIA; matrix cores on AMD."""
    float8: float | None = None


# The first row that matches counts, so special forms come before general ones.
_PEAKS: tuple[Peak, ...] = (
    # NVIDIA GB300 NVL72 data sheet: 360 PF bf16 and 720 PF fp8 with sparsity over 72 GPUs.
    Peak(r"\bGB300\b", 2500.0, 2500.0, 80.0, 5000.0),
    # NVIDIA HGX B300 data sheet: 36 PF bf16 and 72 PF fp8 with sparsity, 600 TF fp32, over 8 GPUs.
    Peak(r"\bB300\b", 2250.0, 2250.0, 75.0, 4500.0),
    # NVIDIA GB200 NVL72 data sheet: 10 PF bf16 and 20 PF fp8 with sparsity, 160 TF fp32, per superchip of 2 GPUs.
    Peak(r"\bGB200\b", 2500.0, 2500.0, 80.0, 5000.0),
    # NVIDIA HGX B200 data sheet: 36 PF bf16 and 72 PF fp8 with sparsity, 600 TF fp32, over 8 GPUs.
    Peak(r"\bB200\b", 2250.0, 2250.0, 75.0, 4500.0),
    # NVIDIA GH200 data sheet: 1979 TF bf16 and 3958 TF fp8 with sparsity; the GPU is an H100 (or H200) SXM.
    Peak(r"\bGH200\b", 989.0, 989.0, 67.0, 1979.0),
    # NVIDIA H200 data sheet, column NVL: 1671 TF bf16 and 3341 TF fp8 with sparsity.
    Peak(r"\bH200 NVL\b", 835.0, 835.0, 60.0, 1670.0),
    # NVIDIA H200 data sheet, column SXM: 1979 TF bf16 and 3958 TF fp8 with sparsity.
    Peak(r"\bH200\b", 989.0, 989.0, 67.0, 1979.0),
    # NVIDIA H20 product brief: 148 TF bf16 and 296 TF fp8, printed dense.
    Peak(r"\bH20\b", 148.0, 148.0, 44.0, 296.0),
    # NVIDIA H100 data sheet, column NVL: 1671 TF bf16 and 3341 TF fp8 with sparsity.
    Peak(r"\bH100 NVL\b", 835.0, 835.0, 60.0, 1670.0),
    # NVIDIA H100 data sheet, column PCIe: 1513 TF bf16 and 3026 TF fp8 with sparsity.
    Peak(r"\bH100 PCIe\b", 756.0, 756.0, 51.0, 1513.0),
    # NVIDIA H100 data sheet, column SXM: 1979 TF bf16 and 3958 TF fp8 with sparsity ("H100 80GB HBM3").
    Peak(r"\bH100\b.*(HBM3|SXM)", 989.0, 989.0, 67.0, 1979.0),
    # NVIDIA A100 data sheet: 312 TF bf16 dense, 19.5 TF fp32; PCIe and SXM alike.
    Peak(r"\bA100\b", 312.0, 312.0, 19.5),
    # NVIDIA A30 data sheet: 165 TF bf16 dense, 10.3 TF fp32.
    Peak(r"\bA30\b", 165.0, 165.0, 10.3),
    # NVIDIA A40 data sheet: 149.7 TF bf16 dense, 37.4 TF fp32.
    Peak(r"\bA40\b", 149.7, 149.7, 37.4),
    # NVIDIA A10 data sheet: 125 TF bf16 dense, 31.2 TF fp32. The A10G is another card and has no public figure.
    Peak(r"\bA10\b", 125.0, 125.0, 31.2),
    # NVIDIA RTX A6000 data sheet and GA102 white paper: 309.7 TF with sparsity, 38.7 TF fp32.
    Peak(r"\bRTX A6000\b", 154.8, 154.8, 38.7),
    # NVIDIA Ada white paper, RTX 6000 Ada: 364.2 TF bf16 and 728.5 TF fp8 dense, 91.1 TF fp32.
    Peak(r"\bRTX 6000 Ada\b", 364.2, 364.2, 91.1, 728.5),
    # NVIDIA L40S data sheet: 362.05 TF bf16 dense (733 with sparsity), 733 TF fp8 dense, 91.6 TF fp32.
    Peak(r"\bL40S\b", 362.05, 362.05, 91.6, 733.0),
    # NVIDIA L40 data sheet: 181.05 TF bf16 dense, 362 TF fp8 dense, 90.5 TF fp32.
    Peak(r"\bL40\b", 181.05, 181.05, 90.5, 362.0),
    # NVIDIA L4 data sheet: 242 TF bf16 and 485 TF fp8 with sparsity, 30.3 TF fp32.
    Peak(r"\bL4\b", 121.0, 121.0, 30.3, 242.5),
    # NVIDIA V100 data sheet, V100S PCIe: 130 TF fp16, 16.4 TF fp32. Volta has no bf16 units.
    Peak(r"\bV100S\b", None, 130.0, 16.4),
    # NVIDIA V100 data sheet, PCIe: 112 TF fp16, 14 TF fp32.
    Peak(r"\bV100-(PCIE|FHHL)", None, 112.0, 14.0),
    # NVIDIA V100 data sheet, SXM2: 125 TF fp16, 15.7 TF fp32.
    Peak(r"\bV100-SXM", None, 125.0, 15.7),
    # NVIDIA T4 data sheet: 65 TF fp16, 8.1 TF fp32. Turing has no bf16 units.
    Peak(r"\bT4\b", None, 65.0, 8.1),
    # NVIDIA Blackwell RTX white paper, 5090: 209.5 TF bf16 and 419 TF fp8 with fp32 accumulation, dense.
    Peak(r"\bRTX 5090(?! (D|Laptop))", 209.5, 209.5, 104.8, 419.0),
    # NVIDIA Ada white paper, 4090: 165.2 TF bf16 and 330.3 TF fp8 with fp32 accumulation, dense.
    Peak(r"\bRTX 4090(?! (D|Laptop))", 165.2, 165.2, 82.6, 330.3),
    # NVIDIA GA102 white paper, 3090: 71 TF bf16 with fp32 accumulation, dense.
    Peak(r"\bRTX 3090(?! (Ti|Laptop))", 71.0, 71.0, 35.6),
    # AMD Instinct MI355X data sheet: 2516.6 TF bf16, 5033.2 TF fp8, 157.3 TF fp32.
    Peak(r"\bMI355X?\b", 2516.6, 2516.6, 157.3, 5033.2),
    # AMD Instinct MI350X data sheet: 2306.9 TF bf16, 4613.7 TF fp8, 144.2 TF fp32.
    Peak(r"\bMI350X?\b", 2306.9, 2306.9, 144.2, 4613.7),
    # AMD Instinct MI325X and MI300X data sheets: 1307.4 TF bf16, 2614.9 TF fp8, 163.4 TF fp32.
    Peak(r"\bMI3(25|00)X\b", 1307.4, 1307.4, 163.4, 2614.9),
    # AMD Instinct MI300A data sheet: 980.6 TF bf16, 1961.2 TF fp8, 122.6 TF fp32.
    Peak(r"\bMI300A\b", 980.6, 980.6, 122.6, 1961.2),
    # AMD Instinct MI250X data sheet: 383 TF bf16, 95.7 TF fp32 for the card, which is two devices.
    Peak(r"\bMI250X\b", 191.5, 191.5, 47.85),
)


GPUS: dict[str, tuple[str, float]] = {
    "gb300": ("NVIDIA GB300", 288),
    "b300": ("NVIDIA B300", 288),
    "gb200": ("NVIDIA GB200", 186),
    "b200": ("NVIDIA B200", 180),
    "gh200": ("NVIDIA GH200 96GB HBM3", 96),
    "h200": ("NVIDIA H200", 141),
    "h100": ("NVIDIA H100 80GB HBM3", 80),
    "h100-nvl": ("NVIDIA H100 NVL", 94),
    "h20": ("NVIDIA H20", 96),
    "a100": ("NVIDIA A100-SXM4-80GB", 80),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 40),
    "a40": ("NVIDIA A40", 48),
    "a30": ("NVIDIA A30", 24),
    "a10": ("NVIDIA A10", 24),
    "l40s": ("NVIDIA L40S", 48),
    "l40": ("NVIDIA L40", 48),
    "l4": ("NVIDIA L4", 24),
    "v100": ("Tesla V100-SXM2-32GB", 32),
    "v100-16gb": ("Tesla V100-SXM2-16GB", 16),
    "t4": ("Tesla T4", 16),
    "rtx5090": ("NVIDIA GeForce RTX 5090", 32),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24),
    "rtx3090": ("NVIDIA GeForce RTX 3090", 24),
    "mi355x": ("AMD Instinct MI355X", 288),
    "mi325x": ("AMD Instinct MI325X", 256),
    "mi300x": ("AMD Instinct MI300X", 192),
    "mi250x": ("AMD Instinct MI250X", 64),
}
"""Devices by the name that ``config check --for-machine`` takes: what the driver calls them, and their GB of memory.

The data sheets' gigabytes (10^9 bytes), of one device: of an MI250X card the half.
"""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in FLOP/s, or None where it is not known.

    ``device_name`` is what the driver reports ("NVIDIA H100 80GB HBM3"), ``dtype`` one of bfloat16, float16, float32
    and float8, with or without ``torch.`` in front. A MIG slice is a part of a device and has no known peak.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16"), peak_flops("AMD EPYC", "bfloat16")
    (989000000000000.0, None)
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    field = dtype.removeprefix("torch.")
    field = "float8" if field.startswith("float8") else field
    if field not in ("bfloat16", "float16", "float32", "float8"):
        return None
    for peak in _PEAKS:
        if re.search(peak.pattern, device_name, re.IGNORECASE):
            value = getattr(peak, field)
            return None if value is None else value * _TERA
    return None
