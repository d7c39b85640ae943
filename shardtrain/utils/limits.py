"""Limits on memory, threads and open files: the minimum that ranks need, and the limit that caused an error."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardtrain.utils.errors import OutOfMemoryError, ShardtrainError
from shardtrain.utils.units import MIB, format_bytes

# Needs of a rank with the smallest model on a CPU, with one thread. docs/launch.md#limits has the same table.
RANK_ADDRESS_BYTES = 1536 * MIB
RANK_DATA_BYTES = 560 * MIB
RANK_RESIDENT_BYTES = 192 * MIB
"""Less than ``FIRST_RESIDENT_BYTES``, because a fork shares PyTorch's pages with its parent."""
FIRST_RESIDENT_BYTES = 256 * MIB
RANK_THREADS = 12
AGENT_THREADS = 8
"""Threads of the agent of a node, which starts its ranks."""
RANK_FILES = 32
_WORDS = (
    *(
        "allocate memory",
        "memory allocation",
        "malloc of size",
        "bad_alloc",
        "out of memory",
        "not enough memory",
    ),
    *(
        "start new thread",
        "worker thread",
        "create a primitive",
        "create a memory",
        "failed to map segment",
    ),
)
"""Phrases in messages of Python, PyTorch, oneDNN, Arrow, Rust and the loader about refused memory or threads."""
OF_MEMORY = ("ulimit -v", "ulimit -d")
OF_THREADS = "ulimit -u"
_NO_LIMIT = 1 << 60
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Limit:
    """A limit, its current use, and the minimum that the ranks of this host need. Bytes, or a count if
    ``is_count``."""

    name: str
    value: int
    used: int
    needed: int
    fix: str
    is_count: bool = False

    def format(self, value: int) -> str:
        """Format a value of this limit."""
        if self.is_count:
            return str(value)
        return format_bytes(value)


def read(ranks: int = 1, more_threads: int = 0) -> list[Limit]:
    """Return the limits of this process: ulimits and the memory limit of its cgroup. Empty if not on Linux.

    ``more_threads`` are needed in addition to those of ``ranks``.
    """
    if sys.platform != "linux":
        return []
    import resource

    # The kernel reports the address space and the data segment in KiB.
    used = {"VmPeak": 0, "VmData": 0}
    for line in _lines("/proc/self/status"):
        name, _, value = line.partition(":")
        if name in used:
            used[name] = int(value.split()[0]) * 1024
    rows = [
        (resource.RLIMIT_AS, "ulimit -v", used["VmPeak"], RANK_ADDRESS_BYTES, False),
        (resource.RLIMIT_DATA, "ulimit -d", used["VmData"], RANK_DATA_BYTES, False),
        (resource.RLIMIT_NOFILE, "ulimit -n", 0, RANK_FILES * (ranks + 1), True),
        (resource.RLIMIT_NPROC, OF_THREADS, 0, RANK_THREADS * ranks + more_threads, True),
    ]
    limits = []
    for number, name, in_use, needed, is_count in rows:
        if name == OF_THREADS and is_host_root():
            continue
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            limits.append(Limit(name, soft, in_use, needed, f"raise it with {name}", is_count))
    size, in_use = cgroup_memory()
    if size:
        needed = FIRST_RESIDENT_BYTES + RANK_RESIDENT_BYTES * ranks
        limits.append(
            Limit(
                "memory of the cgroup",
                size,
                in_use,
                needed,
                "give the container or job more memory",
            )
        )
    return limits


def is_host_root() -> bool:
    """True for root, who may start any number of processes. False for the root of a rootless container."""
    user = os.getuid()
    for line in _lines("/proc/self/uid_map"):
        inside, outside, count = map(int, line.split())
        if inside <= user < inside + count:
            user += outside - inside
            break
    return user == 0


def require(ranks: int, is_node: bool = False) -> None:
    """Check that each limit suffices for ``ranks`` ranks of the smallest model on this host.

    With ``is_node`` this process is the agent of one of several nodes, and messages name the host.

    Raises:
        OutOfMemoryError: limits are too small. The message has each of them and the minimum.
    """
    where = "this host"
    more_threads = 0
    if is_node:
        where = f"host {socket.gethostname()}"
        more_threads = AGENT_THREADS
    problems = []
    for limit in read(ranks, more_threads):
        if limit.value < limit.needed:
            rule = (
                f"must be at least {limit.format(limit.needed)} for {_of_ranks(ranks)} on {where}"
            )
            problems.append(
                f"{limit.name}={limit.format(limit.value)} {rule}, even with the smallest model; {limit.fix}"
            )
    if problems:
        error = OutOfMemoryError("\n".join(problems))
        error.problems = tuple(problems)
        raise error


