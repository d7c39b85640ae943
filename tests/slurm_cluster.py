"""A real Slurm for tests: controller, two nodes and munge as ordinary processes of this machine, in a folder."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


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


def _configuration(folder: Path, munge: Path) -> str:
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
AuthInfo=socket={munge},cred_expire=5
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
"""


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons; gives the variables with which Slurm's commands find them."""
    (folder / "state").mkdir(parents=True)
    user = pwd.getpwnam("munge").pw_uid
    munge = folder / "munge"
    munge.mkdir(mode=0o755)
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o600)
    for path in (munge, munge / "key"):
        os.chown(path, user, -1)
    (folder / "slurm.conf").write_text(_configuration(folder, munge / "socket"))
    names = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    files = [
        f"--{what}={munge}/{what.split('-')[0]}" for what in ("key-file", "socket", "pid-file", "log-file", "seed-file")
    ]
    daemons = [
        # --force: the folder of the tests may be writable by a group, which munge takes ill
        subprocess.Popen(
            ["munged", "--foreground", "--force", *files], env=names, user=user, stderr=subprocess.DEVNULL
        ),
    ]
    try:
        _wait(lambda: (munge / "socket").exists(), 20)
        name = socket.gethostname().split(".")[0]
        for command in (["slurmctld", "-D"], ["slurmd", "-D", "-N", name], ["slurmd", "-D", "-N", f"z{name}"]):
            quiet = subprocess.DEVNULL
            daemons.append(subprocess.Popen(command, env=names, stdout=quiet, stderr=quiet))
        _wait(lambda: _idle(names) == 2, 20)
        yield names
    finally:
        # jobs first: their steps are children of nobody, and would outlive the daemons
        subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], env=names, check=False, timeout=20)
        subprocess.run(["scancel", "--user=root"], env=names, check=False, timeout=20)
        with contextlib.suppress(AssertionError):
            _wait(lambda: not _jobs(names), 40)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _jobs(names: dict[str, str]) -> list[str]:
    done = subprocess.run(["squeue", "-h", "-o", "%i"], env=names, capture_output=True, text=True, timeout=20)
    return done.stdout.split()


def _idle(names: dict[str, str]) -> int:
    done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], env=names, capture_output=True, text=True, timeout=20)
    return done.stdout.split().count("idle")


def _wait(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the cluster does not come up"
        time.sleep(0.1)
