"""Run:ai: build one command line for ``runai``. The two versions of its command line use different names.

Written from the published references of both versions (docs.run.ai 2.20, docs.nvidia.com/run-ai 3.0) and
never run on a cluster. ``--environment`` is not used, because it sets a variable in one version and names an
asset in the other.
"""

from __future__ import annotations

from shardtrain.config.schema.launch_options import Launch
from shardtrain.launch.job import ClusterJob, require, require_nothing_lost
from shardtrain.launch.platforms.slurm import ask
from shardtrain.utils.errors import ConfigError, Problem


def render(job: ClusterJob, launch: Launch) -> list[str]:
    """Return the argument list that submits a job.

    Raises:
        ConfigError: the job requires something that the command does not support.
    """
    fix = "set an image that contains this package; scripts/containers/Dockerfile builds one"
    require(job.image, "launch.image", "runai", fix)
    require_nothing_lost(
        job.forwarded, [s.variable for s in job.secrets], "launch.forward_env", "runai"
    )
    for mount in job.mounts:
        if mount.read_only:
            raise ConfigError(
                Problem(
                    "launch.mounts",
                    f"{mount.source}:{mount.path}:ro",
                    rule="is read-only, which runai does not support",
                    fix="remove :ro",
                )
            )
    render_words = _v2 if launch.runai.cli == "v2" else _v1
    return [*render_words(job, launch), "--command", "--", *job.command]


def _v2(job: ClusterJob, launch: Launch) -> list[str]:
    kind = ["pytorch"] if job.nodes > 1 else ["standard"]
    words = ["runai", "training", *kind, "submit", job.name, *_common(job, launch)]
    if job.devices:
        words += ["--gpu-devices-request", str(job.devices)]
    if job.cpus:
        words += ["--cpu-core-request", str(job.cpus)]
    if job.memory_gib:
        words += ["--cpu-memory-request", f"{job.memory_gib}G"]
    # The pod of the master is not one of the workers.
    if job.nodes > 1:
        words += ["--workers", str(job.nodes - 1)]
        if job.devices:
            words += ["--master-gpu-devices-request", str(job.devices)]
        words += _elastic(job)
    for secret in job.secrets:
        words += ["--env-secret", f"{secret.variable}={secret.name},key={secret.key}"]
    return [*words, "--termination-grace-period", f"{job.grace_seconds}s"]


def _v1(job: ClusterJob, launch: Launch) -> list[str]:
    kind = ["submit-dist", "pytorch"] if job.nodes > 1 else ["submit"]
    words = ["runai", *kind, "--name", job.name, *_common(job, launch)]
    if job.devices:
        words += ["--gpu", str(job.devices)]
    if job.cpus:
        words += ["--cpu", str(job.cpus)]
    if job.memory_gib:
        words += ["--memory", f"{job.memory_gib}G"]
    if job.nodes > 1:
        words += [f"--workers={job.nodes - 1}", *_elastic(job)]
    for name, value in job.environment.items():
        if value.startswith("SECRET:"):
            raise ConfigError(
                Problem(
                    f"launch.env.{name}",
                    value,
                    rule="begins with SECRET:, which runai v1 interprets as a reference",
                    fix="use launch.secrets",
                )
            )
    for secret in job.secrets:
        words += ["-e", f"{secret.variable}=SECRET:{secret.name},{secret.key}"]
    return words


def _common(job: ClusterJob, launch: Launch) -> list[str]:
    words = []
    if launch.runai.project:
        words += ["-p", launch.runai.project]
    words += ["-i", str(job.image)]
    for name, value in job.environment.items():
        words += ["-e", f"{name}={value}"]
    for mount in job.mounts:
        words += ["--existing-pvc", f"claimname={mount.source},path={mount.path}"]
    if job.shared_memory_gib:
        words.append("--large-shm")
    if launch.runai.node_pools:
        words += ["--node-pools", ",".join(launch.runai.node_pools)]
    if job.workdir:
        words += ["--working-dir", job.workdir]
    return words


def _elastic(job: ClusterJob) -> list[str]:
    """Return the options of an elastic job. They do not count the pod of the master,
    which must keep running.
    """
    if not job.is_elastic:
        return []
    return ["--min-replicas", str(job.min_nodes - 1), "--max-replicas", str(job.nodes - 1)]


def submit(words: list[str]) -> None:
    """Run the command that submits a job.

    Raises:
        ConfigError: runai is not installed, or rejects the job.
    """
    ask(words, "", "install Run:ai's command line and log in, or use --dry-run")
