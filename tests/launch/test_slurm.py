"""``launch slurm``: the rendered script, and the same script on a real Slurm cluster with two nodes."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import patience
import pytest
from launched import losses, newest, wait_for
from slurm_cluster import ON_LOOPBACK, SMALL, launch, running, shown, submit
from tiers import cases

from shardtrain import config
from shardtrain.config.command_line import split
from shardtrain.launch import failure, nodes
from shardtrain.launch.job import to_job
from shardtrain.launch.platforms import slurm
from shardtrain.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]


def script(*arguments: str) -> str:
    loaded = config.load(None, arguments)
    assert not config.check(loaded)
    return slurm.render(to_job(loaded, arguments), loaded.config.launch)


def last_step(text: str) -> str:
    """Return the srun command that trains. The one before it checks all nodes."""
    return [line for line in text.splitlines() if line.startswith("srun ")][-1]


def directives(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", text, re.MULTILINE))


def test_the_script_depends_only_on_the_number_of_nodes():
    two = script("--launch.nodes=2")
    eight = script("--launch.nodes=8")
    changed = [(a, b) for a, b in zip(two.splitlines(), eight.splitlines(), strict=True) if a != b]
    assert changed == [("#SBATCH --nodes=2", "#SBATCH --nodes=8")]


def test_each_option_has_its_directive():
    text = script(
        "--launch.name=run", "--launch.devices_per_node=8", "--launch.cpus_per_node=96",
        "--launch.memory_gib_per_node=64",
        "--launch.slurm.partition=gpu", "--launch.slurm.account=me", "--launch.slurm.qos=high",
        "--launch.slurm.time_limit_minutes=150", "--launch.slurm.directives=[\"--exclusive\"]",
        "--checkpoint.grace_seconds=50",
    )  # fmt: skip

    assert directives(text) == {
        "job-name": "run", "nodes": "1", "ntasks-per-node": "1", "gpus-per-node": "8", "cpus-per-task": "96",
        "mem": "64G", "partition": "gpu", "account": "me", "qos": "high", "time": "2:30:00", "output": "run-%j.log",
        "open-mode": "append", "signal": "USR1@60", "requeue": "", "exclusive": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("directive", "fix"),
    [
        ("--nodes=9", "launch.nodes"),
        ("--ntasks=9", "launch.nproc_per_node"),
        ("--ntasks-per-node=4", "launch.nproc_per_node"),
        ("--array=0-3", "launch.slurm.sweep"),
        ("--signal=TERM@5", "checkpoint.grace_seconds"),
        ("--no-requeue", "launch.slurm.requeue"),
        ("--partition=b", "launch.slurm.partition"),
        ("--open-mode=truncate", "remove it"),
    ],
)
def test_a_directive_that_would_replace_one_of_the_script_is_refused(directive, fix):
    """sbatch uses the last of several equal options, so a job of 2 nodes could run on 1."""
    with pytest.raises(ConfigError, match=f"{directive}.* would replace a line .*{fix}"):
        script(f'--launch.slurm.directives=["{directive}"]', "--launch.slurm.partition=a")


@pytest.mark.parametrize(
    "directive", ["--exclusive", "--mem=64G", "--time-min=5", "--output=run.log", "--gpus=8"]
)
def test_other_directives_are_passed_on(directive):
    text = script(f'--launch.slurm.directives=["{directive}"]', "--launch.slurm.partition=a")
    assert f"#SBATCH {directive}\n" in text


def test_the_notice_is_longer_than_the_trainers_grace():
    """Slurm signals 10 s earlier than the grace period requires, for the time until the save begins."""
    assert directives(script("--checkpoint.grace_seconds=100"))["signal"] == "USR1@110"


def test_jobs_are_requeued_unless_disabled():
    text = script("--launch.slurm.no_requeue")
    assert "scontrol requeue" not in text
    assert "no-requeue" in directives(text)


def test_apptainer_receives_mounts_devices_and_the_folder():
    text = script(
        "--launch.slurm.container=apptainer", "--launch.image=run.sif", "--launch.devices_per_node=4",
        "--launch.mounts=[\"/scratch/hf:/hf\", \"/data:/data:ro\"]", "--launch.env.HF_HOME=/hf",
        "--launch.workdir=/src",
        "--launch.fabric=infiniband",
    )  # fmt: skip
    step = last_step(text)

    assert (
        "apptainer exec --nv --bind /scratch/hf:/hf --bind /data:/data:ro --pwd /src run.sif"
        in step
    )
    assert "export HF_HOME=/hf\n" in text
    assert "export NCCL_IB_TIMEOUT=22\n" in text
    assert "cd -- /src" not in text, "the folder is the container's"


def test_pyxis_receives_the_same_as_options_of_srun():
    text = script(
        "--launch.slurm.container=pyxis",
        "--launch.image=reg/run:1",
        '--launch.mounts=["/data:/data:ro"]',
    )
    step = last_step(text)

    assert (
        "--container-image=reg/run:1 --no-container-mount-home --container-mounts=/data:/data:ro"
        in step
    )


VARIANTS = {
    "plain": [],
    "all": [
        "--launch.nodes=2", "--launch.workdir=/a b/it's", "--launch.slurm.setup=[\"module load cuda\"]",
        "--launch.fabric=efa", "--launch.slurm.host_suffix=i", "--launch.env.A=$HOME '", "--launch.slurm.no_requeue",
    ],
    "sweep": ['--launch.slurm.sweep=["--optimizer.lr 1e-4", "--job.description \'a b\'"]'],
    "apptainer": ["--launch.slurm.container=apptainer", "--launch.image=a.sif", '--launch.mounts=["/a b:/a b:ro"]'],
    "pyxis": ["--launch.slurm.container=pyxis", "--launch.image=reg/a:1", "--launch.workdir=/w"],
}  # fmt: skip


@pytest.mark.parametrize("name", [*VARIANTS, "the script at the root"])
def test_shellcheck_accepts_every_script(name):
    text_at_root = (ROOT / "multinode_trainer.slurm").read_text()
    text = script(*VARIANTS[name]) if name in VARIANTS else text_at_root
    result = subprocess.run(
        ["bash", "-n"], input=text, capture_output=True, text=True, timeout=patience.seconds(60)
    )

    assert (result.returncode, result.stderr) == (0, "")

    if not shutil.which("shellcheck"):
        pytest.skip("bash reads it; no shellcheck here: .ci/components.sh installs it")
    command = ["shellcheck", "--severity=warning", "--shell=bash", "-"]
    result = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=patience.seconds(60)
    )

    assert result.returncode == 0, result.stdout


def test_the_host_suffix_is_used_in_the_endpoint_and_for_each_node():
    """At some sites, the IP-over-InfiniBand host name is the node name plus a letter."""
    text = script("--launch.nodes=2", "--launch.slurm.host_suffix=i")
    assert 'SHARDTRAIN_RDZV_ENDPOINT="${hosts[0]}i:$port"' in text
    assert "export SHARDTRAIN_HOST_SUFFIX=i\n" in text

    names = {"SHARDTRAIN_NNODES": "2", "SHARDTRAIN_RDZV_ENDPOINT": "n1i:1", "SLURM_NODEID": "1",
             "SHARDTRAIN_HOST_SUFFIX": "i", "SLURMD_NODENAME": "n2"}  # fmt: skip
    assert nodes.find(split([]), names).local_address == "n2i"
    assert (
        nodes.find(split([]), {**names, "SHARDTRAIN_LOCAL_ADDR": "10.0.0.2"}).local_address
        == "10.0.0.2"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--launch.slurm.container=apptainer"], "launch.image"),
        (["--launch.secrets.HF_TOKEN=hf/token"], "launch.forward_env"),
        (["--launch.nodes=2", "--launch.min_nodes=1"], "launch.min_nodes"),
        (["--job.description=hf_0123456789abcdefghijklmn"], "secret"),
    ],
)
def test_options_that_slurm_does_not_support_are_rejected(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        loaded = config.load(None, arguments)
        slurm.render(to_job(loaded, arguments), loaded.config.launch)


def shimmed(tmp_path: Path, command: list[str], **names: str) -> subprocess.CompletedProcess[str]:
    """Run a script with two simulated nodes: a stub of srun starts one process per node on this machine."""
    shims = {
        "scontrol": 'echo "$*" >> "$CALLS"; [[ "$2" == job ]] && echo "   StdOut=${LOG:-}" && exit; '
        "echo 127.0.0.1; echo node2",
        "srun": 'while [[ "$1" == --* ]]; do shift; done; for i in 0 1; do SLURM_NODEID=$i SLURM_PROCID=$i "$@" & '
        "pids+=($!); done; code=0; for pid in ${pids[@]}; do wait $pid || code=$?; done; exit $code",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in shims.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo", "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1", **names,
    }  # fmt: skip
    return subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        check=False,
    )


def test_a_program_missing_on_a_node_is_named_with_a_fix(tmp_path):
    batch = tmp_path / "batch"
    batch.write_text(
        script("--launch.slurm.container=apptainer", "--launch.image=run.sif").replace(
            "apptainer", "xpptainer"
        )
    )
    result = shimmed(tmp_path, ["bash", str(batch)], SLURMD_NODENAME="n1")

    assert result.returncode == 2
    assert (
        "error[2]: n1: no xpptainer here; install it, load its module in launch.slurm.setup"
        in result.stderr
    )


def test_a_job_signalled_before_its_handlers_is_requeued(tmp_path):
    """SIGUSR1 kills a program before it installs its handler. Nothing was trained, so nothing is lost."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\n[[ "$2" == -c ]] || kill -USR1 $$\n')
    python.chmod(0o755)
    batch = tmp_path / "batch"
    batch.write_text(script("--launch.nodes=2", f"--launch.python={python}"))
    result = shimmed(tmp_path, ["bash", str(batch)])

    assert result.returncode == 138
    assert f"requeue {os.getpid()}" in (tmp_path / "calls").read_text().splitlines()


