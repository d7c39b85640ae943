"""Limits on memory, threads and open files: the minimum that ranks need, and the limit that caused an error."""

from __future__ import annotations

import contextlib
import errno
import importlib.abc
import mmap
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from shardtrain.utils.errors import OutOfMemoryError, ShardtrainError
from shardtrain.utils.units import MIB, format_bytes

# Needs of a rank with the smallest model on a CPU, with one thread. docs/launch.md#limits has the same table.
RANK_ADDRESS_BYTES = 1536 * MIB
RANK_DATA_BYTES = 560 * MIB
RANK_RESIDENT_BYTES = 192 * MIB
"""Less than ``FIRST_RESIDENT_BYTES``, because a fork shares PyTorch's pages with its parent."""
FIRST_RESIDENT_BYTES = 256 * MIB
RANK_THREADS = 12
"""With one compute thread. Each further thread of OMP_NUM_THREADS needs one more."""
AGENT_THREADS = 8
"""Threads of the agent of a node, which starts its ranks."""
WORKER_THREADS = 3
"""Threads of a data worker: the process itself, its thread that sends, and one thread of the rank."""
RANK_FILES = 32
_IMPORT_DATA_BYTES = {"numpy": 56 * MIB, "torch": 160 * MIB}
"""Data segment that importing a library takes. With less, its C++ code ends the process without an exception."""
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
OF_CGROUP_THREADS = "pids.max of the cgroup"
_SMALL_STACK_BYTES = 64 * 1024
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


def read(ranks: int = 1, threads: int | None = None) -> list[Limit]:
    """Return the limits of this process: ulimits and the limits of its cgroup. Empty if not on Linux.

    ``threads`` are needed, or ``RANK_THREADS`` for each of ``ranks`` by default.
    """
    needed_threads = RANK_THREADS * ranks if threads is None else threads
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
        (resource.RLIMIT_NPROC, OF_THREADS, 0, needed_threads, True),
    ]
    limits = []
    for number, name, in_use, needed, is_count in rows:
        if name == OF_THREADS and is_host_root():
            continue
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            limits.append(Limit(name, soft, in_use, needed, f"raise it with {name}", is_count))
    most_threads = cgroup_threads()
    if most_threads:
        fix = "raise the pids limit of the container or job"
        limits.append(Limit(OF_CGROUP_THREADS, most_threads, 0, needed_threads, fix, is_count=True))
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


def require(
    ranks: int, compute_threads: int = 1, is_node: bool = False, is_rank: bool = False
) -> None:
    """Check that each limit suffices for ``ranks`` ranks of the smallest model on this host.

    Args:
        compute_threads: Threads of each rank that compute (OMP_NUM_THREADS).
        is_node: True if this process is the agent of one of several nodes. Messages then name the host.
        is_rank: True if this process is one of the ranks, which all call this function.

    Raises:
        OutOfMemoryError: limits are too small. The message has each of them and the minimum.
    """
    where = "this host"
    threads = (RANK_THREADS + compute_threads - 1) * ranks
    if is_node:
        where = f"host {socket.gethostname()}"
        threads += AGENT_THREADS
    problems = []
    for limit in read(ranks, threads):
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
    # Other programs of this user count, too, so start the threads to check. The main thread exists already.
    own_ranks = 1 if is_rank else ranks
    own_threads = threads // ranks if is_rank else threads
    require_threads(own_threads - 1, f"{_of_ranks(own_ranks)} on {where}", "OMP_NUM_THREADS")


def require_threads(count: int, purpose: str, option: str) -> None:
    """Check that this process can have ``count`` more threads or processes now, by starting threads briefly.

    Libraries print a trace or end the process if they cannot start a thread. No-op without a limit of threads.

    Args:
        purpose: Plural noun for the message, such as "2 data workers".
        option: Option or variable that lowers the number.

    Raises:
        OutOfMemoryError: fewer can be started.
    """
    limits = [limit for limit in read() if limit.name in (OF_THREADS, OF_CGROUP_THREADS)]
    if not limits or count < 1:
        return
    started = startable_threads(count)
    if started < count:
        # The kernel does not report which limit it is. The smaller one is more likely.
        limit = min(limits, key=lambda limit: limit.value)
        raise OutOfMemoryError(
            f"{limit.name}={limit.value} leaves {started} more threads, but {purpose} must be able to start "
            f"{count}; end other programs of this user, lower {option}, or {limit.fix}"
        )


def startable_threads(count: int) -> int:
    """Return how many of ``count`` threads can exist at the same time. They end before this function returns."""
    end = threading.Event()
    threads = []
    previous_stack = threading.stack_size(_SMALL_STACK_BYTES)
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            threads.append(thread)
    except RuntimeError:
        # The limit is reached. The threads that started are the result.
        pass
    finally:
        threading.stack_size(previous_stack)
        end.set()
        for thread in threads:
            thread.join()
    return len(threads)


def can_allocate(num_bytes: int) -> bool:
    """True if this process can get this much more memory under its ulimits, tested by reserving it briefly."""
    if not _has_memory_ulimit():
        return True
    try:
        # Only a private mapping counts towards the data segment. Its pages are never touched.
        reserved = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, OverflowError):
        return False
    reserved.close()
    return True


