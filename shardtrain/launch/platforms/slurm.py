"""Slurm: render a batch script that starts one agent per node and requeues the job.

The script reads nodes, names and ports from Slurm's variables. Slurm's signal (``--signal``) makes the ranks
save and exit with 75, and the script then requeues the job. It also requeues the job, a limited number of
times, after a failure that a retry may fix, such as a lost node.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtrain.config import presets
from shardtrain.config.schema.launch_options import Launch
from shardtrain.launch.failure import PREEMPTED, RETRYABLE, SUPERVISED
from shardtrain.launch.job import (
    ClusterJob,
    folder_words,
    header,
    require,
    require_free,
    require_nothing_lost,
    without,
)
from shardtrain.utils import python_child
from shardtrain.utils.errors import ConfigError, Problem

WAIT_SECONDS = 60

ERROR_FUNCTION = """\
print_error() { # print an error with the name of the node
    printf 'error[2]: %s: %s\\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$1" >&2
}
"""

MEETING = """\
# the rendezvous endpoint, from Slurm's variables
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000))
# skip ports used by other programs
while (: <"/dev/tcp/${hosts[0]}/$port") 2>/dev/null; do port=$((port + 1)); done
export SHARDTRAIN_NNODES="$SLURM_JOB_NUM_NODES"
export SHARDTRAIN_RDZV_ENDPOINT="${hosts[0]}:$port"
export SHARDTRAIN_RDZV_ID="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"
# the nodes sign their messages with this secret, which no file and no command line contains
export SHARDTRAIN_SECRET="${SHARDTRAIN_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')}"
"""

LOOK = """\
import importlib.util, os, sys
folder, file = sys.argv[1:]
wrong = ""
if folder and os.path.realpath(folder) != os.path.realpath("."):
    wrong = f"{folder} is not on this node; use a folder that all nodes see, or launch.workdir"
elif file and not os.path.isfile(file):
    wrong = f"no configuration {os.path.abspath(file)} here; use a folder that all nodes see, or launch.workdir"
for name in ("torch", "shardtrain"):
    if not wrong and not importlib.util.find_spec(name):
        wrong = f"{sys.executable} has no package {name}; install it there, or correct launch.python"
sys.exit("error[2]: " + wrong if wrong else 0)
"""
"""Python script that checks each node, inside the container if there is one. It imports no module of this package.

It runs with ``-P`` like the ranks, so it finds the packages that they find."""

LOOK_ON_NODE = """\
output=$("$@" 2>&1) && exit
# the last line that is not empty, without colors
last=$(sed 's/\\x1b\\[[0-9;]*m//g' <<<"$output" | grep -v '^ *$' | tail -n 1)
if ! command -v "$1" >/dev/null; then
    last="error[2]: no $1 here; install it, load its module in launch.slurm.setup, or correct launch.python"
fi
if grep -qiE '^unknown option:? -P$' <<<"$output"; then
    last="error[2]: Python is older than 3.11 here; install a newer one, or correct launch.python"
