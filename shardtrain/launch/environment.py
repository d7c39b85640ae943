"""What the environment says: is this process a rank already, how many ranks fit here, which of them may speak.

Nothing here imports torch unless a device file shows that there is an accelerator to count.
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

from shardtrain.config.derived import other_degrees
from shardtrain.config.schema import Config
from shardtrain.facts.devices import ACCELERATOR_TYPES
from shardtrain.launch.goodput import ledger
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.private_network import NETWORK
from shardtrain.utils.process import STORE, meeting_folder

LOCAL_ADDRESS = "127.0.0.1"
PORTS_FROM_JOB_ID = 10_000
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class ProcessCount:
    """How many ranks to start on this machine, and the reason in words for the log."""

    count: int
    reason: str


def is_rank(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has already made this process one rank of several.

    RANK and WORLD_SIZE alone do not count: PyTorchJob and Run:ai set them per node. LOCAL_RANK beside them does, and
    so does torchrun's own TORCHELASTIC_RUN_ID.

    >>> is_rank({"RANK": "0", "WORLD_SIZE": "2"}), is_rank({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    (False, True)
    """
    return _was_launched(environment) or is_slurm_rank(environment)


def _was_launched(environment: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environment or all(environment.get(name) for name in RANK_NAMES)


def is_slurm_rank(environment: Mapping[str, str]) -> bool:
    """Whether this is one of several tasks of one srun, and no node that starts ranks (SHARDTRAIN_NNODES, or below).

    The body of an sbatch script is not one: it has no step.

    >>> is_slurm_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    False
    >>> is_slurm_rank({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"})
    True
    """
    if environment.get("SHARDTRAIN_NNODES") or is_slurm_node(environment):
        return False
    return "SLURM_PROCID" in environment and _number(environment, "SLURM_STEP_NUM_TASKS", "1", least=1) > 1


def is_slurm_node(environment: Mapping[str, str]) -> bool:
    """Whether srun has started one task on each of several nodes, and this one has several GPUs: it starts its ranks.

    >>> step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    >>> is_slurm_node(step), is_slurm_node({**step, "SLURM_GPUS_ON_NODE": "8"})
    (False, True)
    """
    nodes = environment.get("SLURM_STEP_NUM_NODES")
    tasks = environment.get("SLURM_STEP_NUM_TASKS")
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    return "SLURM_PROCID" in environment and nodes == tasks not in (None, "1") and gpus.isdecimal() and int(gpus) > 1


def adopt_slurm(environment: MutableMapping[str, str]) -> None:
    """Give a task of srun the names that PyTorch reads, and stop where the names of any launcher's rank cannot be.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; the port follows from the job id, so that two jobs on one
    node do not meet. What is set already is kept, unless Slurm says something else.

    Raises:
        ConfigError: a name is missing, is not a number, or contradicts another.
    """
    # srun has its own names for what torchrun calls RANK and WORLD_SIZE
    if is_slurm_rank(environment) and not _was_launched(environment):
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        names = {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID") or "0",
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "MASTER_ADDR": first_host(nodes) or LOCAL_ADDRESS,
            "MASTER_PORT": str(slurm_port(environment)),
        }
        environment.update({name: value for name, value in names.items() if not environment.get(name)})
        for name, source in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
            if environment[name] != names[name]:
                rule = f"is not {source}={names[name]}, which srun has set"
                raise ConfigError(Problem(name, environment[name], rule, f"unset {name}", "environment"))
    if not environment.get("LOCAL_WORLD_SIZE"):
        environment.pop("LOCAL_WORLD_SIZE", None)
    _require_rank(environment)


def slurm_port(environment: Mapping[str, str]) -> int:
    """The port at which the tasks of a job meet."""
    return 20_000 + _number(environment, "SLURM_JOB_ID", "0") % PORTS_FROM_JOB_ID


def _require_rank(environment: Mapping[str, str]) -> None:
    """Stop at a rank that cannot be: of leftovers of another launcher, or of an environment made by hand."""
    rank = _number(environment, "RANK", "")
    size = _number(environment, "WORLD_SIZE", "", least=1)
    _number(environment, "LOCAL_RANK", "")
    _number(environment, "LOCAL_WORLD_SIZE", "1", least=1)
    if rank >= size:
        rule = f"is not a rank of WORLD_SIZE={size}"
        fix = f"use 0 to {size - 1}"
        raise ConfigError(Problem("RANK", rank, rule, fix, "environment"))
    if size > 1 and not meeting_folder(environment):
        port = _number(environment, "MASTER_PORT", "", least=1)
        if port > 65_535 or not environment.get("MASTER_ADDR"):
            name = "MASTER_PORT" if port > 65_535 else "MASTER_ADDR"
            rule = "is not a port" if port > 65_535 else "is not set"
            fix = "set MASTER_ADDR and MASTER_PORT to where the first rank listens, as torchrun does"
            raise ConfigError(Problem(name, environment.get(name) or None, rule, fix, "environment"))


def _number(environment: Mapping[str, str], name: str, default: str, least: int = 0) -> int:
    text = environment.get(name) or default
    if not text:
        fix = (
            "unset what is left of another launcher (env | grep -E 'RANK|WORLD|TORCHELASTIC'), or set all of its names"
        )
        raise ConfigError(Problem(name, None, "is not set, and a launcher has set others", fix, "environment"))
    if not text.isdecimal() or int(text) < least:
        rule = f"must be a whole number from {least} on"
        raise ConfigError(Problem(name, text, rule, "correct it, or unset it", "environment"))
    return int(text)


def simulated_rank(environment: Mapping[str, str], world_size: int) -> int:
    """The rank that ``comm.mode="fake_backend"`` builds: RANK, or 0.

    Raises:
        ConfigError: a launcher has started this process as one of several, or RANK is not a rank of that world.

    >>> simulated_rank({"RANK": "511"}, 512), simulated_rank({}, 512)
    (511, 0)
    """
    if is_rank(environment):
        rule = "builds any number of ranks in one process, and a launcher has started this one as one rank of several"
        raise ConfigError(Problem("comm.mode", "fake_backend", rule, "start it without torchrun or srun, with --nproc"))
    text = environment.get("RANK") or "0"
    if not text.isdecimal() or int(text) >= world_size:
        rule = f"is not a rank of a world of {world_size}"
        fix = f"use 0 to {world_size - 1}"
        raise ConfigError(Problem("RANK", text, rule, fix, "environment"))
    return int(text)


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list.

    >>> first_host("gpu[07-09,12],login"), first_host("a1,a2"), first_host("rack[1-2]n[01-04]")
    ('gpu07', 'a1', 'rack1n01')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group(0)) if first else ""


