"""Jobs on a real Slurm cluster: nodes that cannot run them, requeued jobs, sweeps and containers."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import patience
import pytest
from launched import losses, newest, wait_for
from slurm_cluster import ON_LOOPBACK, SMALL, launch, running, shown, submit

pytestmark = pytest.mark.slow
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def end_of(names: dict[str, str], job: str) -> str:
    """Wait for the end of a job, and return its status line."""
    wait_for(lambda: shown(names, job)["JobState"] in ENDED, 300)
    return launch(names, "status", f"slurm/{job}").stdout.strip()


def errors(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("error")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["--launch.python=/no/python"],
            "no /no/python here; install it, load its module in launch.slurm.setup, or correct launch.python",
            id="no interpreter",
        ),
        pytest.param(
            ["--launch.python={bare}"],
            "{bare} has no package torch; install it there, or correct launch.python",
            id="no package",
        ),
        pytest.param(
            [
                "--launch.slurm.container=apptainer",
                "--launch.image=/no.sif",
                "--launch.env.PATH={shims}",
            ],
            "/no.sif does not start: FATAL: could not open image; correct launch.python or launch.image",
            id="no image",
        ),
    ],
)
def test_a_missing_dependency_is_one_line_per_node_and_ends_the_job(
    cluster, tmp_path, options, message
):
    bare = tmp_path / "bare"
    shims = tmp_path / "shims"
    shims.mkdir()
    scripts = {bare: f'exec {sys.executable} -I -S "$@"', shims / "apptainer": _NO_IMAGE}
    for path, body in scripts.items():
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    names = {"bare": str(bare), "shims": f"{shims}:{os.environ['PATH']}"}
    options = [option.format(**names) for option in options]
    # The interpreter reports its real path, not that of the wrapper script.
    message = message.replace("{bare}", re.escape(sys.executable))
    job = submit(cluster, tmp_path, "--name=lacks", "--nodes=2", *options)
    line = end_of(cluster, job)

    assert ": FAILED on " in line
    assert ", exit code 2, log " in line

    lines = errors(tmp_path / f"lacks-{job}.log")
    nodes = sorted(re.match(rf"error\[2\]: (\S+): {message}", line)[1] for line in lines)
    assert len(nodes) == 2
    assert nodes[1] == f"z{nodes[0]}"
    assert shown(cluster, job)["Restarts"] == "0"


_NO_IMAGE = 'echo "INFO: looking" >&2; echo "FATAL: could not open image" >&2; exit 255'


def test_a_folder_that_one_node_lacks_is_reported_by_that_node(cluster, tmp_path):
    folder = Path(cluster["UNSEEN"]) / "run"
    folder.mkdir()
    arguments = [
        "--name=unseen",
        "--nodes=2",
        f"--launch.python={sys.executable}",
        f"--launch.workdir={folder}",
    ]
    job = submit(
        cluster, tmp_path, *arguments, f"--launch.env.PYTHONPATH={Path(__file__).parents[2]}"
    )

    assert ", exit code 2, log " in end_of(cluster, job)

    (line,) = errors(tmp_path / f"unseen-{job}.log")
    assert re.fullmatch(
        rf"error\[2\]: z\S+: {folder} is not on this node; use a folder that all nodes see, .*",
        line,
    )


def test_a_deleted_configuration_is_reported_by_each_node(cluster, tmp_path):
    path = tmp_path / "gone.toml"
    path.write_text("[training]\nsteps = 1\n")
    arguments = ["slurm", str(path), "--name=gone", "--nodes=2", *ON_LOOPBACK, "--dry-run"]
    script = launch(cluster, *arguments).stdout
    # Delete the file after rendering, before the job starts.
    path.unlink()
    command = ["sbatch", "--parsable", f"--chdir={tmp_path}"]
    job = subprocess.run(
        command,
        input=script,
        env=cluster,
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
    ).stdout.strip()

    assert ", exit code 2, log " in end_of(cluster, job)

    lines = errors(tmp_path / f"gone-{job}.log")
    assert len(lines) == 2
    assert all(f"no configuration {path} here; use a folder that" in line for line in lines)


def test_a_port_in_use_is_skipped(cluster, tmp_path):
    """The script tries the next port if another program listens on the job's default port."""
    script = launch(cluster, "slurm", "--name=port", "--nodes=1", "--dry-run").stdout
    block = script[script.index("# the rendezvous endpoint") : script.index("\ncommand=")]
    # A program that listens on a free port, prints it, and waits.
    code = "import socket, time; server = socket.create_server(('127.0.0.1', 0)); "
    code += "print(server.getsockname()[1], flush=True); time.sleep(100)"
    listener = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        port = int(listener.stdout.readline())
        names = {
            **cluster,
            "SLURM_JOB_NODELIST": "127.0.0.1",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_ID": "0",
        }
        block = f"{block.replace('20000', str(port))}\necho $SHARDTRAIN_RDZV_ENDPOINT"
        result = subprocess.run(
            ["bash", "-c", block],
            env=names,
            capture_output=True,
            text=True,
            timeout=patience.seconds(60),
        )
    finally:
        listener.kill()
        listener.wait()
    endpoint = re.fullmatch(r"127\.0\.0\.1:(\d+)\n", result.stdout)

    assert endpoint and int(endpoint[1]) > port, result