def queued_again(tmp_path: Path) -> bool:
    return f"requeue {os.getpid()}" in (tmp_path / "calls").read_text().splitlines()


@pytest.mark.parametrize("code", [75, 6])
def test_only_the_task_of_a_sweep_that_ended_is_requeued(tmp_path, code):
    """The last task of an array has the array's own job id. Requeueing that id would requeue every task."""
    # A stand-in for Python that ends with the code of the run.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n[[ "$2" == -c ]] || exit {code}\n')
    python.chmod(0o755)
    batch = tmp_path / "batch"
    batch.write_text(
        script(f"--launch.python={python}", '--launch.slurm.sweep=["--optimizer.lr 1e-4"]')
    )
    names = {"SLURM_ARRAY_JOB_ID": str(os.getpid()), "SLURM_ARRAY_TASK_ID": "0"}

    assert shimmed(tmp_path, ["bash", str(batch)], **names).returncode == code

    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if call.startswith("requeue")] == [f"requeue {os.getpid()}_0"]


CODES = {
    **{code: 0 for code in (0, 1, 2, 3, 4, 5, 7, 93)},
    **{code: 3 for code in (6, 8, 76, 137, 143)},
    75: math.inf,
    138: math.inf,
}
"""Exit code -> number of times a job is requeued, with at most 3 failures."""


