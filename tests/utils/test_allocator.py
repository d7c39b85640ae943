"""A process that keeps freed memory reuses it without page faults, for which the system clears pages."""

from __future__ import annotations

import os
import subprocess
import sys

import patience
import pytest

CHILD = """
import resource, torch
from shardtrain.utils.allocator import keep_freed_memory
is_kept = keep_freed_memory()
for _ in range(8):  # the heap grows until an aligned block fits
    torch.ones(1 << 24)  # 64 MiB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(1 << 24)
print(int(is_kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, check=True, timeout=patience.seconds(60),
        env={**os.environ, **environment},
    )  # fmt: skip
    kept, count = done.stdout.split()
    return int(kept), int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages of Linux are counted")
def test_freed_blocks_are_used_again_unless_the_environment_says_otherwise() -> None:
    kept, count = faults()
    if not kept:
        pytest.skip("this C library is not glibc")
    kept_anyway, usual = faults(MALLOC_TRIM_THRESHOLD_="131072")

    assert not kept_anyway
    assert count < usual / 2  # the heap may still have grown once
