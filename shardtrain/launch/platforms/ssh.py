"""Hosts that are reached with OpenSSH: build the command for each host, and the data for its standard input."""

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
from shardtrain.utils import python_child
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.process import SECRET
from shardtrain.utils.redact import MASK

ENDPOINT = "SHARDTRAIN_RDZV_ENDPOINT"
LOCAL_ADDRESS = "SHARDTRAIN_LOCAL_ADDR"
LOST = 255
"""Exit status of ssh if the connection failed or was lost."""
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class HostCommand:
    """Command that reaches one host, and the data for its standard input."""

    host: Host
    ssh: tuple[str, ...]
    command: tuple[str, ...]
    launcher_variables: Mapping[str, str]
    user_variables: Mapping[str, str]
    forwarded: tuple[str, ...]
    grace_seconds: int

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that may be printed. The user's variables override the launcher's."""
        return {**self.launcher_variables, **self.user_variables}

    def message(self, names: Mapping[str, str], discovered: Mapping[str, str] = NOTHING) -> bytes:
        """Return the line for standard input.

        Args:
            names: Environment from which forwarded variables are taken.
            discovered: Variables that the launcher has determined after connecting. The
                user's variables override them.
        """
        environment = {
            **self.launcher_variables,
            **discovered,
            **self.user_variables,
            **{name: names[name] for name in self.forwarded},
        }
        job = {
            "command": self.command,
            "environment": environment,
            "grace_seconds": self.grace_seconds,
        }
        return json.dumps(job).encode() + b"\n"


def render(
    job: ClusterJob,
    launch: Launch,
    hosts: Sequence[Host],
    meeting: str,
    run_id: str,
) -> list[HostCommand]:
    """Return the command and the message for each host.

    ``meeting`` is the address at which the other hosts reach the first host.

    Raises:
        ConfigError: the job requires something that ssh does not support.
    """
    require_nothing_lost([s.variable for s in job.secrets], job.forwarded, "launch.secrets", "ssh")
    if job.is_elastic:
        raise ConfigError(
            Problem(
                "launch.min_nodes",
                job.min_nodes,
                rule="has no effect on ssh, where the loss of a host ends the run",
                fix="remove it",
            )
        )
    options = launch.ssh
    requested_ranks = launch.nproc_per_node or launch.devices_per_node
    slots = hosts[0].slots
    if requested_ranks and slots and requested_ranks != slots:
        raise ConfigError(
            Problem(
                "launch.nproc_per_node",
                requested_ranks,
                rule=f"differs from the {slots} slots of each host",
                fix="remove it, or change the hostfile",
            )
        )
    command = list(job.command)
    if slots and not requested_ranks:
        command += ["--nproc", str(slots)]
    # The agent reads the command from standard input, so secrets are not visible in the process list.
    agent = python_child.remote_command(launch.python, "shardtrain.launch.remote_agent")
    inside = f"exec {shlex.join(agent)}"
    if job.workdir:
        inside = f"cd -- {shlex.quote(folder_words(job.workdir))} && {inside}"
    plans = []
    for number, host in enumerate(hosts):
        # BatchMode disables password prompts. ssh detects a broken connection after 15 s.
        ssh = [
            "ssh",
            "-T",
            "-o",
            "BatchMode=yes",
            "-o",
            f"ConnectTimeout={options.connect_timeout_seconds}",
        ]
        ssh += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
        # Options of the user's ssh.
        if options.config_file:
            ssh += ["-F", options.config_file]
        if host.port:
            ssh += ["-p", str(host.port)]
        # Set the variables of one node of several, which nodes.py reads.
        variables = {"PYTHONUNBUFFERED": "1", SUPERVISED: "1"}
        if len(hosts) > 1:
            variables |= {
                "SHARDTRAIN_NNODES": str(len(hosts)),
                "SHARDTRAIN_NODE_RANK": str(number),
                ENDPOINT: f"{meeting}:{options.rendezvous_port}",
                "SHARDTRAIN_RDZV_ID": run_id,
            }
        if host.devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.devices))
        arguments = (*ssh, "--", host.address, inside)
        plans.append(
            HostCommand(
                host,
                arguments,
                tuple(command),
                variables,
                job.environment,
                job.forwarded,
                job.grace_seconds,
            ),
        )
    return plans


def text(plans: Sequence[HostCommand]) -> str:
    """Format the plans for a user: each command with its standard input. Values of secrets are masked."""
    lines = [
        f"# {MASK} replaces a secret that is sent over standard input; {SECRET} is random unless you set it"
    ]
    for plan in plans:
        message = plan.message(dict.fromkeys(plan.forwarded, MASK), {SECRET: MASK}).decode().strip()
        lines += [f"# {plan.host.label}", f"{shlex.join(plan.ssh)} <<'END'", message, "END"]
    return "\n".join(lines) + "\n"


def address_of(host: Host, launch: Launch) -> str:
    """Return the address of a host in ssh's configuration. The other hosts use it, too."""
    arguments = ["ssh"]
    if launch.ssh.config_file:
        arguments += ["-F", launch.ssh.config_file]
    arguments += ["-G", "--", host.address]
    # An alias is resolved here, because the other hosts may not have this ssh configuration.
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return host.name
    for line in done.stdout.splitlines():
        if line.startswith("hostname "):
            return line.split(maxsplit=1)[1]
    return host.name


def new_run_id() -> str:
    """Return an unpredictable name for one rendezvous."""
    return secrets.token_hex(8)
