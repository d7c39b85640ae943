"""How many threads a tokenizer may use: the variables of the ``tokenizers`` library, obeyed by the others
too."""

from __future__ import annotations

import os


def threads() -> int:
    """Threads of a batch: 1 where TOKENIZERS_PARALLELISM forbids more, else RAYON_NUM_THREADS or all cores."""
    if os.environ.get("TOKENIZERS_PARALLELISM", "").strip().lower() in ("0", "false", "no", "n", "off", "f"):
        return 1
    wanted = os.environ.get("RAYON_NUM_THREADS", "").strip()
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
