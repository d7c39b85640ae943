"""A node of ``train --nnodes 1:2`` leaves or dies, and comes back: the run goes on with the same data."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import forked
import patience
import pytest
from launched import losses, newest, record, wait_for
from ports import free_port
from tiny import text_file

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 120

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="ranks end with their agent by Linux's help"
    ),
    pytest.mark.slow,
    pytest.mark.nightly(
        "three rounds of a rendezvous of two nodes",
        by="tests/launch/test_meeting.py::test_a_node_is_lost_when_its_heartbeat_has_not_changed_for_fifteen_seconds",
    ),
]

OPTIONS = {
    "training.dataset": "text", "training.dataset_path": text_file(), "training.device": "cpu", "training.seq_len": 32,
    "training.global_batch_size": 4, "training.local_batch_size": 1, "training.steps": 100_000,
    "training.on_data_end": "repeat", "model.overrides.num_layers": 1, "lr_scheduler.warmup_steps": 1,
    "checkpoint.enable": "true", "checkpoint.interval": 5, "metrics.log_freq": 1,
}  # fmt: skip


def world_sizes(folder: Path) -> list[int]:
    """The number of ranks of each attempt so far."""
    path = folder / "goodput.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return [line["world_size"] for line in lines if line["kind"] == "start"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_a_run_goes_on_without_a_node_and_takes_it_back(tmp_path, number, status):
    port = free_port()
    folder = tmp_path / "run"
    names = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1",
        "PET_RDZV_CONF": "keep_alive_interval=1,last_call_timeout=3",
    }  # fmt: skip

    def start(node: int) -> forked.Popen:
        options = [
            "--nnodes=1:2", f"--node_rank={node}", f"--rdzv_endpoint=127.0.0.1:{port}", "--nproc=1",
            "--max_restarts=1", f"--job.dump_folder={folder}",
            *(f"--{name}={value}" for name, value in OPTIONS.items()),
        ]  # fmt: skip
        command = [sys.executable, "-m", "shardtrain", "train", *options]
        process = forked.Popen(command, env=names, cwd=ROOT)
        stack.callback(process.kill)
        return process

    def last_step() -> int:
        return max(losses(folder), default=0) if (folder / "metrics.jsonl").exists() else 0

    def wait_for_steps(sizes: list[int]) -> int:
        """Wait until an attempt with this number of ranks has made steps; return the last step before it."""
        wait_for(lambda: len(world_sizes(folder)) == len(sizes), WAIT_SECONDS)
        first = last_step()
        wait_for(lambda: last_step() > first + 8, WAIT_SECONDS)
        assert world_sizes(folder) == sizes
        return first

    with contextlib.ExitStack() as stack:
        first_node = start(0)
        second_node = start(1)
        wait_for_steps([2])
        second_node.send_signal(number)
        assert second_node.wait(patience.seconds(WAIT_SECONDS)) == status
        assert wait_for_steps([2, 1]) > 8, "the run does not begin anew"
        restarted_node = start(1)
        assert wait_for_steps([2, 1, 2]) > 16
        for node in (first_node, restarted_node):
            node.send_signal(signal.SIGTERM)
        for node in (first_node, restarted_node):
            assert node.wait(patience.seconds(WAIT_SECONDS)) == 75

    end = record(folder)
    assert (end["code"], end["last_step"]) == (75, newest(folder))

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step_lines = [line for line in lines if "loss" in line]
    steps = [line["step"] for line in step_lines]
    assert list(dict.fromkeys(steps)) == list(range(1, newest(folder) + 1))
    # Only the steps since the last checkpoint are repeated, and only after a kill.
    assert len(steps) - len(set(steps)) < (6 if number == signal.SIGKILL else 1)

    # A repeated step reads the same data.
    hashes: dict[int, str] = {}
    for line in step_lines:
        assert hashes.setdefault(line["step"], line["order_hash"]) == line["order_hash"]
