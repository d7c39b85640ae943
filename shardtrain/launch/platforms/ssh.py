"""Hosts that are reached by OpenSSH: the message to each, and the command that reaches it."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardtrain.config.schema.launch_options import Launch
from shardtrain.launch.failure import SUPERVISED
from shardtrain.launch.hostfile import Host
from shardtrain.launch.job import ClusterJob, folder_words, require_nothing_lost
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.process import SECRET
from shardtrain.utils.redact import MASK

ENDPOINT = "SHARDTRAIN_RDZV_ENDPOINT"
LOCAL_ADDRESS = "SHARDTRAIN_LOCAL_ADDR"
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class HostCommand:
    """One host: the command that reaches it, and what that command reads on its standard input."""

    host: Host
    ssh: tuple[str, ...]
    command: tuple[str, ...]
    own: Mapping[str, str]
    given: Mapping[str, str]
    forwarded: tuple[str, ...]
    grace_seconds: int

    @property
    def environment(self) -> dict[str, str]:
        """Variables that may be shown: those of the launcher, and before them those of the user."""
        return {**self.own, **self.given}

    def message(self, names: Mapping[str, str], found: Mapping[str, str] = NOTHING) -> bytes:
        """The line for standard input; forwarded variables are taken from ``names``.

        ``found`` is what the launcher knows better now that the hosts have answered; the user's own come before it.
        """
        environment = {**self.own, **found, **self.given, **{name: names[name] for name in self.forwarded}}
        job = {"command": self.command, "environment": environment, "grace_seconds": self.grace_seconds}
        return json.dumps(job).encode() + b"\n"


def render(job: ClusterJob, launch: Launch, hosts: Sequence[Host], meeting: str, run_id: str) -> list[HostCommand]:
    """The message to each host; ``meeting`` is the address of the first, as the others reach it.

    Raises:
        ConfigError: the job asks for what ssh cannot do.
    """
    require_nothing_lost([s.variable for s in job.secrets], job.forwarded, "launch.secrets", "ssh")
    if job.is_elastic:
        rule = "has no effect on ssh, where the loss of a host ends the run"
        raise ConfigError(Problem("launch.min_nodes", job.min_nodes, rule, "leave it out"))
    options = launch.ssh
    asked = launch.nproc_per_node or launch.devices_per_node
    slots = hosts[0].slots
    if asked and slots and asked != slots:
        rule = f"is not the {slots} slots of each host"
        raise ConfigError(Problem("launch.nproc_per_node", asked, rule, "leave it out, or change the hostfile"))
    command = [*job.command, *(["--nproc", str(slots)] if slots and not asked else [])]
    inside = f"exec {shlex.quote(launch.python)} -m shardtrain.launch.remote_agent"
    inside = f"cd -- {shlex.quote(folder_words(job.workdir))} && {inside}" if job.workdir else inside
    plans = []
    for number, host in enumerate(hosts):
        # BatchMode asks for no password, and a connection that has broken is noticed after 15 s
        ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={options.connect_timeout_seconds}"]
        ssh += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        ssh += ["-F", options.config_file] if options.config_file else []
        ssh += ["-p", str(host.port)] if host.port else []
        # the variables of one of several nodes: see nodes.py
        own = {"PYTHONUNBUFFERED": "1", SUPERVISED: "1"}
        if len(hosts) > 1:
            own |= {
                "SHARDTRAIN_NNODES": str(len(hosts)),
                "SHARDTRAIN_NODE_RANK": str(number),
                ENDPOINT: f"{meeting}:{options.rendezvous_port}",
                "SHARDTRAIN_RDZV_ID": run_id,
            }
        if host.devices is not None:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.devices))
        words = (*ssh, "--", host.address, inside)
        plans.append(HostCommand(host, words, tuple(command), own, job.environment, job.forwarded, job.grace_seconds))
    return plans


def text(plans: Sequence[HostCommand]) -> str:
    """Format the plans for a user: each command and its standard input, with secret values masked."""
    lines = [f"# {MASK} stands for a secret that travels over standard input; {SECRET} is random unless you set it"]
    for plan in plans:
        message = plan.message(dict.fromkeys(plan.forwarded, MASK), {SECRET: MASK}).decode().strip()
        lines += [f"# {plan.host.label}", f"{shlex.join(plan.ssh)} <<'END'", message, "END"]
    return "\n".join(lines) + "\n"


def address_of(host: Host, launch: Launch) -> str:
    """The name or address that ssh's own configuration has for a host; other hosts get this one."""
    words = ["ssh", *(["-F", launch.ssh.config_file] if launch.ssh.config_file else []), "-G", "--", host.address]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return host.name
    names = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.name


def new_run_id() -> str:
    """A name for one rendezvous that nobody can foresee."""
    return secrets.token_hex(8)
