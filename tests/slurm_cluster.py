"""A real Slurm for tests: controller, two nodes and munge as ordinary processes of this machine, in a folder."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import patience
from tiny import text_file

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
START_SECONDS = 60
ROOT = Path(__file__).parents[1]

SMALL = [
    "--training.dataset=text", f"--training.dataset_path={text_file()}", "--training.device=cpu",
    "--training.seq_len=32", "--training.local_batch_size=1", "--model.overrides.num_layers=1",
    "--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1",
]  # fmt: skip

ON_LOOPBACK = [
    f"--launch.python={sys.executable}", f"--launch.workdir={ROOT}", "--launch.env.GLOO_SOCKET_IFNAME=lo",
    "--launch.env.SHARDTRAIN_LOCAL_ADDR=127.0.0.1", "--launch.env.OMP_NUM_THREADS=1",
]  # fmt: skip
"""Options with which a job finds the package, and its nodes, which are this machine, find each other."""


def missing() -> str:
    """What this machine lacks for a real Slurm; empty where nothing does."""
    if os.geteuid() != 0:
        return "Slurm's daemons want root"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    return f"no {', '.join(absent)} here: apt-get install slurmctld slurmd slurm-client munge" if absent else ""


def _free_ports() -> tuple[int, int]:
    """A port for the controller, and the first of two neighbours for the nodes."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
            controller, first = one.getsockname()[1], two.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", first + 1)).close()
            except OSError:
                continue
        return controller, first


def _configuration(folder: Path, socket_of_munge: Path) -> str:
    """Two nodes; beside ``debug`` a partition that is small, one for another account, and a closed one."""
    controller, first = _free_ports()
    name = socket.gethostname().split(".")[0]
    # the first node by the alphabet has the name of this machine, which can be looked up: there the nodes meet
    nodes = f"NodeName={name},z{name} NodeHostname={name} NodeAddr=127.0.0.1 Port=[{first}-{first + 1}]"
    return f"""\
ClusterName=loop
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket_of_munge},cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
KillWait=30
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes={name},z{name} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
PartitionName=small Nodes={name},z{name} MaxTime=1 MaxNodes=1 OverSubscribe=FORCE:4
PartitionName=theirs Nodes={name} AllowAccounts=others
PartitionName=closed Nodes={name} State=DOWN
"""


@contextmanager
def munged(folder: Path) -> Iterator[Path]:
    """Serve credentials of a key of its own; gives the socket."""
    user = pwd.getpwnam("munge").pw_uid
    folder.mkdir()
    folder.chmod(0o755)  # whatever the umask
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    for path in (folder, folder / "key"):
        os.chown(path, user, -1)
    names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    files = [f"--{name}={folder}/{name.split('-')[0]}" for name in names]
    # --force: the folder of the tests may be writable by a group, which munge takes ill
    command = ["munged", "--foreground", "--force", *files]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env={**os.environ, "PATH": PATH}, user=user, stderr=subprocess.DEVNULL)

    daemons, begun = [start()], [time.monotonic()]

    def has_come() -> bool:
        # it was seen to make no socket for minutes on a busy machine, and to say nothing
        if daemons[-1].poll() is not None or time.monotonic() - begun[-1] > patience.seconds(15):
            _end(daemons[-1:])
            daemons.append(start())
            begun.append(time.monotonic())
        return (folder / "socket").exists()

    try:
        _wait(has_come, START_SECONDS)
        yield folder / "socket"
    finally:
        _end(daemons)


