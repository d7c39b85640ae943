"""``launch PLATFORM --doctor``: the doctor runs once, where the training would run, and returns its report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import patience
import pytest
import sshd
import yaml
from ports import free_port

from shardtrain import config
from shardtrain.launch.job import to_job
from shardtrain.launch.platforms import kubernetes

ROOT = Path(__file__).parents[2]


def launch(*arguments: str, **names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardtrain", "launch", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **names}
    return subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience.seconds(180),
        check=False,
    )


@pytest.mark.parametrize("platform", ["local", "ssh", "slurm", "kubernetes", "runai"])
def test_the_doctor_is_submitted_like_the_training(platform):
    arguments = [platform, "configs/debug.toml", "--training.steps=7", "--image=image"]
    arguments += ["--dry-run", "--max_restarts=3"]
    if platform != "local":
        arguments.append("--nodes=2")
    if platform == "ssh":
        arguments += ["--hosts", "a,b"]
    training = launch(*arguments)
    doctor = launch(*arguments, "--doctor")

    assert training.returncode == 0, training.stderr
    assert doctor.returncode == 0, doctor.stderr

    # A manifest has one argument per line. Other platforms have them on one line, some quoted.
    separators = r'[\s",()]|- '
    training_command = re.sub(separators, " ", training.stdout).split()
    doctor_command = re.sub(separators, " ", doctor.stdout).split()

    assert training_command[training_command.index("train") - 1] == "shardtrain"
    assert doctor_command[doctor_command.index("doctor") - 1] == "shardtrain"
    assert "--max_restarts" in training_command
    assert "--max_restarts" not in doctor_command
    assert "doctor" not in training_command
    assert "train" not in doctor_command
    # The doctor examines the given configuration.
    assert "--training.steps=7" in doctor_command


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset"])
def test_a_doctor_that_reports_problems_is_not_restarted(kind):
    arguments = ["--launch.image=image", "--launch.nodes=2", f"--launch.kubernetes.kind={kind}"]
    loaded = config.load(None, arguments)
    job = to_job(loaded, arguments, verb="doctor")
    text = kubernetes.render(job, loaded.config.launch)

    assert job.retries == 0
    for manifest in yaml.safe_load_all(text):
        for key, value in _leaves(manifest):
            if key in ("maxRestarts", "backoffLimit"):
                assert value == 0
            if key == "restartPolicy":
                assert value == "Never"


def _leaves(node: object, key: str = "") -> list[tuple[str, object]]:
    if isinstance(node, dict):
        return [leaf for name, value in node.items() for leaf in _leaves(value, name)]
    if isinstance(node, list):
        return [leaf for value in node for leaf in _leaves(value, key)]
    return [(key, node)]


def test_long_names_are_truncated_to_fit_pod_names():
    arguments = ["--launch.image=image", f"--launch.name={'a' * 48}"]
    loaded = config.load(None, arguments)
    assert not config.check(loaded)
    assert to_job(loaded, arguments).name == "a" * 48
    assert to_job(loaded, arguments, verb="doctor").name == "a" * 41 + "-doctor"


def test_the_doctor_ignores_a_sweep():
    arguments = ["slurm", "--launch.slurm.sweep=--optimizer.lr 1e-4", "--dry-run"]
    assert "--array" in launch(*arguments).stdout
    assert "--array" not in launch(*arguments, "--doctor").stdout


@pytest.mark.nightly(
    "two ranks of this machine make one report",
    by="tests/tools/doctor/test_doctor_command.py::test_the_doctor_examines_two_ranks_and_leaves_no_files",
)
@pytest.mark.slow
@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "sshd")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2")
def test_two_hosts_are_examined_together_and_one_report_comes_back(tmp_path):
    port = free_port()
    with sshd.server(
        tmp_path / "sshd", {"host-a": "127.0.0.1", "host-b": "127.0.0.2"}
    ) as ssh_config:
        result = launch(
            "ssh", "--doctor", "--hosts", "host-a,host-b", "--nproc", "1", f"--launch.ssh.config_file={ssh_config}",
            f"--launch.ssh.rendezvous_port={port}", f"--launch.python={sys.executable}",
            f"--launch.workdir={ROOT}", "--launch.env.GLOO_SOCKET_IFNAME=lo", "--launch.env.OMP_NUM_THREADS=1",
            "--launch.env.SHARDTRAIN_LOCAL_ADDR=127.0.0.1", f"--job.dump_folder={tmp_path}", "--training.device=cpu",
            "--training.dataset=text", "--training.dataset_path=README.md", XDG_STATE_HOME=str(tmp_path),
        )  # fmt: skip

    assert result.returncode == 0, result.stderr

    # Only rank 0 reports on all ranks.
    lines = [line for line in result.stderr.splitlines() if "2 ranks on " in line]
    assert len(lines) == 1
    assert "all_reduce" in result.stderr
    assert "versions" in result.stderr
