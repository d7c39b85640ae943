"""Which kernels a device has: of attention, of grouped products and of bfloat16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from shardtrain.ops.accelerator import is_accelerator


def has_flash_attention(device: torch.device) -> bool:
    """Whether PyTorch's flash attention runs on a device: on CUDA from compute capability 8.0 on, on ROCm as built."""
    if device.type != "cuda":
        return False
    available = getattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)()
    return bool(available) and torch.cuda.get_device_capability(device) >= (8, 0)


def prefer_attention(device: torch.device, flash: str = "FA2") -> AbstractContextManager[Any]:
    """Which kernels of attention PyTorch tries first while the context is open, on a device that has several.

    cuDNN's from compute capability 9.0 on, unless another flash attention than PyTorch's own (FA2) is asked for, which
    then is first; the others for what these do not compute, such as float32.

    Raises:
        ImportError: the package of the flash attention that was asked for is not installed.
    """
    if device.type != "cuda":
        return nullcontext()
    if flash != "FA2":
        attention.activate_flash_attention_impl(flash)  # documents and split sequences take it, too
    # PyTorch takes the first of these that can compute what it is given
    capability = torch.cuda.get_device_capability(device)
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if capability >= (9, 0) and flash == "FA2" and not torch.version.hip:
        kernels.insert(0, SDPBackend.CUDNN_ATTENTION)
    return attention.sdpa_kernel(kernels, set_priority=True)


def has_bfloat16_units(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 itself: NVIDIA's from 8.0 on, AMD's, and Intel's.

    ``torch.cuda.is_bf16_supported`` counts emulation too.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 8


def has_matmul_into_float32(device: torch.device) -> bool:
    """Whether a device adds products of bfloat16 or float16 to a matrix in float32, without rounding them before."""
    return device.type == "cuda" and not torch.version.hip and "dtype_out" in torch.ops.aten.addmm.overloads()


def has_grouped_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the products of all experts are one kernel, which takes the rows per expert from the device.

    Elsewhere PyTorch's ``grouped_mm`` reads them on the host, once per product, and loops over experts.
    """
    if not hasattr(F, "grouped_mm"):
        return False
    if not is_accelerator(device):
        return dtype in (torch.float32, torch.bfloat16)
    if device.type != "cuda" or torch.version.hip:
        return False
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)
