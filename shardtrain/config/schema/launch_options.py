"""Options of ``shardtrain launch``. The docstring of the package explains the conventions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardtrain.facts.ports import RENDEZVOUS_PORT


@dataclass(frozen=True)
class LaunchSSH:
    """Hosts that are reached by ssh."""

    # Hosts.
    hosts: list[str] = field(default_factory=list)
    """Hosts; the first one serves the rendezvous: ["node1", "user@node2:2222"] (shardtrain)."""
    hostfile: str | None = None
    """File with one host per line, in DeepSpeed's format: ``node1 slots=8`` (shardtrain)."""
    include: str = ""
    """Hosts of the hostfile to use, or devices of them: "node1@node2:0,2" (shardtrain)."""
    exclude: str = ""
    """Hosts of the hostfile to exclude, or devices of them: "node1:0@node3" (shardtrain)."""
    # Connections.
    config_file: str | None = None
    """A file instead of ~/.ssh/config, for keys, users, ports and jump hosts (shardtrain)."""
    via: Literal["ssh", "pdsh"] = "ssh"
    """Program that starts the connections: this one, or pdsh, which then runs ssh for each host (shardtrain)."""
    connect_timeout_seconds: int = 10
    """Time limit for a host to answer; then the launch is cancelled and names it (shardtrain)."""
    rendezvous_host: str | None = None
    """Name or address of the first host for the others, for example over InfiniBand; found
    automatically unless set (shardtrain).
    """
    rendezvous_port: int = RENDEZVOUS_PORT
    """Port of the rendezvous on the first host (shardtrain)."""


@dataclass(frozen=True)
class LaunchSlurm:
    """Options of sbatch and srun."""

    # Placement and time limit.
    partition: str | None = None
    """Partition; the cluster's default unless set (shardtrain)."""
    account: str | None = None
    """Account that is charged (shardtrain)."""
    qos: str | None = None
    """Quality of service (shardtrain)."""
    time_limit_minutes: int | None = None
    """Time limit of the job. The run saves and stops before it; with requeue it is queued again (shardtrain)."""
    requeue: bool = True
    """Requeue the job after a request to stop, once it has saved (exit code 75). After failures
    that a retry may fix (6, 8, 76, a killed task), requeue it at most launch.max_restarts times, or
    6 if that is 0 (shardtrain).
    """
    # Start of the processes.
    container: Literal["none", "apptainer", "singularity", "pyxis"] = "none"
    """Program that runs launch.image on the nodes; pyxis is enroot's plugin for srun (shardtrain)."""
    host_suffix: str = ""
    """Added to a node's name to reach it over another network: "i" or "-ib0" on sites that
    name IP over InfiniBand so (shardtrain).
    """
    directives: list[str] = field(default_factory=list)
    """More options of sbatch: ["--exclusive", "--constraint=h100"] (shardtrain)."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the run, copied unchanged: ["module load cuda"] (shardtrain)."""
    # Job arrays.
    sweep: list[str] = field(default_factory=list)
    """A job array. Each entry has the overrides of one task: "--optimizer.lr 1e-4". Task I writes to
    job.dump_folder/sweep-I (shardtrain)."""
    sweep_at_once: int | None = None
    """Tasks of the array that may run at the same time; all by default (shardtrain)."""


@dataclass(frozen=True)
class LaunchKubernetes:
    """Fields of the manifest other than the pods."""

    kind: Literal["pytorchjob", "trainjob", "jobset"] = "pytorchjob"
    """Resource: PyTorchJob of Kubeflow's training operator (v1), TrainJob of Kubeflow Trainer (v2), or JobSet
    (shardtrain)."""
    namespace: str = "default"
    """Namespace (shardtrain)."""
    queue: str | None = None
    """Kueue's queue, which starts the job when its quota allows it (shardtrain)."""
    service_account: str | None = None
    """Service account of the pods (shardtrain)."""
    image_pull_secret: str | None = None
    """Secret with the registry's credentials (shardtrain)."""
    priority_class: str | None = None
    """Priority class of the pods (shardtrain)."""
    node_selector: list[str] = field(default_factory=list)
    """Labels that nodes must have: ["node.kubernetes.io/instance-type=p5.48xlarge"] (shardtrain)."""


