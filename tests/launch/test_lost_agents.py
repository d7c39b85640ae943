"""A node whose agent is killed or stopped is noticed by the others in every phase, and so is a request to stop it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import patience
import pytest
from launched import newest, record, wait_for
from ports import free_port
from tiers import cases
from tiny import text_file

from shardtrain.launch import greeting, meeting

ROOT = Path(__file__).parents[2]
STEPS = 3
INIT_TIMEOUT_SECONDS = 3600
"""A test that ends in time has not waited for ``comm.init_timeout_seconds``."""

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="ranks end with their agent by Linux's help"
    ),
    pytest.mark.slow,
]

HELD_CALLS = {
    "ranks starting": ("shardtrain.distributed.process_group", "join"),
    "init_process_group": ("shardtrain.distributed.process_group", "dist.init_process_group"),
    "first step": ("shardtrain.train.optim", "set_learning_rate"),
    "last save": ("shardtrain.checkpoint.folder", "Checkpoints.save"),
    "end": ("shardtrain.checkpoint.folder", "Checkpoints.close"),
}
"""Phase -> module and call before which the rank of a node is held."""
HOOK = """
import os, sys, time
from importlib.machinery import PathFinder
from pathlib import Path

MODULE, CALL, RANK = {module!r}, {call!r}, {rank!r}

def hold_before_call(module):
    *path, name = CALL.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    def held(*arguments, **options):
        Path(__file__).with_name("ready").touch()
        while True:
            time.sleep(1)

    setattr(owner, name, held)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != MODULE or os.environ.get("RANK") != RANK:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), hold_before_call(module))
        return spec

sys.meta_path.insert(0, Finder())
"""
"""Module that Python imports at its start. It holds one rank for ever."""
SLOW_CHECK = """
import os, pathlib, time

def factor(step, total_steps, warmup_steps, min_lr_factor):
    folder = pathlib.Path(__file__).parent
    if os.environ.get("HELD") and "LOCAL_RANK" not in os.environ:
        (folder / "ready").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    return 1.0
