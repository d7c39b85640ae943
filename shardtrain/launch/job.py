"""Job of a cluster: one command on each of its nodes, with variables, mounts and references to secrets.

A ``ClusterJob`` is plain data. Each platform has a file with ``render``, a pure function from a job to text
or argument lists. This module and the platforms do not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardtrain import __version__
from shardtrain.config import Loaded, presets
from shardtrain.launch.failure import PREEMPTED
from shardtrain.utils import python_child
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.redact import redact

NOTICE_SECONDS = 10
"""Added to ``checkpoint.grace_seconds``, so the trainer exits before the platform kills it."""

RETRIES = 6
"""Number of times that a platform restarts lost pods. This is the default of Kubernetes jobs."""

FABRICS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    # AWS's libfabric provider. NCCL finds it through the plugin in the image.
    "efa": {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"},
    # A busy fabric loses packets for seconds, so wait longer before cancelling a connection. NCCL accepts 1
    # to 22, which is 4.096 us x 2^22 = 17 s per attempt (the default is 20, 4.3 s). Some scripts set 50,
    # which exceeds the five bits of the local ack timeout
    # (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
    "infiniband": {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "10", "UCX_RC_TIMEOUT": "4s"},
}


_NAME_LETTERS = 48
"""Maximum length of a job name. Platforms derive pod names from it, which have at most 63 characters."""


@dataclass(frozen=True)
class Mount:
    """Mount of a volume claim or a folder of the node (``source``) at ``path`` of the run."""

    source: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Secret:
    """Environment variable whose value is stored in the cluster, as ``key`` of the secret ``name``."""

    variable: str
    name: str
    key: str


@dataclass(frozen=True)
class ClusterJob:
    """One run on ``nodes`` nodes. Each node starts the argument list ``command`` without a shell."""

    name: str
    command: tuple[str, ...]
    nodes: int = 1
    min_nodes: int = 1
    devices: int | None = None
    device_resource: str = "nvidia.com/gpu"
    cpus: int | None = None
    memory_gib: int | None = None
    shared_memory_gib: int | None = None
    image: str | None = None
    workdir: str | None = None
    mounts: tuple[Mount, ...] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    forwarded: tuple[str, ...] = ()
    secrets: tuple[Secret, ...] = ()
    max_restarts: int = 0
    retries: int = RETRIES
    grace_seconds: int = 30
    """Seconds between the request to stop and the time at which the platform may kill the run."""
    stop_exit_code: int = PREEMPTED
    """Exit status that the platform reports for a run that has saved after a request to stop."""
    dump_folder: str = "./outputs"
    config_text: str | None = None
    """Text of the configuration file, for platforms that transfer it to the nodes."""

    @property
    def is_elastic(self) -> bool:
        """True if the run may continue with fewer nodes."""
        return self.min_nodes < self.nodes


def to_job(
    loaded: Loaded,
    overrides: Sequence[str],
    path: str | None = None,
    verb: str = "train",
) -> ClusterJob:
    """Build the job of a configuration.

    Args:
        overrides: Overrides of the command line.
        path: Path of the configuration file on the nodes.
        verb: "train", or "doctor", which runs once on all nodes without retries.

    Raises:
        ConfigError: an argument would be changed on its way to the nodes, or would expose a secret.
    """
    launch = loaded.config.launch
    arguments = python_child.remote_command(launch.python, "shardtrain", verb)
    where = path
    if not where and loaded.path:
        where = presets.name_of(loaded.path)
    # Restore the "./" that Path has removed. Without it, a name that starts with
    # a dash would be parsed as an option.
    if where:
        arguments.append(f"./{where}" if where.startswith("-") else where)
    # Skip the options of launch, which only apply to this machine. Skip job.config_file, because ``where``
    # already is the path of the configuration on the nodes.
    arguments += without(overrides, "launch.", "job.config_file")
    ranks = launch.nproc_per_node or launch.devices_per_node
    if ranks:
        arguments += ["--nproc", str(ranks)]
    # Only training is repeated after a failure, and works with fewer nodes.
    name = launch.name
    min_nodes = launch.min_nodes or launch.nodes
    max_restarts = launch.max_restarts
    retries = RETRIES
    if verb != "train":
        name = f"{launch.name[: _NAME_LETTERS - len(verb) - 1].rstrip('-')}-{verb}"
        min_nodes = launch.nodes
        max_restarts = 0
        retries = 0
    if max_restarts:
        arguments += ["--max_restarts", str(max_restarts)]
    environment = {**FABRICS[launch.fabric], **launch.env}
    refuse_unsafe([*arguments, *environment.values()])
    text = None
    if loaded.path:
        text = loaded.path.read_text(encoding="utf-8")
    # A ConfigMap may transfer the text of the file to the nodes, and many users can read it.
    if text is not None and redact(text) != text:
        raise ConfigError(
            Problem(
                "the configuration file",
                str(loaded.path),
                rule="contains a secret, perhaps in a comment",
                fix="remove the secret",
            )
        )
    return ClusterJob(
        name=name,
        command=tuple(arguments),
        nodes=launch.nodes,
        min_nodes=min_nodes,
        devices=launch.devices_per_node,
        device_resource=launch.device_resource,
        cpus=launch.cpus_per_node,
        memory_gib=launch.memory_gib_per_node,
        shared_memory_gib=launch.shared_memory_gib,
        image=launch.image,
        workdir=launch.workdir,
        mounts=tuple(map(to_mount, launch.mounts)),
        environment=MappingProxyType(environment),
        forwarded=tuple(launch.forward_env),
        secrets=tuple(
            Secret(variable, *place.split("/", 1)) for variable, place in launch.secrets.items()
        ),
        max_restarts=max_restarts,
        retries=retries,
        grace_seconds=loaded.config.checkpoint.grace_seconds + NOTICE_SECONDS,
        stop_exit_code=loaded.config.checkpoint.stop_exit_code,
        dump_folder=loaded.config.job.dump_folder,
        config_text=text,
    )


def to_mount(text: str) -> Mount:
    """Parse a mount of the configuration.

    >>> to_mount("data:/data:ro")
    Mount(source='data', path='/data', read_only=True)
    """
    source, path, *rest = text.split(":")
    return Mount(source, path, bool(rest))


def without(overrides: Sequence[str], *names: str) -> list[str]:
    """Return the overrides without the options in ``names``. A name that ends with "." is a prefix.

    >>> without(["--launch.nodes", "2", "--training.steps=5"], "launch.")
    ['--training.steps=5']
    """
    prefixes = tuple(name for name in names if name.endswith("."))
    kept = []
    is_kept = True
    for argument in overrides:
        # The words that follow an option are its values.
        if argument.startswith("--"):
            option = argument[2:].partition("=")[0].replace("-", "_")
            is_kept = option not in names and not option.startswith(prefixes)
        if is_kept:
            kept.append(argument)
    return kept


def refuse_unsafe(texts: Sequence[str]) -> None:
    """Reject texts with control characters, which would be changed in transit, and texts that expose secrets.

    Raises:
        ConfigError: a text is unsafe. The message contains the text with the secret masked.
    """
    # Search the joined texts first, because searching for secrets is slow. It finds a secret in any of them.
    lines = "\n".join(texts)
    is_silent = redact(lines) == lines
    for text in texts:
        if not text.isprintable():
            raise ConfigError(
                Problem(
                    "argument",
                    text,
                    rule="contains a non-printable character, which would not reach the nodes unchanged",
                    fix="remove the character",
                    where="command line",
                )
            )
        if not is_silent and redact(text) != text:
            raise ConfigError(
                Problem(
                    "argument",
                    redact(text),
                    rule="contains a secret, which scripts, manifests and process lists would show",
                    fix=(
                        "use its environment variable in launch.forward_env (ssh, "
                        "slurm) or launch.secrets (kubernetes, runai)"
                    ),
                )
            )


def folder_words(folder: str) -> str:
    """Return a folder as an argument of ``cd --``. ``-`` would mean the previous folder,
    and CDPATH would apply.

    >>> folder_words("/data/run"), folder_words("-"), folder_words("run")
    ('/data/run', './-', './run')
    """
    return folder if folder.startswith("/") else f"./{folder}"


def require_free(job: ClusterJob, taken: Collection[str], platform: str) -> None:
    """Reject variables of ``launch.env`` that the platform sets itself.

    Raises:
        ConfigError: such a variable is set.
    """
    for name in job.environment:
        if name in taken:
            raise ConfigError(
                Problem(
                    f"launch.env.{name}",
                    job.environment[name],
                    rule=f"would be overwritten by {platform}",
                    fix="use another name",
                )
            )


def require_nothing_lost(
    wanted: Sequence[str], has: Sequence[str], option: str, platform: str
) -> None:
    """Require that the platform can pass all requested variables through ``option`` or another option.

    Raises:
        ConfigError: a variable would be missing. The message names the option that can pass it.
    """
    missing = sorted(set(wanted) - set(has))
    if missing:
        other = "launch.forward_env"
        if option == "launch.forward_env":
            other = "launch.secrets"
        raise ConfigError(
            Problem(
                option,
                list(wanted),
                rule=f"is not supported by {platform}, and {', '.join(missing)} would be missing",
                fix=f"also name {missing[0]} in {other}",
            )
        )


def require(value: object, option: str, platform: str, fix: str) -> None:
    """Require that an option is set.

    Raises:
        ConfigError: the option is not set.
    """
    if value is None or value == "" or value == []:
        raise ConfigError(Problem(option, None, f"is not set, but {platform} requires it", fix))


_NAME_PART = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
_REFERENCE = (
    rf"([A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{{1,5}})?/)?{_NAME_PART}(/{_NAME_PART})*"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?"
)


def require_image(image: str | None, platform: str) -> None:
    """Require an image reference that a container runtime accepts. Pods with another one would wait forever.

    Raises:
        ConfigError: launch.image is not set, or not a reference.
    """
    fix = "set an image that contains this package; scripts/containers/Dockerfile builds one"
    require(image, "launch.image", platform, fix)
    if not re.fullmatch(_REFERENCE, image or ""):
        rule = f"is not an image reference, which {platform} requires"
        fix = "write it like registry.example/team/image:tag, in small letters and without https://"
        raise ConfigError(Problem("launch.image", image, rule, fix))


def header(submit: str) -> str:
    """Return the first line of rendered text: the version that created it, and the command to submit it."""
    return f"shardtrain {__version__}. Edit freely; submit with: {submit}"
