"""Read environment variables: detect whether this process is a rank, and choose the number of ranks of this machine.

Imports torch only if a device file indicates an accelerator to count.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from shardtrain.config import ramps
from shardtrain.config.derived import other_degrees
from shardtrain.config.schema import Config
from shardtrain.facts.devices import ACCELERATOR_TYPES
from shardtrain.launch.goodput import ledger
from shardtrain.utils import library_environment, variables
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.private_network import NETWORK
from shardtrain.utils.process import STORE, meeting_folder
from shardtrain.utils.variables import is_whole_number

LOCAL_ADDRESS = "127.0.0.1"
# Number of ports from which a Slurm job's rendezvous port is chosen.
PORTS_FROM_JOB_ID = 10_000
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class ProcessCount:
    """Number of ranks to start on this machine, and the reason for the log."""

    count: int
    reason: str


def is_rank(environment: Mapping[str, str]) -> bool:
    """True if a launcher has started this process as a rank.

    RANK and WORLD_SIZE are not sufficient, because PyTorchJob and Run:ai set them per node. LOCAL_RANK in
    addition to both identifies a rank, and so does torchrun's TORCHELASTIC_RUN_ID.

    >>> is_rank({"RANK": "0", "WORLD_SIZE": "2"}), is_rank({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    (False, True)
    """
    return _was_launched(environment) or is_slurm_rank(environment)


def _was_launched(environment: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environment or all(environment.get(name) for name in RANK_NAMES)


def is_slurm_rank(environment: Mapping[str, str]) -> bool:
    """True if this process is one of several tasks of an srun, each of which is a rank.

    False for a task that starts the ranks of its node, and for the body of an sbatch script,
    which is not a task.

    >>> is_slurm_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    False
    >>> is_slurm_rank({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"})
    True
    """
    # `shardtrain launch` starts one task per node, and sets SHARDTRAIN_NNODES in it.
    if environment.get("SHARDTRAIN_NNODES") or is_slurm_node(environment):
        return False
    return (
        "SLURM_PROCID" in environment
        and variables.number(environment, "SLURM_STEP_NUM_TASKS", "1", least=1) > 1
    )


def is_slurm_node(environment: Mapping[str, str]) -> bool:
    """True if srun has started one task per node on several nodes with several GPUs each. Each task
    then starts ranks.

    >>> step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    >>> is_slurm_node(step), is_slurm_node({**step, "SLURM_GPUS_ON_NODE": "8"})
    (False, True)
    """
    if "SLURM_PROCID" not in environment:
        return False
    nodes = environment.get("SLURM_STEP_NUM_NODES")
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    has_several_nodes = nodes not in (None, "1")
    if not has_several_nodes or tasks != nodes:
        return False
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return is_whole_number(gpus) and int(gpus) > 1


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Set PyTorch's variables in a task of srun, and check the variables of a rank of any launcher.

    The variables are RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. The port depends on the job
    ID, so two jobs on one node use different ports. Existing variables are kept.

    Raises:
        ConfigError: a variable is missing, is not a number, or contradicts another variable.
    """
    # For the rank and the world size, srun uses other names than torchrun.
    if is_slurm_rank(environment) and not _was_launched(environment):
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        names = {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID") or "0",
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "MASTER_ADDR": first_host(nodes) or LOCAL_ADDRESS,
            "MASTER_PORT": str(slurm_port(environment)),
        }
        # A variable that the user has set must agree with srun's.
        environment.update(
            {name: value for name, value in names.items() if not environment.get(name)}
        )
        for name, source in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
            if environment[name] != names[name]:
                raise ConfigError(
                    Problem(
                        name,
                        environment[name],
                        rule=f"differs from {source}={names[name]}, which srun has set",
                        fix=f"unset {name}",
                        where="environment",
                    )
                )
    # An empty variable counts as unset, and PyTorch would fail to read it.
    if not environment.get("LOCAL_WORLD_SIZE"):
        environment.pop("LOCAL_WORLD_SIZE", None)
    _require_rank(environment)


def slurm_port(environment: Mapping[str, str]) -> int:
    """Return the rendezvous port of a job's tasks."""
    return 20_000 + variables.number(environment, "SLURM_JOB_ID", "0") % PORTS_FROM_JOB_ID


def _require_rank(environment: Mapping[str, str]) -> None:
    """Check the variables of a rank.

    They may be left over from another launcher or set manually. Raises ConfigError.
    """
    rank = variables.number(environment, "RANK", "")
    size = variables.number(environment, "WORLD_SIZE", "", least=1)
    variables.number(environment, "LOCAL_RANK", "")
    variables.number(environment, "LOCAL_WORLD_SIZE", "1", least=1)
    if rank >= size:
        raise ConfigError(
            Problem(
                "RANK",
                rank,
                rule=f"is not a rank of WORLD_SIZE={size}",
                fix=f"use 0 to {size - 1}",
                where="environment",
            )
        )
    # Ranks of one machine may meet in a folder instead of at an address.
    if size > 1 and not meeting_folder(environment):
        port = variables.number(environment, "MASTER_PORT", "", least=1)
        is_port = port <= 65_535
        if not is_port or not environment.get("MASTER_ADDR"):
            name = "MASTER_ADDR" if is_port else "MASTER_PORT"
            raise ConfigError(
                Problem(
                    name,
                    environment.get(name) or None,
                    rule="is not set" if is_port else "is not a port",
                    fix="set MASTER_ADDR and MASTER_PORT to the address and port of the first rank, like torchrun",
                    where="environment",
                )
            )


def simulated_rank(environment: Mapping[str, str], world_size: int) -> int:
    """Return the rank to build with ``comm.mode="fake_backend"``: RANK, or 0.

    Raises:
        ConfigError: a launcher has started this process as one of several ranks,
            or RANK is outside of the world.

    >>> simulated_rank({"RANK": "511"}, 512), simulated_rank({}, 512)
    (511, 0)
    """
    if is_rank(environment):
        raise ConfigError(
            Problem(
                "comm.mode",
                "fake_backend",
                rule=(
                    "builds all ranks in one process, but a launcher has started this process as one of several ranks"
                ),
                fix="start it without torchrun or srun, with --nproc",
            )
        )
    # RANK selects the rank whose memory and layers are shown.
    text = environment.get("RANK") or "0"
    if not is_whole_number(text) or int(text) >= world_size:
        raise ConfigError(
            Problem(
                "RANK",
                text,
                rule=f"is not a rank of a world of {world_size}",
                fix=f"use 0 to {world_size - 1}",
                where="environment",
            )
        )
    return int(text)


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("gpu[07-09,12],login"), first_host("a1,a2"), first_host("rack[1-2]n[01-04]")
    ('gpu07', 'a1', 'rack1n01')
    """
    # Commas inside brackets separate numbers of one host name.
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    if first:
        return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group(0))
    return ""


def count_accelerators(device: str = "auto") -> int:
    """Return the number of accelerators that PyTorch can use. ``device`` is ``training.device``.

    Imports torch, which takes a second or more, only if a device file exists.
    """
    # Apple's GPU has no device file.
    is_mac = device == "mps" and sys.platform == "darwin"
    if device == "cpu" or not (is_mac or has_device_files()):
        return 0
    from shardtrain.ops import accelerator

    found_type = accelerator.device_type()
    wanted = ACCELERATOR_TYPES if device == "auto" else (device,)
    if found_type not in wanted:
        return 0
    return accelerator.module(found_type).device_count()  # type: ignore[no-any-return]


def device_type(wanted: str, accelerators: int) -> str:
    """Return the device type that ``training.device`` selects, given the result of ``count_accelerators``."""
    if wanted != "auto":
        return wanted
    # Import torch only if a device was counted.
    if not accelerators:
        return "cpu"
    from shardtrain.ops import accelerator

    return accelerator.device_type()


def has_device_files() -> bool:
    """True if the system has a device file of a GPU: NVIDIA, AMD, or the Windows Subsystem for Linux.

    All graphics cards share the name of Intel's device file, so it only counts
    if PyTorch was built for Intel GPUs.
    """
    if any(glob.glob(pattern) for pattern in ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")):
        return True
    if not glob.glob("/dev/dri/renderD*"):
        return False
    # Find the package folder without importing torch, which takes a second.
    package = importlib.util.find_spec("torch")
    folders = (package.submodule_search_locations or ()) if package else ()
    return any(Path(folder, "lib", "libtorch_xpu.so").exists() for folder in folders)


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use. A
    container's limit counts if it is visible.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_processes(
    config: Config,
    requested: int | None,
    environment: Mapping[str, str],
    accelerators: int,
    cores: int,
) -> ProcessCount:
    """Choose the number of ranks on this machine: as requested, one per accelerator, or two on a CPU.

    If the shard degree is automatic, the number is a multiple of the product of the other degrees. If it is
    fixed, the number is the product of all degrees. ``requested`` is ``--nproc``. ``requested_processes`` lists
    the variables.

    Raises:
        ConfigError: ``--nproc`` or a variable is not a positive integer.
    """
    # A request takes precedence over everything that is found.
    requested_count = requested_processes(requested, environment)
    if requested_count:
        return requested_count
    # A fixed mesh has a fixed number of ranks.
    fixed_size = mesh_size(config)
    if fixed_size:
        return ProcessCount(fixed_size, "the product of the parallelism degrees")
    multiple = other_degrees(config)
    if accelerators:
        # The shard degree covers all accelerators that the other degrees leave free.
        count = max(accelerators // multiple, 1) * multiple
        return ProcessCount(
            _fit_batch(config, count, multiple),
            f"{accelerators} accelerator{'s' * (accelerators != 1)} found",
        )
    # Slurm may have assigned devices that this process cannot see.
    given = unseen_devices(environment)
    if given:
        return given
    # On a CPU, two ranks are enough to test a multi-rank run, and more would compete for the cores.
    count = -(-min(2, cores) // multiple) * multiple
    return ProcessCount(
        _fit_batch(config, count, multiple), f"no accelerator found, {cores} CPU cores"
    )


def choose_processes_here(config: Config, requested: int | None) -> ProcessCount:
    """Choose the number of ranks from this process's environment; see ``choose_processes``."""
    return choose_processes(
        config,
        requested,
        os.environ,
        count_accelerators(config.training.device),
        usable_cores(),
    )


def requested_processes(
    requested: int | None, environment: Mapping[str, str]
) -> ProcessCount | None:
    """Return the number of ranks that ``--nproc`` or a variable requests, or None.

    The variables are NGPU, PET_NPROC_PER_NODE if it is a number, and RUNAI_NUM_OF_GPUS, in this order. A
    fraction of a GPU counts as one GPU.

    Raises:
        ConfigError: the first variable that is set is not a positive integer.

    >>> requested_processes(None, {"PET_NPROC_PER_NODE": "auto", "RUNAI_NUM_OF_GPUS": "0.5"})
    ProcessCount(count=1, reason='from RUNAI_NUM_OF_GPUS')
    """
    if requested is not None:
        return ProcessCount(_at_least_one("--nproc", requested, "command line"), "from --nproc")
    for name in ("NGPU", "PET_NPROC_PER_NODE", "RUNAI_NUM_OF_GPUS"):
        text = environment.get(name, "")
        # Run:ai assigns fractions of a GPU.
        if name == "RUNAI_NUM_OF_GPUS" and re.fullmatch(r"0?\.\d*[1-9]\d*|\d+\.0+", text):
            text = str(max(1, int(float(text))))
        # torchrun's variable may name a kind of device, and a platform may assign no device.
        undecided: tuple[str, ...] = ()
        if name == "PET_NPROC_PER_NODE":
            undecided = ("auto", "gpu", "cpu")
        elif name == "RUNAI_NUM_OF_GPUS":
            undecided = ("0",)
        if text and text not in undecided:
            return ProcessCount(_at_least_one(name, text, "environment"), f"from {name}")
    return None


def unseen_devices(environment: Mapping[str, str]) -> ProcessCount | None:
    """Return one rank per device that Slurm has assigned to this task's node, if
    no device is visible, or else None.

    Devices are not visible in a container without ``--nv``, or on a node without a driver.

    >>> unseen_devices({"SLURM_PROCID": "0", "SLURM_JOB_GPUS": "0,1,2,3"})
    ProcessCount(count=4, reason='SLURM_JOB_GPUS=0,1,2,3, but no device is visible')
    >>> unseen_devices({"SLURM_JOB_GPUS": "0,1"})  # the shell of an allocation, not a task of it
    """
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        text = ""
        if "SLURM_PROCID" in environment:
            text = environment.get(name, "")
        # Either a number of devices, or a list of their indices.
        count = len([index for index in text.split(",") if index])
        if name == "SLURM_GPUS_ON_NODE" and is_whole_number(text):
            count = int(text)
        if count:
            return ProcessCount(count, f"{name}={text}, but no device is visible")
    return None


def mesh_size(config: Config) -> int | None:
    """Return the product of the parallelism degrees, or None if the shard degree is automatic."""
    shard = config.parallelism.data_parallel_shard_degree
    if shard == -1:
        return None
    return other_degrees(config) * shard


def rank_environment(
    rank: int, world_size: int, meeting: int | Path, run_id: str, restarts: int = 0, job: str = ""
) -> dict[str, str]:
    """Return the environment variables of one local rank, with torchrun's names.

    Args:
        meeting: Private rendezvous folder of the ranks, or a port of this
            machine that another process serves.
        job: Result of ``goodput.ledger.new_job``, which contains the
            start time of the first attempt.
    """
    # Time before the first attempt is accounted as start. Time between attempts is accounted as restart.
    begun = job.partition(":")[2]
    if restarts:
        begun = str(time.time())
    # Ranks of one machine meet in a private folder, and others at a port.
    place = {STORE: str(meeting)}
    if isinstance(meeting, int):
        place = {"MASTER_ADDR": LOCAL_ADDRESS, "MASTER_PORT": str(meeting)}
    account = {ledger.JOB: job, ledger.STARTED: begun} if job else {}
    return {
        **account,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ROLE_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        **place,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def set_allocator_default(environment: MutableMapping[str, str]) -> None:
    """Allow CUDA's allocator to extend its segments, unless the user has configured the allocator.

    Must be called before torch is imported.
    """
    # PyTorch reads both names, and the older one may be the user's.
    if has_device_files() and "PYTORCH_CUDA_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def compute_threads(environment: Mapping[str, str], local_ranks: int, cores: int = 0) -> int:
    """Return the number of threads with which each rank of this host computes.

    >>> compute_threads({"OMP_NUM_THREADS": "3"}, 2, 8), compute_threads({}, 2, 8), compute_threads({}, 9, 8)
    (3, 4, 1)
    """
    # A value that is not a number is left to PyTorch.
    chosen = environment.get("OMP_NUM_THREADS", "")
    if is_whole_number(chosen) and int(chosen) > 0:
        return int(chosen)
    return max(1, (cores or usable_cores()) // local_ranks)


def set_process_defaults(
    environment: MutableMapping[str, str],
    local_ranks: int,
    cores: int,
    alone: bool,
) -> None:
    """Set defaults of variables that torch reads when it is imported. Values that the user has set are kept.

    The ranks share the cores evenly. If torch is already imported, as in a verb that reads a checkpoint
    first, also set its thread count. If each rank used all cores, ranks would wait for each other's threads,
    and round differently from the run. C++ traces of broken connections are disabled, because the rank's
    exception reports them in one line.

    Args:
        alone: True if all ranks are on this machine. They then communicate over loopback, so the run is not
            reachable from outside. Variables of ranks of a platform or launcher are removed, because a single
            rank would wait for other ranks.

    Raises:
        ConfigError: GLOO_SOCKET_IFNAME names an interface that does not exist, or the compiler cannot use its cache.
    """
    library_environment.require_compiler_cache(environment)
    # By default, each rank would use one thread per core of the machine.
    defaults = {
        "OMP_NUM_THREADS": str(compute_threads({}, local_ranks, cores)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if alone:
        loopback = "lo" if sys.platform == "linux" else "lo0"
        defaults |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        for name in (*RANK_NAMES, STORE, NETWORK):
            environment.pop(name, None)
    for name, value in defaults.items():
        environment.setdefault(name, value)
    # A verb may have imported torch before it knew the number of ranks.
    threads = environment["OMP_NUM_THREADS"]
    is_for_this_process = environment is os.environ and "torch" in sys.modules
    if is_for_this_process and is_whole_number(threads) and int(threads):
        sys.modules["torch"].set_num_threads(int(threads))
    # Report an unknown interface by the name of its variable, before gloo fails to use it.
    interfaces_named = environment.get("GLOO_SOCKET_IFNAME", "")
    interfaces = [name for _, name in socket.if_nameindex()]
    if any(name and name not in interfaces for name in interfaces_named.split(",")):
        raise ConfigError(
            Problem(
                "GLOO_SOCKET_IFNAME",
                interfaces_named,
                rule="is not a network interface of this machine",
                fix=f"use {' or '.join(interfaces)}, or unset it",
            )
        )


def _at_least_one(name: str, value: int | str, where: str) -> int:
    count = int(value) if isinstance(value, int) or is_whole_number(value) else 0
    if count < 1:
        raise ConfigError(
            Problem(
                name,
                value,
                rule="must be a positive integer",
                fix="use 1 or more",
                where=where,
            )
        )
    return count


def _fit_batch(config: Config, count: int, multiple: int) -> int:
    """Return the largest number of ranks up to ``count`` that divides the global batch, or else ``count``."""
    sizes = ramps.batch_sizes(config.training)
    # Ranks of one model replica read the same rows.
    model_ranks = multiple // config.parallelism.data_parallel_replicate_degree
    # More ranks than the batch allows would make the default number of ranks an error.
    for candidate in range(count, 0, -multiple):
        rows_per_pass = config.training.local_batch_size * (candidate // model_ranks)
        if all(size % rows_per_pass == 0 for size in sizes):
            return candidate
    return count
