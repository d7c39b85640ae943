"""What was launched, by its id: ``slurm/NUMBER``, ``kubernetes/NAMESPACE/KIND/NAME``, ``runai/...`` or ``ssh/PID``.

An id says all that is needed to ask the platform; only ssh, whose launcher is a process of this machine, has a folder.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shardtrain.config.launch_schema import Launch
from shardtrain.errors import ConfigError, Problem
from shardtrain.launch import kubectl
from shardtrain.launch.job import Job
from shardtrain.launch.slurm import ask

_PART = r"[A-Za-z0-9][A-Za-z0-9._@+-]*"


def kubernetes_id(job: Job, launch: Launch) -> str:
    """The id of a manifest's job."""
    return f"kubernetes/{launch.kubernetes.namespace}/{launch.kubernetes.kind}/{job.name}"


def runai_id(job: Job, launch: Launch) -> str:
    """The id of a job of Run:ai; ``-`` stands for the project that is chosen on this machine."""
    kind = "pytorch" if job.nodes > 1 else "standard"
    return f"runai/{launch.runai.cli}/{kind}/{launch.runai.project or '-'}/{job.name}"


def status(name: str) -> int:
    """Print what the platform says of a job."""
    return _run(name, "status")


def logs(name: str) -> int:
    """Print the log of a job; where the platform can, follow it."""
    return _run(name, "logs")


def stop(name: str) -> int:
    """Ask a job to stop; it saves first, if its platform waits for it."""
    return _run(name, "stop")


def _run(name: str, verb: str) -> int:
    platform, *parts = name.split("/")
    lengths = {"slurm": 1, "kubernetes": 3, "runai": 4, "ssh": 1}
    good = len(parts) == lengths.get(platform) and all(re.fullmatch(_PART, p) or p == "-" for p in parts)
    if not good or (platform in ("slurm", "ssh") and not re.fullmatch(r"[0-9]+(_[0-9]+)?", parts[0])):
        raise ConfigError(Problem("id", name, "is no id of a job", "use what launch printed, as slurm/1234"))
    if platform == "ssh":
        return _ssh(int(parts[0]), verb)
    if platform == "kubernetes":
        return _kubernetes(name, parts, verb)
    words = {"slurm": _slurm, "runai": _runai}[platform](parts, verb)
    try:
        return subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(Problem(words[0], None, "is not on this machine", "ask where the job was launched")) from None


def _slurm(parts: list[str], verb: str) -> list[str]:
    if verb == "stop":
        return ["scancel", parts[0]]
    if verb == "status":
        return ["scontrol", "--oneliner", "show", "job", parts[0]]
    told = ask(["scontrol", "--oneliner", "show", "job", parts[0]])
    paths = re.findall(r"StdOut=(\S+)", told)
    if not paths or not Path(paths[0]).exists():
        raise ConfigError(Problem("id", f"slurm/{parts[0]}", "has no log yet", "ask for its status"))
    return ["cat", "--", *paths]


def _kubernetes(name: str, parts: list[str], verb: str) -> int:
    if parts[1] not in kubectl.RESOURCES:
        kinds = ", ".join(kubectl.RESOURCES)
        raise ConfigError(Problem("id", name, f"names none of the kinds {kinds}", "use what launch printed"))
    return {"status": kubectl.status, "logs": kubectl.logs, "stop": kubectl.stop}[verb](*parts)


def _runai(parts: list[str], verb: str) -> list[str]:
    cli, kind, project, name = parts
    where = [] if project == "-" else ["-p", project]
    if cli == "v2":
        word = {"status": "describe", "logs": "logs", "stop": "delete"}[verb]
        return ["runai", "training", kind, word, name, *where]
    words = {"status": ["describe", "job"], "logs": ["logs"], "stop": ["delete", "job"]}[verb]
    return ["runai", *words, name, *where]


def folder_of(pid: int) -> Path:
    """Where the launcher of an ssh job keeps the log of each host."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "shardtrain" / f"ssh-{pid}"


def open_folder(pid: int) -> Path:
    """Make the folder of a launcher, with the mark by which it is known again; an older one of its number goes."""
    folder = folder_of(pid)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for old in folder.glob("*.log"):
        old.unlink()
    (folder / "started").write_text(_started(pid), encoding="utf-8")
    return folder


def _started(pid: int) -> str:
    """When a process began, in the words of ps; empty where it is gone."""
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _ssh(pid: int, verb: str) -> int:
    folder = folder_of(pid)
    if not (folder / "started").exists():
        raise ConfigError(Problem("id", f"ssh/{pid}", "is no launch of this user and machine", "look where it began"))
    runs = bool(_started(pid)) and _started(pid) == (folder / "started").read_text(encoding="utf-8")
    actions: dict[str, Callable[[], object]] = {
        "status": lambda: print("running" if runs else "ended"),
        "stop": lambda: os.kill(pid, signal.SIGTERM) if runs else print("ended already"),
        "logs": lambda: _print_logs(folder),
    }
    actions[verb]()
    return 0


def _print_logs(folder: Path) -> None:
    for path in sorted(folder.glob("*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            sys.stdout.write(f"[{path.stem}] {line}\n")