"""
"""Schedule that holds the preflight of a node with the variable HELD."""


class Run:
    """Nodes of one run on the loopback interface, which may share a folder."""

    def __init__(self, folder: Path, nnodes: str, names: dict[str, str]) -> None:
        self.folder = folder
        self.nodes: dict[int, forked.Popen] = {}
        self._nnodes = nnodes
        self._endpoint = f"127.0.0.1:{free_port()}"
        self._names = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **names}

    def start(self, rank: int, *more: str, **names: str) -> None:
        values = {
            "nnodes": self._nnodes, "node_rank": rank, "rdzv_endpoint": self._endpoint, "nproc": 1,
            "job.dump_folder": self.folder / "run", "training.dataset": "text", "training.dataset_path": text_file(),
            "training.device": "cpu", "training.seq_len": 32, "training.local_batch_size": 1, "training.steps": STEPS,
            "training.on_data_end": "repeat", "model.overrides.num_layers": 1, "lr_scheduler.warmup_steps": 1,
            "checkpoint.enable": "true", "checkpoint.interval": 100,
            "comm.init_timeout_seconds": INIT_TIMEOUT_SECONDS, "comm.hang_timeout_seconds": 0,
        }  # fmt: skip
        options = [f"--{name}={value}" for name, value in values.items()]
        command = [sys.executable, "-m", "shardtrain", "train", *options, *more]
        with self._output(rank).open("w") as output:
            self.nodes[rank] = forked.Popen(
                command, env=self._names | names, cwd=ROOT, stderr=output
            )

    def wait_for_line(self, rank: int, text: str) -> None:
        """Wait until a node has printed a text."""
        wait_for(lambda: text in self.text(rank) or self.nodes[rank].poll() is not None)
        assert text in self.text(rank), self.text(rank)

    def status(self, rank: int) -> int:
        """Wait for the end of a node and return its exit status."""
        status: int = self.nodes[rank].wait(patience.seconds(120))
        return status

    def text(self, rank: int) -> str:
        """Return what a node has printed so far."""
        return self._output(rank).read_text()

    def last_line(self, rank: int) -> str:
        """Return the line with which a node reports how the run ended."""
        (line,) = re.findall(r"^(?:error|stopped)\[.*", self.text(rank), re.MULTILINE)
        return str(line)

    def _output(self, rank: int) -> Path:
        return self.folder / f"err-{rank}"


@contextlib.contextmanager
def run_of(folder: Path, nnodes: str = "2", **names: str) -> Iterator[Run]:
    """Yield a run without nodes, and kill the nodes that were started."""
    run = Run(folder, nnodes, {"RDZV_TIMEOUT": "3600", **names})
    try:
        yield run
    finally:
        for process in run.nodes.values():
            process.kill()


FIRST = ("ranks starting", 1, "SIGKILL")
LOST = list(itertools.product(HELD_CALLS, (0, 1), ("SIGKILL", "SIGSTOP")))


@pytest.mark.parametrize(
    ("phase", "victim", "name"), cases([FIRST], nightly=[cell for cell in LOST if cell != FIRST])
)
def test_a_lost_agent_is_noticed_by_the_other_node_in_every_phase(tmp_path, phase, victim, name):
    """Ranks that start wait an hour for others here, and hang detection is off."""
    module, call = HELD_CALLS[phase]
    hook = HOOK.format(module=module, call=call, rank=str(victim))
    (tmp_path / "sitecustomize.py").write_text(hook)
    with run_of(tmp_path) as run:
        for rank in (0, 1):
            run.start(rank)
        wait_for(lambda: (tmp_path / "ready").exists())
        run.nodes[victim].send_signal(getattr(signal, name))
        status = run.status(1 - victim)
        folder = tmp_path / "run"
        end = record(folder)
        if phase == "end":
            # The last step is saved, and nothing is left to do.
            assert (status, end["code"], newest(folder)) == (0, 0, STEPS)
            return
        assert (status, end["code"], end["rank"], end["retryable"]) == (6, 6, victim, True)
        line = run.last_line(1 - victim)
        assert f"rank {victim} (host " in line
        assert "was lost with its node" in line
        assert f"logs/rank-{victim}.log" in line
        if name == "SIGSTOP":
            # The stopped node notices that the run has ended without it.
            run.nodes[victim].send_signal(signal.SIGCONT)
            assert run.status(victim) == 6


@pytest.mark.nightly(
    "two agents that wait for a third",
    by="tests/launch/test_meeting.py::test_a_node_that_was_removed_before_all_have_joined_may_return_for_some_seconds",
)
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_lost_before_all_have_joined_ends_the_others(tmp_path, victim, name):
    with run_of(tmp_path, "3") as run:
        for rank in (0, 1):
            run.start(rank)
        run.wait_for_line(0, "waiting for other nodes: 2 of 3 have joined")
        run.nodes[victim].send_signal(getattr(signal, name))
        assert run.status(1 - victim) == 6
        line = run.last_line(1 - victim)
        assert victim == 0 or "node 1 (127.0.0.1, process " in line
        end = record(tmp_path / "run")
        assert (end["code"], end["rank"], end["retryable"]) == (6, None, True)


@pytest.mark.nightly(
    "waits for a timeout",
    by="tests/launch/test_lost_ranks.py::test_nodes_that_fail_to_meet_write_exit_json",
)
@pytest.mark.parametrize("absent", [1, 2])
def test_nodes_that_wait_in_vain_name_the_absent_one(tmp_path, absent):
    """Node 0 serves the store, and ends first. The other node reports the same reason instead of a lost store."""
    present = [rank for rank in range(3) if rank != absent]
    with run_of(tmp_path, "3", RDZV_TIMEOUT="30") as run:
        run.start(0)
        run.wait_for_line(0, "waiting for other nodes: 1 of 3 have joined")
        run.start(present[1])
        assert [run.status(rank) for rank in present] == [6, 6]
        lines = {run.last_line(rank) for rank in present}
    assert len(lines) == 1
    (line,) = lines
    assert f"2 joined; check node {absent}" in line
    end = record(tmp_path / "run")
    assert (end["code"], end["rank"], end["retryable"]) == (6, None, True)


# phase of the stopped node, its number, signal, all nodes of the run, nodes that start later
STOPS = {
    "node 0 in its preflight": ("preflight", 0, "SIGTERM", "2", ()),
    "node 1 waits for a third": ("joined", 1, "SIGINT", "3", (2,)),
    "node 1 in its preflight": ("preflight", 1, "SIGTERM", "2", ()),
    "node 0 waits for a third": ("joined", 0, "SIGUSR1", "3", (2,)),
    "node 2 of 3 in its preflight": ("preflight", 2, "SIGINT", "3", ()),
    "node 0 of 3 in its preflight": ("preflight", 0, "SIGINT", "3", ()),
    "node 0 of an elastic run": ("preflight", 0, "SIGTERM", "2:3", ()),
}


@pytest.mark.parametrize("name", cases([*STOPS][:2], nightly=[*STOPS][2:]))
def test_a_stop_request_before_the_nodes_meet_ends_all_nodes(tmp_path, monkeypatch, name):
    for module in (greeting, meeting):
        monkeypatch.setattr(module, "STOP_SECONDS", 3600.0)
    phase, victim, signal_name, nnodes, late = STOPS[name]
    (tmp_path / "slow.py").write_text(SLOW_CHECK)
    more = [
        f"--lr_scheduler.name={tmp_path / 'slow.py'}",
        "--training.global_batch_size=6",
        "--checkpoint.grace_seconds=7200",
    ]
    ranks = range(int(nnodes[-1]))
    with run_of(tmp_path, nnodes) as run:
        for rank in ranks:
            if rank not in late:
                is_held = phase == "preflight" and rank == victim
                run.start(rank, *more, HELD="1" if is_held else "")
        if phase == "preflight":
            wait_for((tmp_path / "ready").exists)
        else:
            run.wait_for_line(0, "waiting for other nodes: 2 of 3 have joined")
        run.nodes[victim].send_signal(getattr(signal, signal_name))
        run.wait_for_line(victim, "telling the other nodes that this one stops")
        for rank in late:
            run.start(rank, *more)
        assert [run.status(rank) for rank in ranks] == [75] * len(ranks)
        for rank in ranks:
            who = signal_name if rank == victim else f"{signal_name} on host "
            assert f"stopped[75]: stopped by {who}" in run.last_line(rank)
            assert "Traceback" not in run.text(rank)
    end = record(tmp_path / "run")

    assert (end["code"], end["rank"], end["last_step"]) == (75, None, None)


def test_two_interrupts_end_a_node_that_would_tell_the_others(tmp_path, monkeypatch):
    """Nobody else has started, so nobody listens."""
    monkeypatch.setattr(greeting, "STOP_SECONDS", 3600.0)
    with run_of(tmp_path) as run:
        run.start(1, "--checkpoint.grace_seconds=7200")
        run.wait_for_line(1, "waiting for 127.0.0.1")
        run.nodes[1].send_signal(signal.SIGINT)
        run.wait_for_line(1, "telling the other nodes that this one stops")
        wait_for(lambda: run.nodes[1].send_signal(signal.SIGINT) or run.nodes[1].poll() is not None)
        assert run.status(1) == 75

    assert json.loads((tmp_path / "run/exit.json").read_text())["code"] == 75
