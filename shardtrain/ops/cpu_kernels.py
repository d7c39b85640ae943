"""Which kernels compute a model on this CPU: measured once per machine, remembered, and printed.

What is fastest depends on the processor: MKL and oneDNN multiply float32 at 95 and 105 GFLOP/s on one core of AMD's
Zen 4, and at 90 and 200 on one of Zen 5. All ranks of a run take the first rank's choice, and a machine that has
measured keeps its choice, so that a run that is continued has the bits of one that never stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from shardtrain.ops import blocked_attention, onednn_linear

WORTH_IT = 1.1
"""A kernel that is less than this much faster than PyTorch's own is not taken."""
_ROUNDS = 4


@dataclass(frozen=True)
class Kernels:
    """For each kernel that can take the place of PyTorch's own, how many times as fast it is; 0 is not measured."""

    onednn_linear: float = 0.0
    """Linear layers in float32 by oneDNN."""
    blocked_attention: float = 0.0
    """Attention in bfloat16 by matrix products."""

    def uses(self, name: str) -> bool:
        """Whether a kernel, by the name of its field, is taken."""
        return bool(getattr(self, name) >= WORTH_IT)


PYTORCH = Kernels()
"""PyTorch's own kernels alone."""
_chosen = PYTORCH


def chosen() -> Kernels:
    """Those that the models of this process compute with."""
    return _chosen


def use(kernels: Kernels) -> None:
    """Let the models of this process compute with these; what is built already keeps its linear layers."""
    global _chosen
    _chosen = kernels


def describe(kernels: Kernels) -> str:
    """The choice in words, for the log."""
    told = {
        "onednn_linear": "linear layers in float32 by oneDNN",
        "blocked_attention": "attention in bfloat16 by blocks",
    }
    taken = [f"{words} ({getattr(kernels, name):.1f} x as fast)" for name, words in told.items() if kernels.uses(name)]
    return f"CPU kernels: {', '.join(taken)}" if taken else "CPU kernels: PyTorch's own, none here is faster"


def remembered_or_measured() -> Kernels:
    """What this machine has measured before, by this version of PyTorch and with as many threads; else measure now.

    What was measured is kept in a small file of the user's cache folder, where one can be written.
    """
    path = _cache_file()
    try:
        return Kernels(**{name: float(value) for name, value in json.loads(path.read_bytes()[:4096]).items()})
    except (OSError, ValueError, TypeError, AttributeError):
        found = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(found), file)
        os.replace(file.name, path)
    except OSError:  # a home that cannot be written costs each start the measurement
        pass
    return found


def measure() -> Kernels:
    """Time each kernel beside PyTorch's own, forward and backward, on a small layer: some 100 ms on one core."""
    generator = torch.Generator().manual_seed(0)
    linear = attention = 0.0
    if onednn_linear.is_available():
        x_RI, weight_OI, gradient_RO = (
            torch.randn(*shape, generator=generator) for shape in ((256, 512), (1024, 512), (256, 1024))
        )
        linear = _times_as_fast(
            lambda: (F.linear(x_RI, weight_OI), gradient_RO @ weight_OI, gradient_RO.t() @ x_RI),
            lambda: (
                onednn_linear.product(x_RI, weight_OI),
                onednn_linear.product(gradient_RO, weight_OI.t()),
                onednn_linear.product(gradient_RO.t(), x_RI.t()),
            ),
        )
    q, k, v, gradient = (
        torch.randn(1, 512, 4, 64, generator=generator).bfloat16() for _ in range(4)
    )  # (B, T, heads, H)
    attention = _times_as_fast(
        lambda: _flash(q, k, v, gradient),
        lambda: (blocked_attention.attend(q, k, v), blocked_attention.attend_backward(gradient, q, k, v)),
    )
    return Kernels(round(linear, 2), round(attention, 2))


def _flash(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> None:
    from shardtrain.ops import flash_attention

    out, lse = flash_attention.attend(q, k, v, causal=True)
    flash_attention.attend_backward(gradient, q, k, v, out, lse, causal=True)


def _times_as_fast(one: Callable[[], object], other: Callable[[], object]) -> float:
    """How many times as fast ``other`` is, by the best of a few rounds in turns: a busy machine slows both."""
    seconds = [float("inf"), float("inf")]
    try:
        with torch.no_grad():
            for _ in range(_ROUNDS + 1):  # the first warms up
                for place, function in enumerate((one, other)):
                    began = time.perf_counter()
                    function()
                    seconds[place] = min(seconds[place], time.perf_counter() - began)
    except RuntimeError:  # a build of PyTorch or a processor that has no such kernel
        return 0.0
    return seconds[0] / seconds[1]


def _cache_file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    facts = [_processor(), torch.__version__, str(torch.get_num_threads())]
    name = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return Path(root) / "shardtrain" / f"cpu_kernels-{name}.json"


def _processor() -> str:
    """The processor's name and what it can do."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read(16384).splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    names = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU part", "Features")
    found = {name.strip(): value for name, _, value in (line.partition(":") for line in lines) if value}
    return "\n".join(found.get(name, "") for name in names)
