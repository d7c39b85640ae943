"""What a platform is asked to run: one command on each of some nodes, with variables, mounts and references to secrets.

A ``ClusterJob`` is plain data. Each platform has a file with ``render``, which turns it into text or argument lists
and does nothing else; nothing here or there imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shardtrain import __version__
from shardtrain.config import Loaded, presets
from shardtrain.launch.failure import PREEMPTED
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.redact import redact

NOTICE_SECONDS = 10
"""Added to ``checkpoint.grace_seconds``: from the last moment of the trainer's own end to that of the platform."""

RETRIES = 6
"""Times that a platform starts lost pods again: the default of Kubernetes' own jobs."""

FABRICS: Mapping[str, Mapping[str, str]] = {
    "none": {},
    # AWS's libfabric provider; NCCL finds it by its plugin in the image
    "efa": {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"},
    # a busy fabric loses packets for seconds: wait longer before a connection is cancelled. NCCL takes 1 to 22, which
    # is 4.096 us x 2^22 = 17 s a try (its default is 20, 4.3 s); scripts go round with 50, which the five bits of the
    # local ack timeout cannot hold (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html)
    "infiniband": {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "10", "UCX_RC_TIMEOUT": "4s"},
}


_NAME_LETTERS = 48
"""Longest name of a job: platforms make names of pods from it, which have 63 letters."""


@dataclass(frozen=True)
class Mount:
    """A volume claim or a folder of the node, and where the run sees it."""

    source: str
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Secret:
    """A variable whose value the cluster holds: ``key`` of the secret ``name``."""

    variable: str
    name: str
    key: str


@dataclass(frozen=True)
class ClusterJob:
    """One run on ``nodes`` nodes. ``command`` is the argument list that each of them starts; no shell reads it."""

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
    """Seconds from the request to stop to the last moment at which the platform may kill."""
    stop_exit_code: int = PREEMPTED
    """Status that the platform shows for a run that was asked to stop and has saved."""
    dump_folder: str = "./outputs"
    config_text: str | None = None
    """Text of the configuration file, for platforms that carry it to the nodes themselves."""

    @property
    def is_elastic(self) -> bool:
        """Whether the run may continue with fewer nodes."""
        return self.min_nodes < self.nodes


def to_job(loaded: Loaded, overrides: Sequence[str], path: str | None = None, verb: str = "train") -> ClusterJob:
    """The job of a configuration; ``overrides`` are those of its command line, ``path`` is the file as nodes see it.

    ``verb`` is "train", or "doctor", which runs once on all nodes and is tried no second time.

    Raises:
        ConfigError: an argument could not be handed on as it is, or would show a secret.
    """
    launch = loaded.config.launch
    words = [launch.python, "-m", "shardtrain", verb]
    where = path or (presets.name_of(loaded.path) if loaded.path else "")
    # Path has taken the "./" away from which a name that begins with a dash was known to be no option
    words += [f"./{where}" if where.startswith("-") else where] if where else []
    # options of launch are for this machine; the file is named once, as nodes see it
    words += without(overrides, "launch.", "job.config_file")
    ranks = launch.nproc_per_node or launch.devices_per_node
    words += ["--nproc", str(ranks)] if ranks else []
    once = verb != "train"
    max_restarts = 0 if once else launch.max_restarts
    words += ["--max_restarts", str(max_restarts)] if max_restarts else []
    environment = {**FABRICS[launch.fabric], **launch.env}
    refuse_unsafe([*words, *environment.values()])
    text = loaded.path.read_text(encoding="utf-8") if loaded.path else None
    # the text of the file may travel to the nodes in a ConfigMap, which many can read
    if text is not None and redact(text) != text:
        rule = "holds a secret, perhaps in a comment"
        raise ConfigError(Problem("the configuration file", str(loaded.path), rule, "take it out"))
    return ClusterJob(
        name=f"{launch.name[: _NAME_LETTERS - len(verb) - 1].rstrip('-')}-{verb}" if once else launch.name,
        command=tuple(words),
        nodes=launch.nodes,
        min_nodes=launch.nodes if once else launch.min_nodes or launch.nodes,
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
        secrets=tuple(Secret(name, *text.split("/", 1)) for name, text in launch.secrets.items()),
        max_restarts=max_restarts,
        retries=0 if once else RETRIES,
        grace_seconds=loaded.config.checkpoint.grace_seconds + NOTICE_SECONDS,
        stop_exit_code=loaded.config.checkpoint.stop_exit_code,
        dump_folder=loaded.config.job.dump_folder,
        config_text=text,
    )


def to_mount(text: str) -> Mount:
    """A mount as the configuration writes it.

    >>> to_mount("data:/data:ro")
    Mount(source='data', path='/data', read_only=True)
    """
    source, path, *rest = text.split(":")
    return Mount(source, path, bool(rest))


def without(overrides: Sequence[str], *names: str) -> list[str]:
    """Overrides without those of options whose name is, or begins with, one of ``names``.

    >>> without(["--launch.nodes", "2", "--training.steps=5"], "launch.")
    ['--training.steps=5']
    """
    kept = []
    keeps = True
    for word in overrides:
        if word.startswith("--"):
            option = word[2:].partition("=")[0].replace("-", "_")
            keeps = not any(option == name or (name.endswith(".") and option.startswith(name)) for name in names)
        if keeps:
            kept.append(word)
    return kept


def refuse_unsafe(texts: Sequence[str]) -> None:
    """Stop at a text that could not be handed on as it is: a control character, or a secret that others would read.

    Raises:
        ConfigError: naming the text, with the secret masked.
    """
    # a secret in one of them is one in all of them; and to look for secrets takes longer than all the rest
    lines = "\n".join(texts)
    is_silent = redact(lines) == lines
    for text in texts:
        if not text.isprintable():
            rule = "has a character that cannot be printed, and would not reach the nodes as it is"
            raise ConfigError(Problem("argument", text, rule, "leave it out", "command line"))
        if not is_silent and redact(text) != text:
            rule = "holds a secret, which scripts, manifests and lists of processes would show"
            fix = "name its variable in launch.forward_env (ssh, slurm) or launch.secrets (kubernetes, runai)"
            raise ConfigError(Problem("argument", redact(text), rule, fix))


def folder_words(folder: str) -> str:
    """A folder as ``cd --`` takes it to be nothing else: ``-`` is the folder before, and CDPATH replaces this one.

    >>> folder_words("/data/run"), folder_words("-"), folder_words("run")
    ('/data/run', './-', './run')
    """
    return folder if folder.startswith("/") else f"./{folder}"


def require_free(job: ClusterJob, taken: Collection[str], platform: str) -> None:
    """Stop at a variable of ``launch.env`` that would not arrive, because the platform's own comes after it.

    Raises:
        ConfigError: naming it.
    """
    for name in job.environment:
        if name in taken:
            rule = f"is set by {platform} itself, and would not arrive as it is written"
            raise ConfigError(Problem(f"launch.env.{name}", job.environment[name], rule, "use another name"))


def require_nothing_lost(wanted: Sequence[str], has: Sequence[str], option: str, platform: str) -> None:
    """Raise ConfigError for a variable that the platform cannot pass in the way asked for, nor in another.

    Raises:
        ConfigError: naming the variables, and the option that would provide them there.
    """
    missing = sorted(set(wanted) - set(has))
    if missing:
        other = "launch.secrets" if option == "launch.forward_env" else "launch.forward_env"
        rule = f"is not what {platform} can use, and {', '.join(missing)} would be missing"
        raise ConfigError(Problem(option, list(wanted), rule, f"name {missing[0]} in {other} too"))


def require(value: object, option: str, platform: str, fix: str) -> None:
    """Stop unless an option is set that a platform cannot do without.

    Raises:
        ConfigError: it is not.
    """
    if value is None or value == "" or value == []:
        raise ConfigError(Problem(option, None, f"is not set, and {platform} needs it", fix))


def header(submit: str) -> str:
    """The first line of what is rendered: what made it, and what to do with it."""
    return f"shardtrain {__version__}. Edit freely; submit with: {submit}"