@pytest.mark.nightly(
    "complete tasks of a sweep",
    by="tests/launch/test_slurm.py::test_a_real_slurm_runs_it_on_two_nodes_and_requeues_it_after_a_signal",
)
def test_each_task_of_a_sweep_has_its_folder_and_fails_independently(cluster, tmp_path):
    folder = tmp_path / "run"
    wrong = "--checkpoint.enable --checkpoint.initial_load_path /nowhere"
    sweep = f'["--optimizer.lr 1e-4", "{wrong}", "--optimizer.lr 3e-4 --training.seed 7"]'
    job = submit(
        cluster, tmp_path, "--name=sweep", "--nproc=1", *ON_LOOPBACK, *SMALL, "--training.steps=2",
        f"--job.dump_folder={folder}", f"--launch.slurm.sweep={sweep}",
    )  # fmt: skip

    def lines() -> list[str]:
        return sorted(launch(cluster, "status", f"slurm/{job}").stdout.splitlines())

    wait_for(
        lambda: len(lines()) == 3 and not re.search("PENDING|RUNNING|COMPLETING", "".join(lines())),
        300,
    )
    states = []
    for line in lines():
        pattern = rf"slurm/{job}_(\d): (\w+) on .*, log {tmp_path}/sweep-{job}_\1\.log$"
        states.append(re.match(pattern, line).groups())
    assert states == [("0", "COMPLETED"), ("1", "FAILED"), ("2", "COMPLETED")]

    for task in (0, 2):
        assert sorted(losses(folder / f"sweep-{task}")) == [1, 2]
    text = (folder / "sweep-2/config.resolved.toml").read_text()
    assert "lr = 0.0003" in text
    assert "seed = 7" in text

    # The logs of the job have a heading for each task, and those of a task have none.
    logs = launch(cluster, "logs", f"slurm/{job}").stdout
    for task in range(3):
        assert f"==> {tmp_path}/sweep-{job}_{task}.log <==" in logs
    task_log = launch(cluster, "logs", f"slurm/{job}_1").stdout
    assert "/nowhere" in task_log
    assert "==>" not in task_log


@pytest.mark.nightly(
    "complete tasks of a sweep",
    by="tests/launch/test_slurm.py::test_a_real_slurm_runs_it_on_two_nodes_and_requeues_it_after_a_signal",
)
def test_a_requeued_task_of_a_sweep_resumes_in_its_folder_and_stops_independently(
    cluster, tmp_path
):
    folder = tmp_path / "run"
    job = submit(
        cluster, tmp_path, "--name=again", "--nproc=1", *ON_LOOPBACK, *SMALL, "--training.steps=100000",
        "--training.on_data_end=repeat",
        "--checkpoint.enable", f"--job.dump_folder={folder}",
        '--launch.slurm.sweep=["--training.seed 1", "--training.seed 2"]',
    )  # fmt: skip
    task_folder = folder / "sweep-1"
    wait_for(lambda: (task_folder / "metrics.jsonl").exists() and len(losses(task_folder)) > 1, 300)
    subprocess.run(
        ["scancel", "--signal=USR1", f"{job}_1"],
        env=cluster,
        check=True,
        timeout=patience.seconds(60),
    )
    wait_for(lambda: shown(cluster, f"{job}_1").get("Restarts") == "1", 120)
    saved = newest(task_folder)
    wait_for(lambda: max(losses(task_folder)) > saved, 300)
    steps = list(losses(task_folder))  # the run continues during this check

    assert steps == list(range(1, steps[-1] + 1)), "a step was lost or repeated"
    assert launch(cluster, "stop", f"slurm/{job}_1").returncode == 0

    wait_for(lambda: shown(cluster, f"{job}_1")["JobState"] == "CANCELLED", 120)
    assert shown(cluster, f"{job}_0")["JobState"] == "RUNNING"
    assert launch(cluster, "stop", f"slurm/{job}").returncode == 0

    wait_for(lambda: not running(folder), 120)


