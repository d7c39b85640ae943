"""Peak memory of this process: of the allocator on an accelerator, resident memory on a CPU."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

from shardtrain.utils.units import gib


@dataclass(frozen=True)
class DeviceMemory:
    """Peaks of the device's allocator since the last reading, and counts since the process started."""

    max_active_gib: float
    max_reserved_gib: float
    capacity_gib: float
    num_alloc_retries: int
    num_ooms: int

    @property
    def peak_gib(self) -> float:
        """Peak of reserved memory, which other processes cannot use."""
        return self.max_reserved_gib

    @property
    def fraction(self) -> float | None:
        """Peak as a fraction of the device's memory, 0..1."""
        return self.max_reserved_gib / self.capacity_gib

    def tags(self) -> dict[str, float]:
        """Return the values by TensorBoard tag."""
        return {
            "memory/max_active(GiB)": self.max_active_gib,
            "memory/max_active(%)": 100 * self.max_active_gib / self.capacity_gib,
            "memory/max_reserved(GiB)": self.max_reserved_gib,
            "memory/max_reserved(%)": 100 * self.max_reserved_gib / self.capacity_gib,
            "memory/num_alloc_retries": self.num_alloc_retries,
            "memory/num_ooms": self.num_ooms,
        }


@dataclass(frozen=True)
class HostMemory:
    """Peak resident memory of this process since its start. The system cannot reset it."""

    max_rss_gib: float

    @property
    def peak_gib(self) -> float:
        """Peak of resident memory."""
        return self.max_rss_gib

    @property
    def fraction(self) -> float | None:
        """None, because the ranks of a host share its memory."""
        return None

    def tags(self) -> dict[str, float]:
        """Return the values by TensorBoard tag."""
        return {"memory/max_rss(GiB)": self.max_rss_gib}


MemoryPeak = DeviceMemory | HostMemory


def max_rss_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    # getrusage counts kibibytes on Linux and bytes on macOS.
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def read_peak(device_type: str) -> MemoryPeak:
    """Return this rank's memory peak. On an accelerator, also reset it."""
    if device_type == "cpu":
        return HostMemory(gib(max_rss_bytes()))
    import torch

    from shardtrain.ops import accelerator

    if accelerator.is_apple(device_type):
        # Apple's allocator keeps no peak. Blocks that it has taken from the system are seldom returned.
        return DeviceMemory(
            max_active_gib=gib(torch.mps.current_allocated_memory()),
            max_reserved_gib=gib(torch.mps.driver_allocated_memory()),
            capacity_gib=gib(accelerator.total_memory_bytes(torch.device("mps"))),
            num_alloc_retries=0,
            num_ooms=0,
        )
    device = accelerator.module(device_type)
    stats = device.memory_stats()
    capacity_bytes = accelerator.total_memory_bytes(
        torch.device(device_type, device.current_device())
    )
    # A process without any allocation has no statistics.
    peak = DeviceMemory(
        max_active_gib=gib(stats.get("active_bytes.all.peak", 0)),
        max_reserved_gib=gib(stats.get("reserved_bytes.all.peak", 0)),
        capacity_gib=gib(capacity_bytes),
        num_alloc_retries=stats.get("num_alloc_retries", 0),
        num_ooms=stats.get("num_ooms", 0),
    )
    device.reset_peak_memory_stats()
    return peak
