"""Two local processes with the variables of two pods: they train one run, save when one is told to go, and continue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import patience
import pytest
from launched import losses, newest, record, wait_for
from ports import free_port
from tiny import text_file

ROOT = Path(__file__).parents[2]
TIMEOUT = 120
DROPPED = ("NGPU", "LOG_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def words(folder: Path, steps: int) -> list[str]:
    options = {
        "job.dump_folder": folder, "training.dataset": "text", "training.dataset_path": text_file(),
        "training.seq_len": 32, "training.local_batch_size": 1, "training.steps": steps, "training.device": "cpu",
        "model.overrides.num_layers": 1, "lr_scheduler.warmup_steps": 1, "metrics.log_freq": 1,
        "checkpoint.enable": "true",
    }  # fmt: skip
    return [sys.executable, "-m", "shardtrain", "train", *(f"--{name}={value}" for name, value in options.items())]


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
    environment = {**inherited, "GLOO_SOCKET_IFNAME": "lo", "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1", **names}
    return forked.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def ended(pods: list[subprocess.Popen]) -> list[tuple[int, str]]:
    try:
        return [(one.wait(patience.seconds(TIMEOUT)), one.communicate()[1]) for one in pods]
    finally:
        for one in pods:
            one.kill()


@pytest.mark.nightly(
    "two hosts stop and continue",
    by="tests/launch/test_ssh.py::test_two_hosts_train_one_run_stop_saved_at_ctrl_c_and_go_on",
)
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is called lo")
def test_two_pods_train_one_is_told_to_go_and_the_same_command_resumes(tmp_path):
    steps = 40
    port, command = free_port(), words(tmp_path, steps)
    pods = [pod(number, port, command) for number in (1, 0)]  # the one that waits comes first

    def has_come() -> bool:
        codes = [one.poll() for one in pods]
        if any(code is not None for code in codes):
            for one in pods:
                if one.poll() is None:
                    one.send_signal(forked.STACKS)
                    time.sleep(1)
                one.terminate()  # or the other waits for it as long as a node waits
            told = [one.communicate(timeout=patience.seconds(TIMEOUT))[1] for one in pods]
            pytest.fail(f"ended with {codes} before two steps:\n" + "\n".join(told))
        return (tmp_path / "metrics.jsonl").exists() and len(losses(tmp_path)) > 1

    try:
        wait_for(has_come)
        pods[0].send_signal(signal.SIGTERM)
    except BaseException:
        for one in pods:
            one.kill()
        raise
    for code, told in ended(pods):
        assert code == 75, told
        assert "Traceback" not in told
    saved = newest(tmp_path)
    assert 1 < saved < steps and record(tmp_path)["code"] == 75

    port = free_port()
    for code, told in ended([pod(number, port, command) for number in (0, 1)]):
        assert code == 0, told
    assert list(losses(tmp_path)) == list(range(1, steps + 1)), "no step is lost or made twice"


@pytest.mark.slow
def test_the_same_image_runs_alone_with_none_of_the_variables(tmp_path):
    """``runai submit``, whose pod has nothing but a command: the original died here of an empty PET_NNODES."""
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "NGPU": "2", "PET_NNODES": ""}
    done = forked.run(
        words(tmp_path / "run", 2),
        env=bare,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience.seconds(TIMEOUT),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(losses(tmp_path / "run")) == [1, 2] and "2 processes (as NGPU says)" in done.stderr
