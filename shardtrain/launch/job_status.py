"""Status, logs and stop of a launch by its ID.

IDs are ``slurm/NUMBER``, ``kubernetes/NAMESPACE/KIND/NAME``, ``runai/...`` and ``ssh/PID``. An ID contains
everything that is needed to query the platform. Only ssh also has a folder, because its launcher is a process
of this machine.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from shardtrain.config.schema.launch_options import Launch
from shardtrain.launch.job import ClusterJob
from shardtrain.launch.platforms import kubectl, slurm_queue
from shardtrain.launch.platforms.slurm import ask
from shardtrain.utils import process_identity
from shardtrain.utils.errors import ConfigError, Problem, ShardtrainError

_WORD = r"[A-Za-z0-9][A-Za-z0-9._@+-]*"


_FORMS: dict[str, tuple[str, ...]] = {
    "slurm": (r"[0-9]+(_[0-9]+)?",),
    "kubernetes": (_WORD, "|".join(kubectl.RESOURCES), _WORD),
    "runai": ("v1|v2", "pytorch|standard", f"-|{_WORD}", _WORD),
    "ssh": (r"[0-9]{1,10}",),
}
"""Patterns of the parts of an ID, which become arguments of a platform's commands."""


def kubernetes_id(job: ClusterJob, launch: Launch) -> str:
    """Return the ID of a Kubernetes job."""
    return f"kubernetes/{launch.kubernetes.namespace}/{launch.kubernetes.kind}/{job.name}"


def runai_id(job: ClusterJob, launch: Launch) -> str:
    """Return the ID of a Run:ai job. ``-`` stands for the current project of this machine."""
    kind = "pytorch" if job.nodes > 1 else "standard"
    return f"runai/{launch.runai.cli}/{kind}/{launch.runai.project or '-'}/{job.name}"


def status(name: str) -> int:
    """Print the state of a job."""
    return _run(name, "status")


def logs(name: str) -> int:
    """Print the log of a job, and follow it if the platform supports that."""
    return _run(name, "logs")


def stop(name: str) -> int:
    """Stop a job. It saves first if its platform waits for the save."""
    return _run(name, "stop")


def parts_of(name: str) -> tuple[str, list[str]]:
    """Return the platform of an ID and its other parts.

    Raises:
        ConfigError: ``name`` is not an ID.

    >>> parts_of("runai/v2/pytorch/-/my-run")
    ('runai', ['v2', 'pytorch', '-', 'my-run'])
    """
    platform, *parts = name.split("/")
    # The parts become arguments of commands, so each must match its pattern.
    forms = _FORMS.get(platform, ())
    if not forms or len(parts) != len(forms) or not all(map(re.fullmatch, forms, parts)):
        raise ConfigError(
            Problem(
                "id",
                name,
                rule="is not a job ID",
                fix="use the ID that launch printed, such as slurm/1234",
            )
        )
    return platform, parts


def _run(name: str, verb: str) -> int:
    platform, parts = parts_of(name)
    if platform == "ssh":
        return _ssh(int(parts[0]), verb)
    if platform == "slurm":
        by_slurm = {
            "status": slurm_queue.status,
            "logs": slurm_queue.logs,
            "stop": slurm_queue.stop,
        }
        return by_slurm[verb](parts[0])
    if platform == "kubernetes":
        by_kubectl = {"status": kubectl.status, "logs": kubectl.logs, "stop": kubectl.stop}
        return by_kubectl[verb](*parts)
    arguments = _runai(parts, verb)
    try:
        # Logs are followed without a timeout.
        if verb != "logs":
            print(ask(arguments, fix="run this where the job was launched"), end="")
            return 0
        return subprocess.run(arguments, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(
            Problem(
                arguments[0],
                None,
                rule="does not exist on this machine",
                fix="run this where the job was launched",
            )
        ) from None


def _runai(parts: list[str], verb: str) -> list[str]:
    cli, kind, project, name = parts
    # Without a project, the command uses the current one of this machine.
    where = [] if project == "-" else ["-p", project]
    if cli == "v2":
        argument = {"status": "describe", "logs": "logs", "stop": "delete"}[verb]
        return ["runai", "training", kind, argument, name, *where]
    arguments = {"status": ["describe", "job"], "logs": ["logs"], "stop": ["delete", "job"]}[verb]
    return ["runai", *arguments, name, *where]


def folder_of(pid: int) -> Path:
    """Return the folder with the hosts' logs of an ssh launch."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "shardtrain" / f"ssh-{pid}"


def open_folder(pid: int) -> Path:
    """Create the folder of an ssh launch with a file that identifies its process.

    Remove files of an older launch.
    """
    folder = folder_of(pid)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The folder is named by a process ID, which the system may reuse.
    for old in [*folder.glob("*.log"), *folder.glob("ended")]:
        old.unlink()
    (folder / "started").write_text(_started(pid), encoding="utf-8")
    return folder


def ended(folder: Path, run: Callable[[], int]) -> int:
    """Run a launcher and write its exit status to the folder. Exceptions of ``run`` are raised."""
    # An exception other than ours is reported as a general failure.
    code = ShardtrainError.exit_code
    try:
        code = run()
    except ShardtrainError as error:
        code = error.exit_code
        raise
    finally:
        (folder / "ended").write_text(str(code), encoding="utf-8")
    return code


def _started(pid: int) -> str:
    """Return a text that identifies the start of a process, or "" if it has ended. Process IDs may be reused.

    On Linux this is the ID of the boot and the kernel's clock ticks since the boot. The time that ps prints
    depends on the time zone and the language of the caller, and changes when the clock is set.
    """
    stat = process_identity.read_stat(pid)
    if stat is not None:
        if stat.has_ended:
            return ""
        return f"{process_identity.boot_id()} {stat.start_ticks}"
    # On Linux a process without the file has ended.
    if process_identity.read_stat() is not None:
        return ""
    arguments = ["ps", "-o", "lstart=", "-p", str(pid)]
    names = {**os.environ, "TZ": "UTC", "LC_ALL": "C"}
    return subprocess.run(
        arguments, capture_output=True, text=True, check=False, env=names
    ).stdout.strip()


def _ssh(pid: int, verb: str) -> int:
    folder = folder_of(pid)
    if not (folder / "started").exists():
        raise ConfigError(
            Problem(
                "id",
                f"ssh/{pid}",
                rule="is not a launch of this user and machine",
                fix="run this where it was launched",
            )
        )
    # The process ID may have been reused.
    runs = bool(_started(pid)) and _started(pid) == (folder / "started").read_text(encoding="utf-8")
    if verb == "stop":
        if runs:
            os.kill(pid, signal.SIGTERM)
        else:
            print("has already ended")
    elif verb == "logs":
        for path in sorted(folder.glob("*.log")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                print(f"[{path.stem}] {line}")
    elif runs:
        print("running")
    else:
        try:
            print(f"ended with {(folder / 'ended').read_text(encoding='utf-8')}")
        except OSError:
            print("ended without an exit status: it was killed, or its machine went down")
    return 0
