"""Devices: type, health, speed and correctness of matrix products."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardtrain.facts.devices import peak_flops
from shardtrain.tools.doctor import health
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.health import AREA
from shardtrain.tools.doctor.outliers import equal, format_rates, slow
from shardtrain.tools.doctor.result import Facts, Finding, Reports, Verdict
from shardtrain.utils.processor import processor_name

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
    on_cpu = context.device == "cpu"
    facts["type"] = context.device
    facts["name"] = processor_name() if on_cpu else accelerator.name(device)
    dtype = _dtype(device, facts["name"])
    facts["dtype"] = str(dtype).removeprefix("torch.")
    context.line.mark("a matrix product")
    a, b = operands(device, dtype)
    facts["exact"] = is_exact(a, b)

    # Query the health under load. The load also warms up the device for the speed measurement.
    if not on_cpu:
        facts["uuid"] = health.uuid_of(device)
        facts["health"] = _under_load(facts["uuid"], a, b)
    facts["rate"] = rate(a, b)

    # Data sheets of processors do not state a peak for one process.
    facts["peak"] = None
    if on_cpu:
        facts["threads"] = num_threads()
    else:
        facts["peak"] = peak_flops(facts["name"], facts["dtype"])


def _dtype(device: torch.device, name: str) -> torch.dtype:
    """Return the dtype to test: float32 on the CPU, bf16 on devices with bf16 units, otherwise float16."""
    import torch

    from shardtrain.ops import device_kernels

    if device.type == "cpu":
        return torch.float32
    if peak_flops(name, "bfloat16") or device_kernels.has_bfloat16_units(device):
        return torch.bfloat16
    return torch.float16


def operands(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two sparse matrices of -1, 0 and 1. Every dtype represents their product exactly.

    bf16 represents integers up to 256. With one nonzero in four, a sum of 8192 products has a standard
    deviation of 23.
    """
    import torch

    size = CPU_SIZE if device.type == "cpu" else CUDA_SIZE
    generator = torch.Generator().manual_seed(7)
    matrices = []
    for _ in range(2):
        # Of eight equally likely numbers, 0 becomes 1, 1 becomes -1, and the others become 0.
        numbers = torch.randint(0, 8, (size, size), generator=generator, dtype=torch.int8)
        signs = (numbers == 0).to(torch.int8) - (numbers == 1).to(torch.int8)
        matrices.append(signs.to(device).to(dtype))
    return matrices[0], matrices[1]