@pytest.mark.parametrize("which", ["rendered", "the script at the root"])
@pytest.mark.parametrize("log", ["readable", "none"])
@pytest.mark.parametrize(
    ("code", "failures"),
    cases(
        [(6, 0), (6, 3), (1, 0), (75, 3)],
        nightly=[(code, n) for code in CODES for n in (0, 2, 3, 9)],
    ),
)
def test_retryable_codes_are_requeued_with_a_limit_for_failures(
    tmp_path, code, failures, log, which
):
    """Failures are counted in the job's log, or else with Slurm's restart count, which includes requests to stop."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n[[ "$2" == -c ]] || exit {code}\n')
    python.chmod(0o755)
    names = {"SLURM_RESTART_COUNT": str(failures)}
    # With a log, Slurm's count of 50 must not be used.
    if log == "readable":
        path = tmp_path / "job.log"
        path.write_text("step: 1\n" + "queued again after code 6: failure\nsaved\n" * failures)
        names = {"SLURM_RESTART_COUNT": "50", "LOG": str(path)}
    batch = tmp_path / "batch"
    if which == "rendered":
        batch.write_text(script(f"--launch.python={python}", "--launch.max_restarts=3"))
    else:
        batch.write_text((ROOT / "multinode_trainer.slurm").read_text())
    result = shimmed(tmp_path, ["bash", str(batch)], **names, PYTHON=str(python), MAX_REQUEUES="3")

    assert result.returncode == code, result.stderr
    assert queued_again(tmp_path) == (failures < CODES[code])

    log_line = f"queued again after code {code}: failure {failures + 1} of at most 3"
    assert (log_line in result.stdout) == (queued_again(tmp_path) and code not in (75, 138))


def test_requeued_codes_are_those_documented_as_retryable():
    page = (ROOT / "docs/launch.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .* \| ?(\w*) \| `tests", page, re.MULTILINE)
    table = {int(code): retry in ("yes", "later") for code, retry in rows}

    assert {code for code, retry in table.items() if retry} == failure.RETRYABLE
    assert all(bool(CODES[code]) == retry for code, retry in table.items())


@pytest.mark.parametrize("stop_exit_code", [75, 0, 3])
@pytest.mark.parametrize("which", ["rendered", "the script at the root"])
def test_a_stopped_job_is_requeued_for_every_configured_status(tmp_path, stop_exit_code, which):
    """Inside the job, a saved run always exits with 75. The script translates this status at its end."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[[ "$2" == -c ]] && exit; exit $((SHARDTRAIN_SUPERVISED ? 75 : {stop_exit_code}))\n'
    )
    python.chmod(0o755)
    batch = tmp_path / "batch"
    if which == "rendered":
        batch.write_text(
            script(f"--launch.python={python}", f"--checkpoint.stop_exit_code={stop_exit_code}")
        )
    else:
        batch.write_text((ROOT / "multinode_trainer.slurm").read_text())
    result = shimmed(
        tmp_path, ["bash", str(batch)], PYTHON=str(python), STOP_STATUS=str(stop_exit_code)
    )

    assert result.returncode == stop_exit_code, result.stderr
    assert queued_again(tmp_path)


