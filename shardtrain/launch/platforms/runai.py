"""Run:ai: build one command line for ``runai``. The two versions of its command line use different names.

Written from the published references of both versions (docs.run.ai 2.20, docs.nvidia.com/run-ai 3.0) and
never run on a cluster. ``--environment`` is not used, because it sets a variable in one version and names an
asset in the other.
"""

from __future__ import annotations

from shardtrain.config.schema.launch_options import Launch
from shardtrain.launch.job import ClusterJob, require_image, require_nothing_lost
from shardtrain.launch.platforms.slurm import ask
from shardtrain.utils.errors import ConfigError, Problem


def render(job: ClusterJob, launch: Launch) -> list[str]:
    """Return the argument list that submits a job.

    Raises:
        ConfigError: the job requires something that the command does not support.
    """
    require_image(job.image, "runai")
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
    arguments = ["runai", "training", *kind, "submit", job.name, *_common(job, launch)]
    if job.devices:
        arguments += ["--gpu-devices-request", str(job.devices)]
    if job.cpus:
        arguments += ["--cpu-core-request", str(job.cpus)]
    if job.memory_gib:
        arguments += ["--cpu-memory-request", f"{job.memory_gib}G"]
    # The pod of the master is not one of the workers.
    if job.nodes > 1:
        arguments += ["--workers", str(job.nodes - 1)]
        if job.devices:
            arguments += ["--master-gpu-devices-request", str(job.devices)]
        arguments += _elastic(job)
    for secret in job.secrets:
        arguments += ["--env-secret", f"{secret.variable}={secret.name},key={secret.key}"]
    return [*arguments, "--termination-grace-period", f"{job.grace_seconds}s"]


def _v1(job: ClusterJob, launch: Launch) -> list[str]:
    kind = ["submit-dist", "pytorch"] if job.nodes > 1 else ["submit"]
    arguments = ["runai", *kind, "--name", job.name, *_common(job, launch)]
    if job.devices:
        arguments += ["--gpu", str(job.devices)]
    if job.cpus:
        arguments += ["--cpu", str(job.cpus)]
    if job.memory_gib:
        arguments += ["--memory", f"{job.memory_gib}G"]
    if job.nodes > 1:
        arguments += [f"--workers={job.nodes - 1}", *_elastic(job)]
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
        arguments += ["-e", f"{secret.variable}=SECRET:{secret.name},{secret.key}"]
    return arguments


def _common(job: ClusterJob, launch: Launch) -> list[str]:
    arguments = []
    if launch.runai.project:
        arguments += ["-p", launch.runai.project]
    arguments += ["-i", str(job.image)]
    for name, value in job.environment.items():
        arguments += ["-e", f"{name}={value}"]
    for mount in job.mounts:
        arguments += ["--existing-pvc", f"claimname={mount.source},path={mount.path}"]
    if job.shared_memory_gib:
        arguments.append("--large-shm")
    if launch.runai.node_pools:
        arguments += ["--node-pools", ",".join(launch.runai.node_pools)]
    if job.workdir:
        arguments += ["--working-dir", job.workdir]
    return arguments


def _elastic(job: ClusterJob) -> list[str]:
    """Return the options of an elastic job. They do not count the pod of the master,
    which must keep running.
    """
    if not job.is_elastic:
        return []
    return ["--min-replicas", str(job.min_nodes - 1), "--max-replicas", str(job.nodes - 1)]


def submit(arguments: list[str]) -> None:
    """Run the command that submits a job.

    Raises:
        ConfigError: runai is not installed, or rejects the job.
    """
    ask(arguments, "", "install Run:ai's command line and log in, or use --dry-run")