def count_accelerators(device: str = "auto") -> int:
    """Accelerators that PyTorch can use, 0 where there are none; ``device`` is ``training.device``.

    Importing torch takes a second or more, so it is asked only where a device file exists.
    """
    if device == "cpu" or not has_device_files():
        return 0
    from shardtrain.ops import accelerator

    found = accelerator.found()
    usable = found in ACCELERATOR_TYPES if device == "auto" else found == device
    return accelerator.module(found).device_count() if usable else 0  # type: ignore[no-any-return]


def device_type(wanted: str, accelerators: int) -> str:
    """The type of device that ``training.device`` means here, given how many ``count_accelerators`` has found."""
    if wanted != "auto":
        return wanted
    if not accelerators:
        return "cpu"
    from shardtrain.ops import accelerator

    return accelerator.found()


def has_device_files() -> bool:
    """Whether the system shows the device file of a GPU: NVIDIA's, AMD's, or that of Windows' Linux subsystem.

    Intel's has the name that every graphics card has, and counts where PyTorch was built for it.
    """
    if any(glob.glob(pattern) for pattern in ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")):
        return True
    if not glob.glob("/dev/dri/renderD*"):
        return False
    # found without an import of torch, which takes a second
    package = importlib.util.find_spec("torch")
    folders = (package.submodule_search_locations or ()) if package else ()
    return any(Path(folder, "lib", "libtorch_xpu.so").exists() for folder in folders)


def usable_cores() -> int:
    """CPU cores that this process may use; a container's limit counts where the system reports it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_processes(
    config: Config, requested: int | None, environment: Mapping[str, str], accelerators: int, cores: int
) -> ProcessCount:
    """Decide how many ranks to start here: as asked, or one per accelerator, or two on a CPU, as the mesh allows.

    With a free shard degree the count is a multiple of the other degrees; with a fixed one it is their product.
    ``requested`` is ``--nproc``; for the variables that come next see ``asked_processes``.

    Raises:
        ConfigError: ``--nproc`` or a variable is not a whole number above 0.
    """
    asked = asked_processes(requested, environment)
    if asked:
        return asked
    whole = mesh_size(config)
    if whole:
        return ProcessCount(whole, "the product of the parallelism degrees")
    multiple = other_degrees(config)
    if accelerators:
        # as many whole models as fit: the shard degree takes the rest
        count = max(accelerators // multiple, 1) * multiple
        return ProcessCount(
            _fit_batch(config, count, multiple), f"{accelerators} accelerator{'s' * (accelerators != 1)} found"
        )
    given = unseen_devices(environment)
    if given:
        return given
    # on CPUs two ranks show that a run works on several, and more would share the same cores
    count = -(-min(2, cores) // multiple) * multiple
    return ProcessCount(_fit_batch(config, count, multiple), f"no accelerator found, {cores} CPU cores")


def choose_processes_here(config: Config, requested: int | None) -> ProcessCount:
    """Decide how many ranks to start on this machine; see ``choose_processes``."""
    return choose_processes(config, requested, os.environ, count_accelerators(config.training.device), usable_cores())


def asked_processes(requested: int | None, environment: Mapping[str, str]) -> ProcessCount | None:
    """The number of ranks that ``--nproc`` or the environment asks for on this machine; None where nothing does.

    NGPU, then PET_NPROC_PER_NODE where it is a number, then RUNAI_NUM_OF_GPUS, where a share of a GPU is one.

    Raises:
        ConfigError: what comes first is not a whole number above 0.

    >>> asked_processes(None, {"PET_NPROC_PER_NODE": "auto", "RUNAI_NUM_OF_GPUS": "0.5"})
    ProcessCount(count=1, reason='as RUNAI_NUM_OF_GPUS says')
    """
    if requested is not None:
        return ProcessCount(_at_least_one("--nproc", requested, "command line"), "as --nproc says")
    for name in ("NGPU", "PET_NPROC_PER_NODE", "RUNAI_NUM_OF_GPUS"):
        text = environment.get(name, "")
        if name == "RUNAI_NUM_OF_GPUS" and re.fullmatch(r"0?\.\d*[1-9]\d*|\d+\.0+", text):
            text = str(max(1, int(float(text))))
        undecided = text in ("auto", "gpu", "cpu") if name == "PET_NPROC_PER_NODE" else text == "0" and name != "NGPU"
        if text and not undecided:
            return ProcessCount(_at_least_one(name, text, "environment"), f"as {name} says")
    return None


def unseen_devices(environment: Mapping[str, str]) -> ProcessCount | None:
    """A rank for each device that Slurm has given to this task's node, where none can be seen; None where none is.

    That is a container without its devices (``--nv``), a node without a driver, or a training on CPUs in such a job.

    >>> unseen_devices({"SLURM_PROCID": "0", "SLURM_JOB_GPUS": "0,1,2,3"})
    ProcessCount(count=4, reason='SLURM_JOB_GPUS=0,1,2,3, of which none can be seen here')
    >>> unseen_devices({"SLURM_JOB_GPUS": "0,1"})  # the shell of an allocation, not a task of it
    """
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        text = environment.get(name, "") if "SLURM_PROCID" in environment else ""
        is_number = name == "SLURM_GPUS_ON_NODE" and text.isdecimal()
        count = int(text) if is_number else len([one for one in text.split(",") if one])
        if count:
            return ProcessCount(count, f"{name}={text}, of which none can be seen here")
    return None


def mesh_size(config: Config) -> int | None:
    """The product of the parallelism degrees; None where the shard degree takes what there is."""
    shard = config.parallelism.data_parallel_shard_degree
    return None if shard == -1 else other_degrees(config) * shard


def rank_environment(
    rank: int, world_size: int, meeting: int | Path, run_id: str, restarts: int = 0, job: str = ""
) -> dict[str, str]:
    """Variables of one local rank, the names of torchrun.

    ``meeting`` is the private folder in which the ranks meet, or a port of this machine that somebody else serves.
    ``job`` is that of ``goodput.ledger.new_job``: the first attempt began with it, the others begin now.
    """
    # the time before the first attempt counts as start, that between attempts as restart
    begun = str(time.time()) if restarts else job.partition(":")[2]
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
    """Let CUDA's allocator grow its segments, unless the user has configured it; before torch is imported."""
    if has_device_files() and "PYTORCH_CUDA_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def set_process_defaults(environment: MutableMapping[str, str], local_ranks: int, cores: int, alone: bool) -> None:
    """Fill in variables that torch reads when it is imported; a value that the user has set is kept.

    Where torch is there already, as in a verb that reads a checkpoint before it knows its ranks, it is given its
    threads: ranks that each use all cores wait for each other's threads, and round differently from the run.

    Ranks share the cores evenly, and leave C++ traces of a broken connection out of the terminal (the rank's own
    exception says the same in one line). With ``alone`` all ranks are on this machine and talk over its loopback
    interface, so that nothing of the run can be reached from outside; and what a platform says of ranks, or another
    launcher has left, is taken away: a single rank would wait for the others.

    Raises:
        ConfigError: GLOO_SOCKET_IFNAME names an interface that is not there.
    """
    # PyTorch takes one thread per core otherwise, in each of the ranks of a machine
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // local_ranks)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if alone:
        loopback = "lo" if sys.platform == "linux" else "lo0"
        defaults |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        for name in (*RANK_NAMES, STORE, NETWORK):
            environment.pop(name, None)
    for name, value in defaults.items():
        environment.setdefault(name, value)
    # a verb may have imported torch before it knew its ranks
    threads = environment["OMP_NUM_THREADS"]
    if environment is os.environ and "torch" in sys.modules and threads.isdecimal() and int(threads):
        sys.modules["torch"].set_num_threads(int(threads))
    named = environment.get("GLOO_SOCKET_IFNAME", "")
    own = [name for _, name in socket.if_nameindex()]
    if any(name and name not in own for name in named.split(",")):
        rule = "is not a network interface of this machine"
        raise ConfigError(Problem("GLOO_SOCKET_IFNAME", named, rule, f"use {' or '.join(own)}, or unset it"))


def _at_least_one(name: str, value: int | str, where: str) -> int:
    try:
        count = int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(Problem(name, value, "must be a whole number of processes above 0", "use 1 or more", where))
    return count


def _fit_batch(config: Config, count: int, multiple: int) -> int:
    """The largest number of ranks up to ``count`` over which the global batch divides; ``count`` where none does."""
    batch = config.training.global_batch_size
    if batch == -1:
        return count
    # ranks that hold one copy of the model read the same rows
    model_ranks = multiple // config.parallelism.data_parallel_replicate_degree
    for candidate in range(count, 0, -multiple):
        if batch % (config.training.local_batch_size * (candidate // model_ranks)) == 0:
            return candidate
    return count