def _of_ranks(ranks: int) -> str:
    return f"{ranks} ranks" if ranks > 1 else f"{ranks} rank"


def memory_of_ranks(ranks: int) -> tuple[str, int] | None:
    """Return name and bytes of the ulimit that leaves least memory for the models of ``ranks``.

    None without ulimits.
    """
    remaining = []
    for limit in read():
        if limit.name in OF_MEMORY:
            # About a quarter of ``needed`` is for the smallest model. The rest is overhead.
            bytes_per_rank = int(limit.value - 0.75 * limit.needed)
            remaining.append((bytes_per_rank * ranks, limit.name))
    if not remaining:
        return None
    size, name = min(remaining)
    return f"{name} of {_of_ranks(ranks)}", size


def is_out_of_memory(error: BaseException) -> bool:
    """True if Python, the system or a library (judged by its message) could not get memory or a thread."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN):
        # An error of a non-blocking stream has ``characters_written``. The error of a failed fork does not.
        return not hasattr(error, "characters_written")
    text = str(error)[:1000].lower()
    return not isinstance(error, ShardtrainError) and any(word in text for word in _WORDS)


def explain(error: BaseException) -> str:
    """Return the message for an out-of-memory error: its own text, and the limit that was reached."""
    text = " ".join((getattr(error, "strerror", None) or str(error)).split())
    # For device memory the text includes the size.
    if "CUDA" in text or "HIP" in text:
        return text
    message = "memory ran out"
    if text:
        message += f" ({text})"

    # Use a threshold below 1, because memory of the failed attempt may be free again.
    limits = read()
    reached = [limit for limit in limits if not limit.is_count and limit.used > 0.6 * limit.value]
    is_thread = "thread" in text or (isinstance(error, OSError) and error.errno == errno.EAGAIN)
    if is_thread:
        reached = [limit for limit in limits if limit.name == OF_THREADS] or reached
    if reached:
        limit = max(reached, key=lambda limit: limit.used / limit.value)
        message += f" under {limit.name}={limit.format(limit.value)}: {limit.fix}"
        if not limit.is_count:
            message += f"; {limit.format(limit.used)} of it are used"
        return message
    memory = host_memory()
    sizes = [format_bytes(memory[name]) for name in ("available", "total") if name in memory]
    return f"{message}: free memory on this machine; {' of '.join(sizes)} are free now"


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Convert errors of the block that are about memory to OutOfMemoryError, with the limit that was reached."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ShardtrainError) or not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(explain(error)) from error


def host_memory(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Return total, available and swap bytes of this host; only the total on macOS."""
    lines = _lines(path)
    if not lines:
        return {"total": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    names = {"MemTotal": "total", "MemAvailable": "available", "SwapTotal": "swap"}
    sizes = {}
    for line in lines:
        key, _, value = line.partition(":")
        if key in names:
            sizes[names[key]] = int(value.split()[0]) * 1024
    return sizes


def cgroup_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return memory limit and use of this process's cgroup (version 2 or 1) in bytes.

    Without a limit it is 0.
    """
    # All of these cgroups limit the process, so the smallest limit counts.
    limits = []
    for folder in memory_cgroups(root):
        for limit_file, used_file in _CGROUP_FILES:
            limit = number_in(folder / limit_file)
            if 0 < limit < _NO_LIMIT:
                limits.append((limit, number_in(folder / used_file)))
    return min(limits, default=(0, 0))


def memory_cgroups(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return the folders of the cgroups (version 2 and 1) that may limit the memory of this process."""
    folders = [root, root / "memory"]
    for own in own_memory_cgroups(root):
        folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return list(dict.fromkeys(folders))


def own_memory_cgroups(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return the folders of the cgroups (version 2 and 1) that this process belongs to.

    A container may see the paths of its host in /proc/self/cgroup, but mount only its own cgroup, at
    ``root``.
    """
    folders = []
    for line in _lines("/proc/self/cgroup"):
        # A line is HIERARCHY:CONTROLLERS:PATH. Version 2 names no controllers.
        _, _, place = line.partition(":")
        controllers, _, path = place.partition(":")
        if controllers in ("", "memory"):
            mount = root / controllers
            own = mount / path.lstrip("/")
            folders.append(own if own.is_dir() else mount)
    return folders


def number_in(path: Path) -> int:
    """Return the number in a system file, or 0 if there is no number in it."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
