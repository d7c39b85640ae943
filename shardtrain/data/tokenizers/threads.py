"""The number of threads that a tokenizer may use, from the environment variables of the ``tokenizers`` library."""

from __future__ import annotations

import os

from shardtrain.utils.variables import is_whole_number


def threads() -> int:
    """Return 1 if TOKENIZERS_PARALLELISM is false, else RAYON_NUM_THREADS or the number of cores."""
    if os.environ.get("TOKENIZERS_PARALLELISM", "").strip().lower() in (
        "0",
        "false",
        "no",
        "n",
        "off",
        "f",
    ):
        return 1
    wanted = os.environ.get("RAYON_NUM_THREADS", "").strip()
    if is_whole_number(wanted) and int(wanted) > 0:
        return int(wanted)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
