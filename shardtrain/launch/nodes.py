"""Determine this node's position in a multi-node run from the variables of all platforms.

The first of these sources that is set determines each setting: an option of the command line, a variable of
shardtrain, PET_* (torchrun's variables, which Kubeflow sets), a variable of Run:ai or PyTorchJob, Slurm,
SkyPilot, or an indexed Kubernetes job. Without any of them, the run has one node.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardtrain.config import ramps
from shardtrain.config.command_line import CommandLine
from shardtrain.config.load import Loaded
from shardtrain.config.machine_rules import mesh_notes
from shardtrain.config.schema import Config
from shardtrain.facts.ports import RENDEZVOUS_PORT
from shardtrain.launch import environment
from shardtrain.launch.environment import ProcessCount
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.variables import is_whole_number, number

JOIN_SECONDS = 600
CLOCKS_APART_SECONDS = 5.0
"""Clock difference that is reported.

torchrun's rendezvous sends a heartbeat every 5 s, and drops a node whose last heartbeat is 15 s old by the
reader's wall clock. With such a difference it may drop a live node.
"""

# Variables of each setting. The first one that is set counts.
NNODES = ("SHARDTRAIN_NNODES", "OVERRIDE_PET_NNODES", "PET_NNODES")
NODE_RANK = (
    "SHARDTRAIN_NODE_RANK",
    "PET_NODE_RANK",
    "RANK",
    "SLURM_NODEID",
    "SKYPILOT_NODE_RANK",
    "JOB_COMPLETION_INDEX",
)
RUN_ID = ("SHARDTRAIN_RDZV_ID", "PET_RDZV_ID", "RUNAI_JOB_UUID", "SLURM_JOB_ID", "RUNAI_JOB_NAME")
RESTARTS = ("MAX_RESTARTS", "PET_MAX_RESTARTS")
# Variables that count mpirun's processes.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
# Variables that identify a Run:ai job.
_RUNAI = ("RUNAI_JOB_NAME", "RUNAI_JOB_UUID", "RUNAI_PROJECT", "RUNAI_NUM_OF_GPUS")


@dataclass(frozen=True)
class Nodes:
    """This node's position in a run of ``least`` to ``most`` nodes with the rendezvous ``endpoint`` (HOST:PORT)."""

    least: int
    most: int
    endpoint: str
    node_rank: int | None
    run_id: str
    local_address: str | None
    max_restarts: int
    join_seconds: int
    reason: str
    rendezvous: Mapping[str, str] = field(default_factory=dict)
    """Settings of PyTorch's rendezvous, such as last_call_timeout in seconds.
    They override the fields above.
    """
    counts: Sequence[int] = ()
    """Node counts that can work, ascending. Empty if all counts from ``least`` to ``most`` work."""
    first_decides: bool = False
    """True if the first node count determines the global batch size. Later
    node counts must then divide it.
    """

    @property
    def hosts_meeting(self) -> bool | None:
        """True if this node hosts the rendezvous. If None, PyTorch compares host names."""
        if self.node_rank is None:
            return None
        return self.node_rank == 0

    @property
    def refusal_key(self) -> str:
        """Key in the store of the rendezvous under which a node writes the reason why it cannot run."""
        return f"shardtrain/{self.run_id}/refused"


