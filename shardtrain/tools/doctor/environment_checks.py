"""Environment variables of NCCL, gloo, CUDA and PyTorch: differences between ranks, and costly settings."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator

from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.outliers import equal
from shardtrain.tools.doctor.result import Facts, Finding, Judged, Reports, each, has_infiniband
from shardtrain.utils.variables import is_whole_number

AREA = "environment"

PREFIXES = (
    "NCCL_",
    "RCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "CUBLAS_",
    "FI_",
    "UCX_",
    "OMP_",
    "MKL_",
    "KMP_",
)
_OWN_TO_A_RANK = (
    "CUDA_VISIBLE_DEVICES",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "NCCL_DEBUG_FILE",
    "TORCH_NCCL_RANKS",
)
_HARMLESS = (
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VERSION",
    "NCCL_VERSION",
)
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

COSTLY: tuple[tuple[str, str, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", r"1", "waits for every kernel, for debugging"),
    ("TORCH_DISTRIBUTED_DEBUG", r"(?i)detail", "compares every collective, for debugging"),
    ("TORCH_CPP_LOG_LEVEL", r"(?i)info", "logs each collective, for debugging"),
    ("NCCL_DEBUG", r"(?i)info|trace", "writes thousands of lines on many ranks"),
    (
        "NCCL_P2P_DISABLE",
        r"1",
        "devices of a host communicate through memory instead of NVLink or PCIe",
    ),
    (
        "NCCL_SHM_DISABLE",
        r"1",
        "devices of a host without peer access communicate over the network",
    ),
    ("NCCL_NVLS_ENABLE", r"0", "disables reductions in the NVLink switch"),
    ("NCCL_ALGO", r".+", "forces one algorithm for all sizes; NCCL's choice is usually faster"),
    (
        "NCCL_PROTO",
        r".+",
        "forces one protocol for all sizes; LL128 returns wrong sums on links that do not support it",
    ),
    ("NCCL_NET_GDR_LEVEL", r"0|LOC", "network cards do not access device memory directly"),
)
"""Name, pattern of costly values, and cost. Sources: NVIDIA NCCL User Guide, Environment Variables, and
PyTorch, Torch Distributed Debug."""


def collect(context: RankContext, facts: Facts) -> None:
    """Record variables with known prefixes, network interfaces and cores."""
    import socket

    from shardtrain.launch.environment import unseen_devices, usable_cores
    from shardtrain.utils.log import redact

    # Skip variables with other prefixes, because they may be secrets. Redact secrets in the values of the rest.
    facts["variables"] = {}
    for name in sorted(os.environ):
        if name.startswith(PREFIXES) and name not in _HARMLESS:
            facts["variables"][name] = redact(os.environ[name])[:80]

    facts["interfaces"] = [name for _, name in socket.if_nameindex()]
    facts["infiniband"] = has_infiniband()
    facts["cores"] = usable_cores()
    facts["local_size"] = context.local_size

    # Devices that a container hides make an automatic choice fall back to the CPU.
    facts["unseen"] = ""
    if context.device == "cpu" and context.loaded.config.training.device == "auto":
        unseen = unseen_devices(os.environ)
        if unseen:
            facts["unseen"] = unseen.reason


def judge(reports: Reports) -> Iterator[Finding]:
    """Check that variables are equal, interfaces exist, debugging is off, and threads fit the cores."""
    yield from _differences(reports)
    for name in _INTERFACES:
        yield from each(reports, AREA, {name: functools.partial(_interface, name)})
    for name, pattern, cost in COSTLY:
        yield from each(reports, AREA, {name: functools.partial(_costly, name, pattern, cost)})
    rules = {"NCCL_IB_DISABLE": _infiniband, "devices of the job": _unseen, "threads": _threads}
    yield from each(reports, AREA, rules)


def _differences(reports: Reports) -> Iterator[Finding]:
    """Report variables that differ between ranks, or one finding if all are equal."""
    by_rank = {rank: facts["variables"] for rank, facts in reports.of(AREA).items()}
    if not by_rank:
        return
    names = set().union(*by_rank.values()) - set(_OWN_TO_A_RANK)
    fix = "set it in the job script, which all ranks read, instead of the shell of one host"
    are_equal = True
    for name in sorted(names):
        values = {rank: variables.get(name, "") for rank, variables in by_rank.items()}
        finding = equal(reports, AREA, name, values, "warn", fix)
        if finding.verdict != "pass":
            are_equal = False
            yield finding
    if are_equal:
        yield Finding(AREA, "variables", "pass", f"{len(names)} set", "equal on all ranks")


def _interface(variable: str, facts: Facts) -> Judged | None:
    """Judge a variable that selects network interfaces."""
    value = facts["variables"].get(variable, "")
    if not value:
        return None
    interfaces = facts["interfaces"]
    # NCCL lists name prefixes, exact names after "=", and excluded prefixes after "^". Gloo lists exact
    # names.
    if value.startswith("^"):
        excluded = tuple(value[1:].split(","))
        selected = [interface for interface in interfaces if not interface.startswith(excluded)]
    else:
        # A trailing comma leaves an empty name, and every interface starts with an empty prefix.
        wanted = tuple(name for name in value.lstrip("=").split(",") if name)
        is_exact = variable.startswith("GLOO") or value.startswith("=")
        if is_exact:
            selected = [interface for interface in interfaces if interface in wanted]
        else:
            selected = [interface for interface in interfaces if interface.startswith(wanted)]

    expected = "an interface of this host"
    if not selected:
        text = f"{value}: none of {', '.join(interfaces[:6])}"
        return "fail", text, expected, f"set {variable} to an interface of `ip link`"
    return "pass", f"{value}: {', '.join(selected[:4])}", expected, ""


def _costly(name: str, pattern: str, cost: str, facts: Facts) -> Judged | None:
    value = facts["variables"].get(name, "")
    if not value or not re.fullmatch(pattern, value):
        return None
    return "warn", f"{value}: {cost}", "not set", f"unset {name}"


def _infiniband(facts: Facts) -> Judged | None:
    if facts["variables"].get("NCCL_IB_DISABLE") != "1":
        return None
    if facts["infiniband"]:
        fix = "unset NCCL_IB_DISABLE"
        return "fail", "1, so the InfiniBand or RoCE cards of this host are unused", "not set", fix
    return "pass", "1, and this host has no InfiniBand or RoCE card", "not set", ""


def _unseen(facts: Facts) -> Judged | None:
    if not facts["unseen"]:
        return None
    fix = "pass the devices to the container (apptainer --nv, docker --gpus all), or fix the driver: nvidia-smi"
    return "fail", facts["unseen"], "all devices that Slurm allocated", fix


def _threads(facts: Facts) -> Judged | None:
    """Judge the number of threads that all ranks of a host start together."""
    value = facts["variables"].get("OMP_NUM_THREADS", "")
    if not is_whole_number(value):
        return None
    cores = facts["cores"]
    num_ranks = facts["local_size"]
    text = f"OMP_NUM_THREADS={value} on each of {num_ranks} ranks, with {cores} cores"
    expected = "no more than cores"
    if int(value) * num_ranks <= cores:
        return "pass", text, expected, ""
    if cores >= num_ranks:
        return "warn", text, expected, f"set OMP_NUM_THREADS to {cores // num_ranks}"
    return "warn", text, expected, f"start {cores} ranks here, or fewer"
