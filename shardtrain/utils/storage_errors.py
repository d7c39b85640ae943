"""Storage errors: a table from errno to cause and fix, and the messages built from it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardtrain.utils import limits
from shardtrain.utils.errors import OutOfMemoryError, ShardtrainError, StorageError


@dataclass(frozen=True)
class Cause:
    """Cause and fix of an errno.

    Attributes:
        may_pass: True for failures of the system, after which a later attempt may succeed. False if the path
            or the user's permissions are wrong.
        is_of_sockets: True if sockets raise this errno, too. Their errors have no path.
    """

    meaning: str
    fix: str
    may_pass: bool = False
    is_of_sockets: bool = False


_CAUSES = {
    # The storage is full or read-only.
    "ENOSPC": Cause("", "free space", may_pass=True),
    "EDQUOT": Cause(
        "", "delete files or raise the quota of this user, group or project", may_pass=True
    ),
    "EROFS": Cause(
        "",
        "mount it for writing; after disk errors Linux mounts read-only, see dmesg",
        may_pass=True,
    ),
    # The disk or the file server fails. A mount may recover.
    "EIO": Cause(
        "the disk or the file server failed",
        "see dmesg, then check the disk or the mount",
        may_pass=True,
    ),
    "EREMOTEIO": Cause(
        "the disk of the file server failed", "check the file server", may_pass=True
    ),
    "ESTALE": Cause(
        "the file server no longer knows the file", "mount the folder again", may_pass=True
    ),
    "ENOTCONN": Cause(
        "the program behind the mount has ended", "mount the folder again", True, True
    ),
    "EHOSTDOWN": Cause(
        "the file server is down", "start the file server or wait for it", True, True
    ),
    "ETIMEDOUT": Cause(
        "the file server did not answer", "check the file server and the network", True, True
    ),
    # The device or its locks are missing.
    "ENXIO": Cause("the device is gone", "connect and mount the device again"),
    "ENODEV": Cause("the device is gone", "connect and mount the device again"),
    "ENOLCK": Cause(
        "the file server refuses locks", "start its lock service or mount with local locks"
    ),
    # Limits of the process or of the system. See utils/limits.py.
    "EMFILE": Cause(
        "this process reached its limit of open files", "raise it with ulimit -n", may_pass=True
    ),
    "ENFILE": Cause(
        "all processes reached the limit of open files",
        "raise the sysctl fs.file-max",
        may_pass=True,
    ),
    "ENOMEM": Cause("", "see utils/limits.py", may_pass=True),
    # The user's permissions, or the path.
    "EACCES": Cause("this user has no right to it", "change its owner or mode with chown or chmod"),
    "EPERM": Cause(
        "the filesystem forbids it", "check lsattr (an immutable file?) and the mount options"
    ),
    "EEXIST": Cause("another file or folder has the name", "rename it"),
    "ENOENT": Cause("", "create the folder"),
    "ENOTDIR": Cause("a file has the name of a folder of this path", "rename the file"),
    "EISDIR": Cause("a folder has the name of the file", "rename the folder"),
    "ELOOP": Cause("a link points to itself, or is where no link is allowed", "remove the link"),
    "ENAMETOOLONG": Cause("the filesystem does not allow such a long name", "use a shorter path"),
    "EFBIG": Cause(
        "the file would exceed the size limit", "raise it with ulimit -f, or use another filesystem"
    ),
    "EOPNOTSUPP": Cause("", "use a regular file, or another filesystem", is_of_sockets=True),
    "ETXTBSY": Cause("the file is a running program", "stop the program"),
    "EBUSY": Cause(
        "another program or a mount uses it", "stop the program (see fuser -v) or unmount it"
    ),
    # fork reports a process limit with this errno.
    "EAGAIN": Cause("no further process may start", "see utils/limits.py", may_pass=True),
}
# Systems do not define all of these.
CAUSES = {getattr(errno, name): cause for name, cause in _CAUSES.items() if hasattr(errno, name)}
_UNKNOWN = Cause("", "check the storage")
_OF_OBJECT_STORE = Cause("", "fix checkpoint.folder or the rights of this host there")
_FEW_INODES = 32
"""Number of free inodes up to which they count as exhausted.

