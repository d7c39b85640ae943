"""Kernels that a device supports: attention, grouped matrix products, and bfloat16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from shardtrain.ops.accelerator import is_accelerator


def has_flash_attention(device: torch.device) -> bool:
    """True if PyTorch's flash attention runs on a device.

    CUDA requires compute capability 8.0. On ROCm it depends on the build.
    """
    if device.type != "cuda":
        return False
    available = getattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)()
    return bool(available) and torch.cuda.get_device_capability(device) >= (8, 0)


def prefer_attention(device: torch.device, flash: str = "FA2") -> AbstractContextManager[Any]:
    """Return a context in which PyTorch prefers the fastest attention kernels of a device.

    cuDNN is first from compute capability 9.0 on. If ``flash`` names another kernel than PyTorch's FA2,
    that kernel is first. The other kernels remain as fallbacks, for example for float32.

    Raises:
        ImportError: the package of the requested flash attention is not installed.
    """
    if device.type != "cuda":
        return nullcontext()
    if flash != "FA2":
        # Also used for documents and split sequences.
        attention.activate_flash_attention_impl(flash)
    # PyTorch uses the first of these kernels that supports the inputs.
    capability = torch.cuda.get_device_capability(device)
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if capability >= (9, 0) and flash == "FA2" and not torch.version.hip:
        kernels.insert(0, SDPBackend.CUDNN_ATTENTION)
    return attention.sdpa_kernel(kernels, set_priority=True)


def has_bfloat16_units(device: torch.device) -> bool:
    """True if the hardware multiplies bfloat16: AMD, Intel, and NVIDIA from compute capability 8.0 on.

    ``torch.cuda.is_bf16_supported`` is also true for emulation.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8


def has_matmul_into_float32(device: torch.device) -> bool:
    """True if a device can add an unrounded product of bfloat16 or float16 matrices to a float32 matrix."""
    return (
        device.type == "cuda"
        and not torch.version.hip
        and "dtype_out" in torch.ops.aten.addmm.overloads()
    )


def has_grouped_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """True if one kernel computes the products of all experts, with the rows per expert in device memory.

    On other devices, PyTorch's ``grouped_mm`` reads these counts on the host for each product, and loops over
    experts.
    """
    if not hasattr(F, "grouped_mm"):
        return False
    if not is_accelerator(device):
        return dtype in (torch.float32, torch.bfloat16)
    if device.type != "cuda" or torch.version.hip:
        return False
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)
