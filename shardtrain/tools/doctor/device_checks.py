"""Devices: type, health, speed and correctness of matrix products."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardtrain.facts.devices import peak_flops
from shardtrain.tools.doctor import health
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.health import AREA
from shardtrain.tools.doctor.outliers import equal, fastest_first, slow
from shardtrain.tools.doctor.result import Facts, Finding, Reports, Verdict, kernel_text

if TYPE_CHECKING:
    import torch


CPU_SIZE = 512
CUDA_SIZE = 8192
REPEATS = 9
LOAD_SECONDS = 5.0
"""Maximum time to keep a device busy while querying its driver."""
GOOD_SHARE = 0.5
"""Minimum fraction of the data sheet's peak.

A large bf16 product reaches 0.6 to 0.85 without a power limit, and 0.5 on small cards with reduced clocks.
"""
BAD_SHARE = 0.2
"""Fraction of the data sheet's peak below which the check fails."""
TERA = 1e12


def collect(context: RankContext, facts: Facts) -> None:
    """Record the device, its speed, the correctness of its products, and its health from the driver."""
    from shardtrain.ops import accelerator

    device = context.torch_device()
    facts["type"] = context.device
    facts["name"] = cpu_name() if context.device == "cpu" else accelerator.name(device)
    dtype = _dtype(device, facts["name"])
    facts["dtype"] = str(dtype).removeprefix("torch.")
    context.line.mark("a matrix product")
    a, b = operands(device, dtype)
    facts["exact"] = is_exact(a, b)
    # Query the health under load. The load also warms up the device for the speed measurement.
    if context.device != "cpu":
        facts["uuid"] = health.uuid_of(device)
        facts["health"] = _under_load(facts["uuid"], a, b)
    facts["rate"] = rate(a, b)
    if context.device == "cpu":
        facts["threads"] = num_threads()
    facts["peak"] = peak_flops(facts["name"], facts["dtype"]) if context.device != "cpu" else None


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model name of the processor, or its architecture if the kernel does not name the model."""
    for line in kernel_text(path).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def _dtype(device: torch.device, name: str) -> torch.dtype:
    """Return the dtype to test: float32 on the CPU, bf16 on devices with bf16 units, otherwise float16."""
    import torch

    from shardtrain.ops import device_kernels

    if device.type == "cpu":
        return torch.float32
    has_units = peak_flops(name, "bfloat16") or device_kernels.has_bfloat16_units(device)
    return torch.bfloat16 if has_units else torch.float16


def operands(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two sparse matrices of -1, 0 and 1. Every dtype represents their product exactly.

    bf16 represents integers up to 256. With one nonzero in four, a sum of 8192 products has a standard
    deviation of 23.
    """
    import torch

    size = CPU_SIZE if device.type == "cpu" else CUDA_SIZE
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(2):
        numbers = torch.randint(0, 8, (size, size), generator=generator, dtype=torch.int8)
        signs = (numbers == 0).to(torch.int8) - (numbers == 1).to(torch.int8)
        found.append(signs.to(device).to(dtype))
    return found[0], found[1]


