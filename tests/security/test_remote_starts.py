"""Python processes on other hosts and in containers import nothing from their working directory.

``launch`` writes ``-P`` after every interpreter that it starts elsewhere. A real sshd and the scripts of Slurm show
that modules in the working directory of a node are not imported.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
import sshd
import yaml
from launched import losses
from ports import free_port
from tiers import cases
from tiny import text_file

from shardtrain import config
from shardtrain.launch.hostfile import Host
from shardtrain.launch.job import to_job
from shardtrain.launch.platforms import kubernetes, runai, slurm, ssh

ROOT = Path(__file__).parents[2]
NODE_PYTHON = "/opt/node python/bin/python3"
JOB = [f"--launch.python={NODE_PYTHON}", "--launch.nodes=2", "--launch.image=image.sif"]
PLATFORMS = [
    "ssh",
    *(f"slurm {container}" for container in ("none", "apptainer", "singularity", "pyxis")),
    "slurm sweep",
    *(f"kubernetes {kind}" for kind in ("pytorchjob", "trainjob", "jobset")),
    "runai v1",
    "runai v2",
]
PLANTED = (
    "ctypes", "importlib", "json", "numpy", "runpy", "select", "shardtrain", "subprocess", "tomllib", "torch", "types",
)  # fmt: skip
"""Modules that the agent of a host, the check of a node, a rank, or Python's own start would import."""
ONE_STEP = [
    "--training.dataset=text", f"--training.dataset_path={text_file()}", "--training.device=cpu",
    "--training.seq_len=32", "--training.local_batch_size=1", "--model.overrides.num_layers=1",
    "--lr_scheduler.warmup_steps=1", "--metrics.log_freq=1", "--training.steps=1",
]  # fmt: skip


def commands_of(platform: str, verb: str) -> Iterator[list[str]]:
    """Yield each argument list that the platform starts on a node."""
    name, _, kind = platform.partition(" ")
    arguments = list(JOB)
    if name == "kubernetes":
        arguments.append(f"--launch.kubernetes.kind={kind}")
    if name == "runai":
        arguments.append(f"--launch.runai.cli={kind}")
    if kind == "sweep":
        arguments.append('--launch.slurm.sweep=["--optimizer.lr 1e-4"]')
    elif name == "slurm":
        arguments.append(f"--launch.slurm.container={kind}")
    loaded = config.load(None, arguments)
    launch = loaded.config.launch
    job = to_job(loaded, arguments, verb=verb)
    if name == "ssh":
        for plan in ssh.render(job, launch, [Host("a"), Host("b")], "a", "id"):
            yield shlex.split(plan.ssh[-1])
            yield list(plan.command)
    if name == "slurm":
        for line in slurm.render(job, launch).splitlines():
            if line.startswith(("command=(", "srun ")):
                yield shlex.split(line.removeprefix("command=(").removesuffix(")"))
    if name == "kubernetes":
        for manifest in yaml.safe_load_all(kubernetes.render(job, launch)):
            yield from containers_of(manifest)
    if name == "runai":
        yield runai.render(job, launch)


def containers_of(value: object) -> Iterator[list[str]]:
    """Yield the command of each container of a manifest."""
    if isinstance(value, list):
        for one in value:
            yield from containers_of(one)
    if isinstance(value, dict):
        if "command" in value:
            yield value["command"]
        for one in value.values():
            yield from containers_of(one)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_interpreter_on_a_node_has_the_safe_path(platform: str) -> None:
    for verb in ("train", "doctor"):
        count = 0
        for command in commands_of(platform, verb):
            if "$on_node" in command:
                # bash stores the next argument in $0, for messages
                del command[command.index("$on_node") + 1]
            for index, argument in enumerate(command):
                if argument == NODE_PYTHON:
                    count += 1
                    assert command[index + 1] == "-P", command
                    assert command[index + 2] in ("-m", "-c"), command

        assert count >= 1, f"{platform} starts no Python"


def test_scripts_for_several_nodes_start_python_with_the_safe_path() -> None:
    for name in ("multinode_trainer.slurm", "run_train.sh"):
        text = (ROOT / name).read_text()
        starts = re.findall(r'"\$(?:python|\{PYTHON:-python3\})" .*', text)
        assert starts, name
        for start in starts:
            assert re.match(r'"[^"]*" -P -m shardtrain ', start), f"{name}: {start}"


