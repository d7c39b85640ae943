"""Recovery time of a killed run: from SIGKILL of a rank to the end of all ranks, and to the next new step.

    python benchmarks/restarts.py [--kills 20] [--launcher torchrun] [--at load|rendezvous] [--output FILE]

Kills ranks of a run of two CPU ranks repeatedly, one at a time, after it has trained some new steps or,
with ``--at``, while it restarts. Counts the restarts of the launcher. A new step is one with a number above
all logged before the kill or, if steps are repeated, the first one logged after it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 120


class Lines:
    """Read the output of the launcher and rank 0 in a thread, and store each line with its arrival time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.found: list[tuple[float, str]] = []
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self.found.append((time.monotonic(), line))

    def wait(self, pattern: str, after: float) -> tuple[float, str]:
        """Return the time and text of the first line after ``after`` that matches ``pattern``."""
        end = time.monotonic() + TIMEOUT_SECONDS
        seen = 0
        while time.monotonic() < end:
            while seen < len(self.found):
                came, line = self.found[seen]
                seen += 1
                if came > after and re.search(pattern, line):
                    return came, line
            if self._process.poll() is not None and seen == len(self.found):
                raise SystemExit(
                    f"the run has ended with {self._process.returncode}:\n{self.tail()}"
                )
            time.sleep(0.005)
        raise SystemExit(f"waited in vain for {pattern}:\n{self.tail()}")

    def tail(self) -> str:
        return "".join(line for _, line in self.found[-15:])


def ranks_of(launcher: int) -> dict[int, int]:
    """Map each rank to its process ID, from the environments of the launcher's children."""
    processes = {}
    for task in Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            rank = re.search(r"(?:^|\0)RANK=(\d+)", environment)
            processes[int(rank.group(1)) if rank else len(processes)] = pid
    return processes


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def start(folder: Path, launcher: str, kills: int) -> subprocess.Popen[str]:
    text = folder / "words.txt"
    text.write_text(
        " ".join(random.Random(0).choices(["mesh", "shard", "gather", "reduce", "loss"], k=200_000))
    )
    options = {
        "job.dump_folder": folder, "training.dataset": "text", "training.dataset_path": text, "training.seq_len": 32,
        "training.local_batch_size": 1, "training.steps": 1_000_000, "training.device": "cpu", "metrics.log_freq": 1,
        "model.overrides.num_layers": 1, "checkpoint.enable": "true", "checkpoint.interval": 2,
        "checkpoint.keep_latest_k": 2,
    }  # fmt: skip
    train = ["-m", "shardtrain", "train"]
    for name, value in options.items():
        train += [f"--{name}", str(value)]
    if launcher == "torchrun":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={kills}"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        command += ["--monitor-interval=0.1", "--local-addr=127.0.0.1", *train]
    else:
        command = [*train, "--nproc", "2", "--max_restarts", str(kills)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def p95(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def measure(launcher: str, kills: int, at: str, seed: int = 0) -> dict[str, object]:
    dice = random.Random(seed)
    stopped = []
    resumed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = start(folder, launcher, kills)
        try:
            lines = Lines(process)
            after = 0.0
            done = 0
            while done < kills:
                if at == "step" or done % 2 == 0:
                    for _ in range(dice.randrange(3, 9)):
                        after, _ = lines.wait(r"step: *\d+ .*loss", after)
                elif at == "load":
                    after, _ = lines.wait("dataset text", after)
                else:  # kill during the rendezvous: wait only until both ranks have been started again
                    end = time.monotonic() + TIMEOUT_SECONDS
                    while (
                        len([p for p in ranks_of(process.pid).values() if not gone(p)]) < 2
                        and time.monotonic() < end
                    ):
                        time.sleep(0.002)
                    time.sleep(dice.random() * (0.3 if launcher == "shardtrain" else 3.0))
                ranks = ranks_of(process.pid)
                rank = dice.choice(sorted(ranks))
                killed = time.monotonic()
                os.kill(ranks[rank], signal.SIGKILL)
                done += 1
                while not all(gone(pid) for pid in ranks.values()):
                    time.sleep(0.005)
                stopped.append(time.monotonic() - killed)
                after = time.monotonic()
                if at == "step" or done % 2 == 0:
                    came, _ = lines.wait(r"step: *\d+ .*loss", after)
                    resumed.append(came - killed)
            if launcher == "shardtrain":
                restarts = sum(bool(re.match(r"restart \d+ of", line)) for _, line in lines.found)
            else:
                environ = Path(
                    f"/proc/{next(iter(ranks_of(process.pid).values()))}/environ"
                ).read_bytes()
                restarts = int(re.search(rb"TORCHELASTIC_RESTART_COUNT=(\d+)", environ).group(1))  # type: ignore[union-attr]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
    return {
        "launcher": launcher, "at": at, "kills": kills, "restarts_used": restarts,
        "stopped_seconds_p50": sorted(stopped)[len(stopped) // 2], "stopped_seconds_p95": p95(stopped),
        "new_step_seconds_p50": sorted(resumed)[len(resumed) // 2], "new_step_seconds_p95": p95(resumed),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--launcher", choices=["shardtrain", "torchrun"], default="shardtrain")
    parser.add_argument("--at", choices=["step", "load", "rendezvous"], default="step")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    import torch

    result = measure(options.launcher, options.kills, options.at)
    result |= {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    print(json.dumps(result, indent=2))
    if options.output:
        # Replace the earlier result of the same case.
        results = [result]
        if options.output.exists():
            case = (result["launcher"], result["at"])
            earlier = json.loads(options.output.read_text())
            others = [row for row in earlier if (row["launcher"], row["at"]) != case]
            results = [*others, result]
        options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
