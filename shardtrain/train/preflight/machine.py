"""The machine of a verdict: this one, as ``train`` would use it, or one that is known by name."""

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

_ASK_SECONDS = 20


@dataclass(frozen=True)
class Machine:
    """Where a run would be.

    world_size:   ranks of the whole run; None where it is not known.
    local_ranks:  ranks that share one host.
    device:       "cpu", "cuda" or "xpu"; None where it is not known.
    num_devices:  accelerators of a host.
    name:         of the device, in words.
    memory_bytes: what one device has, or on a CPU what all ranks of the host share; 0 where it is not known.
    is_here:      whether this is the machine on which the verdict is made, so that its files count.
    """

    world_size: int | None
    local_ranks: int
    device: str | None
    num_devices: int | None
    name: str
    memory_bytes: int = 0
    is_here: bool = True

    def notes(self, config: Config) -> list[str]:
        """What the device does, and does slowly."""
        if self.device == "cpu":
            return without_effect_on_a_cpu(config)
        dtype = derived.compute_dtype(config)
        if self.device != "cuda" or dtype != "bfloat16" or devices.peak_flops(self.name, "float16") is None:
            return []
        if devices.peak_flops(self.name, "bfloat16") is not None:
            return []
        option = "training.dtype" if config.training.dtype == "bfloat16" else "training.mixed_precision_param"
        return [f"{option}=bfloat16: {self.name} has no bfloat16 units and computes it slowly; use float16"]


def this_machine(
    loaded: Loaded, nproc: int | None, world_size: int | None = None, local_ranks: int | None = None
) -> Machine:
    """This machine with as many ranks as ``train`` would start, or those of a launcher.

    Raises:
        ConfigError: ``nproc`` or a variable of the environment is not a number of ranks.
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
    """Return a machine with one known accelerator (h100, a100-40gb, ...) per rank, and as few ranks as the mesh needs.

    Raises:
        ConfigError: the name is unknown, or ``train`` does not run on such a device.
    """
    rows = devices.table()["devices"]
    supported = [
        known for known in devices.names() if rows[known].get("torch_device", "cuda") in devices.ACCELERATOR_TYPES
    ]
    known = devices.find(name)
    if known is None or known not in supported:
        from shardtrain.config import nearest

        near = nearest(name, supported)
        fix = (f"did you mean {near}? " if near else "") + f"use none, here, or one of {', '.join(supported)}"
        rule = "is not a known machine" if known is None else "is not a device that train can use"
        raise ConfigError(Problem("--for-machine", name, rule, fix, "command line"))
    config = loaded.config
    fewest = derived.other_degrees(config) * max(1, config.parallelism.data_parallel_shard_degree)
    count = nproc or max(1, fewest)
    row = rows[known]
    memory_bytes = int(row["memory_gib"] * GIB)
    return Machine(count, count, row.get("torch_device", "cuda"), count, known, memory_bytes, is_here=False)


def _host(ranks: int) -> tuple[str, int]:
    """Return name and size in bytes of the memory that all ``ranks`` of this host may use, including used memory."""
    memory = limits.host_memory()
    # swap counts: a run that needs it is slow, and is not killed
    swap = memory.get("swap", 0)
    (limit, _) = limits.cgroup_memory()
    places = [("this machine", memory.get("total", 0) + swap)]
    if limit:
        places.append(("this container", limit + swap))
    if (of_ranks := limits.memory_of_ranks(ranks)) is not None:
        places.append(of_ranks)
    return min(places, key=lambda place: place[1])


def _gpu(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Name and bytes of the largest GPU here, by nvidia-smi: PyTorch would take memory on it to answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "each GPU", 0
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "each GPU", 0
    rows = [line.rpartition(",") for line in done.stdout.splitlines()]
    sizes = [(name.strip(), int(mib) * 2**20) for name, _, mib in rows if mib.strip().isdecimal()]
    return max(sizes, key=lambda one: one[1], default=("each GPU", 0))
