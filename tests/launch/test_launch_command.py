"""The command ``shardtrain launch``: dry runs only print, errors are one line, torch stays out, secrets are hidden."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import patience
import pytest
import yaml

from shardtrain.launch import launch_command
from shardtrain.launch.job import require_image
from shardtrain.launch.platforms import runai

ROOT = Path(__file__).parents[2]
CANARIES = {"HF_TOKEN": "hf_canary0123456789abcdef", "WANDB_API_KEY": "wandb-canary-9876543210"}
CONFIG = """\
[launch]
name = "run"
nodes = 2
devices_per_node = 8
image = "registry.example/shardtrain:1"
mounts = ["data:/data"]
shared_memory_gib = 16
forward_env = ["HF_TOKEN", "WANDB_API_KEY"]

[launch.env]
HF_HOME = "/data/hf"

[launch.secrets]
HF_TOKEN = "hub/token"
WANDB_API_KEY = "wandb/key"

[launch.ssh]
hosts = ["node1", "node2"]

[launch.slurm]
container = "apptainer"

[launch.kubernetes]
queue = "team"
node_selector = ["gpu=h100"]

[launch.runai]
project = "team"
"""
# an interpreter that can import only the standard library, PyYAML and this package
BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("shardtrain", "yaml", "_yaml", "sitecustomize"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from shardtrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


NOTES = {
    "local": "note: launch.image, launch.mounts, launch.shared_memory_gib, launch.secrets: no effect on local\n",
    "ssh": "note: launch.image, launch.mounts, launch.shared_memory_gib: no effect on ssh\n",
    "slurm": "note: launch.shared_memory_gib: no effect on slurm\n"
    "note: launch.cpus_per_node is not set: many clusters then assign one core to all 8 ranks of a node; "
    "set it to about 8 per device\n",
    "runai": "note: paths of this machine: the configuration {file}; the job opens them in /workspace of its image, "
    "so copy them there, or use launch.mounts\n",
}


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def run(*arguments: str | Path, **names: str) -> subprocess.CompletedProcess[str]:
    """Run the command in an interpreter that cannot import torch, as on a laptop without it."""
    environment = {**os.environ, **CANARIES, "PYTHONPATH": str(ROOT), **names}
    command = [sys.executable, "-c", BARE, "launch", *map(str, arguments)]
    return subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--nproc", "1"],
        ["doctor"],
        ["generate", "--from", "x", "--prompt", "def"],
        ["verify"],
    ],
)
def test_commands_that_need_torch_report_its_absence_in_one_line(arguments):
    command = [sys.executable, "-c", BARE, *arguments]
    # TensorBoard would be missing before PyTorch is.
    if "train" in arguments:
        command.append("--metrics.no_enable_tensorboard")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command,
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=False,
    )

    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert re.fullmatch(
        r"error\[2\]: (torch|numpy) is not installed here; .*`launch`.*",
        result.stderr.splitlines()[-1],
    )


@pytest.mark.parametrize("platform", ["local", "ssh", "slurm", "kubernetes", "runai"])
def test_one_file_is_rendered_for_every_platform_without_torch_and_secrets(
    tmp_path, config_file, platform
):
    more = ["--nodes", "1"] if platform == "local" else []
    before = sorted(tmp_path.rglob("*"))
    result = run(
        platform,
        config_file,
        "--dry-run",
        "--optimizer.lr",
        "2e-05",
        *more,
        XDG_STATE_HOME=str(tmp_path),
    )

    assert result.returncode == 0, result.stderr
    assert result.stderr == NOTES.get(platform, "").format(file=config_file)
    assert "2e-05" in result.stdout
    assert "--launch" not in result.stdout
    for canary in CANARIES.values():
        assert canary not in result.stdout
    assert sorted(tmp_path.rglob("*")) == before, "a dry run must not write files"


def test_resources_that_a_platform_grants_only_on_request_are_reported():
    devices = ["--launch.devices_per_node", "8", "--image", "x"]
    for platform in ("slurm", "kubernetes", "runai"):
        message = run(platform, "--dry-run", "--nproc", "8", "--image", "x").stderr
        assert (
            "no GPU is requested: the 8 ranks of a node train on its CPU; set launch.devices_per_node = 8"
            in message
        )
        assert "no GPU" not in run(platform, "--dry-run", *devices).stderr
        meant = run(platform, "--dry-run", "--image", "x", "--training.device", "cpu")
        assert meant.returncode == 0
        assert "no GPU" not in meant.stderr

    assert "launch.cpus_per_node is not set" in run("slurm", "--dry-run", *devices).stderr

    for platform in ("kubernetes", "runai"):
        assert "launch.shared_memory_gib is not set" in run(platform, "--dry-run", *devices).stderr
        nothing = ["--checkpoint.enable=false"]  # checkpoints would need a volume
        assert (
            run(
                platform,
                "debug",
                "--dry-run",
                *devices,
                "--launch.shared_memory_gib",
                "16",
                *nothing,
            ).stderr
            == ""
        )


def test_devices_that_no_rank_uses_and_ranks_without_a_device_are_reported_before_submission():
    devices = ["--launch.devices_per_node", "8", "--image", "x"]
    for platform in ("slurm", "kubernetes", "runai"):
        idle = run(platform, "debug", "--dry-run", *devices, "--nproc", "6").stderr
        assert "the 6 ranks of a node use only 6 of its 8 GPUs" in idle
        unused = run(platform, "debug", "--dry-run", *devices, "--training.device", "cpu").stderr
        assert '8 GPUs are requested on each node, but training.device = "cpu" uses none' in unused
        refused = run(platform, "debug", "--dry-run", *devices, "--nproc", "16")
        assert refused.returncode == 2
        assert refused.stdout == ""
        assert "launch.nproc_per_node=16 exceeds the 8 devices of a node" in refused.stderr


def test_a_launch_without_a_configuration_names_its_preset():
    assert (
        "note: no configuration is named: this is the preset debug"
        in run("slurm", "--dry-run").stderr
    )
    assert "no configuration" not in run("slurm", "debug", "--dry-run").stderr


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset"])
def test_secrets_are_references_in_every_manifest(config_file, kind):
    result = run("kubernetes", config_file, "--dry-run", f"--launch.kubernetes.kind={kind}")
    manifests = list(yaml.safe_load_all(result.stdout))
    assert manifests[0]["kind"] == "ConfigMap"
    assert manifests[0]["data"]["config.toml"] == CONFIG
    assert result.stdout.count("secretKeyRef") == 2 * (2 if kind == "pytorchjob" else 1)
    assert not re.search(r"^\s+(value|data): .*canary", result.stdout, re.MULTILINE)
    assert manifests[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"


FLAGS = {
    # Transcribed from the published references: docs.run.ai (v2.20, `runai submit-dist pytorch`), and
    # docs.nvidia.com/run-ai (v3.0, `runai training pytorch submit`)
    cli: set(flags.split())
    for cli, flags in {
        "v1": "--name -p -i -e --existing-pvc --large-shm --node-pools --working-dir --gpu --cpu --memory --workers "
        "--min-replicas --max-replicas --command",
        "v2": "-p -i -e --existing-pvc --large-shm --node-pools --working-dir --gpu-devices-request --cpu-core-request "
        "--cpu-memory-request --workers --master-gpu-devices-request --min-replicas --max-replicas --env-secret "
        "--termination-grace-period --command",
    }.items()
}
COMMANDS = {
    "v1": "runai submit-dist pytorch --name run -p team -i registry.example/shardtrain:1 -e HF_HOME=/data/hf "
    "--existing-pvc claimname=data,path=/data --large-shm --gpu 8 --workers=1 -e HF_TOKEN=SECRET:hub,token "
    "-e WANDB_API_KEY=SECRET:wandb,key --command -- python3 -P -m shardtrain train FILE --nproc 8",
    "v2": "runai training pytorch submit run -p team -i registry.example/shardtrain:1 -e HF_HOME=/data/hf "
    "--existing-pvc claimname=data,path=/data --large-shm --gpu-devices-request 8 --workers 1 "
    "--master-gpu-devices-request 8 --env-secret HF_TOKEN=hub,key=token --env-secret WANDB_API_KEY=wandb,key=key "
    "--termination-grace-period 40s --command -- python3 -P -m shardtrain train FILE --nproc 8",
}


@pytest.mark.parametrize("cli", ["v1", "v2"])
def test_runai_receives_only_documented_flags(tmp_path, config_file, cli):
    record = tmp_path / "argv"
    stub = tmp_path / "bin" / "runai"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\nprintf "%s\\0" runai "$@" > {shlex.quote(str(record))}\n')
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    result = run("runai", config_file, f"--launch.runai.cli={cli}", PATH=path)

    assert result.returncode == 0, result.stderr

    arguments = record.read_text().split("\0")[:-1]
    assert arguments == COMMANDS[cli].replace("FILE", str(config_file)).split()

    # Only the options before "--" are for runai. The rest is the command in the container.
    flags = set()
    for argument in arguments[: arguments.index("--")]:
        if argument.startswith("-"):
            flags.add(argument.partition("=")[0])
    assert flags <= FLAGS[cli]
    assert not any(argument.startswith("--environment") for argument in arguments)
    assert result.stdout == f"runai/{cli}/pytorch/team/run\n"


@pytest.mark.parametrize("platform", ["kubernetes", "runai"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--job.dump_folder=/data/run"], ""),
        (["--job.dump_folder=run", "--launch.workdir=/data"], ""),
        (["--checkpoint.folder=s3://bucket/run"], ""),
        ([], "/workspace/outputs/checkpoint"),
        (["--job.dump_folder=/data2"], "/data2/checkpoint"),
    ],
)
def test_checkpoints_that_would_be_deleted_with_their_pod_are_reported(
    config_file, platform, arguments, message
):
    result = run(platform, config_file, "--dry-run", "--checkpoint.enable", *arguments)
    assert result.returncode == 0 and (
        message in result.stderr if message else result.stderr == ""
    ), result.stderr
    assert len(result.stderr.splitlines()) == bool(message)


@pytest.mark.parametrize(
    ("platform", "is_file_named"), [("runai", True), ("kubernetes", False), ("slurm", False)]
)
def test_local_paths_missing_in_a_container_are_noted(tmp_path, platform, is_file_named):
    """Kubernetes receives the TOML in a ConfigMap, and Slurm nodes share the folder."""
    (tmp_path / "rows.jsonl").write_text("{}")
    file = tmp_path / "base.toml"
    data = ["--training.dataset", "jsonl", "--training.dataset_path", str(tmp_path / "rows.jsonl")]
    file.write_text("[training]\nsteps = 10\n")
    arguments = [platform, str(file), "--dry-run", "--image", "x", *data]
    note = run(*arguments).stderr

    assert (f"the configuration {file}" in note) is is_file_named
    assert (f"training.dataset_path {tmp_path / 'rows.jsonl'}" in note) is (platform != "slurm")

    # A path inside a mounted claim, and a preset, exist in the container.
    mounted = run(*arguments, "--launch.mounts", f"claim:{tmp_path}").stderr
    assert "paths of this machine" not in mounted
    assert "paths of this machine" not in run(platform, "debug", "--dry-run", "--image", "x").stderr


def test_one_pod_and_an_elastic_range_become_runai_options(config_file):
    single = run("runai", config_file, "--dry-run", "--nodes", "1").stdout
    assert single.startswith("runai training standard submit run ")
    assert "--workers" not in single

    elastic = run("runai", config_file, "--dry-run", "--nodes", "2:4").stdout
    assert "--workers 3 " in elastic
    assert "--min-replicas 1 --max-replicas 3 " in elastic


def test_an_elastic_pytorchjob_has_only_workers(config_file):
    result = run("kubernetes", config_file, "--dry-run", "--nodes=1:4", "--max_restarts=2")
    spec = list(yaml.safe_load_all(result.stdout))[-1]["spec"]
    assert spec["elasticPolicy"] == {
        "rdzvBackend": "c10d",
        "minReplicas": 1,
        "maxReplicas": 4,
        "maxRestarts": 2,
    }
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]

    result = run("kubernetes", config_file, "--dry-run", "--nodes=1:4")
    policy = list(yaml.safe_load_all(result.stdout))[-1]["spec"]["elasticPolicy"]
    assert policy["maxRestarts"] == 6, "by default, a lost pod must not end the other pods"


def test_pods_get_the_grace_period_of_a_save(config_file):
    result = run("kubernetes", config_file, "--dry-run", "--checkpoint.grace_seconds", "120")
    assert "terminationGracePeriodSeconds: 130" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "requires a platform"),
        (["nowhere"], "requires a platform"),
        (["slurm", "--nodes"], "has no value"),
        (["slurm", "--nodes", "none"], "launch.nodes"),
        (["slurm", "--nodes", "2:"], "write 2, or 1:4"),
        (["kubernetes", "--nodes=:2"], "write 2, or 1:4"),
        (["slurm", "--nnodes", "2"], "use --nodes"),
        (["local", "--nodes", "2"], "launch.nodes"),
        (["ssh"], "names no host"),
        (["ssh", "--hosts", "a", "--launch.forward_env=NOT_SET_HERE"], "NOT_SET_HERE"),
        (["kubernetes"], "launch.image"),
        (["kubernetes", "--image=a", "--launch.forward_env=HF_TOKEN"], "launch.secrets"),
        (
            ["kubernetes", "--image=a", "--nodes=1:2", "--launch.kubernetes.kind=jobset"],
            "launch.min_nodes",
        ),
        (["runai", "--image=a", '--launch.mounts=["a:/b:ro"]'], "read-only"),
        (
            ["slurm", "--nodes=3", "--nproc=4", "--parallelism.tensor_parallel_degree=8"],
            "cannot divide 12 ranks",
        ),
        (["slurm", "--launch.slurm.sweep=--optimizer.lrr 1"], "did you mean optimizer.lr?"),
        (
            ["slurm", "--launch.slurm.sweep=--optimizer.lrr 1"],
            "launch.slurm.sweep '--optimizer.lrr 1'",
        ),
        (["slurm", "--launch.slurm.sweep=--optimizer.lr none"], "launch.slurm.sweep"),
        (
            [
                "kubernetes",
                "--image=a",
                "--launch.mounts=a:/dev/shm",
                "--launch.shared_memory_gib=1",
            ],
            "launch.mounts",
        ),
        (["slurm", "--launch.slurm.sweep_at_once=2"], "sweep"),
        (["ssh", "--hosts=a:0"], "user@node1:2222"),
        (["ssh", "--hosts=a:65536"], "user@node1:2222"),
        (["ssh", "--hosts=a,b", "--launch.ssh.rendezvous_port=65536"], "is not a port"),
        (["kubernetes", "--image=https://reg.example/a:1"], "is not an image reference"),
        (["runai", "--image=reg.example/Upper:1"], "is not an image reference"),
        (["status", "slurm/1;2"], "not a job ID"),
        (["stop", "ssh/99999999"], "not a launch of this user"),
        (["logs"], "requires one ID"),
    ],
)
def test_bad_input_is_reported_in_one_line(tmp_path, arguments, message):
    if arguments and arguments[0] not in ("status", "stop", "logs"):
        arguments = [*arguments, "--dry-run"]
    result = run(*arguments, XDG_STATE_HOME=str(tmp_path))

    assert result.returncode == 2, (result.stdout, result.stderr)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.parametrize("platform", ["kubernetes", "runai", "slurm"])
def test_a_password_in_the_image_is_refused_and_not_printed(platform):
    result = run(platform, "--image=me:hunter22@reg.example/a:1", "--dry-run")
    assert result.returncode == 2
    assert "contains a password" in result.stderr
    assert "hunter22" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "image", ["a", "reg:5000/a/b_c:1.2-x", "Reg.example/a@sha256:" + "0" * 64, "localhost/a--b"]
)
def test_image_references_are_accepted(image):
    # It raises for an image that a container runtime does not accept.
    require_image(image, "kubernetes")


def test_a_program_that_is_missing_or_refuses_is_reported_in_one_line(tmp_path, config_file):
    empty = tmp_path / "empty"
    empty.mkdir()
    result = run("kubernetes", config_file, PATH=str(empty))

    assert result.returncode == 2
    assert "kubectl" in result.stderr
    assert len(result.stderr.splitlines()) == 1

    stub = empty / "runai"
    stub.write_text("#!/bin/sh\necho 'project team: quota exceeded' >&2\nexit 1\n")
    stub.chmod(0o755)
    result = run("runai", config_file, PATH=f"{empty}:/bin:/usr/bin")

    assert result.returncode == 2
    assert "quota exceeded" in result.stderr.splitlines()[-1]
    assert [line for line in result.stderr.splitlines()[:-1] if not line.startswith("note: ")] == []


def test_job_verbs_call_the_platform_s_command(tmp_path):
    record = tmp_path / "argv"
    for name in ("runai", "scancel", "scontrol"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {shlex.quote(str(record))}\n')
        (tmp_path / name).chmod(0o755)

    for arguments in (
        ["logs", "runai/v2/pytorch/team/run"], ["stop", "runai/v1/standard/-/run"], ["stop", "slurm/12_3"],
    ):  # fmt: skip
        assert run(*arguments, PATH=f"{tmp_path}:{os.environ['PATH']}").returncode == 0
    assert record.read_text().splitlines() == [
        "runai training pytorch logs run -p team",
        "runai delete job run",
        "scontrol --oneliner show job 12_3",
        "scancel 12_3",
    ]


@pytest.mark.parametrize(("code", "expected"), [(75, 3), (0, 0), (1, 1), (76, 76)])
def test_launch_returns_the_configured_status_of_a_stopped_run(monkeypatch, code, expected):
    """The commands on the hosts use 75 for a saved stop."""
    monkeypatch.setitem(
        launch_command.PLATFORMS, "ssh", lambda request: launch_command.Submission("", lambda: code)
    )
    assert launch_command.main(["ssh", "--checkpoint.stop_exit_code=3"]) == expected


def test_launch_local_is_train_with_the_variables_of_launch(tmp_path):
    """The process is replaced by ``shardtrain train``, which then receives the signals."""
    command = [sys.executable, "-m", "shardtrain", "launch", "local", "--launch.env.NGPU=none"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=False,
    )

    assert result.returncode == 2
    assert "NGPU" in result.stderr


def test_the_source_of_flags_names_their_reference():
    assert "docs.run.ai" in (runai.__doc__ or "")