The failed write may have removed its own files since.
"""
_OF_MEMORY = frozenset({errno.ENOMEM, errno.EAGAIN})


def is_of_system(error: OSError, path: object = None) -> bool:
    """True if the storage or a system limit is the cause, not the path, the user's permissions or a socket."""
    cause = CAUSES.get(error.errno or 0, _UNKNOWN)
    has_path = bool(path or error.filename)
    return cause.may_pass and (has_path or not cause.is_of_sockets)


def explain(error: Exception, path: str | os.PathLike[str] = "", otherwise: str = "") -> str:
    """Return reason and fix of an OSError: ``Stale file handle (errno 116), the file server ...; mount the ...``.

    ``otherwise`` is a fix that only the caller knows, such as another folder. It follows the fix of the
    errno.
    """
    # Only utils/limits.py can tell which limit of memory or processes was reached.
    if isinstance(error, OSError) and error.errno in _OF_MEMORY:
        return limits.explain(error)
    if not isinstance(error, OSError) or error.errno is None:
        return f"{str(error) or type(error).__name__}; {otherwise or _UNKNOWN.fix}"
    cause = CAUSES.get(error.errno, _UNKNOWN)
    # An object store has no mount and no inodes.
    if "://" in str(path):
        cause = _OF_OBJECT_STORE
    # A full disk and exhausted inodes have the same errno.
    if error.errno == errno.ENOSPC:
        inodes = _exhausted_inodes(path or error.filename)
        if inodes:
            rule = f"{inodes} inodes are free although there is free space"
            cause = Cause(rule, "delete files, small ones too")
    meaning = f", {cause.meaning}" if cause.meaning else ""
    alternative = f", or {otherwise}" if otherwise else ""
    return f"{error.strerror or error} (errno {error.errno}){meaning}; {cause.fix}{alternative}"


def cannot(action: str, path: object, error: OSError, otherwise: str = "") -> ShardtrainError:
    """Return the error for a file that cannot be written, read, ...; OutOfMemoryError for ENOMEM and EAGAIN.

    The path in the OSError, which may be a temporary file, is used instead of ``path`` if it is set.
    """
    name = str(path)
    if isinstance(error.filename, str | bytes):
        name = os.fsdecode(error.filename)
    text = f"cannot {action} {name}: {explain(error, name, otherwise)}"
    if error.errno in _OF_MEMORY:
        return OutOfMemoryError(text)
    return StorageError(text)


@contextlib.contextmanager
def writing(path: object, otherwise: str = "choose another folder") -> Iterator[None]:
    """Convert an OSError of the block with ``cannot("write", path, ...)``."""
    try:
        yield
    except OSError as error:
        raise cannot("write", path, error, otherwise) from error


@contextlib.contextmanager
def naming(path: object) -> Iterator[None]:
    """Put the path into an OSError that has none, or only its last name, relative to a descriptor of the folder."""
    try:
        yield
    except OSError as error:
        if error.filename in (None, os.path.basename(str(path))):
            error.filename = str(path)
        raise


def _exhausted_inodes(path: str | os.PathLike[str] | None) -> str:
    """Return ``FREE of TOTAL`` inodes of the filesystem of ``path`` if few are free but space is free; else ""."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        # The path may not exist yet, so use its nearest existing folder.
        place = Path(os.path.abspath(os.fsdecode(path or "")))
        while not place.exists():
            place = place.parent
        facts = os.statvfs(place)
        if facts.f_bavail > 0 and facts.f_files > 0 and facts.f_favail <= _FEW_INODES:
            return f"{facts.f_favail} of {facts.f_files}"
    return ""
