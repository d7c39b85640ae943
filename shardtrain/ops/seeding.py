"""Random seeds as a function of (seed, step, rank in the mesh), so checkpoints contain no generator states."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import torch


def seed_of(seed: int, *parts: int) -> int:
    """Return a seed from 0 to 2^32 - 1 that depends on all parts.

    Every generator accepts this range. DTensor's generator has overflowed with seeds of 2^63 and more.

    >>> seed_of(2**64 - 1, 3) == seed_of(2**64 - 1, 3) < 2**32
    True
    """
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def seed_step(
    seed: int, step: int, pipeline_rank: int, batch_rank: int, sequence_rank: int = 0
) -> None:
    """Seed Python, NumPy and PyTorch for one step.

    Ranks with different activations get different random numbers, so their dropout masks are independent.
    Activations differ between pipeline stages, between samples, and between parts of a sequence.
    Sequences are split by context parallelism, and by tensor parallelism (along the sequence between
    layers, by heads and features within layers).

    The first part of a sequence gets the random numbers of a mesh that does not split it.
    """
    place = (
        (pipeline_rank, batch_rank, sequence_rank) if sequence_rank else (pipeline_rank, batch_rank)
    )
    value = seed_of(seed, step, *place)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def set_determinism(warn_only: bool = False) -> None:
    """Require deterministic kernels from PyTorch.

    Other kernels raise an error, or only warn with ``warn_only``.
    """
    # cuBLAS is only deterministic with a fixed workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
