"""How fast the kernels of ``chosen_kernels.py`` are on this machine: measured once, and remembered.

MKL and oneDNN multiply float32 at 95 and 105 GFLOP/s on one core of AMD's Zen 4, and at 90 and 200 on one of Zen 5. A
machine that has measured keeps its choice, so that a run that is continued has the bits of one that never stopped.
"""

from __future__ import annotations

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
"""A kernel that is this many times faster or slower after two rounds is not measured further."""
_ENOUGH_SECONDS = 0.06
"""Time for which other kernels are measured, so that the result is also useful if other processes are active."""
_MOST_ROUNDS = 100
_PRESSURE = "/proc/pressure/memory"
_MOST_PERCENT = 1.0
"""Limit for the share of the last ten seconds in which some process of the machine waited for memory."""
_SHORT_OF_MEMORY = "short_of_memory"
_KERNELS_OF = "November 2026"
"""When a kernel last became faster or slower. Change it, so that machines measure again."""
_KEPT_SECONDS = 3600
"""Lifetime of measurements that were taken under memory pressure."""


def remembered_or_measured() -> Kernels:
    """Return cached measurements of this machine, PyTorch version and number of threads. Measure if there are none.

    The measurements are cached in a small file in the user's cache folder, if it can be written. They do not expire,
    even if the machine was busy. Measurements taken under memory pressure are unreliable and expire after an hour.
    """
    threads = torch.get_num_threads()
    kernels = remembered(threads)
    if kernels is not None:
        return kernels
    kernels = measure()
    path = _cache_file(threads)
    try:
        content = asdict(kernels) | ({_SHORT_OF_MEMORY: True} if _is_short_of_memory() else {})
        atomic_io.write(path, json.dumps(content), create_folder=True)
    except OSError:  # a home that cannot be written costs each start the measurement
        pass
    return kernels


