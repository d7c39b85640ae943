"""CPU kernels are measured once per machine and cached. A run can disable them in favor of PyTorch's own."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import resource
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from shardtrain.ops import chosen_kernels
from shardtrain.ops.chosen_kernels import Kernels
from shardtrain.ops.cpu import kernel_speed, packed_linear


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    # ignore the current load of the machine
    monkeypatch.setattr(kernel_speed, "_PRESSURE", "/dev/null")
    return tmp_path / "home/shardtrain"


def test_machine_is_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernel_speed.remembered_or_measured()
    speeds = asdict(first)
    if not packed_linear.is_available(torch.bfloat16):
        assert speeds.pop("packed_linear") == 0  # this processor cannot pack bfloat16 weights
    assert all(speed > 0 for speed in speeds.values())

    monkeypatch.setattr(kernel_speed, "measure", lambda: pytest.fail("measured again"))
    assert kernel_speed.remembered_or_measured() == first
    assert len(list(cache.iterdir())) == 1  # no temporary files remain


def test_measurement_under_memory_pressure_is_repeated_after_an_hour(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressure = tmp_path / "memory"
    pressure.write_text(
        "some avg10=23.40 avg60=9.00 avg300=2.10 total=1208791999\nfull avg10=0.00 avg60=0.00\n"
    )
    monkeypatch.setattr(kernel_speed, "_PRESSURE", str(pressure))
    slow = Kernels(onednn_linear=0.9)
    fast = Kernels(onednn_linear=2.0)
    monkeypatch.setattr(kernel_speed, "measure", lambda: slow)

    assert kernel_speed.remembered_or_measured() == slow

    # All runs within an hour use the same choice.
    monkeypatch.setattr(kernel_speed, "measure", lambda: fast)
    assert kernel_speed.remembered_or_measured() == slow

    # After an hour, the machine is measured again, now without memory pressure.
    (path,) = cache.iterdir()
    an_hour_ago = time.time() - 3700
    os.utime(path, (an_hour_ago, an_hour_ago))
    pressure.write_text("some avg10=0.00 avg60=9.00 avg300=2.10 total=1208791999\n")
    assert kernel_speed.remembered_or_measured() == fast

    # This measurement is kept permanently.
    os.utime(path, (0, 0))
    monkeypatch.setattr(kernel_speed, "measure", lambda: pytest.fail("measured again"))
    assert kernel_speed.remembered_or_measured() == fast


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"another": 2.0}', '{"onednn_linear": "fast"}'])
def test_damaged_cache_file_is_replaced(
    cache: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernel_speed, "measure", lambda: Kernels(onednn_linear=2.0, blocked_attention=3.0)
    )
    kernel_speed.remembered_or_measured()
    (path,) = cache.iterdir()
    path.write_text(text)

    assert kernel_speed.remembered_or_measured() == Kernels(
        onednn_linear=2.0, blocked_attention=3.0
    )
    assert json.loads(path.read_text()) == asdict(Kernels(onednn_linear=2.0, blocked_attention=3.0))


def test_unwritable_home_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(
        kernel_speed, "measure", lambda: Kernels(onednn_linear=2.0, blocked_attention=3.0)
    )

    assert kernel_speed.remembered_or_measured() == Kernels(
        onednn_linear=2.0, blocked_attention=3.0
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the limit changes the clock of Linux")
def test_speed_is_measured_under_a_limit_of_cpu_time() -> None:
    """RLIMIT_CPU makes Linux's clock of CPU time so coarse that a kernel would appear to take no time."""

    def measure() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (3600, 3600))
        torch.set_num_threads(1)
        numbers = torch.ones(1000)
        speedup = kernel_speed._times_as_fast(numbers.sum, lambda: [numbers.sum()] * 2)
        os._exit(0 if speedup > 0 else 1)

    process = multiprocessing.get_context("fork").Process(target=measure)
    process.start()
    process.join()

    assert process.exitcode == 0


def test_kernel_is_used_if_clearly_faster() -> None:
    kernels = Kernels(onednn_linear=1.04, blocked_attention=1.8)
    assert not kernels.uses("onednn_linear")
    assert kernels.uses("blocked_attention")
    assert kernels.describe() == "CPU kernels: blocked bfloat16 attention (1.8 x as fast)"
    assert "none of shardtrain's is faster" in chosen_kernels.PYTORCH.describe()


def test_failing_kernel_is_logged_when_measured_and_at_each_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("no such kernel\nmore of it")

    monkeypatch.setattr("shardtrain.ops.cpu.blocked_attention.attend", missing)
    monkeypatch.setattr(logging.getLogger("shardtrain"), "propagate", True)
    with caplog.at_level("WARNING"):
        speeds = kernel_speed.remembered_or_measured()

    assert speeds.blocked_attention == chosen_kernels.FAILED
    assert not speeds.uses("blocked_attention")
    failed_kernels = (
        "bfloat16 attention",
        "float32 attention with narrow heads",
        "float32 attention with wide heads",
    )
    for record, name in zip(caplog.records, failed_kernels, strict=True):
        assert record.message == (
            f"CPU kernels: blocked {name} failed (RuntimeError: no such kernel);"
            " using PyTorch's kernel"
        )

    # The next start reads the stored measurement, and reports the same kernels.
    again = kernel_speed.remembered_or_measured()
    assert again == speeds
    assert again.describe().endswith(
        "; failed when measured, so PyTorch's own: "
        "blocked bfloat16 attention, blocked float32 attention with narrow heads, "
        "blocked float32 attention with wide heads"
    )
