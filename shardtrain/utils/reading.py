"""Storage that fails to answer is told apart from a file that is wrong: the first is worth a retry."""

from __future__ import annotations

import errno
import os

from shardtrain.utils.errors import StorageError

_PASSING = frozenset(
    getattr(errno, name)
    for name in (
        "EIO",
        "ESTALE",
        "EMFILE",
        "ENFILE",
        "ETIMEDOUT",
        "EREMOTEIO",
        "ENOTCONN",
        "EHOSTDOWN",
        "ENOSPC",
        "EDQUOT",
    )
    if hasattr(errno, name)
)
"""What a network filesystem, a drive or a full table of files says; what is absent or forbidden says another."""


def trouble(path: str | os.PathLike[str], error: OSError) -> StorageError | None:
    """The error of storage that may answer at the next try; None where the file or the user's rights are the cause."""
    if error.errno not in _PASSING:
        return None
    fix = "start again when the storage answers"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        fix = "raise the limit of open files (ulimit -n), then start again"
    return StorageError(f"cannot read {os.fspath(path)}: {error.strerror} (errno {error.errno}); {fix}")
