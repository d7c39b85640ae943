"""The machine that preflight checks assume: the one they run on, or a known machine by name."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from shardtrain.config import Loaded, derived, without_effect_on_a_cpu
from shardtrain.config.schema import Config
from shardtrain.facts import devices
from shardtrain.launch import environment
from shardtrain.utils import limits
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.units import GIB
from shardtrain.utils.variables import is_whole_number

_TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class Machine:
    """Ranks, devices and memory of a run.

    Attributes:
        world_size: number of ranks of the run. None if unknown.
        local_ranks: number of ranks on one host.
        device: "cpu", "cuda" or "xpu". None if unknown.
        num_devices: number of accelerators on one host.
        name: name of the device for messages.
        memory_bytes: memory of one accelerator. On a CPU, the memory that all ranks of the host share. 0 if
            unknown.
        is_here: True for the machine that this process runs on. Its files are checked too.
    """

    world_size: int | None
    local_ranks: int
    device: str | None
    num_devices: int | None
    name: str
    memory_bytes: int = 0
    is_here: bool = True

    def notes(self, config: Config) -> list[str]:
        """Return notes on options that this device ignores or that are slow on it."""
        if self.device == "cpu":
            return without_effect_on_a_cpu(config)
        dtype = derived.compute_dtype(config)
        if (
            self.device != "cuda"
            or dtype != "bfloat16"
            or devices.peak_flops(self.name, "float16") is None
        ):
            return []
        if devices.peak_flops(self.name, "bfloat16") is not None:
            return []
        option = (
            "training.dtype"
            if config.training.dtype == "bfloat16"
            else "training.mixed_precision_param"
        )
        return [
            f"{option}=bfloat16: {self.name} has no bfloat16 units and computes it slowly; use float16"
        ]


def this_machine(
    loaded: Loaded, nproc: int | None, world_size: int | None = None, local_ranks: int | None = None
) -> Machine:
    """Return this machine, with the ranks that ``train`` would start or that a launcher has started.

    Raises:
        ConfigError: ``nproc`` or an environment variable is not a number of ranks.
    """
    config = loaded.config
    accelerators = environment.count_accelerators(config.training.device)
    if local_ranks is None:
        local_ranks = environment.choose_processes_here(config, nproc).count
        world_size = local_ranks
    device = environment.device_type(config.training.device, accelerators)
    name, memory = _gpu() if device != "cpu" and accelerators else _host(local_ranks)
    return Machine(world_size, local_ranks, device, accelerators, name, memory)


def named(name: str, loaded: Loaded, nproc: int | None) -> Machine:
    """Return a machine with accelerators of a known type (h100, a100-40gb, ...), one for each rank.

    It has ``nproc`` ranks, or if this is None, as few ranks as the mesh needs.

    Raises:
        ConfigError: the name is unknown, or ``train`` does not run on such a device.
    """
    rows = devices.table()["devices"]
    supported = []
    for device in devices.names():
        if rows[device].get("torch_device", "cuda") in devices.ACCELERATOR_TYPES:
            supported.append(device)
    known = devices.find(name)
    if known is None or known not in supported:
        from shardtrain.config import nearest

        rule = "is not a device that train supports"
        if known is None:
            rule = "is not a known machine"
        fix = f"use none, here, or one of {', '.join(supported)}"
        near = nearest(name, supported)
        if near:
            fix = f"did you mean {near}? {fix}"
        raise ConfigError(Problem("--for-machine", name, rule, fix, "command line"))
    config = loaded.config
    # -1 shards over all other ranks, however few they are.
    shard_degree = max(1, config.parallelism.data_parallel_shard_degree)
    min_ranks = derived.other_degrees(config) * shard_degree
    count = nproc or max(1, min_ranks)
    row = rows[known]
    memory_bytes = int(row["memory_gib"] * GIB)
    return Machine(
        count, count, row.get("torch_device", "cuda"), count, known, memory_bytes, is_here=False
    )


def _host(ranks: int) -> tuple[str, int]:
    """Return the name and the bytes of the memory that all ranks of this host may use together.

    Memory that other processes use now is included.
    """
    memory = limits.host_memory()
    # Include swap, because a run that needs swap is slow but is not killed.
    swap_bytes = memory.get("swap", 0)
    memory_limits = [("this machine", memory.get("total", 0) + swap_bytes)]
    cgroup_limit, _ = limits.cgroup_memory()
    if cgroup_limit:
        memory_limits.append(("this container", cgroup_limit + swap_bytes))
    ranks_limit = limits.memory_of_ranks(ranks)
    if ranks_limit is not None:
        memory_limits.append(ranks_limit)
    # The smallest limit applies.
    return min(memory_limits, key=lambda limit: limit[1])


def _gpu(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the name and the bytes of memory of this host's largest GPU.

    Uses nvidia-smi, because PyTorch would allocate memory on the GPU.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return "each GPU", 0
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "each GPU", 0
    gpus = []
    for line in result.stdout.splitlines():
        name, _, mib = line.rpartition(",")
        if is_whole_number(mib.strip()):
            gpus.append((name.strip(), int(mib) * 2**20))
    return max(gpus, key=lambda gpu: gpu[1], default=("each GPU", 0))
