"""Work for a device and numbers from it, asked in one place, so that no code asks for its name.

A device that is not the host has a queue of its own: the host gives it work and continues, until it asks for a number.
Such a wait leaves the device without work for as long as the host then needs to give it more, so a training step has
one, and each is made by ``read``. ``docs/performance.md`` names them.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

HOST = ("cpu", "meta")


def found() -> str:
    """The type of the accelerator that PyTorch finds here, such as "cuda" (ROCm's too) or "xpu"; empty without one."""
    if not torch.accelerator.is_available():
        return ""
    device = torch.accelerator.current_accelerator()
    return "" if device is None else device.type


def is_accelerator(device: torch.device | str) -> bool:
    """Whether a device (or a type of devices) has a queue and a memory of its own."""
    return torch.device(device).type not in HOST


def module(device: torch.device | str) -> ModuleType:
    """What PyTorch has for a type of devices: ``torch.cuda``, ``torch.xpu``, ..."""
    return torch.get_device_module(torch.device(device).type)  # type: ignore[no-any-return]


def of_rank(kind: str, local_rank: int) -> torch.device:
    """The device of a rank of this host, which is the current one from now on.

    That of its number among them; or the only one that it sees, where the launcher gives each rank one of its own, as
    ``srun --gpus-per-task=1`` does. A launcher that counts the ranks of a host (LOCAL_WORLD_SIZE) lets all see all.
    """
    if not is_accelerator(kind):
        return torch.device(kind)
    has_own = "LOCAL_WORLD_SIZE" not in os.environ and module(kind).device_count() == 1
    device = torch.device(kind, 0 if has_own else local_rank)
    module(device).set_device(device)
    return device


def collectives(device: torch.device | str) -> str:
    """The backends of a process group whose ranks have such a device; what the host alone counts travels by gloo."""
    kind = torch.device(device).type
    if not is_accelerator(kind):
        return "gloo"
    backend = torch.distributed.get_default_backend_for_device(kind)
    return f"cpu:gloo,{kind}:{backend}"


def pins_memory(device: torch.device | str | None = None) -> bool:
    """Whether page-locked memory of the host helps: it does where there is an accelerator to copy to."""
    return is_accelerator(device) if device is not None else bool(found())


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device, copied behind the work that the device was given, without waiting for that work.

    Only from page-locked memory: before it reads any other, CUDA waits for the queue to be empty.
    """
    if is_accelerator(device) and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Reading:
    """Numbers of a device on their way to the host: ``get`` waits for them, and for nothing that was queued later."""

    def __init__(self, tensor: Tensor, what: str) -> None:
        self.what = what
        """For whoever asks why a step waits."""
        self._event: Any = None
        self._numbers = tensor.detach()
        if is_accelerator(tensor.device):
            # The event is behind the copy in the queue: to wait for it is not to wait for what was queued later
            self._numbers = self._numbers.to("cpu", non_blocking=True)  # into page-locked memory
            self._event = module(tensor.device).Event()
            self._event.record()

    def get(self) -> list[Any]:
        """The numbers, as ``Tensor.tolist`` gives them."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()  # type: ignore[no-any-return]


def read(tensor: Tensor, what: str) -> list[Any]:
    """The numbers of a tensor; on an accelerator the host waits for them, and ``what`` says for which."""
    return Reading(tensor, what).get()


def finish(device: torch.device | str) -> None:
    """Wait until a device has done all that it was given; nothing to do on the host."""
    if is_accelerator(device):
        module(device).synchronize(device)


def finish_stream(device: torch.device) -> None:
    """Wait until a device has done what its current stream was given; nothing to do on the host."""
    if is_accelerator(device):
        module(device).current_stream(device).synchronize()


def name(device: torch.device) -> str:
    """What the device calls itself; "cpu" on the host."""
    return module(device).get_device_name(device) if is_accelerator(device) else "cpu"  # type: ignore[no-any-return]


def total_memory_bytes(device: torch.device) -> int:
    """Memory of an accelerator."""
    return int(module(device).mem_get_info(device)[1])


def records_memory_history(device: torch.device | str) -> bool:
    """Whether the allocator can write down every allocation (``profiling.enable_memory_snapshot``)."""
    return torch.device(device).type == "cuda"


def profiler_activity(device: torch.device | str) -> Any:
    """What PyTorch's profiler calls work on such a device; None on the host, or where it has no word for it."""
    kind = torch.device(device).type
    names = {"cuda": "CUDA", "xpu": "XPU", "mtia": "MTIA", "hpu": "HPU"}
    word = names.get(kind, "PrivateUse1") if is_accelerator(kind) else "CPU"
    return None if word == "CPU" else getattr(torch.profiler.ProfilerActivity, word, None)
