"""Laws of ``launch PLATFORM --doctor``: the doctor goes where the training would, once, and its report comes back."""

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


def launch(*words: str, **names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardtrain", "launch", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **names}
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=patience.seconds(180), check=False
    )


@pytest.mark.parametrize("platform", ["local", "ssh", "slurm", "kubernetes", "runai"])
def test_the_doctor_is_submitted_as_the_training_would_be(platform):
    words = [platform, "configs/debug.toml", "--training.steps=7", "--image=image", "--dry-run", "--max_restarts=3"]
    words += [] if platform == "local" else ["--nodes=2"]
    words += ["--hosts", "a,b"] if platform == "ssh" else []
    training, doctor = launch(*words), launch(*words, "--doctor")
    assert training.returncode == doctor.returncode == 0, doctor.stderr
    # A manifest has one argument per line. Other platforms have them on one line, some quoted.
    one, other = (re.sub(r'[\s",()]|- ', " ", done.stdout).split() for done in (training, doctor))
    assert one[one.index("train") - 1] == "shardtrain" == other[other.index("doctor") - 1]
    assert "--max_restarts" in one and "--max_restarts" not in other
    assert "doctor" not in one and "train" not in other
    assert "--training.steps=7" in other, "the doctor examines the given configuration"


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset"])
def test_a_doctor_that_finds_something_is_not_started_again(kind):
    words = ["--launch.image=image", "--launch.nodes=2", f"--launch.kubernetes.kind={kind}"]
    loaded = config.load(None, words)
    job = to_job(loaded, words, verb="doctor")
    text = kubernetes.render(job, loaded.config.launch)
    assert job.retries == 0
    for manifest in yaml.safe_load_all(text):
        assert not {value for key, value in _leaves(manifest) if key in ("maxRestarts", "backoffLimit")} - {0}
        assert {value for key, value in _leaves(manifest) if key == "restartPolicy"} <= {"Never"}


def _leaves(node: object, key: str = "") -> list[tuple[str, object]]:
    if isinstance(node, dict):
        return [one for name, value in node.items() for one in _leaves(value, name)]
    if isinstance(node, list):
        return [one for value in node for one in _leaves(value, key)]
    return [(key, node)]


def test_a_long_name_stays_short_enough_for_the_names_of_pods():
    words = ["--launch.image=image", f"--launch.name={'a' * 48}"]
    loaded = config.load(None, words)
    assert not config.check(loaded)
    assert to_job(loaded, words).name == "a" * 48
    assert to_job(loaded, words, verb="doctor").name == "a" * 41 + "-doctor"


def test_a_sweep_is_left_to_the_training():
    words = ["slurm", "--launch.slurm.sweep=--optimizer.lr 1e-4", "--dry-run"]
    assert "--array" in launch(*words).stdout and "--array" not in launch(*words, "--doctor").stdout


@pytest.mark.nightly(
    "two ranks of this machine make one report",
    by="tests/tools/doctor/test_doctor_command.py::test_the_doctor_looks_at_two_ranks_and_leaves_nothing",
)
@pytest.mark.slow
@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "sshd")
@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is Linux's")
def test_two_hosts_are_examined_together_and_one_report_comes_back(tmp_path):
    port = free_port()
    with sshd.server(tmp_path / "sshd", {"host-a": "127.0.0.1", "host-b": "127.0.0.2"}) as ssh_config:
        done = launch(
            "ssh", "--doctor", "--hosts", "host-a,host-b", "--nproc", "1", f"--launch.ssh.config_file={ssh_config}",
            f"--launch.ssh.rendezvous_port={port}", f"--launch.python={sys.executable}",
            f"--launch.workdir={ROOT}", "--launch.env.GLOO_SOCKET_IFNAME=lo", "--launch.env.OMP_NUM_THREADS=1",
            "--launch.env.SHARDTRAIN_LOCAL_ADDR=127.0.0.1", f"--job.dump_folder={tmp_path}", "--training.device=cpu",
            "--training.dataset=text", "--training.dataset_path=README.md", XDG_STATE_HOME=str(tmp_path),
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "2 ranks on " in line]
    assert len(lines) == 1, "only rank 0, on any host, reports on all ranks"
    assert "all_reduce" in done.stderr and "versions" in done.stderr