def is_exact(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the product is correct.

    Freivalds' test (1977) compares (a b) v with a (b v) for a vector v. All numbers are small integers, so
    both sides are exact in float64 for any order of summation.
    """
    import torch

    v = torch.arange(1, a.shape[0] + 1, device=a.device, dtype=torch.float64) % 251
    left = multiply(a, b).double() @ v
    right = a.double() @ (b.double() @ v)
    return bool(torch.equal(left, right))


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product under test."""
    return a @ b


def rate(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the FLOP/s of the fastest of several products, because other work slows some of them."""
    from shardtrain.ops import accelerator

    # Products on an accelerator are short, so time ten at a time.
    inner = 1 if a.device.type == "cpu" else 10
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        for _ in range(inner):
            multiply(a, b)
        accelerator.finish(a.device)
        seconds.append((time.perf_counter() - started) / inner)

    # Skip the first product, which also loads the library. A product of two n x n matrices has 2 n^3
    # operations.
    num_operations = 2 * a.shape[0] ** 3
    return float(num_operations / min(seconds[1:]))


def num_threads() -> int:
    """Return the number of CPU threads that PyTorch uses for a product."""
    import torch

    return torch.get_num_threads()


def _under_load(uuid: str, a: torch.Tensor, b: torch.Tensor) -> Facts:
    """Return the health of the device under load.

    An idle healthy device also has low clocks and a narrow link.
    """
    from shardtrain.ops import accelerator

    with health.query(uuid) as query:
        end = time.monotonic() + LOAD_SECONDS
        while query.poll() is None and time.monotonic() < end:
            # Queue several matmuls before each poll of the query, so the device is never idle.
            for _ in range(10):
                multiply(a, b)
            accelerator.finish(a.device)
        try:
            return health.answer(query, uuid)
        except (OSError, subprocess.SubprocessError) as error:
            return {"error": str(error).splitlines()[0]}


def judge(reports: Reports) -> Iterator[Finding]:
    """Check that each rank has its own device, and that devices are equal, fast, correct and healthy."""
    by_rank = reports.of(AREA)
    if not by_rank:
        return
    names = {}
    health_by_rank = {}
    for rank, facts in by_rank.items():
        names[rank] = str(facts["name"])
        # Processors have no driver that reports their health.
        if "health" in facts:
            health_by_rank[rank] = facts["health"]
    fix = "use devices of one type, because all ranks wait for the slowest"
    yield equal(reports, AREA, "kind", names, "warn", fix)
    yield from _shared_devices(reports, by_rank)
    yield _exactness(reports, by_rank)
    yield from _rates(reports, by_rank)
    yield from health.judge(reports, health_by_rank)


def _shared_devices(reports: Reports, by_rank: dict[int, Facts]) -> Iterator[Finding]:
    """Report ranks of one host that use the same device."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, facts in by_rank.items():
        # Processors have no UUID, and ranks of a host always share them.
        if facts.get("uuid"):
            device = (reports.host(rank), facts["uuid"])
            users.setdefault(device, []).append(rank)

    subject = "one rank per device"
    expected = "a separate device for each rank"
    fix = "start one rank per device, and check CUDA_VISIBLE_DEVICES"
    for (_, uuid), ranks in users.items():
        if len(ranks) > 1:
            text = f"{uuid} is used by {reports.who(ranks)}"
            yield Finding(AREA, subject, "fail", text, expected, fix, tuple(ranks))


def _exactness(reports: Reports, by_rank: dict[int, Facts]) -> Finding:
    """Report ranks whose device computes wrong products."""
    expected = "exact integers"
    wrong = [rank for rank, facts in by_rank.items() if not facts["exact"]]
    if not wrong:
        return Finding(AREA, "matrix product", "pass", "exact", expected)
    text = f"wrong on {reports.who(wrong)}"
    fix = "remove this device from the job and have it replaced: its results are wrong"
    return Finding(AREA, "matrix product", "fail", text, expected, fix, tuple(wrong))


def _rates(reports: Reports, by_rank: dict[int, Facts]) -> Iterator[Finding]:
    """Compare the speed of equal devices with each other and with their data sheet."""
    rates_by_kind: dict[tuple[str, str], dict[int, float]] = {}
    for rank, facts in by_rank.items():
        kind = (facts["name"], facts["dtype"])
        rates = rates_by_kind.setdefault(kind, {})
        rates[rank] = facts["rate"] / TERA
    for (_, dtype), rates in rates_by_kind.items():
        # Equal devices have the same peak. It is None for processors and unknown devices.
        first_rank = next(iter(rates))
        yield _rate_of_kind(reports, dtype, rates, by_rank[first_rank]["peak"])


def _rate_of_kind(
    reports: Reports, dtype: str, rates: dict[int, float], peak: float | None
) -> Finding:
    """Judge the TFLOP/s of equal devices by rank. ``peak`` is that of their data sheet in FLOP/s."""
    subject = f"matmul {dtype}"
    text = format_rates(reports, rates, "TFLOP/s")
    expected = "no expectation"
    low = []
    if peak:
        peak_rate = peak / TERA
        expected = f"{GOOD_SHARE:.0%} of {peak_rate:.0f} TFLOP/s or more"
        low = [rank for rank, measured in rates.items() if measured < GOOD_SHARE * peak_rate]
    if peak and low:
        verdict: Verdict = "warn"
        if min(rates.values()) < BAD_SHARE * peak_rate:
            verdict = "fail"
        fix = "check clocks, power and temperature below, and other processes on the device"
        # Name the ranks unless all are slow.
        named = tuple(low) if len(low) < reports.size else ()
        return Finding(AREA, subject, verdict, text, expected, fix, named)

    # Devices above the limit may still be much slower than the others, and unknown devices have no limit.
    behind = slow(rates)
    if behind:
        fix = (
            "look for other processes, heat or a power cap on it; exclude the host if you find none"
        )
        return Finding(AREA, subject, "warn", text, "as on other ranks", fix, tuple(behind))
    return Finding(AREA, subject, "pass", text, expected)