def test_a_saved_run_that_cannot_be_requeued_is_reported(cluster, tmp_path):
    """JobRequeue=0 or a directive disables requeueing."""
    folder = tmp_path / "run"
    script = launch(
        cluster, "slurm", "--name=once", "--nproc=1", *ON_LOOPBACK, *SMALL, "--training.steps=100000",
        "--training.on_data_end=repeat",
        "--checkpoint.enable", f"--job.dump_folder={folder}", "--dry-run",
    ).stdout  # fmt: skip
    command = ["sbatch", "--parsable", f"--chdir={tmp_path}", "--no-requeue"]
    job = subprocess.run(
        command,
        input=script,
        env=cluster,
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
    ).stdout.strip()
    wait_for(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) > 1, 300)
    subprocess.run(
        ["scancel", "--signal=USR1", job], env=cluster, check=True, timeout=patience.seconds(60)
    )

    assert ": FAILED on " in (line := end_of(cluster, job))
    assert "exit code 75" in line

    (line,) = errors(tmp_path / f"once-{job}.log")
    assert line.endswith("saved, but Slurm did not requeue it; submit it again to continue")
    assert newest(folder) == max(losses(folder))


@pytest.mark.nightly("it takes four minutes, the shortest limit that Slurm keeps")
def test_a_run_saves_before_the_time_limit_of_its_job_and_is_requeued(cluster, tmp_path):
    folder = tmp_path / "run"
    job = submit(
        cluster, tmp_path, "--name=limit", "--nproc=1", *ON_LOOPBACK, *SMALL, "--training.steps=100000",
        "--training.on_data_end=repeat",
        "--checkpoint.enable", "--checkpoint.grace_seconds=20", f"--job.dump_folder={folder}",
        "--launch.slurm.time_limit_minutes=3",
    )  # fmt: skip
    wait_for(lambda: shown(cluster, job).get("Restarts") == "1", 390)
    text = (tmp_path / f"limit-{job}.log").read_text()

    assert re.search(
        r"stopped by (SIGUSR1|the end of the Slurm job).*; everything is saved", text
    ), text[-2000:]
    assert newest(folder) == max(losses(folder))
    assert launch(cluster, "stop", f"slurm/{job}").returncode == 0

    wait_for(lambda: not running(folder), 120)


@pytest.mark.skipif(not shutil.which("apptainer"), reason="no apptainer here")
def test_a_container_has_its_mounts_and_cannot_write_read_only_ones(cluster, tmp_path):
    """``SHARDTRAIN_SANDBOX`` is a folder with the unpacked CPU image, into which the working tree is mounted."""
    sandbox = os.environ.get("SHARDTRAIN_SANDBOX")
    if not sandbox:
        pytest.skip("SHARDTRAIN_SANDBOX names no folder with the CPU image")
    folder = tmp_path / "run"
    cache = tmp_path / "cache"
    folder.mkdir()
    cache.mkdir()
    root = Path(__file__).parents[2]
    text = next(option for option in SMALL if "dataset_path" in option).partition("=")[2]
    job = submit(
        cluster, tmp_path, "--name=box", "--nodes=2", "--nproc=1", *ON_LOOPBACK[2:], *SMALL, "--training.steps=2",
        "--launch.python=/opt/shardtrain/bin/python3", "--launch.workdir=/src", "--job.dump_folder=/runs",
        "--launch.slurm.container=apptainer", f"--launch.image={sandbox}", "--launch.env.HF_HOME=/hf",
        f'--launch.mounts=["{root}:/src:ro", "{folder}:/runs", "{cache}:/hf", "{text}:{text}:ro"]',
    )  # fmt: skip

    log = (tmp_path / f"box-{job}.log").read_text
    assert ": COMPLETED on " in end_of(cluster, job), log()[-3000:]
    assert list(losses(folder)) == [1, 2]

    # Run a command in the container that writes to a read-only mount.
    script = launch(cluster, "slurm", "--launch.slurm.container=apptainer", f"--launch.image={sandbox}",
                    f'--launch.mounts=["{cache}:/hf:ro"]', "--dry-run").stdout  # fmt: skip
    pattern = r'^srun .*--export=ALL (apptainer exec .*) "\$\{command'
    container = re.search(pattern, script, re.MULTILINE)[1]
    result = subprocess.run(
        ["bash", "-c", f"{container} touch /hf/x"], env=cluster, capture_output=True, text=True
    )

    assert result.returncode
    assert "Read-only file system" in result.stderr
    assert not list(cache.iterdir())
