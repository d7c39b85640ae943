"""Measurement of the kernels in ``chosen_kernels.py`` on this machine. Results are cached.

The fastest kernel depends on the processor: on one core of AMD's Zen 4, MKL and oneDNN multiply float32
at 95 and 105 GFLOP/s, and on Zen 5 at 90 and 200. The cache makes a machine use the same kernels again,
so a resumed run is bitwise equal to an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from shardtrain.ops import flash_attention
from shardtrain.ops.chosen_kernels import FAILED, NARROW_HEAD, WIDE_HEAD, Kernels
from shardtrain.ops.cpu import blocked_attention, onednn_linear, packed_linear, rms_norm
from shardtrain.ops.machine_key import machine_key
from shardtrain.utils import atomic_io, user_cache
from shardtrain.utils.log import logger

_CLEAR = 1.25
"""Measurement of a kernel ends after two rounds if it is faster or slower than PyTorch's by this factor."""
_ENOUGH_SECONDS = 0.06
"""Duration of other measurements. It is long enough for a useful result while other processes are active."""
_MOST_ROUNDS = 100
_PRESSURE = "/proc/pressure/memory"
_MOST_PERCENT = 1.0
"""Limit in percent for the time that any process waited for memory during the last ten seconds."""
_SHORT_OF_MEMORY = "short_of_memory"
_KERNELS_OF = "November 2026"
"""Part of the cache key. Change it when the speed of a kernel changes, to make all machines measure again."""
_KEPT_SECONDS = 3600
"""Lifetime of measurements that were taken under memory pressure."""


def remembered_or_measured() -> Kernels:
    """Return cached measurements of this machine, PyTorch version and number of threads. Measure if there are none.

    The measurements are cached in a small file in the user's cache folder, if it can be written. They do
    not expire, even if the machine was busy. Measurements taken under memory pressure are unreliable and
    expire after an hour.
    """
    threads = torch.get_num_threads()
    kernels = remembered(threads)
    if kernels is not None:
        return kernels
    kernels = measure()
    content: dict[str, float | bool] = asdict(kernels)
    if _is_short_of_memory():
        content[_SHORT_OF_MEMORY] = True
    # Without a writable cache folder, each start measures again.
    with contextlib.suppress(OSError):
        atomic_io.write(_cache_file(threads), json.dumps(content), create_folder=True)
    return kernels