def find(arguments: CommandLine, names: Mapping[str, str]) -> Nodes | None:
    """Return this node's position in a multi-node run, or None if there is only one node.

    Raises:
        ConfigError: a variable is not a number, or the rendezvous endpoint is unknown.
    """
    # A rank of torchrun cannot start other ranks.
    if arguments.nnodes and "TORCHELASTIC_RUN_ID" in names:
        raise ConfigError(
            Problem(
                "--nnodes",
                arguments.nnodes,
                rule="requires one process per node, but torchrun has started this process as a rank",
                fix="remove torchrun or --nnodes",
                where="command line",
            )
        )
    # Determine the number of nodes, and this node's rank.
    name, text = _count(arguments, names)
    # Without a number of nodes, the run has one node, unless something names another node.
    if not text:
        _refuse_half(arguments, names)
        return None
    match = re.fullmatch(r"(?:([1-9][0-9]{0,5}):)?([1-9][0-9]{0,5})", text)
    if not match or int(match[1] or 1) > int(match[2]):
        raise ConfigError(
            Problem(
                name,
                text,
                rule="is not a number of nodes",
                fix="use 2, or 1:4 for an elastic run",
                where=_at(name),
            )
        )
    least = int(match[1] or match[2])
    most = int(match[2])
    # With one node, read only the rank variable that belongs to the count. Others, such as SLURM_NODEID, may
    # number the nodes of a larger job.
    variables: tuple[str, ...] = (name.replace("NNODES", "NODE_RANK"),)
    if most > 1:
        variables = NODE_RANK
    rank = _number("--node_rank", arguments.node_rank, variables, names, least=0)
    if rank is not None and rank >= most:
        raise ConfigError(
            Problem(
                name,
                text,
                rule=f"is the number of nodes, but this is node {rank}",
                fix="count from 0",
            )
        )
    _refuse_several_tasks(name, text, names)
    if most == 1:
        return None
    # The address at which the nodes meet.
    endpoint = _endpoint(arguments, names, name, text)
    where = re.fullmatch(r"[^\s/]+:([0-9]{1,5})", endpoint)
    if not where or not 0 < int(where[1]) < 65_536:
        raise ConfigError(
            Problem(
                "rendezvous",
                endpoint,
                rule="is not a host and a numeric port",
                fix="use the form HOST:PORT",
            )
        )
    # An elastic platform renumbers nodes when pods change, so ignore its rank.
    is_rank_chosen = "SHARDTRAIN_NODE_RANK" in names or arguments.node_rank is not None
    if least != most and not is_rank_chosen:
        rank = None
    local_address = names.get("SHARDTRAIN_LOCAL_ADDR") or names.get("PET_LOCAL_ADDR")
    if not local_address:
        local_address = _by_suffix(names)
    return Nodes(
        least=least,
        most=most,
        endpoint=endpoint,
        node_rank=rank,
        run_id=next((names[name] for name in RUN_ID if names.get(name)), "shardtrain"),
        local_address=local_address,
        max_restarts=_number("--max_restarts", arguments.max_restarts, RESTARTS, names, least=0)
        or 0,
        join_seconds=_number("", None, ("RDZV_TIMEOUT",), names, least=1) or JOIN_SECONDS,
        reason=f"{name}={text}",
        rendezvous=_settings(names.get("PET_RDZV_CONF", "")),
    )


def _settings(text: str) -> dict[str, str]:
    """Parse torchrun's --rdzv-conf, which Kubeflow sets from a PyTorchJob's elasticPolicy.rdzvConf.

    >>> _settings("last_call_timeout=3, keep_alive_interval=1")
    {'last_call_timeout': '3', 'keep_alive_interval': '1'}
    """
    pairs = [pair.strip().partition("=") for pair in text.split(",") if pair.strip()]
    if any(not re.fullmatch(r"[a-z_]+", key) or not value for key, _, value in pairs):
        raise ConfigError(
            Problem(
                "PET_RDZV_CONF",
                text,
                rule="is not a list of settings",
                fix="use the form last_call_timeout=10,keep_alive_interval=2",
                where="environment",
            )
        )
    return {key: value for key, _, value in pairs}


