"""Pods of a rendered manifest as local processes: what its operator adds to each, and the command out of it."""

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
# what this machine may say to a launcher, and a container would not
_DROPPED = re.compile(
    r"(PET|SHARDTRAIN|SLURM|RUNAI|SKYPILOT|TORCH|KUBERNETES|MASTER)_|(NGPU|LOG_RANK|RANK|WORLD_SIZE)$"
)


def manifests(kind: str, arguments: list[str], path: Path | None = None) -> str:
    """What ``launch kubernetes --dry-run`` prints."""
    words = [*arguments, f"--launch.kubernetes.kind={kind}", "--launch.image=reg/run:1"]
    loaded = config.load(path, words)
    assert not config.check(loaded)
    return kubernetes.render(to_job(loaded, words, kubernetes.CONFIG_PATH if path else None), loaded.config.launch)


def containers(node: object) -> list[dict]:
    """All containers of a manifest."""
    if isinstance(node, dict):
        return [*node.get("containers", []), *(one for value in node.values() for one in containers(value))]
    return [one for value in node for one in containers(value)] if isinstance(node, list) else []


def expanded(value: str, names: dict[str, str]) -> str:
    """Kubernetes' own expansion of arguments and values: ``$$`` is one dollar, ``$(NAME)`` a variable's value."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda m: "$" if m[1] == "$" else names.get(m[2], m[0]),
        value,
    )


def of_operator(manifest: dict, number: int, endpoint: str) -> dict[str, str]:
    """The variables that pod ``number`` gets from its operator; names of pods lead to ``endpoint`` (HOST:PORT).

    PyTorchJob: kubeflow/training-operator 1.9, pkg/controller.v1/pytorch/envvar.go and elastic.go. TrainJob:
    kubeflow/trainer 2, the torch plugin. JobSet: the index that Kubernetes gives to pods of an indexed job.
    """
    host, _, port = endpoint.rpartition(":")
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        return {"JOB_COMPLETION_INDEX": str(number)}
    master = {"PET_MASTER_ADDR": host, "PET_MASTER_PORT": port, "PET_NODE_RANK": str(number)}
    if manifest["kind"] == "TrainJob":
        return {**master, "PET_NNODES": str(spec["trainer"]["numNodes"]), "PET_NPROC_PER_NODE": "auto"}
    names = {"PYTHONUNBUFFERED": "1"}
    if policy := spec.get("elasticPolicy"):
        elastic = {
            "PET_RDZV_ENDPOINT": endpoint,
            "PET_RDZV_BACKEND": policy["rdzvBackend"],
            "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
            "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        }
        return names | elastic | ({"PET_RDZV_ID": policy["rdzvId"]} if "rdzvId" in policy else {})
    nodes = str(sum(role["replicas"] for role in spec["pytorchReplicaSpecs"].values()))
    both = {name.removeprefix("PET_"): value for name, value in master.items() if "MASTER" in name}
    return {**names, **master, **both, "PET_NNODES": nodes, "WORLD_SIZE": nodes, "RANK": str(number)}


@dataclass
class Pod:
    """A pod that runs here, and the file with what it tells."""

    process: subprocess.Popen
    log: Path

    def told(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        """End it as a node that loses power does: all its processes, at once."""
        mine = children(self.process.pid) if self.process.poll() is None else []
        for pid in [self.process.pid, *mine]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(patience.seconds(20))

    def ended(self, seconds: float) -> int:
        """Its exit status; killed when it does not come."""
        try:
            return self.process.wait(patience.seconds(seconds))
        finally:
            self.kill()


def start(found: list[dict], number: int, endpoint: str, log: Path, mounted: Path | None = None, **more: str) -> Pod:
    """Pod ``number`` of a job as a process of this machine; ``mounted`` is where its ConfigMap lies."""
    container, job = containers(found)[0], found[-1]
    own = {one["name"]: expanded(one["value"], {}) for one in container.get("env", [])}
    if "SHARDTRAIN_RDZV_ENDPOINT" in own:  # the stable name of the first pod, which the cluster would look up
        own["SHARDTRAIN_RDZV_ENDPOINT"] = endpoint
    names = {**of_operator(job, number, endpoint), **own, **more}
    words = [expanded(word, names) for word in container["command"]]
    if mounted:
        words = [str(mounted) if word == kubernetes.CONFIG_PATH else word for word in words]
    inherited = {name: value for name, value in os.environ.items() if not _DROPPED.match(name)}
    # a pod has an address of its own; these share the loopback
    here = {"GLOO_SOCKET_IFNAME": "lo", "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    everything = {**inherited, **here, "OMP_NUM_THREADS": "1", **names}
    with log.open("a") as told:
        return Pod(subprocess.Popen(words, env=everything, cwd=ROOT, stdout=told, stderr=told), log)


def free_endpoint() -> str:
    """An address of the loopback at which nodes can meet."""
    return f"127.0.0.1:{free_port()}"


def children(pid: int) -> list[int]:
    """Processes that a pod has started itself."""
    return [int(p) for task in glob.glob(f"/proc/{pid}/task/*/children") for p in Path(task).read_text().split()]


def listens(endpoint: str) -> bool:
    """Whether somebody takes connections there."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
