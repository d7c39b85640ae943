"""Devices: which each rank has, how fast it multiplies matrices, and whether the products are right."""

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
from shardtrain.tools.doctor.outliers import equal, fastest_first, slow
from shardtrain.tools.doctor.result import Facts, Finding, Reports, Verdict, kernel_text

if TYPE_CHECKING:
    import torch

AREA = "devices"

CPU_SIZE = 512
CUDA_SIZE = 8192
REPEATS = 9
LOAD_SECONDS = 5.0
"""How long a device is kept busy at most while the driver is asked about it."""
GOOD_SHARE = 0.5
"""Of the peak in the data sheet. A large product in bf16 reaches 0.6 to 0.85 of it where power allows; small cards that
hold their clocks down reach half."""
BAD_SHARE = 0.2
"""Of the same: below it is a failure."""
TERA = 1e12


def collect(context: RankContext, facts: Facts) -> None:
    """Note the device, its rate, whether its products are exact, and what the driver says of its health."""
    from shardtrain.ops import accelerator

    device = context.torch_device()
    facts["type"] = context.device
    facts["name"] = cpu_name() if context.device == "cpu" else accelerator.name(device)
    dtype = _dtype(device, facts["name"])
    facts["dtype"] = str(dtype).removeprefix("torch.")
    context.line.mark("a matrix product")
    a, b = operands(device, dtype)
    facts["exact"] = is_exact(a, b)
    # its health is asked while it multiplies, and its rate measured after that, when it is warm
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
    """The type that training would use: bf16 where the device has units for it."""
    import torch

    from shardtrain.ops import device_kernels

    if device.type == "cpu":
        return torch.float32
    has_units = peak_flops(name, "bfloat16") or device_kernels.has_bfloat16_units(device)
    return torch.bfloat16 if has_units else torch.float16


def operands(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices of -1, 0 and 1, mostly 0: sums of products are whole numbers that every type holds exactly.

    bf16 holds whole numbers to 256. With one in four not 0, a sum of 8192 products has a standard deviation of 23.
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
    """Whether the device's product is right, tested against a vector as Freivalds did (1977): (a b) v = a (b v).

    All numbers are whole and small, so both sides are exact in float64 whatever the order of the sums.
    """
    import torch

    v = torch.arange(1, a.shape[0] + 1, device=a.device, dtype=torch.float64) % 251
    left = multiply(a, b).double() @ v
    return bool(torch.equal(left, a.double() @ (b.double() @ v)))


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product under test."""
    return a @ b


def rate(a: torch.Tensor, b: torch.Tensor) -> float:
    """FLOP per second of the product; the best of some: other work slows some of them, a slow device all."""
    from shardtrain.ops import accelerator

    seconds = []
    inner = 1 if a.device.type == "cpu" else 10
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        for _ in range(inner):
            multiply(a, b)
        accelerator.finish(a.device)
        seconds.append((time.perf_counter() - started) / inner)
    # the first also loads the library; a product of n x n matrices is 2 n^3 operations
    return float(2 * a.shape[0] ** 3 / min(seconds[1:]))


def num_threads() -> int:
    """Threads that a product on a CPU has here."""
    import torch

    return torch.get_num_threads()


def _under_load(uuid: str, a: torch.Tensor, b: torch.Tensor) -> Facts:
    """What the driver says while the device works: an idle one has low clocks and a narrow link, and is not ill."""
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
    """One device for each rank, of one kind, as fast as the others and as its data sheet, right, and in good health."""
    by_rank = reports.of(AREA)
    if not by_rank:
        return
    fix = "use hosts of one kind: the slowest device sets the pace of all"
    yield equal(reports, AREA, "kind", {rank: str(facts["name"]) for rank, facts in by_rank.items()}, "warn", fix)

    # Two ranks of a host on one device.
    used: dict[tuple[str, str], list[int]] = {}
    for rank, facts in by_rank.items():
        if facts.get("uuid"):
            used.setdefault((reports.host(rank), facts["uuid"]), []).append(rank)
    for (_, uuid), ranks in used.items():
        if len(ranks) > 1:
            fix = "start one rank for each device, and look at CUDA_VISIBLE_DEVICES"
            text = f"{uuid} is that of {reports.who(ranks)}"
            yield Finding(AREA, "one rank a device", "fail", text, "a device of its own", fix, tuple(ranks))

    wrong = [rank for rank, facts in by_rank.items() if not facts["exact"]]
    text = f"wrong on {reports.who(wrong)}" if wrong else "exact"
    replace = "take this device out of the job and have it replaced: its results cannot be trusted" if wrong else ""
    verdict: Verdict = "fail" if wrong else "pass"
    yield Finding(AREA, "product of matrices", verdict, text, "exact whole numbers", replace, tuple(wrong))
    yield from _rates(reports, by_rank)
    yield from health.judge(reports, {rank: facts["health"] for rank, facts in by_rank.items() if "health" in facts})


def _rates(reports: Reports, by_rank: dict[int, Facts]) -> Iterator[Finding]:
    """Ranks with one kind of device are compared with each other, and each with its data sheet."""
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
            fix = "look at clocks, power and heat below, and at other processes on the device"
            yield Finding(AREA, subject, verdict, text, expected, fix, tuple(low) if len(low) < reports.size else ())
        elif behind:
            fix = "look for other processes, heat or a power cap there; leave the host out if none is found"
            yield Finding(AREA, subject, "warn", text, "as on other ranks", fix, tuple(behind))
        else:
            yield Finding(AREA, subject, "pass", text, expected)
