"""Random numbers as a function of (seed, step, place in the mesh): nothing to save, nothing to restore."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import torch

from shardtrain.config.schema import Debug


def seed_of(seed: int, *parts: int) -> int:
    """A number in 0..2^32-1 that depends on all parts.

    The range is what every generator accepts: DTensor's has overflowed on seeds of 2^63 and above.

    >>> seed_of(2**64 - 1, 3) == seed_of(2**64 - 1, 3) < 2**32
    True
    """
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def seed_step(seed: int, step: int, pipeline_rank: int, batch_rank: int) -> None:
    """Seed Python, NumPy and PyTorch for one step.

    Ranks that share samples and a pipeline stage get the same numbers, so that replicated activations drop alike;
    other ranks get others. A resumed run needs no generator state.
    """
    value = seed_of(seed, step, pipeline_rank, batch_rank)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def set_determinism(debug: Debug) -> None:
    """Ask PyTorch for kernels that give the same bits every time, as ``[debug]`` says."""
    if not debug.deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it
    torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
