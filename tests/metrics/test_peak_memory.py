import pytest
import torch

from shardtrain.metrics import peak_memory
from shardtrain.utils.units import gib


def test_host_peak_is_in_gib_and_never_decreases():
    before = peak_memory.read_peak("cpu")
    block = bytearray(64 * 2**20)
    after = peak_memory.read_peak("cpu")
    del block

    assert isinstance(after, peak_memory.HostMemory)
    # A process with torch in it is between 50 MiB and 1 TiB: a wrong unit would be off by 1024.
    assert 0.05 < before.max_rss_gib <= after.max_rss_gib < 1024
    assert set(after.tags()) == {"memory/max_rss(GiB)"}


def test_the_host_peak_agrees_with_the_kernel():
    with open("/proc/self/status") as status:
        peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    # The kernel adds up page counts of threads late, so the values may differ by a few MiB.
    assert peak_memory.max_rss_bytes() == pytest.approx(peak_kib * 1024, abs=16 * 2**20)


def test_cuda_peaks_come_from_the_allocator_and_are_reset(monkeypatch):
    calls = []
    stats = {
        "active_bytes.all.peak": 10 * 2**30,
        "reserved_bytes.all.peak": 20 * 2**30,
        "num_alloc_retries": 3,
        "num_ooms": 1,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    peak = peak_memory.read_peak("cuda")

    assert peak == peak_memory.DeviceMemory(10.0, 20.0, 80.0, 3, 1)
    assert (peak.peak_gib, peak.fraction) == (20.0, 0.25)
    assert calls == ["reset"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_peaks_see_a_real_allocation():
    peak_memory.read_peak("cuda")
    block = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    del block
    first = peak_memory.read_peak("cuda")
    second = peak_memory.read_peak("cuda")

    assert first.max_active_gib >= gib(256 * 2**20)
    assert second.max_active_gib < first.max_active_gib