def is_exact(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the product is correct.

    Freivalds' test (1977) compares (a b) v with a (b v) for a vector v. All numbers are small integers, so
    both sides are exact in float64 for any order of summation.
    """
    import torch

    v = torch.arange(1, a.shape[0] + 1, device=a.device, dtype=torch.float64) % 251
    left = multiply(a, b).double() @ v
    return bool(torch.equal(left, a.double() @ (b.double() @ v)))


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product under test."""
    return a @ b


def rate(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the FLOP/s of the fastest of several products, because other work on the machine slows some of them."""
    from shardtrain.ops import accelerator

    seconds = []
    inner = 1 if a.device.type == "cpu" else 10
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        for _ in range(inner):
            multiply(a, b)
        accelerator.finish(a.device)
        seconds.append((time.perf_counter() - started) / inner)
    # Skip the first product, which also loads the library. A product of two n x n matrices has 2 n^3 operations.
    return float(2 * a.shape[0] ** 3 / min(seconds[1:]))


def num_threads() -> int:
    """Return the number of CPU threads that PyTorch uses for a product."""
    import torch

    return torch.get_num_threads()


def _under_load(uuid: str, a: torch.Tensor, b: torch.Tensor) -> Facts:
    """Return the health of the device under load. An idle healthy device also has low clocks and a narrow link."""
    from shardtrain.ops import accelerator

    with health.asking(uuid) as asked:
        end = time.monotonic() + LOAD_SECONDS
        while asked.poll() is None and time.monotonic() < end:
            for _ in range(10):
                multiply(a, b)
            accelerator.finish(a.device)
        try:
            return health.answer(asked, uuid)
        except (OSError, subprocess.SubprocessError) as error:
            return {"error": str(error).splitlines()[0]}


def judge(reports: Reports) -> Iterator[Finding]:
    """Check that each rank has its own device, and that devices are equal, fast, correct and healthy."""
    by_rank = reports.of(AREA)
    if not by_rank:
        return
    fix = "use devices of one type, because all ranks wait for the slowest"
    yield equal(reports, AREA, "kind", {rank: str(facts["name"]) for rank, facts in by_rank.items()}, "warn", fix)

    # Find ranks of a host that share one device.
    used: dict[tuple[str, str], list[int]] = {}
    for rank, facts in by_rank.items():
        if facts.get("uuid"):
            used.setdefault((reports.host(rank), facts["uuid"]), []).append(rank)
    for (_, uuid), ranks in used.items():
        if len(ranks) > 1:
            fix = "start one rank per device, and check CUDA_VISIBLE_DEVICES"
            text = f"{uuid} is used by {reports.who(ranks)}"
            yield Finding(
                AREA, "one rank per device", "fail", text, "a separate device for each rank", fix, tuple(ranks)
            )

    wrong = [rank for rank, facts in by_rank.items() if not facts["exact"]]
    text = f"wrong on {reports.who(wrong)}" if wrong else "exact"
    replace = "remove this device from the job and have it replaced: its results are wrong" if wrong else ""
    verdict: Verdict = "fail" if wrong else "pass"
    yield Finding(AREA, "matrix product", verdict, text, "exact integers", replace, tuple(wrong))
    yield from _rates(reports, by_rank)
    yield from health.judge(reports, {rank: facts["health"] for rank, facts in by_rank.items() if "health" in facts})


def _rates(reports: Reports, by_rank: dict[int, Facts]) -> Iterator[Finding]:
    """Compare the speed of equal devices with each other and with their data sheet."""
    kinds: dict[tuple[str, str], dict[int, float]] = {}
    for rank, facts in by_rank.items():
        kinds.setdefault((facts["name"], facts["dtype"]), {})[rank] = facts["rate"] / TERA
    for (_, dtype), rates in kinds.items():
        peak = by_rank[next(iter(rates))]["peak"]
        expected = f"{GOOD_SHARE:.0%} of {peak / TERA:.0f} TFLOP/s or more" if peak else "no expectation"
        text = fastest_first(reports, rates, "TFLOP/s")
        subject = f"matmul {dtype}"
        low = [rank for rank in rates if peak and rates[rank] * TERA < GOOD_SHARE * peak]
        behind = slow(rates)
        if low:
            verdict: Verdict = "fail" if any(rates[rank] * TERA < BAD_SHARE * peak for rank in low) else "warn"
            fix = "check clocks, power and temperature below, and other processes on the device"
            yield Finding(AREA, subject, verdict, text, expected, fix, tuple(low) if len(low) < reports.size else ())
        elif behind:
            fix = "look for other processes, heat or a power cap on it; exclude the host if you find none"
            yield Finding(AREA, subject, "warn", text, "as on other ranks", fix, tuple(behind))
        else:
            yield Finding(AREA, subject, "pass", text, expected)