def remembered(threads: int) -> Kernels | None:
    """Return the cached measurements of this machine for a number of threads, or None."""
    # A truncated file, or one of another version, is not an error: measure again.
    try:
        with _cache_file(threads).open("rb") as file:
            content = json.loads(file.read(4096))
            age_seconds = time.time() - os.fstat(file.fileno()).st_mtime
        if content.pop(_SHORT_OF_MEMORY, False) and age_seconds > _KEPT_SECONDS:
            return None
        return Kernels(**{name: float(value) for name, value in content.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def measure() -> Kernels:
    """Time each kernel and PyTorch's kernel, forward and backward, on a small layer. Takes about 500 ms on one core.

    Configure the allocator as for training before the call (``utils/allocator.py``). Otherwise the time
    to clear the pages of new memory is included, which differs between kernels.
    """
    generator = torch.Generator().manual_seed(0)

    # Linear layers in float32, and the gradients of their weights.
    linear = weight_gradient = 0.0
    if onednn_linear.is_available():
        x_RI = torch.randn(2048, 256, generator=generator)
        weight_OI = torch.randn(256, 256, generator=generator)
        gradient_RO = torch.randn(2048, 256, generator=generator)

        def by_pytorch() -> None:
            F.linear(x_RI, weight_OI)
            torch.mm(gradient_RO, weight_OI)

        def by_onednn() -> None:
            onednn_linear.product(x_RI, weight_OI)
            onednn_linear.product(gradient_RO, weight_OI.t())

        linear = _measured("linear layers by oneDNN", by_pytorch, by_onednn)
        weight_gradient = _measured(
            "gradients of weights by oneDNN",
            lambda: gradient_RO.t() @ x_RI,
            lambda: onednn_linear.product(gradient_RO.t(), x_RI.t()),
        )

    # Attention by blocks, in both dtypes. With few rows of narrow heads, calls take longer than products, so
    # the result would not hold for training.
    in_bfloat16 = _attention_speed(
        "blocked bfloat16 attention", torch.bfloat16, NARROW_HEAD, 2, generator
    )

    narrow = _attention_speed(
        "blocked float32 attention with narrow heads", torch.float32, NARROW_HEAD, 2, generator
    )
    wide = _attention_speed(
        "blocked float32 attention with wide heads", torch.float32, WIDE_HEAD, 1, generator
    )

    # RMSNorm, with more rows than fit into caches. In a cache, PyTorch's passes over entire tensors would
    # be cheap.
    x_RD = torch.randn(4096, 256, generator=generator).requires_grad_()
    norm = _measured(
        "RMSNorm by rows",
        partial(_forward_backward, torch.nn.RMSNorm(256, eps=1e-5), x_RD),
        partial(_forward_backward, rms_norm.RowwiseRMSNorm(256, eps=1e-5), x_RD),
    )

    # Packed weights, for generation.
    packed_bfloat16 = _packed_speed(torch.bfloat16, generator)
    packed_float32 = _packed_speed(torch.float32, generator)
    speeds = (
        linear,
        weight_gradient,
        in_bfloat16,
        narrow,
        wide,
        norm,
        packed_bfloat16,
        packed_float32,
    )
    return Kernels(*(round(speed, 2) for speed in speeds))


def _attention_speed(
    name: str, dtype: torch.dtype, width: int, times: int, generator: torch.Generator
) -> float:
    """Return the speedup of attention by blocks over the flash kernel.

    ``times`` multiplies rows and heads.
    """

    def random(heads: int) -> Tensor:
        """Return a random tensor (B, T, heads, H)."""
        numbers = torch.randn(times, 512, times * heads, width, generator=generator)
        return numbers.to(dtype)

    # two query heads per key-value head
    tensors = (random(4), random(2), random(2), random(4))
    return _measured(name, partial(_flash, *tensors), partial(_in_blocks, *tensors))


def _packed_speed(dtype: torch.dtype, generator: torch.Generator) -> float:
    """Return the speedup of a packed weight over PyTorch's linear layer."""
    if not packed_linear.is_available(dtype):
        return 0.0
    x_RI = torch.randn(4, 1024, generator=generator).to(dtype)
    weight_OI = torch.randn(1024, 1024, generator=generator).to(dtype)

    # Pack in the first round, so _measured catches errors of packing too.
    packed: list[Tensor] = []

    def ours() -> Tensor:
        if not packed:
            packed.append(packed_linear.pack(weight_OI))
        return packed_linear.product(x_RI, packed[0])

    name = f"packed weights in {str(dtype).removeprefix('torch.')}"
    return _measured(name, lambda: F.linear(x_RI, weight_OI), ours)


def _forward_backward(module: torch.nn.Module, x_RD: Tensor) -> None:
    with torch.enable_grad():
        module(x_RD).backward(x_RD.detach())


def _flash(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> None:
    out, lse = flash_attention.attend(q, k, v, causal=True)
    flash_attention.attend_backward(gradient, q, k, v, out, lse, causal=True)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> None:
    _, lse = blocked_attention.attend(q, k, v)
    blocked_attention.attend_backward(gradient, q, k, v, lse)


def _measured(name: str, pytorch: Callable[[], object], ours: Callable[[], object]) -> float:
    """Return the speedup. Log a warning and return FAILED if PyTorch or the processor lacks an operation."""
    try:
        return _times_as_fast(pytorch, ours)
    except (RuntimeError, AttributeError, TypeError) as error:
        reason = str(error).strip().splitlines() or [""]
        logger.warning(
            f"CPU kernels: {name} failed ({type(error).__name__}: {reason[0][:200]}); using PyTorch's kernel"
        )
        return FAILED


def _times_as_fast(pytorch: Callable[[], object], ours: Callable[[], object]) -> float:
    """Return the speedup of ``ours``, from the shortest times of alternating rounds.

    A busy machine slows both.
    """
    # With one thread, measure CPU time, because other processes may use the core during a round. With
    # several threads, measure wall time, because CPU time does not include their waiting for each other.
    # Under `ulimit -t`, the kernel updates the CPU time of a process only every few milliseconds.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    shortest_seconds = [float("inf"), float("inf")]
    total_seconds = 0.0
    with torch.no_grad():
        for round_number in range(_MOST_ROUNDS):
            for index, function in enumerate((pytorch, ours)):
                start = clock()
                function()
                seconds = clock() - start
                # The first round is a warm-up.
                if round_number > 0:
                    shortest_seconds[index] = min(shortest_seconds[index], seconds)
                    total_seconds += seconds
            ratio = shortest_seconds[0] / shortest_seconds[1]
            is_clear = round_number >= 2 and not 1 / _CLEAR < ratio < _CLEAR
            if is_clear or (round_number >= 3 and total_seconds > _ENOUGH_SECONDS):
                break
    return shortest_seconds[0] / shortest_seconds[1]


def _is_short_of_memory() -> bool:
    """True if processes of this machine waited for memory during the last ten seconds."""
    try:
        with open(_PRESSURE) as file:
            percent = re.search(r"some avg10=([0-9.]+)", file.read(256))
    except OSError:
        # This OS kernel does not report memory pressure (PSI).
        return False
    return percent is not None and float(percent[1]) > _MOST_PERCENT


def _cache_file(threads: int) -> Path:
    kernels = " ".join(field.name for field in fields(Kernels))
    return (
        user_cache.folder() / f"cpu_kernels-{machine_key(str(threads), kernels, _KERNELS_OF)}.json"
    )
