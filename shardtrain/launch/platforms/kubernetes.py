"""Kubernetes manifests of a PyTorchJob, a TrainJob or a JobSet, generated from data without text templates.

A ConfigMap contains the configuration file. Secrets are references (``secretKeyRef``). Each pod runs
``shardtrain train``, which reads the variables that the three operators set, see ``nodes``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from shardtrain.config.schema.launch_options import Launch
from shardtrain.facts.ports import RENDEZVOUS_PORT
from shardtrain.launch.job import (
    RETRIES,
    ClusterJob,
    header,
    require_free,
    require_image,
    require_nothing_lost,
)
from shardtrain.utils.errors import ConfigError, Problem

CONFIG_PATH = "/etc/shardtrain/config.toml"

_NO_FOLD = 1 << 30
Manifest = dict[str, Any]


def render(job: ClusterJob, launch: Launch) -> str:
    """Return the manifests of a job as YAML for ``kubectl create``.

    Raises:
        ConfigError: the job requires something that Kubernetes does not support.
    """
    require_image(job.image, "kubernetes")
    require_nothing_lost(
        job.forwarded, [s.variable for s in job.secrets], "launch.forward_env", "kubernetes"
    )
    kinds = {"pytorchjob": _pytorchjob, "trainjob": _trainjob, "jobset": _jobset}
    manifests = kinds[launch.kubernetes.kind](job, launch)
    if job.config_text is not None:
        # The ConfigMap precedes the job, because the job's pods read it.
        data = {"config.toml": job.config_text}
        metadata = _metadata(job, launch)
        manifests.insert(
            0, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        )
    if job.is_elastic and launch.kubernetes.kind != "pytorchjob":
        raise ConfigError(
            Problem(
                "launch.kubernetes.kind",
                launch.kubernetes.kind,
                rule="does not support launch.min_nodes, because a lost pod ends the attempt",
                fix='remove launch.min_nodes, or use "pytorchjob"',
            )
        )
    # Keep each text on one line, so all YAML parsers agree on the quotes, and users can search for the text.
    text = yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=_NO_FOLD)
    return f"# {header('kubectl create -f FILE')}\n{text}"


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes texts unless every YAML parser reads them as texts.

    PyYAML writes ``2e-05`` without quotes. Kubernetes would parse it as a number, and reject a number in a
    list of arguments.
    """


def _quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.fullmatch(r"[A-Za-z/][A-Za-z0-9_./-]*", text) and text.lower() not in _WORDS
    style: str | None = '"'
    if "\n" in text:
        style = "|"
    elif plain:
        style = None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_Dumper.add_representer(str, _quoted)


def _metadata(job: ClusterJob, launch: Launch, queued: bool = False) -> Manifest:
    labels = {"app.kubernetes.io/name": "shardtrain", "app.kubernetes.io/instance": job.name}
    if queued and launch.kubernetes.queue:
        labels["kueue.x-k8s.io/queue-name"] = launch.kubernetes.queue
    return {"name": job.name, "namespace": launch.kubernetes.namespace, "labels": labels}


def _container(job: ClusterJob, name: str, more: Mapping[str, str] | None = None) -> Manifest:
    """Return the container of a pod.

    ``name`` is the name that the operator expects; it ignores other containers.
    """
    values = {**job.environment, **(more or {})}
    variables: list[Manifest] = [
        {"name": key, "value": _literal(value)} for key, value in values.items()
    ]
    for secret in job.secrets:
        reference = {"secretKeyRef": {"name": secret.name, "key": secret.key}}
        variables.append({"name": secret.variable, "valueFrom": reference})
    container: Manifest = {
        "name": name,
        "image": job.image,
        "command": list(map(_literal, job.command)),
    }
    if variables:
        container["env"] = variables
    if job.workdir:
        container["workingDir"] = job.workdir
    resources: dict[str, str] = {}
    if job.cpus:
        resources["cpu"] = str(job.cpus)
    if job.memory_gib:
        resources["memory"] = f"{job.memory_gib}Gi"
    if job.devices:
        resources[job.device_resource] = str(job.devices)
    if resources:
        # Set requests equal to limits, because a node evicts such pods last.
        container["resources"] = {"requests": dict(resources), "limits": dict(resources)}
    mounts = [{"name": name, **mount} for name, mount, _ in _volumes(job)]
    if mounts:
        container["volumeMounts"] = mounts
    return container


def _literal(text: str) -> str:
    """Escape text for Kubernetes, which expands ``$(NAME)`` and replaces ``$$`` with one dollar."""
    return text.replace("$", "$$")