def plant(folder: Path) -> Path:
    """Write modules that record their name in the returned file and end the process."""
    imported = folder.parent / "imported"
    folder.mkdir()
    for name in PLANTED:
        text = f"open({str(imported)!r}, 'a').write('{name} ')\nraise SystemExit(99)\n"
        (folder / f"{name}.py").write_text(text)
    return imported


@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "sshd")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number_of_hosts", "verb"), cases([(1, "train")], nightly=[(2, "train"), (2, "doctor")])
)
def test_hosts_of_ssh_import_no_planted_module(
    number_of_hosts: int, verb: str, tmp_path: Path
) -> None:
    planted = tmp_path / "planted"
    imported = plant(planted)
    hosts = {f"host-{number}": f"127.0.0.{number + 1}" for number in range(number_of_hosts)}
    with sshd.server(tmp_path / "sshd", hosts) as ssh_config:
        command = [
            sys.executable, "-P", "-m", "shardtrain", "launch", "ssh", "debug", "--hosts", ",".join(hosts),
            f"--launch.ssh.config_file={ssh_config}", f"--launch.ssh.rendezvous_port={free_port()}",
            f"--launch.python={sys.executable}", f"--launch.workdir={planted}", "--nproc=1",
            "--launch.env.OMP_NUM_THREADS=1", f"--job.dump_folder={tmp_path}/run", *ONE_STEP,
        ]  # fmt: skip
        if verb == "doctor":
            command.append("--doctor")
        done = finished(command, ROOT, {"XDG_STATE_HOME": str(tmp_path)})

    assert not imported.exists(), imported.read_text()
    assert done.returncode == 0, done.stderr[-2000:]
    if verb == "train":
        assert list(losses(tmp_path / "run")) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("script", cases(["launch slurm"], nightly=["multinode_trainer.slurm"]))
def test_nodes_of_slurm_import_no_planted_module(script: str, tmp_path: Path) -> None:
    """Shell programs take the place of ``srun`` and ``scontrol``."""
    planted = tmp_path / "planted"
    imported = plant(planted)
    options = [*ONE_STEP, f"--job.dump_folder={tmp_path}/run"]
    text = ROOT / "multinode_trainer.slurm"
    arguments = options
    if script == "launch slurm":
        overrides = [f"--launch.python={sys.executable}", "--launch.nproc_per_node=1", *options]
        loaded = config.load("debug", overrides)
        text = tmp_path / "script"
        text.write_text(slurm.render(to_job(loaded, overrides), loaded.config.launch))
        arguments = []
    programs = {
        "scontrol": '[[ "$2" == job ]] || echo 127.0.0.1',
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    }
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, body in programs.items():
        (bin_folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (bin_folder / name).chmod(0o755)
    variables = {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1",
        "PYTHON": sys.executable,
        "CONFIG_FILE": "debug",
        "NGPU": "1",
    }
    done = finished(["bash", str(text), *arguments], planted, variables)

    assert not imported.exists(), imported.read_text()
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(losses(tmp_path / "run")) == [1]


def finished(
    command: list[str], folder: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, without PYTHONSAFEPATH, and wait for it."""
    environment = {**os.environ, **variables}
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        check=False,
    )


@pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing() or "sshd")
def test_host_with_an_older_python_is_named_in_one_line(tmp_path: Path) -> None:
    """Python 3.10 and older have no ``-P``. This program prints their message."""
    python = tmp_path / "python"
    message = "Unknown option: -P\nusage: python [option]\nTry `python -h' for more information."
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(message)} >&2\nexit 2\n")
    python.chmod(0o755)
    with sshd.server(tmp_path / "sshd", {"host-a": "127.0.0.1"}) as ssh_config:
        command = [
            sys.executable, "-P", "-m", "shardtrain", "launch", "ssh", "debug", "--hosts=host-a",
            f"--launch.ssh.config_file={ssh_config}", f"--launch.python={python}",
        ]  # fmt: skip
        done = finished(command, ROOT, {"XDG_STATE_HOME": str(tmp_path)})
    lines = [line for line in done.stderr.splitlines() if line.startswith("error[")]

    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert "host-a" in lines[0]
    assert "its Python is older than 3.11" in lines[0]
