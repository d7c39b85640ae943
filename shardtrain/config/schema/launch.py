"""The options of ``shardtrain launch``: part of ``schema.py``, whose rules hold here too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class LaunchSSH:
    """Hosts that are reached by ssh."""

    hosts: list[str] = field(default_factory=list)
    """Hosts, the first of which serves the rendezvous: ["node1", "user@node2:2222"] (shardtrain)."""
    hostfile: str | None = None
    """File with a line for each host, as DeepSpeed's: ``node1 slots=8`` (shardtrain)."""
    include: str = ""
    """Hosts of the hostfile to use, and perhaps their devices: "node1@node2:0,2" (shardtrain)."""
    exclude: str = ""
    """Hosts of the hostfile, or devices of them, to leave out: "node1:0@node3" (shardtrain)."""
    config_file: str | None = None
    """A file in place of ~/.ssh/config: keys, users, ports and jump hosts belong there (shardtrain)."""
    via: Literal["ssh", "pdsh"] = "ssh"
    """What starts the connections: this program, or pdsh, which then runs its ssh for each host (shardtrain)."""
    connect_timeout_seconds: int = 10
    """Seconds after which a host that does not answer is named, and the launch is cancelled (shardtrain)."""
    rendezvous_host: str | None = None
    """Name or address at which the others meet the first host, as over InfiniBand; found by itself unless set
    (shardtrain)."""
    rendezvous_port: int = 29500
    """Port of the first host at which the others meet it (shardtrain)."""


@dataclass(frozen=True)
class LaunchSlurm:
    """Options of sbatch and srun."""

    partition: str | None = None
    """Partition; the cluster's default unless set (shardtrain)."""
    account: str | None = None
    """Account that is charged (shardtrain)."""
    qos: str | None = None
    """Quality of service (shardtrain)."""
    time_limit_minutes: int | None = None
    """Time limit of the job; the run saves and stops before it, and is queued again with requeue (shardtrain)."""
    requeue: bool = True
    """Queue the job again when it was asked to stop and has saved (exit code 75) (shardtrain)."""
    container: Literal["none", "apptainer", "singularity", "pyxis"] = "none"
    """What runs launch.image on the nodes; pyxis is enroot's plugin for srun (shardtrain)."""
    host_suffix: str = ""
    """Added to a node's name to reach it by another network, as "i" or "-ib0" where sites name IP over InfiniBand so
    (shardtrain)."""
    directives: list[str] = field(default_factory=list)
    """More options of sbatch, one each: ["--exclusive", "--constraint=h100"] (shardtrain)."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell of your own before the run, as ["module load cuda"]; they are copied as they are (shardtrain)."""
    sweep: list[str] = field(default_factory=list)
    """A job array: each entry holds the overrides of one task, as "--optimizer.lr 1e-4"; task I writes to
    job.dump_folder/sweep-I (shardtrain)."""
    sweep_at_once: int | None = None
    """Tasks of the array that may run at the same time; all unless set (shardtrain)."""


@dataclass(frozen=True)
class LaunchKubernetes:
    """What a manifest says beside the pods."""

    kind: Literal["pytorchjob", "trainjob", "jobset"] = "pytorchjob"
    """Resource: of Kubeflow's training operator (v1), of Kubeflow Trainer (v2), or of JobSet (shardtrain)."""
    namespace: str = "default"
    """Namespace (shardtrain)."""
    queue: str | None = None
    """Queue of Kueue, which starts the job when its quota allows it (shardtrain)."""
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
    """Which command line is installed: v2 submits by ``runai training``, v1 by ``runai submit`` (shardtrain)."""
    project: str | None = None
    """Project; the one chosen by ``runai config project`` unless set (shardtrain)."""
    node_pools: list[str] = field(default_factory=list)
    """Node pools, the preferred first (shardtrain)."""


@dataclass(frozen=True)
class Launch:
    """What ``shardtrain launch`` asks a cluster for; ``train`` reads none of it."""

    name: str = "shardtrain"
    """Name of the job: small letters, digits and dashes (shardtrain)."""
    nodes: int = 1
    """Machines or pods (shardtrain)."""
    min_nodes: int | None = None
    """Nodes with which an elastic run goes on when others are lost; nodes unless set (shardtrain)."""
    devices_per_node: int | None = None
    """Accelerators to ask for on each node; none are asked for unless set (shardtrain)."""
    device: str | None = None
    """What each device is, as a row of ``shardtrain plan --device`` or a file of one: "h100". A run that is planned not
    to fit there is refused before it is submitted; nothing is planned unless set (shardtrain)."""
    device_resource: str = "nvidia.com/gpu"
    """What Kubernetes calls an accelerator (shardtrain)."""
    nproc_per_node: int | None = None
    """Ranks on each node; devices_per_node unless set, or one per device found there (shardtrain)."""
    cpus_per_node: int | None = None
    """CPU cores to ask for on each node (shardtrain)."""
    memory_gib_per_node: int | None = None
    """Memory to ask for on each node, in GiB (shardtrain)."""
    shared_memory_gib: int | None = None
    """Size of /dev/shm in pods, in GiB, for the processes that prepare data; the platform's own (64 MiB) unless set
    (shardtrain)."""
    image: str | None = None
    """Container image that holds this package, or an Apptainer file (shardtrain)."""
    python: str = "python3"
    """The interpreter on the nodes that has this package (shardtrain)."""
    workdir: str | None = None
    """Folder on the nodes from which relative paths are read (shardtrain)."""
    mounts: list[str] = field(default_factory=list)
    """SOURCE:PATH or SOURCE:PATH:ro. SOURCE is a volume claim on kubernetes and runai, and a folder of the node for the
    containers of slurm (shardtrain)."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the run; no secrets, which have secrets and forward_env (shardtrain)."""
    forward_env: list[str] = field(default_factory=list)
    """Names of variables of this machine that ssh and slurm hand on; their values are written nowhere (shardtrain)."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Variables whose values kubernetes and runai take from a secret of the cluster: NAME = "SECRET/KEY"
    (shardtrain)."""
    fabric: Literal["none", "efa", "infiniband"] = "none"
    """Variables that a network between nodes wants; those in env come before them (shardtrain)."""
    max_restarts: int = 0
    """Restarts of the ranks after a failure, as ``train --max_restarts`` (shardtrain)."""
    ssh: LaunchSSH = field(default_factory=LaunchSSH)
    slurm: LaunchSlurm = field(default_factory=LaunchSlurm)
    kubernetes: LaunchKubernetes = field(default_factory=LaunchKubernetes)
    runai: LaunchRunai = field(default_factory=LaunchRunai)
