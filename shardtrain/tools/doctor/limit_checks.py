"""Process limits and kernel settings that slow runs or make them fail late, such as open files and quotas."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import (
    Facts,
    Finding,
    Judged,
    Reports,
    each,
    has_infiniband,
    kernel_text,
    warn_if,
)
from shardtrain.utils.units import GIB, format_bytes

AREA = "limits"

FEW_FILES = 4096
"""Number of open files below which the check warns.

A rank opens one or two sockets per peer, and one file per data shard.
"""
TOO_FEW_FILES = 512
"""Number of open files below which the check fails."""
FEW_PROCESSES = 4096
"""Number of processes and threads below which the check warns.

A rank starts several per device, group and worker.
"""
STEAL = 0.05


def collect(context: RankContext, facts: Facts) -> None:
    """Record ulimits, the CPU quota of the cgroup, and kernel settings for CPUs and pages."""
    from shardtrain.launch.environment import usable_cores

    facts.update(ulimits())
    facts["cores"] = usable_cores()
    facts["quota"] = cpu_quota()
    facts["load"] = os.getloadavg()[0]
    facts["governor"] = kernel_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    facts["huge_pages"] = _chosen(kernel_text("/sys/kernel/mm/transparent_hugepage/enabled"))
    facts["core_pattern"] = kernel_text("/proc/sys/kernel/core_pattern")
    facts["infiniband"] = has_infiniband()
    facts["steal"] = _steal()


def _steal() -> float:
    """Return the fraction of CPU time that the hypervisor gave to other guests since boot, 0 if unknown."""
    # The first line is "cpu" and the ticks of all CPUs by state. Steal is the eighth number. The
    # numbers after it are parts of the first two.
    first_line = kernel_text("/proc/stat").split("\n")[0]
    times = [int(ticks) for ticks in first_line.split()[1:9]]
    if len(times) < 8 or not sum(times):
        return 0.0
    return times[7] / sum(times)


def ulimits() -> dict[str, int]:
    """Return the soft limits by name, -1 for unlimited."""
    import resource

    names = {
        "open_files": "RLIMIT_NOFILE",
        "locked_bytes": "RLIMIT_MEMLOCK",
        "core_bytes": "RLIMIT_CORE",
        "processes": "RLIMIT_NPROC",
        "address_bytes": "RLIMIT_AS",
    }
    limits = {}
    for name, constant in names.items():
        # Each system has only some of the limits.
        if hasattr(resource, constant):
            soft, _ = resource.getrlimit(getattr(resource, constant))
            limits[name] = -1 if soft == resource.RLIM_INFINITY else soft
    return limits


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the CPU quota of this process's cgroup (version 2 or 1) in CPUs, or 0 without a quota."""
    # Version 2 has both numbers in one file, "max 100000" without a quota. Version 1 has one file for
    # each, with -1 without a quota.
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        texts = []
        for file in files:
            texts += kernel_text(root / file).split()
        if len(texts) != 2:
            continue
        quota, period = texts
        if quota not in ("max", "-1") and int(period):
            return int(quota) / int(period)
    return 0.0


def _chosen(text: str) -> str:
    """Return the selected value, which the kernel marks with brackets.

    >>> _chosen("always [madvise] never")
    'madvise'
    """
    return text.partition("[")[2].partition("]")[0]


def judge(reports: Reports) -> Iterator[Finding]:
    """Compare each limit with the needs of a run of this size."""
    rules = {
        "open files": _files,
        "processes": _processes,
        "locked memory": _locked,
        "address space": _address,
        "core dumps": _core,
        "CPU quota": _quota,
        "CPU load": _load,
        "CPU governor": _governor,
        "CPU steal": _stolen,
        "huge pages": _pages,
    }
    yield from each(reports, AREA, rules)


def _files(facts: Facts) -> Judged | None:
    value = facts.get("open_files")
    if value is None:
        return None
    expected = f"{FEW_FILES} or more"
    fix = "raise it: ulimit -n 65536 (LimitNOFILE, or the container)"
    if 0 <= value < TOO_FEW_FILES:
        return "fail", str(value), expected, fix
    return warn_if(0 <= value < FEW_FILES, _limit(value, str), expected, fix)


def _limit(value: int, format_value: Callable[[int], str]) -> str:
    return format_value(value) if value >= 0 else "unlimited"


def _processes(facts: Facts) -> Judged | None:
    value = facts.get("processes")
    if value is None:
        return None
    expected = f"{FEW_PROCESSES} or more"
    fix = "raise it: ulimit -u 65536 (LimitNPROC, or the container)"
    return warn_if(0 <= value < FEW_PROCESSES, _limit(value, str), expected, fix)


def _locked(facts: Facts) -> Judged | None:
    value = facts.get("locked_bytes")
    if value is None:
        return None
    text = _limit(value, format_bytes)
    # Without InfiniBand, nothing locks much memory.
    if not facts["infiniband"]:
        return "pass", text, "", ""
    expected = "unlimited, for InfiniBand"
    if 0 <= value < GIB:
        fix = "set it to unlimited (ulimit -l, LimitMEMLOCK), because InfiniBand locks its buffers"
        return "fail", text, expected, fix
    return "pass", text, expected, ""


def _address(facts: Facts) -> Judged | None:
    value = facts.get("address_bytes", -1)
    if value < 0:
        return None
    fix = "remove it (ulimit -v unlimited), because CUDA reserves more than it uses"
    return "fail", format_bytes(value), "unlimited", fix


def _core(facts: Facts) -> Judged | None:
    value = facts.get("core_bytes")
    if value is None or sys.platform != "linux":
        return None
    text = _limit(value, format_bytes)
    # A pattern that starts with a pipe passes dumps to a program.
    if value and not facts["core_pattern"].startswith("|"):
        fix = "set ulimit -c 0: a crashing rank would write all its memory to disk"
        return "warn", f"{text}, to files", "none", fix
    return "pass", text, "none", ""


def _quota(facts: Facts) -> Judged | None:
    quota = facts["quota"]
    cores = facts["cores"]
    if not quota:
        return "pass", f"none; {cores} cores", "none, or all cores", ""
    text = f"{quota:g} of {cores} cores"
    fix = "raise the container's CPU limit, or start fewer ranks and threads"
    return warn_if(quota < cores, text, "none, or all cores", fix)


def _load(facts: Facts) -> Judged:
    load = facts["load"]
    cores = facts["cores"]
    expected = "below the number of cores"
    text = f"{load:.1f} on {cores} cores (last minute)"
    fix = "end other processes of this host (see top), or wait for them"
    return warn_if(load > 1.5 * cores, text, expected, fix)


def _governor(facts: Facts) -> Judged | None:
    value = facts["governor"]
    # Virtual machines have no governor.
    if not value:
        return None
    fix = "cpupower frequency-set -g performance"
    return warn_if(value == "powersave", value, "performance", fix)


def _stolen(facts: Facts) -> Judged | None:
    value = facts["steal"]
    text = f"{100 * value:.1f} % since boot"
    expected = f"below {100 * STEAL:.0f} %"
    return warn_if(value > STEAL, text, expected, "use a host that is not overcommitted")


def _pages(facts: Facts) -> Judged | None:
    value = facts["huge_pages"]
    if not value:
        return None
    return "pass", value, "", ""