@dataclass(frozen=True)
class LaunchRunai:
    """Options of the runai command."""

    cli: Literal["v2", "v1"] = "v2"
    """Installed command line: v2 has ``runai training``, v1 ``runai submit`` (shardtrain)."""
    project: str | None = None
    """Project; by default the one of ``runai config project`` (shardtrain)."""
    node_pools: list[str] = field(default_factory=list)
    """Node pools, the preferred first (shardtrain)."""


@dataclass(frozen=True)
class Launch:
    """Resources and settings that ``shardtrain launch`` requests from a cluster. ``train`` ignores them."""

    # Nodes and devices.
    name: str = "shardtrain"
    """Name of the job: small letters, digits and dashes (shardtrain)."""
    nodes: int = 1
    """Machines or pods (shardtrain)."""
    min_nodes: int | None = None
    """Fewest nodes of an elastic run, when others are lost; nodes by default (shardtrain)."""
    devices_per_node: int | None = None
    """Accelerators to request on each node; unset: none (shardtrain)."""
    device: str | None = None
    """Name of the device, as in ``shardtrain plan --device``, or a file of one: "h100". If the plan
    does not fit, the run is refused before it is submitted. Unset: no plan (shardtrain).
    """
    device_resource: str = "nvidia.com/gpu"
    """Name of the accelerator resource in Kubernetes (shardtrain)."""
    nproc_per_node: int | None = None
    """Ranks on each node; by default devices_per_node, or one per device found there (shardtrain)."""
    # Resources of a node.
    cpus_per_node: int | None = None
    """CPU cores to request on each node (shardtrain)."""
    memory_gib_per_node: int | None = None
    """Memory to request on each node, in GiB (shardtrain)."""
    shared_memory_gib: int | None = None
    """Size of /dev/shm in pods, in GiB, for NCCL and data workers; the platform's default (64 MiB) unless set
    (shardtrain)."""
    # Program and folders.
    image: str | None = None
    """Container image with this package, or an Apptainer file (shardtrain)."""
    python: str = "python3"
    """Python interpreter on the nodes, with this package (shardtrain)."""
    workdir: str | None = None
    """Folder on the nodes where relative paths start (shardtrain)."""
    mounts: list[str] = field(default_factory=list)
    """SOURCE:PATH or SOURCE:PATH:ro. SOURCE is a volume claim on kubernetes and runai, and a folder
    of the node for the containers of slurm (shardtrain).
    """
    # Environment.
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the run. Not for secrets: use secrets or forward_env (shardtrain)."""
    forward_env: list[str] = field(default_factory=list)
    """Names of variables of this machine that ssh and slurm pass on; their values are not
    written to any file (shardtrain).
    """
    secrets: dict[str, str] = field(default_factory=dict)
    """Variables that kubernetes and runai read from a secret of the cluster:
    NAME = "SECRET/KEY" (shardtrain).
    """
    fabric: Literal["none", "efa", "infiniband"] = "none"
    """Sets the variables of a network between nodes; env overrides them (shardtrain)."""
    # Failures.
    max_restarts: int = 0
    """Maximum number of restarts of the ranks after failures (``train --max_restarts``). On slurm
    also the maximum number of requeues after failures (shardtrain).
    """
    ssh: LaunchSSH = field(default_factory=LaunchSSH)
    slurm: LaunchSlurm = field(default_factory=LaunchSlurm)
    kubernetes: LaunchKubernetes = field(default_factory=LaunchKubernetes)
    runai: LaunchRunai = field(default_factory=LaunchRunai)
