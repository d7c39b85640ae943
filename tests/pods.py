"""Run the pods of a rendered manifest as local processes, with the environment that its operator would add."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import patience
from ports import free_port

from shardtrain import config
from shardtrain.launch.job import to_job
from shardtrain.launch.platforms import kubernetes

ROOT = Path(__file__).parents[1]
# variables of this machine that affect a launcher and do not exist in a container
_DROPPED = re.compile(
    r"(PET|SHARDTRAIN|SLURM|RUNAI|SKYPILOT|TORCH|KUBERNETES|MASTER)_|(NGPU|LOG_RANK|RANK|WORLD_SIZE)$"
)


def manifests(kind: str, arguments: list[str], path: Path | None = None) -> str:
    """Return the output of ``launch kubernetes --dry-run``."""
    arguments = [*arguments, f"--launch.kubernetes.kind={kind}", "--launch.image=reg/run:1"]
    loaded = config.load(path, arguments)
    assert not config.check(loaded)
    job = to_job(loaded, arguments, kubernetes.CONFIG_PATH if path else None)
    return kubernetes.render(job, loaded.config.launch)


def containers(node: object) -> list[dict]:
    """Return all containers of a manifest, at any depth."""
    if isinstance(node, list):
        return [container for value in node for container in containers(value)]
    if not isinstance(node, dict):
        return []
    inner = [container for value in node.values() for container in containers(value)]
    return [*node.get("containers", []), *inner]


def expanded(value: str, names: dict[str, str]) -> str:
    """Expand variables as Kubernetes does: ``$(NAME)`` is the value of a variable, and ``$$`` is a dollar sign."""

    def replacement(match: re.Match[str]) -> str:
        return "$" if match[1] == "$" else names.get(match[2], match[0])

    return re.sub(r"\$(\$|\(([^)]*)\))", replacement, value)


def of_operator(manifest: dict, number: int, endpoint: str) -> dict[str, str]:
    """Return the environment variables that the operator sets in pod ``number``.

    ``endpoint`` (HOST:PORT) replaces the names of pods, which only resolve in a cluster. Sources:
    PyTorchJob: kubeflow/training-operator 1.9, pkg/controller.v1/pytorch/envvar.go and elastic.go. TrainJob:
    kubeflow/trainer 2, the torch plugin. JobSet: the index that Kubernetes sets in pods of an indexed job.
    """
    host, _, port = endpoint.rpartition(":")
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        return {"JOB_COMPLETION_INDEX": str(number)}
    master = {"PET_MASTER_ADDR": host, "PET_MASTER_PORT": port, "PET_NODE_RANK": str(number)}
    if manifest["kind"] == "TrainJob":
        return {
            **master,
            "PET_NNODES": str(spec["trainer"]["numNodes"]),
            "PET_NPROC_PER_NODE": "auto",
        }
    names = {"PYTHONUNBUFFERED": "1"}
    if policy := spec.get("elasticPolicy"):
        elastic = {
            "PET_RDZV_ENDPOINT": endpoint,
            "PET_RDZV_BACKEND": policy["rdzvBackend"],
            "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
            "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        }
        if "rdzvId" in policy:
            elastic["PET_RDZV_ID"] = policy["rdzvId"]
        return names | elastic
    nodes = str(sum(role["replicas"] for role in spec["pytorchReplicaSpecs"].values()))
    return {
        **names,
        **master,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "PET_NNODES": nodes,
        "WORLD_SIZE": nodes,
        "RANK": str(number),
    }


@dataclass
class Pod:
    """A pod that runs as a local process. ``log`` is the file of its output."""

    process: subprocess.Popen
    log: Path

    def output(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        """Kill the pod with all its processes, like a node that loses power."""
        child_pids = children(self.process.pid) if self.process.poll() is None else []
        for pid in [self.process.pid, *child_pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(patience.seconds(20))

    def ended(self, seconds: float) -> int:
        """Wait for the pod and return its exit status. Kill it after the timeout."""
        try:
            return self.process.wait(patience.seconds(seconds))
        finally:
            self.kill()


def start(
    documents: list[dict],
    number: int,
    endpoint: str,
    log: Path,
    mounted: Path | None = None,
    **more: str,
) -> Pod:
    """Start pod ``number`` of a job as a local process.

    Args:
        documents: Documents of the manifest. The last one is the job.
        number: Index of the pod.
        endpoint: HOST:PORT of the rendezvous.
        log: File to append the output to.
        mounted: Path of the file in the pod's ConfigMap, or None.
        **more: Additional environment variables.
    """
    container = containers(documents)[0]
    job = documents[-1]
    container_env = {}
    for entry in container.get("env", []):
        container_env[entry["name"]] = expanded(entry["value"], {})
    # The endpoint is the name of the first pod, which only resolves in a cluster.
    if "SHARDTRAIN_RDZV_ENDPOINT" in container_env:
        container_env["SHARDTRAIN_RDZV_ENDPOINT"] = endpoint
    names = {**of_operator(job, number, endpoint), **container_env, **more}

    command = []
    for argument in container["command"]:
        is_mounted = mounted is not None and argument == kubernetes.CONFIG_PATH
        command.append(str(mounted) if is_mounted else expanded(argument, names))

    inherited = {name: value for name, value in os.environ.items() if not _DROPPED.match(name)}
    # a real pod has its own address; these processes share the loopback interface
    local = {
        "GLOO_SOCKET_IFNAME": "lo",
        "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }
    environment = {**inherited, **local, "OMP_NUM_THREADS": "1", **names}
    with log.open("a") as output:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=output)
    return Pod(process, log)


def free_endpoint() -> str:
    """Return a free HOST:PORT of the loopback interface for a rendezvous."""
    return f"127.0.0.1:{free_port()}"


def children(pid: int) -> list[int]:
    """Return the ids of the direct child processes."""
    paths = glob.glob(f"/proc/{pid}/task/*/children")
    return [int(child) for path in paths for child in Path(path).read_text().split()]


def listens(endpoint: str) -> bool:
    """True if the endpoint accepts connections."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
