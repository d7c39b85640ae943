"""Slurm: a batch script that takes nodes, names and ports from Slurm's own variables, and starts one agent a node.

Slurm's signal (``--signal``) goes to the ranks, which save and leave with 75; the script then queues the job again.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence

from shardtrain.config.launch_schema import Launch
from shardtrain.errors import ConfigError, Problem
from shardtrain.launch.job import Job, folder_words, header, require, require_free, require_nothing_lost, without

SUBMIT = ("sbatch", "--parsable")
WAIT_SECONDS = 60

MEETING = """\
# where the nodes meet: everything comes from Slurm
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export SHARDTRAIN_NNODES="$SLURM_JOB_NUM_NODES"
export SHARDTRAIN_RDZV_ENDPOINT="${hosts[0]}:$((20000 + SLURM_JOB_ID % 10000))"
export SHARDTRAIN_RDZV_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
"""

_OF_THE_SCRIPT = "SHARDTRAIN_NNODES SHARDTRAIN_RDZV_ENDPOINT SHARDTRAIN_RDZV_ID hosts command code"
# those that bash does not let be set, sets anew, or reads
_OF_BASH = """
_ BASH BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_LINENO BASH_REMATCH
BASH_SOURCE BASH_SUBSHELL BASH_VERSINFO BASH_VERSION COMP_WORDBREAKS DIRSTACK EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME
GROUPS HISTCMD IFS LINENO OLDPWD OPTARG OPTERR OPTIND PIPESTATUS POSIXLY_CORRECT PPID PWD RANDOM SECONDS SHELLOPTS SHLVL
SRANDOM UID
"""
TAKEN = frozenset([*_OF_THE_SCRIPT.split(), *_OF_BASH.split()])
"""Variables that would not arrive through a script of bash."""

AGAIN = """\
if ((code == 75)); then
    # asked to stop, and saved: the same job goes on from there
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


def render(job: Job, launch: Launch) -> str:
    """The batch script of a job.

    Raises:
        ConfigError: the job asks for what Slurm cannot do.
    """
    _require(job, launch)
    slurm = launch.slurm
    lines = ["#!/bin/bash", f"# {header('sbatch FILE')}", *_directives(job, launch), "set -euo pipefail"]
    lines += [f"cd -- {shlex.quote(folder_words(job.workdir))}"] if job.workdir and slurm.container == "none" else []
    lines += slurm.setup
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    # sbatch hands on the environment unless a site's SBATCH_EXPORT, or --export in a directive, says otherwise
    lines += [f': "${{{name}?was not handed on by sbatch; see --export}}"' for name in job.forwarded]
    lines += ["", MEETING.rstrip(), "", *_command(job, launch)]
    step = ["srun", "--ntasks-per-node=1"]
    # an agent that ends early must not take the others with it while they save
    step += ["--kill-on-bad-exit=0", f"--wait={job.grace_seconds + 60}", "--export=ALL"]
    container = _container(job, launch)
    lines += ["code=0", " ".join([*step, *map(shlex.quote, container), '"${command[@]}"', "|| code=$?"])]
    lines += [AGAIN.rstrip()] if slurm.requeue else []
    return "\n".join([*lines, 'exit "$code"', ""])


def _require(job: Job, launch: Launch) -> None:
    require_nothing_lost([s.variable for s in job.secrets], job.forwarded, "launch.secrets", "slurm")
    require_free(job, TAKEN, "Slurm's script")
    if launch.slurm.container != "none":
        require(job.image, "launch.image", f"{launch.slurm.container}", "set the image, or container to none")
    if job.is_elastic:
        rule = "has no effect on slurm, which starts a job on all its nodes or on none"
        raise ConfigError(Problem("launch.min_nodes", job.min_nodes, rule, "leave it out"))


def _directives(job: Job, launch: Launch) -> list[str]:
    slurm = launch.slurm
    sweep = f"0-{len(slurm.sweep) - 1}" + (f"%{slurm.sweep_at_once}" if slurm.sweep_at_once else "")
    hours, minutes = divmod(slurm.time_limit_minutes or 0, 60)
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.devices,
        "cpus-per-task": job.cpus,
        "mem": f"{job.memory_gib}G" if job.memory_gib else None,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": f"{hours}:{minutes:02}:00" if slurm.time_limit_minutes else None,
        "array": sweep if slurm.sweep else None,
        "output": f"{job.name}-%A_%a.log" if slurm.sweep else f"{job.name}-%j.log",
        "open-mode": "append",
        "signal": f"USR1@{job.grace_seconds}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines.append("#SBATCH --requeue" if slurm.requeue else "#SBATCH --no-requeue")
    return lines + [f"#SBATCH {directive}" for directive in slurm.directives]


def _command(job: Job, launch: Launch) -> list[str]:
    """Lines that set the array ``command``; in a sweep each task adds its overrides, and a folder of its own."""
    if not launch.slurm.sweep:
        return [f"command=({shlex.join(job.command)})"]
    kept = without(job.command, "job.dump_folder")
    lines = [f"command=({shlex.join(kept)})", 'case "$SLURM_ARRAY_TASK_ID" in']
    for number, entry in enumerate(launch.slurm.sweep):
        lines.append(f"{number}) command+=({shlex.join(shlex.split(entry))}) ;;")
    return [*lines, "esac", f'command+=(--job.dump_folder {shlex.quote(job.dump_folder)}/sweep-"$SLURM_ARRAY_TASK_ID")']


def _container(job: Job, launch: Launch) -> list[str]:
    kind, image = launch.slurm.container, job.image or ""
    mounts = [f"{m.source}:{m.path}" + (":ro" if m.read_only else "") for m in job.mounts]
    if kind in ("apptainer", "singularity"):
        words = [kind, "exec", *(["--nv"] if job.devices else [])]
        words += [word for mount in mounts for word in ("--bind", mount)]
        return [*words, *(["--pwd", job.workdir] if job.workdir else []), image]
    if kind == "pyxis":
        words = [f"--container-image={image}", "--no-container-mount-home"]
        words += [f"--container-mounts={','.join(mounts)}"] if mounts else []
        return words + ([f"--container-workdir={job.workdir}"] if job.workdir else [])
    return []


def submit(text: str) -> str:
    """Give the script to sbatch; gives the job's number.

    Raises:
        ConfigError: sbatch is missing, or refuses the script.
    """
    answer = ask([*SUBMIT], text, "is slurm's client installed here? launch from a login node, or use --dry-run")
    return answer.strip().partition(";")[0]


def ask(command: Sequence[str], text: str = "", fix: str = "") -> str:
    """Run a command of a scheduler; gives its output.

    Raises:
        ConfigError: it is missing, fails, or does not answer; one line with its own words.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    except FileNotFoundError:
        raise ConfigError(Problem(command[0], None, "is not on this machine", fix or "install it")) from None
    except subprocess.TimeoutExpired:
        rule = f"did not answer within {WAIT_SECONDS} s"
        raise ConfigError(Problem(command[0], None, rule, "is the cluster up? try again later")) from None
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())[-500:] or f"exit status {done.returncode}"
        raise ConfigError(Problem(command[0], None, f"refused: {words}", "correct [launch], or ask the cluster"))
    return done.stdout