def remembered(threads: int) -> Kernels | None:
    """Return the cached measurements of this machine for a number of threads, or None."""
    # A file of another version, or one that was cut short, is not an error: the machine is measured again
    try:
        with _cache_file(threads).open("rb") as file:
            found = json.loads(file.read(4096))
            age_seconds = time.time() - os.fstat(file.fileno()).st_mtime
        if found.pop(_SHORT_OF_MEMORY, False) and age_seconds > _KEPT_SECONDS:
            return None
        return Kernels(**{name: float(value) for name, value in found.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def measure() -> Kernels:
    """Time each kernel beside PyTorch's own, forward and backward, on a small layer: some 500 ms on one core.

    Memory has to be kept already as it will be in training (``utils/allocator.py``): clearing the pages of new blocks,
    of which one of the two may need more, would be measured too.
    """
    generator = torch.Generator().manual_seed(0)

    # Linear layers in float32, and the gradients of their weights
    linear = weight_gradient = 0.0
    if onednn_linear.is_available():
        x_RI, weight_OI, gradient_RO = (
            torch.randn(*shape, generator=generator) for shape in ((2048, 256), (256, 256), (2048, 256))
        )
        linear = _measured(
            "linear layers by oneDNN",
            lambda: (F.linear(x_RI, weight_OI), gradient_RO @ weight_OI),
            lambda: (onednn_linear.product(x_RI, weight_OI), onednn_linear.product(gradient_RO, weight_OI.t())),
        )
        weight_gradient = _measured(
            "gradients of weights by oneDNN",
            lambda: gradient_RO.t() @ x_RI,
            lambda: onednn_linear.product(gradient_RO.t(), x_RI.t()),
        )

    # Attention by blocks, in both types
    in_bfloat16 = _attention_speed("attention in bfloat16 by blocks", torch.bfloat16, NARROW_HEAD, 1, generator)
    # Few rows say little of float32
    narrow = _attention_speed(
        "attention in float32 with narrow heads by blocks", torch.float32, NARROW_HEAD, 2, generator
    )
    wide = _attention_speed("attention in float32 with wide heads by blocks", torch.float32, WIDE_HEAD, 1, generator)

    # RMSNorm
    # as many rows as fill caches: PyTorch's own reads and writes whole tensors, which costs little where they are near
    x_RD = torch.randn(4096, 256, generator=generator).requires_grad_()
    norm = _measured(
        "RMSNorm by rows",
        partial(_forward_backward, torch.nn.RMSNorm(256, eps=1e-5), x_RD),
        partial(_forward_backward, rms_norm.RowwiseRMSNorm(256, eps=1e-5), x_RD),
    )

    # Packed weights, which generation uses
    packed = {
        torch.bfloat16: _packed_speed(torch.bfloat16, generator),
        torch.float32: _packed_speed(torch.float32, generator),
    }
    return Kernels(
        round(linear, 2),
        round(weight_gradient, 2),
        round(in_bfloat16, 2),
        round(narrow, 2),
        round(wide, 2),
        round(norm, 2),
        round(packed[torch.bfloat16], 2),
        round(packed[torch.float32], 2),
    )


def _attention_speed(words: str, dtype: torch.dtype, width: int, times: int, generator: torch.Generator) -> float:
    q, k, v, gradient = (
        torch.randn(times, 512, times * heads, width, generator=generator).to(dtype) for heads in (4, 2, 2, 4)
    )  # (B, T, heads, H), grouped
    return _measured(words, partial(_flash, q, k, v, gradient), partial(_in_blocks, q, k, v, gradient))


def _packed_speed(dtype: torch.dtype, generator: torch.Generator) -> float:
    if not packed_linear.is_available(dtype):
        return 0.0
    x_RI = torch.randn(4, 1024, generator=generator).to(dtype)
    weight_OI = torch.randn(1024, 1024, generator=generator).to(dtype)
    packed: list[Tensor] = []  # the first round packs, so that what it raises is caught

    def ours() -> Tensor:
        if not packed:
            packed.append(packed_linear.pack(weight_OI))
        return packed_linear.product(x_RI, packed[0])

    words = f"packed weights in {str(dtype).removeprefix('torch.')}"
    return _measured(words, lambda: F.linear(x_RI, weight_OI), ours)


def _forward_backward(module: torch.nn.Module, x_RD: Tensor) -> None:
    with torch.enable_grad():
        module(x_RD).backward(x_RD.detach())


def _flash(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> None:
    out, lse = flash_attention.attend(q, k, v, causal=True)
    flash_attention.attend_backward(gradient, q, k, v, out, lse, causal=True)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> None:
    _, lse = blocked_attention.attend(q, k, v)
    blocked_attention.attend_backward(gradient, q, k, v, lse)


def _measured(words: str, pytorch: Callable[[], object], ours: Callable[[], object]) -> float:
    """``_times_as_fast``, or FAILED with a warning: a build of PyTorch or a processor may lack what a kernel calls."""
    try:
        return _times_as_fast(pytorch, ours)
    except (RuntimeError, AttributeError, TypeError) as error:
        reason = str(error).strip().splitlines() or [""]
        logger.warning(
            f"CPU kernels: {words} failed ({type(error).__name__}: {reason[0][:200]}); PyTorch's own is used"
        )
        return FAILED


def _times_as_fast(pytorch: Callable[[], object], ours: Callable[[], object]) -> float:
    """How many times as fast ``ours`` is, by the best of a few rounds in turns: a busy machine slows both."""
    # On one thread CPU time, since other processes may take the core away within a round. Several threads wait for each
    # other, which CPU time does not show
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = [float("inf"), float("inf")]
    spent = 0.0
    with torch.no_grad():
        for number in range(_MOST_ROUNDS):
            for place, function in enumerate((pytorch, ours)):
                began = clock()
                function()
                passed = clock() - began
                if number:  # the first warms up
                    seconds[place] = min(seconds[place], passed)
                    spent += passed
            is_clear = number >= 2 and not 1 / _CLEAR < seconds[0] / seconds[1] < _CLEAR
            if is_clear or (number >= 3 and spent > _ENOUGH_SECONDS):
                break
    return seconds[0] / seconds[1]


def _is_short_of_memory() -> bool:
    """Whether processes of this machine have waited for memory for a part of the last ten seconds."""
    try:
        with open(_PRESSURE) as file:
            share = re.search(r"some avg10=([0-9.]+)", file.read(256))
    except OSError:  # a kernel that does not count it
        return False
    return share is not None and float(share[1]) > _MOST_PERCENT


def _cache_file(threads: int) -> Path:
    kernels = " ".join(field.name for field in fields(Kernels))
    return user_cache.folder() / f"cpu_kernels-{machine_key(str(threads), kernels, _KERNELS_OF)}.json"