def require_memory(num_bytes: int, purpose: str) -> None:
    """Check that this process can get this much more memory under its ulimits.

    A library in Rust aborts its process if it cannot allocate memory, so nobody could report the error. No-op
    without a ulimit of memory.

    Args:
        purpose: Singular noun for the message, such as "tokenizing 2 MiB of text".

    Raises:
        OutOfMemoryError: a ulimit leaves less memory.
    """
    if can_allocate(num_bytes):
        return
    # The kernel does not report which limit it is. The one that leaves least is more likely.
    limit = min(
        (limit for limit in read() if limit.name in OF_MEMORY),
        key=lambda limit: limit.value - limit.used,
    )
    raise OutOfMemoryError(
        f"memory ran out ({purpose} may need {format_bytes(num_bytes)}) under {limit.name}="
        f"{limit.format(limit.value)}: {limit.fix}; {limit.format(limit.used)} of it are used"
    )


def _has_memory_ulimit() -> bool:
    if sys.platform != "linux":
        return False
    import resource

    soft_limits = (
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    )
    return any(limit != resource.RLIM_INFINITY for limit in soft_limits)


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
    limits = read()
    of_threads = [limit for limit in limits if limit.name in (OF_THREADS, OF_CGROUP_THREADS)]
    is_thread = "thread" in text or (isinstance(error, OSError) and error.errno == errno.EAGAIN)
    if is_thread and of_threads:
        limit = min(of_threads, key=lambda limit: limit.value)
        return (
            f"no more processes or threads can be started ({text}) under {limit.name}={limit.value}, "
            f"of which {threads_in_use(limit.name)} are in use; end other programs, or {limit.fix}"
        )
    message = "no more processes or threads can be started" if is_thread else "memory ran out"
    if text:
        message += f" ({text})"

    # Use a threshold below 1, because memory of the failed attempt may be free again.
    reached = [limit for limit in limits if not limit.is_count and limit.used > 0.6 * limit.value]
    if reached:
        limit = max(reached, key=lambda limit: limit.used / limit.value)
        message += f" under {limit.name}={limit.format(limit.value)}: {limit.fix}"
        return f"{message}; {limit.format(limit.used)} of it are used"
    memory = host_memory()
    sizes = [format_bytes(memory[name]) for name in ("available", "total") if name in memory]
    return f"{message}: free memory on this machine; {' of '.join(sizes)} are free now"


class ImportCheck(importlib.abc.MetaPathFinder):
    """Raises OutOfMemoryError instead of importing a library that ``ulimit -d`` would make end the process.

    Each verb imports NumPy and PyTorch at another place, or not at all.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Check the limit. The other finders then find the module."""
        needed = _IMPORT_DATA_BYTES.get(name, 0)
        for limit in read() if needed else []:
            if limit.name == "ulimit -d" and limit.value < needed:
                rule = f"must be at least {limit.format(needed)} to import {name}"
                raise OutOfMemoryError(
                    f"{limit.name}={limit.format(limit.value)} {rule}; {limit.fix}"
                )


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


def cgroup_threads(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the maximum number of threads in this process's cgroup (version 2 or 1), or 0 without a limit."""
    folders = cgroups(root, "pids")
    return min(filter(None, (number_in(folder / "pids.max") for folder in folders)), default=0)


def memory_cgroups(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return the folders of the cgroups (version 2 and 1) that may limit the memory of this process."""
    return cgroups(root, "memory")


def cgroups(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's cgroups (version 2 and 1) that may have limits of a controller."""
    folders = [root, root / controller]
    for cgroup in own_cgroups(root, controller):
        folders += [folder for folder in (cgroup, *cgroup.parents) if folder.is_relative_to(root)]
    return list(dict.fromkeys(folders))


def own_memory_cgroups(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return the folders of the cgroups (version 2 and 1) with the memory of this process."""
    return own_cgroups(root, "memory")


def threads_in_use(name: str) -> int:
    """Return the number of processes and threads that count towards a limit.

    These are all of the user for ``OF_THREADS``, and all of the cgroup for ``OF_CGROUP_THREADS``. Those
    outside of this container are not visible.
    """
    if name == OF_CGROUP_THREADS:
        root = Path("/sys/fs/cgroup")
        return max(number_in(folder / "pids.current") for folder in cgroups(root, "pids"))
    total = 0
    for path in Path("/proc").glob("[0-9]*/status"):
        fields = dict(line.split(":", 1) for line in _lines(path) if ":" in line)
        # The first ID is the real user, whom the kernel charges.
        if fields.get("Uid", "").split()[:1] == [str(os.getuid())]:
            total += int(fields["Threads"])
    return total


def own_cgroups(root: Path, controller: str) -> list[Path]:
    """Return the folders of the cgroups (version 2 and 1) that this process belongs to.

    A container may see the paths of its host in /proc/self/cgroup, but mount only its own cgroup, at
    ``root``.
    """
    folders = []
    for line in _lines("/proc/self/cgroup"):
        # A line is HIERARCHY:CONTROLLERS:PATH. Version 2 names no controllers.
        _, _, place = line.partition(":")
        controllers, _, path = place.partition(":")
        if controllers in ("", controller):
            mount = root / controllers
            folder = mount / path.lstrip("/")
            folders.append(folder if folder.is_dir() else mount)
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