@contextmanager
def cluster(folder: Path, unseen: Path | None = None) -> Iterator[dict[str, str]]:
    """Start the daemons; gives the variables with which Slurm's commands find them.

    The second node does not see what is in the folder ``unseen``, as one where a file system is not mounted.
    """
    (folder / "state").mkdir(parents=True)
    with munged(folder / "munge") as munge:
        (folder / "slurm.conf").write_text(_configuration(folder, munge))
        names = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        name = socket.gethostname().split(".")[0]
        commands = [["slurmd", "-D", "-N", name], ["slurmd", "-D", "-N", f"z{name}"]]
        if unseen:
            hide = 'mount -t tmpfs none "$0" && exec "$@"'
            commands[-1] = ["unshare", "--mount", "sh", "-c", hide, str(unseen), *commands[-1]]
        quiet = subprocess.DEVNULL
        daemons = [subprocess.Popen(["slurmctld", "-D"], env=names, stdout=quiet, stderr=quiet)]
        try:
            # a node that registers before the controller listens is not heard of again for minutes
            _wait(lambda: _answers(names), START_SECONDS)
            daemons += [subprocess.Popen(command, env=names, stdout=quiet, stderr=quiet) for command in commands]
            _wait(lambda: _idle(names) == 2, START_SECONDS)
            yield names
        finally:
            cancel_all(names)
            _end(daemons)


def cancel_all(names: dict[str, str]) -> None:
    """End all jobs that are there, before the daemons: their steps are children of nobody, and would outlive them."""
    if not _jobs(names):
        return
    subprocess.run(
        ["scancel", "--full", "--signal=KILL", "--user=root"], env=names, check=False, timeout=patience.seconds(30)
    )
    subprocess.run(["scancel", "--user=root"], env=names, check=False, timeout=patience.seconds(30))
    with contextlib.suppress(AssertionError):
        _wait(lambda: not _jobs(names), 40)


def _end(daemons: list[subprocess.Popen[bytes]]) -> None:
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(patience.seconds(10))
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _jobs(names: dict[str, str]) -> list[str]:
    done = subprocess.run(
        ["squeue", "-h", "-o", "%i"], env=names, capture_output=True, text=True, timeout=patience.seconds(30)
    )
    return done.stdout.split()


def _answers(names: dict[str, str]) -> bool:
    command = ["scontrol", "ping"]
    done = subprocess.run(command, env=names, capture_output=True, timeout=patience.seconds(60), check=False)
    return done.returncode == 0


def _idle(names: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-p", "debug", "-o", "%T"],
        env=names,
        capture_output=True,
        text=True,
        timeout=patience.seconds(30),
    )
    return done.stdout.split().count("idle")


def _wait(condition, seconds: float) -> None:
    patience.wait_for(condition, seconds, "the cluster", 0.1)


def launch(names: dict[str, str], *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """``shardtrain launch`` with the cluster's variables."""
    if words[0] == "slurm" and not any(word.startswith("--training.device") for word in words):
        words = (*words, "--training.device=cpu")  # the cluster has no GPU, and whoever asks for none is told so
    command = [sys.executable, "-m", "shardtrain", "launch", *words]
    names = {**names, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, env=names, cwd=cwd, capture_output=True, text=True, timeout=patience.seconds(120), check=False
    )


def submit(names: dict[str, str], folder: Path, *words: str) -> str:
    """Launch with the log in ``folder``; gives the job's number."""
    done = launch(names, "slurm", f'--launch.slurm.directives=["--chdir={folder}"]', *words)
    assert done.returncode == 0, done.stderr
    return re.fullmatch(r"slurm/(\d+)\n", done.stdout)[1]


def shown(names: dict[str, str], job: str) -> dict[str, str]:
    """What scontrol says of a job."""
    told = subprocess.run(
        ["scontrol", "-o", "show", "job", job], env=names, capture_output=True, text=True, timeout=patience.seconds(30)
    )
    return dict(part.partition("=")[::2] for part in told.stdout.split())


def running(folder: Path) -> list[str]:
    """Numbers of the processes that train into a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if any(word.startswith(f"--job.dump_folder={folder}".encode()) for word in path.read_bytes().split(b"\0")):
                found.append(path.parent.name)
        except OSError:
            continue
    return found
