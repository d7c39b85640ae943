"""Random numbers as a function of (seed, step, place in the mesh): nothing to save, nothing to restore."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import torch


def seed_of(seed: int, *parts: int) -> int:
    """A number in 0..2^32-1 that depends on all parts.

    The range is what every generator accepts: DTensor's has overflowed on seeds of 2^63 and above.

    >>> seed_of(2**64 - 1, 3) == seed_of(2**64 - 1, 3) < 2**32
    True
    """
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def seed_step(seed: int, step: int, pipeline_rank: int, batch_rank: int, sequence_rank: int = 0) -> None:
    """Seed Python, NumPy and PyTorch for one step.

    Ranks that hold different activations get different numbers, so that none drops what its peer drops: those of other
    pipeline stages, of other samples, and of other parts of the sequence (context parallelism, and tensor parallelism,
    which splits activations along the sequence between layers and by heads and features within them). A resumed run
    needs no generator state. The first part of a sequence has the numbers of a mesh that does not split it.
    """
    place = (pipeline_rank, batch_rank, sequence_rank) if sequence_rank else (pipeline_rank, batch_rank)
    value = seed_of(seed, step, *place)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def set_determinism(warn_only: bool = False) -> None:
    """Ask PyTorch for kernels that give the same bits every time; others fail, or warn with ``warn_only``."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
