"""The user's cache folder.

It holds results that later starts reuse to save time; deleting it changes no result.
"""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path:
    """Return ``$XDG_CACHE_HOME/shardtrain`` or ``~/.cache/shardtrain``. The folder may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "shardtrain"
