"""A real Slurm cluster for tests: a controller, two nodes and munge as processes on this machine, in one folder."""

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
"""Options that let a job find the package, and let its nodes, which are all this machine, connect to each other."""


def missing() -> str:
    """Return the reason why Slurm cannot run on this machine, or an empty string."""
    if os.geteuid() != 0:
        return "Slurm's daemons require root"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    return (
        f"no {', '.join(absent)} here: apt-get install slurmctld slurmd slurm-client munge"
        if absent
        else ""
    )


def _free_ports() -> tuple[int, int]:
    """Return a port for the controller, and the first of two consecutive ports for the nodes."""
    while True:
        with (
            socket.create_server(("127.0.0.1", 0)) as controller,
            socket.create_server(("127.0.0.1", 0)) as node,
        ):
            controller_port = controller.getsockname()[1]
            node_port = node.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", node_port + 1)).close()
            except OSError:
                continue
        return controller_port, node_port


def _configuration(folder: Path, socket_of_munge: Path) -> str:
    """Return slurm.conf: two nodes, and the partitions debug, small, theirs (for another account) and closed."""
    controller, first = _free_ports()
    name = socket.gethostname().split(".")[0]
    # The first node in alphabetical order hosts the rendezvous, so its name must resolve: use this machine's.
    nodes = (
        f"NodeName={name},z{name} NodeHostname={name} NodeAddr=127.0.0.1 Port=[{first}-{first + 1}]"
    )
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
    """Run munge with a new key for the duration of the block. Yield the path of its socket."""
    user = pwd.getpwnam("munge").pw_uid
    folder.mkdir()
    folder.chmod(0o755)  # independent of the umask
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    for path in (folder, folder / "key"):
        os.chown(path, user, -1)
    names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    files = [f"--{name}={folder}/{name.split('-')[0]}" for name in names]
    # --force: munge refuses a folder that a group can write, which the folder of the tests may be
    command = ["munged", "--foreground", "--force", *files]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, env={**os.environ, "PATH": PATH}, user=user, stderr=subprocess.DEVNULL
        )

    daemons = [start()]
    start_times = [time.monotonic()]

    def has_socket() -> bool:
        # on a busy machine munge sometimes hangs for minutes without a socket or a message, so restart it
        if daemons[-1].poll() is not None or time.monotonic() - start_times[-1] > patience.seconds(
            15
        ):
            _end(daemons[-1:])
            daemons.append(start())
            start_times.append(time.monotonic())
        return (folder / "socket").exists()

    try:
        _wait(has_socket, START_SECONDS)
        yield folder / "socket"
    finally:
        _end(daemons)


@contextmanager
def cluster(folder: Path, unseen: Path | None = None) -> Iterator[dict[str, str]]:
    """Run the daemons for the duration of the block. Yield the environment for Slurm's commands.

    The folder ``unseen`` is empty on the second node, like an unmounted file system.
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
            # a node that starts before the controller listens retries only after minutes
            _wait(lambda: _answers(names), START_SECONDS)
            daemons += [
                subprocess.Popen(command, env=names, stdout=quiet, stderr=quiet)
                for command in commands
            ]
            _wait(lambda: _idle(names) == 2, START_SECONDS)
            yield names
        finally:
            cancel_all(names)
            _end(daemons)


def cancel_all(names: dict[str, str]) -> None:
    """Cancel all jobs. Call it before stopping the daemons, because processes of jobs would outlive them."""
    if not _jobs(names):
        return
    subprocess.run(
        ["scancel", "--full", "--signal=KILL", "--user=root"],
        env=names,
        check=False,
        timeout=patience.seconds(30),
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
        ["squeue", "-h", "-o", "%i"],
        env=names,
        capture_output=True,
        text=True,
        timeout=patience.seconds(30),
    )
    return done.stdout.split()


def _answers(names: dict[str, str]) -> bool:
    command = ["scontrol", "ping"]
    done = subprocess.run(
        command, env=names, capture_output=True, timeout=patience.seconds(60), check=False
    )
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


def launch(
    names: dict[str, str], *arguments: str, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run ``shardtrain launch`` with the environment of the cluster."""
    if arguments[0] == "slurm" and not any(
        argument.startswith("--training.device") for argument in arguments
    ):
        arguments = (*arguments, "--training.device=cpu")  # the cluster has no GPU
    command = [sys.executable, "-m", "shardtrain", "launch", *arguments]
    names = {**names, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command,
        env=names,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        check=False,
    )


def submit(names: dict[str, str], folder: Path, *arguments: str) -> str:
    """Launch a job with its log in ``folder``. Return the job id."""
    done = launch(names, "slurm", f'--launch.slurm.directives=["--chdir={folder}"]', *arguments)
    assert done.returncode == 0, done.stderr
    return re.fullmatch(r"slurm/(\d+)\n", done.stdout)[1]


def shown(names: dict[str, str], job: str) -> dict[str, str]:
    """Return the fields that scontrol shows for a job."""
    command = ["scontrol", "-o", "show", "job", job]
    done = subprocess.run(
        command, env=names, capture_output=True, text=True, timeout=patience.seconds(30)
    )
    return dict(part.partition("=")[::2] for part in done.stdout.split())


def running(folder: Path) -> list[str]:
    """Return the ids of the processes that train into a folder."""
    option = f"--job.dump_folder={folder}".encode()
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(argument.startswith(option) for argument in arguments):
            pids.append(path.parent.name)
    return pids
