"""The agent of a node monitors its ranks like the local launcher."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import forked
import patience
import pytest
from launched import wait_for
from ports import free_port
from tiers import cases
from tiny import text_file

from shardtrain.config import load
from shardtrain.launch import agent, child_watch, nodes

ROOT = Path(__file__).parents[2]


def test_the_agent_polls_at_the_interval_used_to_count_stopped_ranks(tmp_path):
    """PyTorch's default interval is twice as long, and would double the time until a stopped rank is killed."""
    node = nodes.Nodes(2, 2, "127.0.0.1:1", 0, "run", "127.0.0.1", 0, 1, "--nnodes=2")
    rendezvous = SimpleNamespace(get_backend=lambda: "c10d", get_run_id=lambda: "run")
    node_agent = agent._agent(node, rendezvous, 1, ["doctor"], 0, str(tmp_path), None)
    assert node_agent.get_worker_group().spec.monitor_interval == child_watch.POLL_SECONDS


def test_an_agent_that_restarts_its_ranks_still_ends_at_a_request(tmp_path):
    """PyTorch ends the remaining ranks before each restart, and then may wait minutes for other nodes."""
    node = nodes.Nodes(2, 2, "127.0.0.1:1", 0, "run", "127.0.0.1", 0, 1, "--nnodes=2")
    rendezvous = SimpleNamespace(get_backend=lambda: "c10d", get_run_id=lambda: "run")
    loaded = load(None, [f"--job.dump_folder={tmp_path}"], preset="debug")
    node_agent = agent._agent(node, rendezvous, 1, ["train"], 0, str(tmp_path), loaded)
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    node_agent._stop_workers(node_agent.get_worker_group())

    assert {number: signal.getsignal(number) for number in handlers} == handlers


TELLING = "telling the other nodes that this one cannot run, at most 120 s\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_cannot_run_says_so_before_it_tells_the_others(tmp_path, rank):
    """Other nodes may start minutes later. A signal in this time must keep the reason and the exit status."""
    options = ["--nnodes=2", f"--node_rank={rank}", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    command = [
        sys.executable,
        "-m",
        "shardtrain",
        "train",
        "debug",
        *options,
        f"--job.dump_folder={tmp_path}",
    ]

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))

    with forked.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=limit_files
    ) as process:
        try:
            line = process.stderr.readline()
            assert line.startswith("error[7]: ulimit -n=60 must be at least ")
            # The node prints this line after it has installed its signal handler.
            process.send_signal(signal.SIGTERM)
            assert process.wait(patience.seconds(30)) == 7
            assert process.stderr.read() in ("", TELLING)
        finally:
            process.kill()

    assert '"code": 7' in (tmp_path / "exit.json").read_text()


ENDS = """
import sys, threading
from shardtrain import __main__, cli

def run():
    from torch.distributed import TCPStore
    server = TCPStore("127.0.0.1", 0, 1, True)
    all_are_in_calls = threading.Barrier(9)

    def keep_alive():
        store = TCPStore("127.0.0.1", server.port, 1, False)
        all_are_in_calls.wait()
        while True:
            store.check(["state"])

    for _ in range(8):
        threading.Thread(target=keep_alive, daemon=True).start()
    all_are_in_calls.wait()
    print("done")
    END

cli.main = run
sys.exit(__main__.main())
"""


@pytest.mark.parametrize("end", ["return 75", "sys.exit(75)"])
def test_threads_in_a_store_do_not_abort_the_end_of_a_node(end):
    """PyTorch's heartbeat thread may still be in a store call at exit. This aborted finished runs with 134."""
    command = [sys.executable, "-c", ENDS.replace("END", end)]
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=patience.seconds(60)
    )

    assert (ended.returncode, ended.stdout) == (75, "done\n"), ended.stderr


def test_a_node_that_is_stopped_while_it_waits_leaves_no_temporary_folder(tmp_path):
    (tmp_path / "tmp").mkdir()
    options = ["--nnodes=2", "--node_rank=0", f"--rdzv_endpoint=127.0.0.1:{free_port()}"]
    command = [
        sys.executable,
        "-m",
        "shardtrain",
        "train",
        "debug",
        *options,
        f"--job.dump_folder={tmp_path / 'run'}",
        "--checkpoint.grace_seconds=1",
    ]
    names = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    with forked.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=names) as process:
        try:
            wait_for(lambda: [*(tmp_path / "tmp").glob("shardtrain-*/.removed*")])
            process.send_signal(signal.SIGTERM)
            assert process.wait(patience.seconds(30)) == 75
        finally:
            process.kill()

    assert not [*(tmp_path / "tmp").glob("shardtrain-*")]


@pytest.mark.parametrize("lacking", cases([{1}], nightly=[{0}, {0, 1}]))
def test_a_node_without_its_data_ends_all_nodes_with_the_reason(tmp_path, lacking):
    """Other nodes must not wait ten minutes for the node. If all nodes lack the data, all end immediately."""
    endpoint = f"127.0.0.1:{free_port()}"
    nodes_of_run = []
    for rank in (0, 1):
        path = tmp_path / "missing.txt" if rank in lacking else text_file()
        options = [
            "--nnodes=2",
            f"--node_rank={rank}",
            f"--rdzv_endpoint={endpoint}",
            "--training.dataset=text",
            f"--training.dataset_path={path}",
            "--training.on_data_end=repeat",
            f"--job.dump_folder={tmp_path / str(rank)}",
        ]
        command = [sys.executable, "-m", "shardtrain", "train", "debug", *options]
        environment = {**os.environ, "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        node = forked.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        nodes_of_run.append(node)
    try:
        outputs = [node.communicate(timeout=patience.seconds(90))[1] for node in nodes_of_run]
    finally:
        for node in nodes_of_run:
            node.kill()

    assert [node.returncode for node in nodes_of_run] == [2, 2], outputs

    # A node with data names the host that lacks it. A node without data reports its own problem.
    for rank, text in enumerate(outputs):
        (line,) = [line for line in text.splitlines() if line.startswith("error[")]
        assert "missing.txt" in line, text
        assert (f"host {socket.gethostname()} cannot run: " in line) == (rank not in lacking)
