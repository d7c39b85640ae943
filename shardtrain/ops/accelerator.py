"""Device-independent access to accelerators, so no other module checks the name of a device.

An accelerator has its own queue: the host enqueues kernels and continues until it reads a value.
Reading waits for the queue, and the device is then idle until the host enqueues more. A training
step therefore reads once, with ``read``. ``docs/performance.md`` lists the reads.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

HOST = ("cpu", "meta")
APPLE = {"mps"}
"""Apple's GPUs. PyTorch has no float64 and no collectives there, and they use the host's memory."""


def device_type() -> str:
    """Return the type of this host's accelerator, such as "cuda" (also for ROCm) or "xpu". "" if it has none."""
    if not torch.accelerator.is_available():
        return ""
    device = torch.accelerator.current_accelerator()
    return "" if device is None else device.type


def is_apple(device: torch.device | str) -> bool:
    """True for Apple's GPUs. They train in one process, eagerly, and add in float32."""
    return torch.device(device).type in APPLE


def sum_dtype(device: torch.device | str) -> torch.dtype:
    """Return the dtype of sums over many tokens: float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if is_apple(device) else torch.float64


def is_accelerator(device: torch.device | str) -> bool:
    """True if a device (or a type of devices) has its own queue and memory."""
    return torch.device(device).type not in HOST


def module(device: torch.device | str) -> ModuleType:
    """Return PyTorch's module for a type of devices: ``torch.cuda``, ``torch.xpu``, ..."""
    return torch.get_device_module(torch.device(device).type)  # type: ignore[no-any-return]


def of_rank(kind: str, local_rank: int) -> torch.device:
    """Return the device of a rank on this host, and make it the current device.

    Its index is the local rank. If the launcher makes only one device visible to each rank, as
    ``srun --gpus-per-task=1`` does, it is 0. Launchers that set LOCAL_WORLD_SIZE make all devices
    visible to all ranks.
    """
    if not is_accelerator(kind):
        return torch.device(kind)
    if is_apple(kind):
        # It is the only one of its host.
        return torch.device(kind, 0)
    sees_only_its_device = "LOCAL_WORLD_SIZE" not in os.environ and module(kind).device_count() == 1
    device = torch.device(kind, 0 if sees_only_its_device else local_rank)
    module(device).set_device(device)
    return device


def collectives(device: torch.device | str) -> str:
    """Return the backends of a process group for this type of device. Tensors on the CPU always use gloo."""
    kind = torch.device(device).type
    if not is_accelerator(kind) or is_apple(kind):
        return "gloo"
    backend = torch.distributed.get_default_backend_for_device(kind)
    return f"cpu:gloo,{kind}:{backend}"


def pins_memory(device: torch.device | str | None = None) -> bool:
    """True if host memory should be pinned, because copies go to an accelerator with memory apart from the host's.

    None checks for any accelerator. Apple's GPUs use the host's memory.
    """
    kind = device_type() if device is None else torch.device(device).type
    return bool(kind) and is_accelerator(kind) and not is_apple(kind)


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on a device. The copy is enqueued, and the host does not wait for it.

    The tensor is pinned first: before CUDA copies from pageable memory, it waits until the queue is empty.
    """
    if pins_memory(device) and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    # Copies to and from Apple's GPU must wait: PyTorch does not keep the host's memory for them.
    return tensor.to(device, non_blocking=not is_apple(device))


class Reading:
    """An asynchronous copy of a tensor to the host. ``get`` waits for the copy, but not for later kernels."""

    def __init__(self, tensor: Tensor, what: str) -> None:
        self.what = what
        """Description of the value, to find out why a step waits."""
        self._event: Any = None
        self._numbers = tensor.detach()
        if is_accelerator(tensor.device) and not is_apple(tensor.device):
            # Copy to pinned memory. The event follows the copy in the queue.
            self._numbers = self._numbers.to("cpu", non_blocking=True)
            self._event = module(tensor.device).Event()
            self._event.record()

    def get(self) -> list[Any]:
        """Wait for the copy, and return the result of ``Tensor.tolist``."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()  # type: ignore[no-any-return]


def read(tensor: Tensor, what: str) -> list[Any]:
    """Return the values of a tensor as nested lists.

    The host waits for the device. ``what`` describes the value.
    """
    return Reading(tensor, what).get()


def finish(device: torch.device | str) -> None:
    """Wait until a device has finished all its streams. A no-op for the CPU."""
    if not is_accelerator(device):
        return
    if is_apple(device):
        module(device).synchronize()
    else:
        module(device).synchronize(device)


def finish_stream(device: torch.device) -> None:
    """Wait until a device has finished its current stream. A no-op for the CPU."""
    if not is_accelerator(device):
        return
    if is_apple(device):
        finish(device)
    else:
        module(device).current_stream(device).synchronize()


def name(device: torch.device) -> str:
    """Return the product name of an accelerator; "cpu" for the CPU."""
    if not is_accelerator(device):
        return "cpu"
    if is_apple(device):
        return device.type
    return module(device).get_device_name(device)  # type: ignore[no-any-return]


def total_memory_bytes(device: torch.device) -> int:
    """Return the total memory of an accelerator in bytes."""
    if is_apple(device):
        # the part of the host's memory that the GPU may use
        return int(torch.mps.recommended_max_memory())
    return int(module(device).mem_get_info(device)[1])


def records_memory_history(device: torch.device | str) -> bool:
    """True if the allocator can record its history of allocations (``profiling.enable_memory_snapshot``)."""
    return torch.device(device).type == "cuda"


def profiler_activity(device: torch.device | str) -> Any:
    """Return the profiler's activity for kernels of a device.

    None for the CPU, or if PyTorch does not support it.
    """
    kind = torch.device(device).type
    if not is_accelerator(kind):
        return None
    if is_apple(kind):
        return None
    names = {"cuda": "CUDA", "xpu": "XPU", "mtia": "MTIA", "hpu": "HPU"}
    return getattr(torch.profiler.ProfilerActivity, names.get(kind, "PrivateUse1"), None)
