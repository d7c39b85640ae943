"""Two local processes with the variables of two pods train one run, save when one is terminated, and resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import forked
import patience
import pytest
from launched import losses, newest, record, wait_for
from ports import free_port
from tiny import text_file

ROOT = Path(__file__).parents[2]
TIMEOUT = 120
DROPPED = ("NGPU", "LOG_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def command_of(folder: Path, steps: int) -> list[str]:
    options = {
        "job.dump_folder": folder, "training.dataset": "text", "training.dataset_path": text_file(),
        "training.seq_len": 32, "training.local_batch_size": 1, "training.steps": steps, "training.device": "cpu",
        "model.overrides.num_layers": 1, "lr_scheduler.warmup_steps": 1, "metrics.log_freq": 1,
        "checkpoint.enable": "true",
    }  # fmt: skip
    command = [sys.executable, "-m", "shardtrain", "train"]
    return command + [f"--{name}={value}" for name, value in options.items()]


def pod(number: int, port: int, command: list[str]) -> subprocess.Popen:
    """A pod of ``runai submit-dist pytorch --workers 1 -g 1``: WORLD_SIZE and RANK count pods."""
    names = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(number),
        "PET_NNODES": "2", "PET_NODE_RANK": str(number), "PET_NPROC_PER_NODE": "auto", "PYTHONUNBUFFERED": "1",
        "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "NODE_NAME": f"node{number}",
        "RUNAI_PROJECT": "team", "RUNAI_JOB_NAME": "job", "RUNAI_JOB_UUID": "8c1c", "RUNAI_NUM_OF_GPUS": "1",
        "RDZV_TIMEOUT": str(round(patience.seconds(TIMEOUT))),
    }  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if name not in DROPPED}
    environment = {
        **inherited,
        "GLOO_SOCKET_IFNAME": "lo",
        "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1",
        **names,
    }
    return forked.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def fail_with_output(pods: list[subprocess.Popen], why: str) -> NoReturn:
    """Terminate all pods, and fail with their output and the stacks of those that still run."""
    codes = [process.poll() for process in pods]
    for process in pods:
        if process.poll() is None:
            process.send_signal(forked.STACKS)
    time.sleep(1)
    for process in pods:
        process.kill()  # kill all before reading the output: a living pod would wait for the others
    outputs = [process.communicate()[1] for process in pods]
    pytest.fail(f"{why}, ended with {codes}:\n" + "\n".join(outputs))


def ended(pods: list[subprocess.Popen]) -> list[tuple[int, str]]:
    try:
        codes = [process.wait(patience.seconds(TIMEOUT)) for process in pods]
        return [(code, process.communicate()[1]) for code, process in zip(codes, pods, strict=True)]
    except subprocess.TimeoutExpired:
        fail_with_output(pods, "a pod does not end")
    finally:
        for process in pods:
            process.kill()


@pytest.mark.nightly(
    "two hosts stop and continue",
    by="tests/launch/test_ssh.py::test_two_hosts_train_one_run_stop_saved_at_ctrl_c_and_continue",
)
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is called lo")
def test_two_pods_train_one_is_terminated_and_the_same_command_resumes(tmp_path):
    steps = 40
    port = free_port()
    command = command_of(tmp_path, steps)
    # start the node that has to wait first
    pods = [pod(number, port, command) for number in (1, 0)]

    def have_made_two_steps() -> bool:
        if any(process.poll() is not None for process in pods):
            fail_with_output(pods, "before two steps")
        return (tmp_path / "metrics.jsonl").exists() and len(losses(tmp_path)) > 1

    try:
        wait_for(have_made_two_steps)
        pods[0].send_signal(signal.SIGTERM)
    except BaseException:
        for process in pods:
            process.kill()
        raise

    for code, stderr in ended(pods):
        assert code == 75, stderr
        assert "Traceback" not in stderr

    saved = newest(tmp_path)
    assert 1 < saved < steps
    assert record(tmp_path)["code"] == 75

    port = free_port()
    for code, stderr in ended([pod(number, port, command) for number in (0, 1)]):
        assert code == 0, stderr
    assert list(losses(tmp_path)) == list(range(1, steps + 1)), "a step was lost or repeated"


@pytest.mark.slow
def test_the_same_image_runs_on_one_node_without_the_variables(tmp_path):
    """Pods of ``runai submit`` have no rendezvous variables, and PET_NNODES is empty."""
    bare = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "NGPU": "2",
        "PET_NNODES": "",
    }
    result = forked.run(
        command_of(tmp_path / "run", 2),
        env=bare,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience.seconds(TIMEOUT),
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert list(losses(tmp_path / "run")) == [1, 2]
    assert "2 processes (from NGPU)" in result.stderr
