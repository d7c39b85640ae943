"""Memory of the host, container and device, and shared memory for data workers."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import (
    Facts,
    Finding,
    Judged,
    Reports,
    Rule,
    Verdict,
    each,
    kernel_text,
    warn_if,
)
from shardtrain.utils.limits import cgroup_memory, host_memory, own_memory_cgroups
from shardtrain.utils.units import GIB, MIB, format_bytes

AREA = "memory"

LITTLE_SHARED = 256 * MIB
"""Minimum size of /dev/shm. With Docker's default of 64 MiB, NCCL and data workers fail with a bus error."""
BUSY_BYTES = 2 * GIB
"""Maximum memory in use on a device before the run.

CUDA contexts use some. More belongs to other processes.
"""
BUSY_SHARE = 0.05
"""The same limit as a fraction of a large device's memory."""
SPARE_SHARE = 0.05


def collect(context: RankContext, facts: Facts) -> None:
    """Record total and free memory and the limit of the container, in bytes."""
    facts["local_size"] = context.local_size
    facts.update(host_memory())
    facts["limit"], facts["used"] = cgroup_memory()
    facts["kills"] = _oom_kills()
    if os.path.isdir("/dev/shm"):
        filesystem = os.statvfs("/dev/shm")
        facts["shared"] = filesystem.f_blocks * filesystem.f_frsize
    if context.device != "cpu":
        from shardtrain.ops import accelerator

        free, total = accelerator.module(context.device).mem_get_info(context.local_rank)
        facts["device_free"] = free
        facts["device_total"] = total


def _oom_kills(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of OOM kills in this process's cgroup and those below it.

    The cgroups above it would also count the kills of other jobs.
    """
    num_kills = 0
    for folder in own_memory_cgroups(root):
        # The file of cgroup version 2, and that of version 1.
        for name in ("memory.events", "memory.oom_control"):
            for line in kernel_text(folder / name).splitlines():
                key, _, number = line.partition(" ")
                if key == "oom_kill":
                    num_kills = max(num_kills, int(number))
    return num_kills


def judge(reports: Reports) -> Iterator[Finding]:
    """Check that memory suffices for the model's states, and that no other process uses the device."""
    # Rank 0 computed the size of the model during the checks of the configuration.
    state_bytes = reports.facts.get(0, {}).get("config", {}).get("state_bytes_per_rank", 0)
    has_device = any("device_total" in facts for facts in reports.of(AREA).values())
    rules: dict[str, Rule] = {
        "host memory": functools.partial(_host, 0 if has_device else state_bytes),
        "kills for memory": _kills,
        "/dev/shm": _shared,
        "device memory": functools.partial(_device, state_bytes),
    }
    yield from each(reports, AREA, rules)


def _host(state_bytes: int, facts: Facts) -> Judged:
    """Judge the memory of a host, or of its container.

    ``state_bytes`` per rank is 0 if states are on devices.
    """
    total = int(facts["total"])
    free = int(facts.get("available", total))
    kind = "host"
    if facts["limit"] and facts["limit"] < total:
        total = facts["limit"]
        kind = "container"
        free = min(free, total - facts["used"])
    text = f"{format_bytes(free)} free of {format_bytes(total)} ({kind})"

    # All ranks of the host share its memory.
    expected = f"{SPARE_SHARE:.0%} free"
    needed = state_bytes * facts["local_size"]
    if needed:
        expected = f"{format_bytes(needed)} or more for model and optimizer"
    if needed and free < needed:
        fix = "use more hosts, a smaller model, or bfloat16 with training.dtype"
        return "fail", text, expected, fix
    fix = "end other processes of this host, or raise the container's limit"
    return warn_if(free < SPARE_SHARE * total, text, expected, fix)


def _kills(facts: Facts) -> Judged | None:
    if not facts["kills"]:
        return None
    return (
        "warn",
        f"{facts['kills']} in this container",
        "none",
        "raise its memory limit, or use less memory",
    )


def _shared(facts: Facts) -> Judged | None:
    if "shared" not in facts:
        return None
    text = format_bytes(facts["shared"])
    expected = f"{format_bytes(LITTLE_SHARED)} or more"
    if facts["shared"] >= LITTLE_SHARED:
        return "pass", text, expected, ""
    # NCCL always uses shared memory between ranks of a host. On a CPU, only data workers do.
    verdict: Verdict = "fail" if "device_total" in facts else "warn"
    fix = "docker run --shm-size 8g, or an emptyDir of medium Memory at /dev/shm"
    return verdict, text, expected, fix


def _device(state_bytes: int, facts: Facts) -> Judged | None:
    """Judge the memory of a rank's device, before this run uses it."""
    if "device_total" not in facts:
        return None
    free = facts["device_free"]
    total = facts["device_total"]
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    if state_bytes and total < state_bytes:
        expected = f"{format_bytes(state_bytes)} or more for model and optimizer"
        fix = "use more devices, or a larger parallelism.*_degree that shards"
        return "fail", text, expected, fix

    expected = "free before the run"
    busy = total - free
    if busy <= max(BUSY_BYTES, BUSY_SHARE * total):
        return "pass", text, expected, ""
    verdict: Verdict = "fail" if busy > total / 2 else "warn"
    return verdict, text, expected, "end the processes that use it (see nvidia-smi)"
