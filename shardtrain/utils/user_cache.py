"""Where this machine keeps what one start has worked out and the next may use: nothing depends on it but time."""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """``$XDG_CACHE_HOME/shardtrain``, or ``~/.cache/shardtrain``; it need not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "shardtrain"