def _count(arguments: CommandLine, names: Mapping[str, str]) -> tuple[str, str]:
    """Return name and value of the variable with the number of nodes, or two
    empty strings for a single node.
    """
    # The order of sources is that of the module's docstring.
    if arguments.nnodes:
        return "--nnodes", arguments.nnodes
    for name in NNODES:
        if names.get(name):
            return name, names[name]
    # PyTorchJob and Run:ai count nodes in WORLD_SIZE, but torchrun counts ranks.
    # Other variables distinguish them.
    world = names.get("WORLD_SIZE", "")
    if world not in ("", "1") and not environment.is_rank(names):
        if any(name in names for name in _RUNAI):
            return "WORLD_SIZE", world
        missing = " and ".join(name for name in ("RANK", "LOCAL_RANK") if not names.get(name))
        raise ConfigError(
            Problem(
                "WORLD_SIZE",
                world,
                rule=f"is set without {missing}, so it may count nodes or ranks",
                fix="set SHARDTRAIN_NNODES if it counts nodes, or start ranks with torchrun or srun",
                where="environment",
            )
        )
    if environment.is_slurm_node(names):
        return "SLURM_STEP_NUM_NODES", names["SLURM_STEP_NUM_NODES"]
    if names.get("SKYPILOT_NUM_NODES"):
        return "SKYPILOT_NUM_NODES", names["SKYPILOT_NUM_NODES"]
    # mpirun sets no variable that PyTorch reads, so each of its processes
    # would train the full run separately.
    mpi = next((name for name in _MPI_SIZES if names.get(name, "1") != "1"), "")
    if mpi and not environment.is_rank(names):
        raise ConfigError(
            Problem(
                mpi,
                names[mpi],
                rule="was set by mpirun, whose processes are not ranks, so each would train separately",
                fix="start shardtrain once per node with --nnodes, or start ranks with torchrun or srun",
                where="environment",
            )
        )
    return "", ""


def _refuse_half(arguments: CommandLine, names: Mapping[str, str]) -> None:
    """Raise ConfigError if there are other nodes but their number is unknown.

    This node would train without them.
    """
    name = ""
    value = ""
    given = arguments.rdzv_endpoint or arguments.node_rank
    if given is not None:
        name = "--rdzv_endpoint" if arguments.rdzv_endpoint else "--node_rank"
        value = str(given)
        fix = "use --nnodes or set PET_NNODES"
    else:
        # Node 0 may be the only node, so a variable with 0 proves nothing.
        for variable in NODE_RANK[:2]:
            if not name and names.get(variable, "0") not in ("", "0"):
                name = variable
                value = names[variable]
        fix = f"set PET_NNODES, or unset {name}"
    if name:
        raise ConfigError(
            Problem(
                name,
                value,
                rule="is for one of several nodes, but the number of nodes is not set",
                fix=fix,
                where=_at(name),
            )
        )


def _refuse_several_tasks(name: str, text: str, names: Mapping[str, str]) -> None:
    """Raise ConfigError if srun has started several tasks on a node, because each
    would start all ranks of the node.
    """
    tasks = names.get("SLURM_STEP_NUM_TASKS", "")
    hosts = names.get("SLURM_STEP_NUM_NODES", "")
    # Outside of srun the counts are not set.
    if name != "SHARDTRAIN_NNODES" or not is_whole_number(tasks) or not is_whole_number(hosts):
        return
    if int(tasks) > int(hosts):
        raise ConfigError(
            Problem(
                name,
                text,
                rule=f"requires one task per node, but srun has started {tasks} tasks on {hosts} nodes",
                fix="use srun --ntasks-per-node=1, or unset it",
                where="environment",
            )
        )


def _endpoint(arguments: CommandLine, names: Mapping[str, str], why: str, text: str) -> str:
    """Return the rendezvous endpoint as HOST:PORT."""
    for endpoint in (
        arguments.rdzv_endpoint,
        names.get("SHARDTRAIN_RDZV_ENDPOINT"),
        names.get("PET_RDZV_ENDPOINT"),
    ):
        # The port is optional.
        if endpoint:
            if ":" in endpoint:
                return endpoint
            return f"{endpoint}:{RENDEZVOUS_PORT}"
    for address, port in (("PET_MASTER_ADDR", "PET_MASTER_PORT"), ("MASTER_ADDR", "MASTER_PORT")):
        if names.get(address):
            return f"{names[address]}:{names.get(port) or RENDEZVOUS_PORT}"
    # Slurm and SkyPilot list the nodes in order. The first one hosts the rendezvous.
    first = environment.first_host(
        names.get("SLURM_STEP_NODELIST") or names.get("SLURM_JOB_NODELIST", "")
    )
    if first and environment.is_slurm_node(names):
        return f"{first}:{environment.slurm_port(names)}"
    if names.get("SKYPILOT_NODE_IPS"):
        return f"{names['SKYPILOT_NODE_IPS'].split()[0]}:{RENDEZVOUS_PORT}"
    raise ConfigError(
        Problem(
            why,
            text,
            rule="means several nodes, but the rendezvous endpoint is not set",
            fix="use --rdzv_endpoint HOST:PORT, or set MASTER_ADDR",
            where=_at(why),
        )
    )