@pytest.mark.nightly(
    "the rendered script on a real Slurm",
    by="tests/launch/test_slurm.py::test_a_real_slurm_runs_it_on_two_nodes_and_requeues_it_after_a_signal",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "ranks"), cases([({"NGPU": "1"}, 2)], nightly=[({"SLURM_JOB_GPUS": "0,1"}, 4)])
)
def test_the_script_at_the_root_runs_on_two_nodes_with_only_their_number_changed(
    tmp_path, variables, ranks
):
    """``multinode_trainer.slurm`` is edited by hand. Slurm's variables provide everything but the number of nodes."""
    command = [
        "bash",
        str(ROOT / "multinode_trainer.slurm"),
        *SMALL,
        "--training.steps=2",
        f"--job.dump_folder={tmp_path}",
    ]
    result = shimmed(
        tmp_path, command, **variables, PYTHON=sys.executable, CONFIG_FILE="configs/debug.toml"
    )

    assert result.returncode == 0, result.stderr
    assert list(losses(tmp_path)) == [1, 2]
    assert f"on {ranks} x cpu" in result.stderr
    assert ("but no device is visible" in result.stderr) == ("SLURM_JOB_GPUS" in variables), (
        "hidden GPUs must be reported"
    )

    text = (ROOT / "multinode_trainer.slurm").read_text()
    assert len(re.findall(r"--nodes=", text)) == 1, "the number of nodes must appear only once"