def _volumes(job: ClusterJob) -> list[tuple[str, Manifest, Manifest]]:
    """Return name, mount and source of each volume: configuration, shared memory and claims."""
    volumes: list[tuple[str, Manifest, Manifest]] = []
    if job.config_text is not None:
        folder = CONFIG_PATH.rpartition("/")[0]
        volumes.append(
            ("config", {"mountPath": folder, "readOnly": True}, {"configMap": {"name": job.name}})
        )
    if job.shared_memory_gib:
        memory = {"medium": "Memory", "sizeLimit": f"{job.shared_memory_gib}Gi"}
        volumes.append(("shared-memory", {"mountPath": "/dev/shm"}, {"emptyDir": memory}))
    reserved_paths = {mount["mountPath"] for _, mount, _ in volumes}
    for mount in job.mounts:
        if mount.path.rstrip("/") in reserved_paths:
            raise ConfigError(
                Problem(
                    "launch.mounts",
                    f"{mount.source}:{mount.path}",
                    rule="uses a path at which the pod mounts another volume",
                    fix="mount it at another path",
                )
            )
    claims = list(dict.fromkeys(mount.source for mount in job.mounts))
    for mount in job.mounts:
        where: dict[str, Any] = {"mountPath": mount.path}
        if mount.read_only:
            where["readOnly"] = True
        claim = {"persistentVolumeClaim": {"claimName": mount.source}}
        volumes.append((f"claim-{claims.index(mount.source)}", where, claim))
    return volumes


def _pod(
    job: ClusterJob,
    launch: Launch,
    name: str,
    restart: str | None = None,
    more: Mapping[str, str] | None = None,
) -> Manifest:
    options = launch.kubernetes
    spec: Manifest = {"restartPolicy": restart} if restart else {}
    spec["terminationGracePeriodSeconds"] = job.grace_seconds
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.priority_class:
        spec["priorityClassName"] = options.priority_class
    if options.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": options.image_pull_secret}]
    if options.node_selector:
        spec["nodeSelector"] = dict(label.split("=", 1) for label in options.node_selector)
    spec["containers"] = [_container(job, name, more)]
    volumes = {name: source for name, _, source in _volumes(job)}
    if volumes:
        spec["volumes"] = [{"name": name, **source} for name, source in volumes.items()]
    return {"spec": spec}


def _pytorchjob(job: ClusterJob, launch: Launch) -> list[Manifest]:
    """Return the job of the training operator (kubeflow.org/v1), which Run:ai also uses.

    The operator requires the container name ``pytorch``.
    """
    # The operator sets the template's restartPolicy.
    template = _pod(job, launch, "pytorch")
    spec: Manifest = {"runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.retries}}
    if job.is_elastic:
        # Omit the master. The operator then puts the rendezvous on worker 0, and may remove any other worker.
        spec["elasticPolicy"] = {
            "rdzvBackend": "c10d",
            "minReplicas": job.min_nodes,
            "maxReplicas": job.nodes,
            # Each loss of a pod counts as a restart. With 0, the ranks would end, and only the
            # cluster would restart them.
            "maxRestarts": job.max_restarts or RETRIES,
        }
        replicas = {"Worker": job.nodes}
    else:
        replicas = {"Master": 1}
        if job.nodes > 1:
            replicas["Worker"] = job.nodes - 1
    restart = "OnFailure" if job.retries else "Never"
    roles = {}
    for role, count in replicas.items():
        roles[role] = {"replicas": count, "restartPolicy": restart, "template": template}
    spec["pytorchReplicaSpecs"] = roles
    metadata = _metadata(job, launch, queued=True)
    return _copied(
        {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": spec},
    )


def _trainjob(job: ClusterJob, launch: Launch) -> list[Manifest]:
    """Return the runtime (the pod template) and the job for Kubeflow Trainer."""
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = _pod(job, launch, "node", "Never")
    node = {
        "name": "node",
        "template": {"metadata": {"labels": step}, "spec": {"backoffLimit": 0, "template": pod}},
    }
    metadata = _metadata(job, launch)
    metadata["labels"]["trainer.kubeflow.org/framework"] = "torch"
    jobs = {"failurePolicy": {"maxRestarts": job.retries}, "replicatedJobs": [node]}
    runtime = {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": jobs}}
    trainer: Manifest = {"numNodes": job.nodes}
    queued = _metadata(job, launch, queued=True)
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    return _copied(
        {"apiVersion": _TRAINER, "kind": "TrainingRuntime", "metadata": metadata, "spec": runtime},
        {
            "apiVersion": _TRAINER,
            "kind": "TrainJob",
            "metadata": queued,
            "spec": {"runtimeRef": reference, "trainer": trainer},
        },
    )


_TRAINER = "trainer.kubeflow.org/v1alpha1"


def _jobset(job: ClusterJob, launch: Launch) -> list[Manifest]:
    """Return a JobSet: plain jobs with stable host names. The first pod's host
    name is the rendezvous address.
    """
    variables = {
        "SHARDTRAIN_NNODES": str(job.nodes),
        "SHARDTRAIN_RDZV_ENDPOINT": f"{job.name}-node-0-0.{job.name}:{RENDEZVOUS_PORT}",
        "SHARDTRAIN_RDZV_ID": job.name,
    }
    require_free(job, variables, "jobset")
    indexed: Manifest = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": _pod(job, launch, "node", "Never", variables if job.nodes > 1 else None),
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "failurePolicy": {"maxRestarts": job.retries},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": indexed}}],
    }
    metadata = _metadata(job, launch, queued=True)
    return _copied(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata,
            "spec": spec,
        },
    )


def _copied(*manifests: Manifest) -> list[Manifest]:
    """Return copies of the manifests without shared objects, which YAML would write as anchors."""
    return list(json.loads(json.dumps(manifests)))