def _by_suffix(names: Mapping[str, str]) -> str | None:
    """Return this node's name with the suffix launch.slurm.host_suffix, which selects another network, or
    None without it.

    >>> _by_suffix({"SHARDTRAIN_HOST_SUFFIX": "i", "SLURMD_NODENAME": "jwb0001"}), _by_suffix({})
    ('jwb0001i', None)
    """
    suffix = names.get("SHARDTRAIN_HOST_SUFFIX")
    name = names.get("SLURMD_NODENAME")
    return f"{name}{suffix}" if suffix and name else None


def _number(
    flag: str, given: int | None, variables: tuple[str, ...], names: Mapping[str, str], least: int
) -> int | None:
    if given is not None:
        return given
    for name in variables:
        if names.get(name):
            return number(names, name, "", least)
    return None


def _at(name: str) -> str:
    return "command line" if name.startswith("-") else "environment"


def count_nodes(nodes: Nodes, loaded: Loaded, local_ranks: int) -> Nodes:
    """Determine the node counts with which an elastic run can work. Print a note
    if some counts in its range cannot.

    Raises:
        ConfigError: no node count can work.
    """
    # Try every count that the range allows.
    problems = {}
    for count in range(nodes.least, nodes.most + 1):
        problems[count] = next(mesh_notes(loaded, count * local_ranks), None)
    counts = [count for count in problems if problems[count] is None]
    # Name the largest count that cannot work, and why.
    name, _, text = nodes.reason.partition("=")
    for count in sorted({*problems} - {*counts})[-1:]:
        reason = f"with {count}, {problems[count]}"
        if not counts:
            raise ConfigError(
                Problem(
                    name,
                    text,
                    rule=f"does not include a usable number of nodes: {reason}",
                    fix="choose other numbers of nodes",
                    where=_at(name),
                )
            )
        working = " or ".join(map(str, counts))
        print(
            f"note: {name}={text}: only {working} nodes can work, and additional nodes wait; {reason}",
            file=sys.stderr,
            flush=True,
        )
    return replace(
        nodes, counts=counts, first_decides=not ramps.batch_sizes(loaded.config.training)
    )


def choose_processes_here(config: Config, requested: int | None, nodes: Nodes) -> ProcessCount:
    """Choose the number of ranks of this node from its environment; see ``choose_processes``."""
    accelerators = environment.count_accelerators(config.training.device)
    return choose_processes(
        config, requested, os.environ, nodes, accelerators, environment.usable_cores()
    )


def choose_processes(
    config: Config,
    requested: int | None,
    names: Mapping[str, str],
    nodes: Nodes,
    accelerators: int,
    cores: int,
) -> ProcessCount:
    """Choose this node's number of ranks: as requested, one per accelerator, its share of the mesh,
    or two on a CPU.

    Raises:
        ConfigError: a variable is not a number.
    """
    requested_count = environment.requested_processes(requested, names)
    if requested_count:
        return requested_count
    if accelerators:
        return ProcessCount(
            accelerators, f"{accelerators} accelerator{'s' * (accelerators != 1)} found"
        )
    num_mesh_ranks = environment.mesh_size(config)
    if num_mesh_ranks and num_mesh_ranks % nodes.most == 0:
        return ProcessCount(num_mesh_ranks // nodes.most, "its share of the parallelism degrees")
    given = environment.unseen_devices(names)
    if given:
        return given
    return ProcessCount(min(2, cores), f"no accelerator found, {cores} CPU cores")