def processes(folder: Path) -> tuple[list[int], list[int]]:
    """Return the process ids of a job's agents and of their ranks."""
    parents = {}
    for number in map(int, running(folder)):
        with contextlib.suppress(OSError):
            if "srun" not in Path(f"/proc/{number}/comm").read_text():
                parents[number] = int(
                    Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1]
                )
    agents = [number for number, parent in parents.items() if parent not in parents]
    return agents, [number for number in parents if number not in agents]


@pytest.mark.nightly(
    "a minute each",
    by="tests/launch/test_slurm.py::test_retryable_codes_are_requeued_with_a_limit_for_failures",
)
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["agent", "rank"])
def test_a_real_slurm_requeues_a_job_that_lost_a_process_of_a_node(cluster, tmp_path, victim):
    """An agent dies with its node. A rank dies, for example, of a lack of memory."""
    folder = tmp_path / "run"
    job = submit(
        cluster, tmp_path, f"--name={victim}", "--nodes=2", "--nproc=1", *ON_LOOPBACK, *SMALL,
        "--training.steps=100000", "--training.on_data_end=repeat", "--checkpoint.enable", "--checkpoint.interval=5",
        f"--job.dump_folder={folder}",
    )  # fmt: skip
    wait_for(lambda: newest(folder) > 0, 180)
    agents, ranks = processes(folder)

    assert len(agents) == len(ranks) == 2

    restarts = int(shown(cluster, job)["Restarts"])
    os.kill((agents if victim == "agent" else ranks)[-1], signal.SIGKILL)
    wait_for(lambda: int(shown(cluster, job).get("Restarts", 0)) > restarts, 180)
    saved = newest(folder)
    wait_for(lambda: newest(folder) > saved, 240)
    log = (tmp_path / f"{victim}-{job}.log").read_text()

    assert re.search(
        r"^queued again after code (6|137): failure \d of at most 6$", log, re.MULTILINE
    ), log

    steps = list(losses(folder))
    assert steps == list(range(1, steps[-1] + 1))
    assert launch(cluster, "stop", f"slurm/{job}").returncode == 0

    wait_for(lambda: not running(folder), 60)


@pytest.mark.slow
def test_a_real_slurm_runs_it_on_two_nodes_and_requeues_it_after_a_signal(cluster, tmp_path):
    folder = tmp_path / "run"
    job = submit(
        cluster, tmp_path, "--name=law", "--nodes=2", "--nproc=1", *ON_LOOPBACK, *SMALL,
        "--training.steps=100000",
        "--training.on_data_end=repeat", "--checkpoint.enable", f"--job.dump_folder={folder}",
    )  # fmt: skip
    log = tmp_path / f"law-{job}.log"

    def has_come() -> bool:
        assert shown(cluster, job)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), (
            log.read_text()
        )
        return (folder / "metrics.jsonl").exists() and len(losses(folder)) > 1

    wait_for(has_come)
    subprocess.run(
        ["scancel", "--signal=USR1", job], env=cluster, check=True, timeout=patience.seconds(20)
    )
    wait_for(lambda: shown(cluster, job).get("Restarts") == "1", 120)
    saved = newest(folder)

    assert saved > 1

    wait_for(lambda: max(losses(folder)) > saved, 180)
    steps = list(losses(folder))  # the run may continue during this check
    assert steps == list(range(1, steps[-1] + 1)), "a step was lost or repeated"

    status = launch(cluster, "status", f"slurm/{job}").stdout
    assert re.fullmatch(
        rf"slurm/{job}: RUNNING on \S+ for [\d:]+, queued again 1 time, log {log}\n", status
    ), status
    assert "on 2 x cpu" in launch(cluster, "logs", f"slurm/{job}").stdout
    assert launch(cluster, "stop", f"slurm/{job}").returncode == 0

    wait_for(lambda: shown(cluster, job)["JobState"] == "CANCELLED", 60)
    wait_for(lambda: not running(folder), 60)


def test_a_machine_without_slurm_is_reported():
    result = launch({"PATH": "/nowhere", "PYTHONPATH": str(ROOT)}, "slurm", "debug")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "--dry-run" in result.stderr
