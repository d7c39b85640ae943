"""Kill ranks and nodes of a run of two nodes repeatedly, and count the steps that each kill costs.

    python benchmarks/snapshot_kills.py [--kills 100] [--seed 0]

Two agents on this machine train one CPU rank each, with ``checkpoint.snapshot_interval = 1`` and no checkpoint
before the end. A kill is a SIGKILL of one rank, or of the agent of the second node, which is then started
again with empty memory. At the end, the losses of all steps must be bitwise those of a run without kills.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 180
STEPS_BETWEEN = 4
"""Largest number of new steps between two kills."""
STEPS_PER_KILL = 12
"""Steps of the run for each kill, which include those until the kill takes effect."""
OPTIONS = {
    "training.dataset": "text", "training.device": "cpu", "training.seq_len": 32, "training.local_batch_size": 1,
    "training.on_data_end": "repeat", "model.overrides.num_layers": 1, "lr_scheduler.warmup_steps": 1,
    "metrics.log_freq": 1, "checkpoint.enable": "true", "checkpoint.interval": 1_000_000,
    "checkpoint.snapshot_interval": 1,
}  # fmt: skip

Start = Callable[[list[str], dict[str, str]], Any]
"""Starts a process from its command and environment, and returns an object like ``subprocess.Popen``."""


@dataclass
class Nodes:
    """The two agents of one run, each of which acts as a node.

    Attributes:
        processes: The agent of each node.
    """

    folder: Path
    steps: int
    start: Start
    port: int
    processes: list[Any]

    def begin(self, node: int) -> Any:
        """Start the agent of a node."""
        words = ["--nnodes=2", f"--node_rank={node}", f"--rdzv_endpoint=127.0.0.1:{self.port}",
                 "--nproc=1", "--max_restarts=1000", f"--job.dump_folder={self.folder}",
                 f"--training.steps={self.steps}",
                 f"--training.dataset_path={self.folder.with_suffix('.txt')}"]  # fmt: skip
        options = [f"--{name}={value}" for name, value in OPTIONS.items()]
        names = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1",
            "PET_RDZV_CONF": "keep_alive_interval=1,last_call_timeout=3",
        }  # fmt: skip
        return self.start([sys.executable, "-m", "shardtrain", "train", *words, *options], names)

    def ranks(self, node: int) -> list[int]:
        """Return the process IDs of a node's ranks."""
        pid = self.processes[node].pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(word) for word in text.split()]


@contextlib.contextmanager
def running(folder: Path, steps: int, start: Start) -> Iterator[Nodes]:
    """Start both agents. On exit, kill the processes that are still alive."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = random.Random(0).choices(["mesh", "shard", "gather", "loss", "rank", "step"], k=10_000)
    folder.with_suffix(".txt").write_text(" ".join(words))
    nodes = Nodes(folder, steps, start, port, [])
    try:
        for node in range(2):
            nodes.processes.append(nodes.begin(node))
        yield nodes
    finally:
        for process in nodes.processes:
            process.kill()
            process.wait()


def logged(folder: Path) -> list[tuple[int, float]]:
    """Return step and loss of each step that rank 0 has logged, in the order of the file."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        # A kill may leave an incomplete line.
        with contextlib.suppress(ValueError):
            fields = json.loads(line)
            if "loss" in fields:
                found.append((fields["step"], fields["loss"]))
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds. Raises AssertionError after ``TIMEOUT_SECONDS``."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def run(folder: Path, steps: int, kills: int, start: Start, seed: int = 0) -> list[str]:
    """Train with ``kills`` kills at random steps. Return the kind of each kill: "rank" or "node"."""
    dice = random.Random(seed)
    kinds: list[str] = []
    with running(folder, steps, start) as nodes:
        for _ in range(kills):
            newest = max((step for step, _ in logged(folder)), default=0)
            wanted = newest + dice.randint(2, STEPS_BETWEEN)
            wait_for(lambda wanted=wanted: logged(folder)[-1:] >= [(wanted, 0.0)], f"step {wanted}")
            time.sleep(dice.random() * 0.05)
            kind = dice.choice(["rank", "rank", "node"])
            lines_before = len(logged(folder))
            if kind == "rank":
                for pid in nodes.ranks(dice.randrange(2))[:1]:
                    os.kill(pid, signal.SIGKILL)
            else:
                nodes.processes[1].send_signal(signal.SIGKILL)
                nodes.processes[1].wait()
                nodes.processes[1] = nodes.begin(1)
            kinds.append(kind)
            attempts = len(kinds)
            wait_for(lambda attempts=attempts: starts(folder) > attempts, "the next attempt")
            wait_for(lambda count=lines_before: len(logged(folder)) > count + 1, "its first steps")
        for process in nodes.processes:
            code = process.wait(TIMEOUT_SECONDS)
            assert code == 0, f"an agent ended with {code}"
    return kinds


def starts(folder: Path) -> int:
    """Return how often the run has started training, including restarts."""
    path = folder / "goodput.jsonl"
    if not path.exists():
        return 0
    return path.read_text().count('{"kind": "start"')


def lost_steps(folder: Path) -> list[int]:
    """Return, for each restart, the number of completed steps that were trained again."""
    lost = []
    steps = [step for step, _ in logged(folder)]
    for before, after in itertools.pairwise(steps):
        if after <= before:
            lost.append(before - after + 1)
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps = options.kills * STEPS_PER_KILL + 10

    with tempfile.TemporaryDirectory() as folder:
        output = (Path(folder) / "output.txt").open("w")

        def start(command: list[str], names: dict[str, str]) -> Any:
            return subprocess.Popen(command, env=names, cwd=ROOT, stdout=output, stderr=output)

        begun = time.monotonic()
        try:
            kinds = run(Path(folder, "killed"), steps, options.kills, start, options.seed)
        except AssertionError:
            print((Path(folder) / "output.txt").read_text()[-5000:], file=sys.stderr)
            raise
        seconds = time.monotonic() - begun
        run(Path(folder, "undisturbed"), steps, 0, start)
        killed = dict(logged(Path(folder, "killed")))
        undisturbed = dict(logged(Path(folder, "undisturbed")))
        lost = lost_steps(Path(folder, "killed"))
    print(
        f"{kinds.count('rank')} ranks and {kinds.count('node')} nodes were killed in {seconds:.0f} s"
    )
    print(f"kills that cost completed steps: {len(lost)}, at most {max(lost, default=0)} each")
    equal = "bitwise equal" if killed == undisturbed else "DIFFERENT"
    print(f"losses of {len(killed)} steps: {equal} to a run without kills")
    if killed != undisturbed or max(lost, default=0) > 1:
        sys.exit(1)


if __name__ == "__main__":
    main()