fi
problem=${last##*error\\[2\\]: }
[[ "$last" == *"error[2]: "* ]] || problem="$0 does not start: $last; correct launch.python or launch.image"
echo "error[2]: ${SLURMD_NODENAME:-$HOSTNAME}: $problem" >&2
exit 2
"""
"""Bash script that runs the check on a node. It prints the error, or the reason why the check did not start, with the
name of the node.
"""

_OF_THE_SCRIPT = (
    "SHARDTRAIN_NNODES SHARDTRAIN_RDZV_ENDPOINT SHARDTRAIN_RDZV_ID SHARDTRAIN_HOST_SUFFIX "
    "SHARDTRAIN_SUPERVISED hosts port command code look on_node"
)
# Variables that bash protects, overwrites or interprets.
_OF_BASH = """
_ BASH BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND BASH_LINENO BASH_REMATCH
BASH_SOURCE BASH_SUBSHELL BASH_VERSINFO BASH_VERSION COMP_WORDBREAKS DIRSTACK EPOCHREALTIME EPOCHSECONDS EUID FUNCNAME
GROUPS HISTCMD IFS LINENO OLDPWD OPTARG OPTERR OPTIND PIPESTATUS POSIXLY_CORRECT PPID PWD RANDOM SECONDS SHELLOPTS SHLVL
SRANDOM UID
"""
TAKEN = frozenset([*_OF_THE_SCRIPT.split(), *_OF_BASH.split()])
"""Variables that the batch script cannot pass on to the job."""

AGAIN = """\
# requeue only this task of a sweep: the ID of the last task denotes the entire array
job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
if ((code == 75 || code == 138)); then
    # stopped on request and saved, or ended by SIGUSR1 before it had a handler: the same job continues from there
    scontrol requeue "$job" || print_error "saved, but Slurm did not requeue it; submit it again to continue"
elif ((CODES || code > 128)); then
    # a retry may succeed: the job continues from its last checkpoint. Failures are counted in the job's log.
    # Slurm's own count includes requests to stop, and is used if the log cannot be read
    log=$(scontrol show job "$job" | sed -n 's/^ *StdOut=//p') || log=
    failures=$(grep -cs '^queued again after code ' "$log") || [[ -r "$log" ]] || failures=${SLURM_RESTART_COUNT:-0}
    if ((failures < LIMIT)); then
        echo "queued again after code $code: failure $((failures + 1)) of at most LIMIT"
        scontrol requeue "$job" || print_error "Slurm did not requeue the job; submit it again to continue"
    fi
fi
"""
_OPTION_OF_DIRECTIVE = {
    "job-name": "launch.name",
    "nodes": "launch.nodes",
    "ntasks": "launch.nproc_per_node",
    "ntasks-per-node": "launch.nproc_per_node",
    "gpus-per-node": "launch.devices_per_node",
    "cpus-per-task": "launch.cpus_per_node",
    "mem": "launch.memory_gib_per_node",
    "partition": "launch.slurm.partition",
    "account": "launch.slurm.account",
    "qos": "launch.slurm.qos",
    "time": "launch.slurm.time_limit_minutes",
    "array": "launch.slurm.sweep",
    "signal": "checkpoint.grace_seconds",
    "requeue": "launch.slurm.requeue",
    "no-requeue": "launch.slurm.requeue",
}
"""Directive -> the option that it would silently override."""
_ALWAYS_SET = frozenset(("ntasks", "array", "requeue", "no-requeue"))
"""Directives that change how many ranks or jobs run, even if the script does not set them."""
_CODES = " || ".join(f"code == {code}" for code in sorted(RETRYABLE - {PREEMPTED}))


def render(job: ClusterJob, launch: Launch) -> str:
    """Return the batch script of a job.

    Raises:
        ConfigError: the job requires something that Slurm does not support.
    """
    slurm = launch.slurm
    require_nothing_lost(
        [s.variable for s in job.secrets], job.forwarded, "launch.secrets", "slurm"
    )
    require_free(job, TAKEN, "Slurm's script")
    if slurm.container != "none":
        require(
            job.image,
            "launch.image",
            slurm.container,
            "set the image, or set the container to none",
        )
    if job.is_elastic:
        raise ConfigError(
            Problem(
                "launch.min_nodes",
                job.min_nodes,
                rule="has no effect on slurm, which starts a job only on all its nodes",
                fix="remove it",
            )
        )

    # The head of the script: sbatch options, the folder, the user's setup lines, and variables.
    lines = [
        "#!/bin/bash",
        f"# {header('sbatch FILE')}",
        *_directives(job, launch),
        "set -euo pipefail",
        ERROR_FUNCTION.rstrip(),
    ]
    if job.workdir and slurm.container == "none":
        rule = f"launch.workdir={job.workdir} is not a folder here; use one that all nodes see"
        folder = shlex.quote(folder_words(job.workdir))
        lines.append(
            f"cd -- {folder} 2>/dev/null || {{ print_error {shlex.quote(rule)}; exit 2; }}"
        )
    lines += [
        *slurm.setup,
        *(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()),
        # sbatch passes the environment on, unless SBATCH_EXPORT or --export in a directive limits it.
        *(f': "${{{name}?was not passed on by sbatch; see --export}}"' for name in job.forwarded),
    ]

    # The rendezvous of the nodes, and the command of each node.
    suffix = f'${{hosts[0]}}{slurm.host_suffix}:$port"'
    lines += ["", MEETING.rstrip().replace('${hosts[0]}:$port"', suffix)]
    if slurm.host_suffix:
        lines.append(f"export SHARDTRAIN_HOST_SUFFIX={slurm.host_suffix}")
    lines += ["", *_command(job, launch), *_look(job, launch)]

    # The run. Its status determines whether the job is requeued. An agent that ends early must not end the
    # other agents while they save.
    step = [
        "srun",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        f"--wait={job.grace_seconds + 60}",
        "--export=ALL",
    ]
    container = _container(job, launch)
    lines += [
        "code=0",
        " ".join([*step, *map(shlex.quote, container), '"${command[@]}"', "|| code=$?"]),
    ]
    limit = str(job.max_restarts or job.retries)
    if slurm.requeue:
        lines.append(AGAIN.rstrip().replace("CODES", _CODES).replace("LIMIT", limit))
    if job.stop_exit_code != PREEMPTED:
        # Inside the job the status stays 75, so the script can recognize that the run has saved.
        lines.insert(lines.index("code=0"), f"export {SUPERVISED}=1")
        lines.append(f"if ((code == {PREEMPTED})); then code={job.stop_exit_code}; fi")
    return "\n".join([*lines, 'exit "$code"', ""])


def _look(job: ClusterJob, launch: Launch) -> list[str]:
    """Return the lines of a check before the run. If a node cannot start, it prints one line, and the job ends."""
    python = job.command[0]
    # The configuration file is the first argument of the verb. The package contains presets.
    file = ""
    arguments = python_child.arguments_of(job.command)[1:]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in presets.names():
        file = arguments[0]
    # A container has its own folders. On a node without the job's folder, Slurm uses /tmp.
    folder = '"$PWD"' if launch.slurm.container == "none" else "''"
    container = _container(job, launch)
    options = [option for option in container if launch.slurm.container == "pyxis"]
    inside = [option for option in container if launch.slurm.container != "pyxis"]
    name = job.image if inside else python
    step = [
        "srun",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--export=ALL",
        *map(shlex.quote, options),
    ]
    step += ["bash", "-c", '"$on_node"', shlex.quote(name or python), *map(shlex.quote, inside)]
    step += [shlex.quote(python), python_child.SAFE, "-c", '"$look"', folder, shlex.quote(file)]
    return [
        "",
        "# check on each node that ranks can start, before the first one starts",
        f"look={shlex.quote(LOOK)}",
        f"on_node={shlex.quote(LOOK_ON_NODE)}",
        f"{' '.join(step)} || exit",
        "",
    ]


def _directives(job: ClusterJob, launch: Launch) -> list[str]:
    slurm = launch.slurm
    # An option whose value is None is not set.
    sweep = None
    log = f"{job.name}-%j.log"
    if slurm.sweep:
        sweep = f"0-{len(slurm.sweep) - 1}"
        log = f"{job.name}-%A_%a.log"
        if slurm.sweep_at_once:
            sweep += f"%{slurm.sweep_at_once}"
    memory = None
    if job.memory_gib:
        memory = f"{job.memory_gib}G"
    time_limit = None
    if slurm.time_limit_minutes:
        hours, minutes = divmod(slurm.time_limit_minutes, 60)
        time_limit = f"{hours}:{minutes:02}:00"
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.devices,
        "cpus-per-task": job.cpus,
        "mem": memory,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": time_limit,
        "array": sweep,
        "output": log,
        "open-mode": "append",
        "signal": f"USR1@{job.grace_seconds}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines.append("#SBATCH --requeue" if slurm.requeue else "#SBATCH --no-requeue")
    taken = {name for name, value in options.items() if value is not None} | _ALWAYS_SET
    # sbatch uses the last of several equal options. A user may want another log.
    taken.remove("output")
    for directive in slurm.directives:
        name = directive.removeprefix("--").partition("=")[0]
        if name not in taken:
            continue
        option = _OPTION_OF_DIRECTIVE.get(name)
        fix = f"set {option} instead" if option else "remove it"
        rule = "would replace a line of the script, on which the run depends"
        raise ConfigError(Problem("launch.slurm.directives", directive, rule, fix))
    return lines + [f"#SBATCH {directive}" for directive in slurm.directives]


def _command(job: ClusterJob, launch: Launch) -> list[str]:
    """Return the lines that set the array ``command``.

    Each task of a sweep appends its overrides and its folder.
    """
    if not launch.slurm.sweep:
        return [f"command=({shlex.join(job.command)})"]
    kept = without(job.command, "job.dump_folder")
    lines = [f"command=({shlex.join(kept)})", 'case "$SLURM_ARRAY_TASK_ID" in']
    for number, entry in enumerate(launch.slurm.sweep):
        lines.append(f"{number}) command+=({shlex.join(shlex.split(entry))}) ;;")
    return [
        *lines,
        "esac",
        f'command+=(--job.dump_folder {shlex.quote(job.dump_folder)}/sweep-"$SLURM_ARRAY_TASK_ID")',
    ]


def _container(job: ClusterJob, launch: Launch) -> list[str]:
    kind = launch.slurm.container
    image = job.image or ""
    mounts = []
    for mount in job.mounts:
        suffix = ":ro" if mount.read_only else ""
        mounts.append(f"{mount.source}:{mount.path}{suffix}")
    arguments = []
    # Apptainer starts the command. Pyxis adds options to srun.
    if kind in ("apptainer", "singularity"):
        arguments += [kind, "exec"]
        if job.devices:
            arguments.append("--nv")
        for text in mounts:
            arguments += ["--bind", text]
        if job.workdir:
            arguments += ["--pwd", job.workdir]
        arguments.append(image)
    if kind == "pyxis":
        arguments += [f"--container-image={image}", "--no-container-mount-home"]
        if mounts:
            arguments.append(f"--container-mounts={','.join(mounts)}")
        if job.workdir:
            arguments.append(f"--container-workdir={job.workdir}")
    return arguments


def note_missing(job: ClusterJob, launch: Launch) -> None:
    """Print a note if the container image or the folder does not exist on this machine. The nodes may have it."""
    image = job.image or ""
    named = []
    if job.workdir and launch.slurm.container == "none":
        named = [("launch.workdir", job.workdir)]
    if launch.slurm.container in ("apptainer", "singularity") and "://" not in image:
        named.append(("launch.image", image))
    for option, path in named:
        if path and not Path(path).exists():
            print(
                f"note: {option}={path} does not exist on this machine; it must exist on all nodes",
                file=sys.stderr,
            )


def ask(
    command: Sequence[str], text: str = "", fix: str = "", fixes: Mapping[str, str] | None = None
) -> str:
    """Run a command of a scheduler and return its output. ``fixes`` maps patterns of its errors to fixes.

    Raises:
        ConfigError: the command is missing, fails, or does not reply. The message is one line with the
            command's text.
    """
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(
            Problem(
                command[0],
                None,
                rule="does not exist on this machine",
                fix=fix or "install it",
            )
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            Problem(
                command[0],
                None,
                rule=f"did not answer within {WAIT_SECONDS} s",
                fix="check that the cluster is up, and try again later",
            )
        ) from None
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines()]
        # Remove "sbatch: error: " from each line.
        messages = [re.sub(r"^\w+: (error|fatal): ", "", line) for line in lines]
        message = "; ".join(filter(None, messages))[-500:] or f"exit status {done.returncode}"
        known = [advice for pattern, advice in (fixes or {}).items() if re.search(pattern, message)]
        known.append("correct [launch], or ask the cluster's administrators")
        raise ConfigError(Problem(command[0], None, f"failed: {message}", known[0]))
    return done.stdout
