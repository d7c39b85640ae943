"""Time from ``launch ssh`` to the first step, and from starting the same job by hand on each of two hosts.

    python benchmarks/launch_ssh.py [--rounds 7] [--output FILE]

A real sshd on two loopback addresses imitates two hosts with one CPU rank each, and runs
``configs/debug.toml`` with one layer. Each round starts ``shardtrain launch ssh``, ``torchrun`` twice, and
``shardtrain train`` twice with options for two nodes. The last two run without ssh, like on hosts with open
sessions. The time is measured from the start of the command to the first step in ``metrics.jsonl``. Ratios
are computed per round, because other load affects all three.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import sshd  # noqa: E402  (the tests' own server)

TIMEOUT_SECONDS = 180
ADDRESS = "127.0.0.1"
Commands = list[list[str]]


def free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as free:
        return int(free.getsockname()[1])


def options(folder: Path) -> list[str]:
    return [
        "configs/debug.toml", f"--job.dump_folder={folder}", "--training.steps=2", "--metrics.log_freq=1",
        "--training.seq_len=32", "--training.local_batch_size=1", "--training.device=cpu",
        "--model.overrides.num_layers=1", "--lr_scheduler.warmup_steps=1",
    ]  # fmt: skip


def by_ssh(config: Path, folder: Path) -> Commands:
    return [[
        sys.executable, "-m", "shardtrain", "launch", "ssh", *options(folder), "--hosts", "host-a,host-b", "--nproc=1",
        f"--launch.ssh.config_file={config}", f"--launch.ssh.rendezvous_port={free_port()}",
        f"--launch.python={sys.executable}", f"--launch.workdir={ROOT}", "--launch.env.OMP_NUM_THREADS=1",
    ]]  # fmt: skip


def by_torchrun(_: Path, folder: Path) -> Commands:
    meeting = f"{ADDRESS}:{free_port()}"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={meeting}", "--rdzv-id=benchmark", f"--local-addr={ADDRESS}", "-m", "shardtrain", "train",
    ]  # fmt: skip
    return [[*command, *options(folder)]] * 2


def by_train(_: Path, folder: Path) -> Commands:
    meeting = f"{ADDRESS}:{free_port()}"
    command = [sys.executable, "-m", "shardtrain", "train", *options(folder)]
    command += ["--nproc=1", "--nnodes=2", f"--rdzv_endpoint={meeting}"]
    return [[*command, f"--node_rank={node}"] for node in range(2)]


WAYS = {"launch ssh": by_ssh, "torchrun twice": by_torchrun, "train twice": by_train}


def seconds_to_first_step(way: str, config: Path) -> float:
    """Start one job, and wait for its first step and its end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        names = {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": name, "GLOO_SOCKET_IFNAME": "lo",
            "SHARDTRAIN_LOCAL_ADDR": ADDRESS,
        }  # fmt: skip
        with (Path(name) / "log").open("w+") as log:
            began = time.monotonic()
            environment = {**os.environ, **names}
            processes = []
            for command in WAYS[way](config, folder):
                processes.append(
                    subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
                )
            try:
                while not _has_step(folder / "metrics.jsonl"):
                    has_timed_out = time.monotonic() > began + TIMEOUT_SECONDS
                    have_ended = all(process.poll() is not None for process in processes)
                    if has_timed_out or have_ended:
                        output = (Path(name) / "log").read_text()
                        raise SystemExit(f"{way} made no step:\n{output[-2000:]}")
                    time.sleep(0.01)
                seconds = time.monotonic() - began
                for process in processes:
                    process.wait(TIMEOUT_SECONDS)
            finally:
                for process in processes:
                    if process.poll() is None:
                        process.send_signal(signal.SIGTERM)
                        process.wait(TIMEOUT_SECONDS)
        return seconds


def _has_step(path: Path) -> bool:
    try:
        return any(
            "loss" in json.loads(line)
            for line in path.read_text().splitlines()
            if line.endswith("}")
        )
    except OSError:
        return False


def measure(rounds: int, output: Path | None) -> None:
    """Measure in rounds, and update ``output`` after each."""
    seconds_of_ways: dict[str, list[float]] = {way: [] for way in WAYS}
    loads = []
    hosts = {"host-a": ADDRESS, "host-b": "127.0.0.2"}
    with tempfile.TemporaryDirectory() as name, sshd.server(Path(name) / "sshd", hosts) as config:
        for number in range(rounds + 1):
            ways = list(WAYS)[number % len(WAYS) :] + list(WAYS)[: number % len(WAYS)]
            for way in ways:
                seconds = seconds_to_first_step(way, config)
                if number:  # skip the first round, which fills the file cache
                    seconds_of_ways[way].append(round(seconds, 3))
            if number:
                loads.append(round(os.getloadavg()[0], 2))
                text = json.dumps(summary(seconds_of_ways, loads), indent=1)
                print(text, flush=True)
                if output:
                    output.write_text(text + "\n")


def summary(seconds_of_ways: dict[str, list[float]], loads: list[float]) -> dict[str, object]:
    ssh = seconds_of_ways["launch ssh"]
    median_ratios = {}
    for way in list(WAYS)[1:]:
        ratios = [a / b for a, b in zip(ssh, seconds_of_ways[way], strict=True)]
        median_ratios[way] = round(statistics.median(ratios), 3)
    return {
        "rounds": len(ssh),
        "median_seconds": {
            way: statistics.median(seconds) for way, seconds in seconds_of_ways.items()
        },
        "median_ratio_of_launch_ssh_to": median_ratios,
        "seconds": seconds_of_ways,
        "load_1min_after_each_round": loads,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if sshd.missing():
        raise SystemExit(sshd.missing())
    measure(arguments.rounds, arguments.output)


if __name__ == "__main__":
    main()
