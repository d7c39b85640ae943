"""Create the objects of a job with kubectl, print its state or its logs, and delete it.

Every request has a timeout and fails with a one-line error. Only logs are followed without a timeout.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

import yaml

from shardtrain.utils.errors import ConfigError, Problem

ANSWER_SECONDS = 8
"""Timeout of the first request, which checks that the cluster replies."""
WAIT_SECONDS = 60
"""Timeout of other kubectl commands. Half of it limits their requests to the server."""

RESOURCES = {
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "trainjob": "trainjobs.trainer.kubeflow.org",
    "jobset": "jobsets.jobset.x-k8s.io",
}
# A TrainJob creates a JobSet of the same name.
_PODS_OF = {
    "pytorchjob": "training.kubeflow.org/job-name",
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "jobset": "jobset.sigs.k8s.io/jobset-name",
}
# Objects other than config maps that a job creates.
_OTHER_OBJECTS = {"trainjob": "configmaps,trainingruntimes.trainer.kubeflow.org"}

# Pattern of kubectl's error -> fix.
_FIXES = (
    ("AlreadyExists", "choose another --name, or end the other job with launch stop"),
    (r"namespaces .* not found", "create the namespace, or correct launch.kubernetes.namespace"),
    (
        r"no matches for kind|have a resource type|find the requested resource",
        "install its operator, or correct launch.kubernetes.kind",
    ),
    ("exceeded quota", "request less, or wait until other jobs end"),
    (r"NotFound", "it has ended and was removed, or the ID is wrong"),
    (r"orbidden", "ask the cluster's administrators for this permission"),
    (r"context .*(not found|not exist)", "choose an existing one: kubectl config use-context NAME"),
    (r"logged in|Unauthorized", "log in to the cluster again"),
    (
        r"onnect|no such host",
        "check that the cluster is up and is the right one: kubectl config current-context",
    ),
)


def create(text: str) -> None:
    """Create the objects of a job. If the cluster rejects one, delete the objects created before it.

    The objects are created one by one, because kubectl would continue after an error in a single command, and
    a server-side dry run rejects a TrainJob whose runtime does not exist yet.

    Raises:
        ConfigError: kubectl is missing, the cluster does not answer, or it rejects an object.
    """
    _require_answer()
    created: list[str] = []
    try:
        for manifest in yaml.safe_load_all(text):
            written = json.dumps(manifest)
            _ask(["create", "--filename", "-"], written)
            created.append(written)
    except BaseException as error:
        # An interrupt must not leave objects behind, either.
        stayed = _take_away(created)
        if stayed and isinstance(error, ConfigError):
            raise ConfigError(f"{error}; {stayed}") from None
        raise


def _take_away(created: Sequence[str]) -> str:
    """Delete the created objects, last first. If one cannot be deleted, return a description of it,
    or else "".
    """
    for written in reversed(created):
        try:
            _ask(["delete", "--ignore-not-found", "--wait=false", "--filename", "-"], written)
        except ConfigError:
            manifest = json.loads(written)
            name = f"{manifest['kind'].lower()}/{manifest['metadata']['name']}"
            return f"{name} was created and could not be removed; delete it with kubectl"
    return ""


def status(namespace: str, kind: str, name: str) -> int:
    """Print the state of a job and return the exit status.

    Raises:
        ConfigError: the job does not exist, or the cluster does not answer.
    """
    _require_answer()
    print(_ask(["--namespace", namespace, "get", RESOURCES[kind], name]), end="")
    return 0


def stop(namespace: str, kind: str, name: str) -> int:
    """Delete a job and its other objects.

    Its pods receive SIGTERM and may save. Raises the errors of ``status``.
    """
    _require_answer()
    within = ["--namespace", namespace]
    quick = ["--wait=false", "--ignore-not-found"]
    # Delete the job first, so its pods receive SIGTERM without delay.
    gone: ConfigError | None = None
    try:
        print(_ask([*within, "delete", RESOURCES[kind], name, "--wait=false"]), end="")
    except ConfigError as error:
        if "NotFound" not in str(error):
            raise
        gone = error  # its other objects may still exist and would conflict with those of a new job
    mine = f"app.kubernetes.io/name=shardtrain,app.kubernetes.io/instance={name}"
    # A label identifies the objects of this job.
    _ask([*within, "delete", _OTHER_OBJECTS.get(kind, "configmaps"), "--selector", mine, *quick])
    if gone:
        raise gone
    return 0


MOST_FOLLOWED = 64
"""Maximum number of pods whose logs are followed together. Each is a stream from the server."""


def logs(namespace: str, kind: str, name: str) -> int:
    """Follow the logs of all pods of a job. For a large job, follow only the log of rank 0.

    Raises:
        ConfigError: as ``status``, or the job has no pods.
    """
    _require_answer()
    within = ["--namespace", namespace]
    selector = ["--selector", f"{_PODS_OF[kind]}={name}"]
    # Check the job first: a job that does not exist would look like a job without pods.
    _ask([*within, "get", RESOURCES[kind], name])
    pods = _ask([*within, "get", "pods", *selector, "--output", "name"]).split()
    if not pods:
        raise ConfigError(
            Problem(
                f"{kind} {name}",
                None,
                rule=f"has no pods in {namespace}, so it has no log",
                fix="wait for them, and check its status",
            )
        )
    if len(pods) > MOST_FOLLOWED:  # kubectl does not support so many
        # master before worker, then by number: the first has rank 0
        first = min(pods, key=_in_order)
        print(
            f"{len(pods):,} pods: showing the log of {first}, which prints the steps",
            file=sys.stderr,
            flush=True,
        )
        print(
            f"for another pod: kubectl --namespace {namespace} logs POD",
            file=sys.stderr,
            flush=True,
        )
        return subprocess.run(
            ["kubectl", *within, "logs", first, "--follow"], check=False
        ).returncode
    # All lines, each with the name of its pod.
    follow = [
        "--follow",
        "--prefix",
        "--tail=-1",
        f"--max-log-requests={MOST_FOLLOWED}",
        "--ignore-errors",
    ]
    return subprocess.run(["kubectl", *within, "logs", *selector, *follow], check=False).returncode


def _in_order(pod: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in names by value, so node 2 comes before node 10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", pod)]


def _require_answer() -> None:
    """Require a reply of the cluster. Without this check, kubectl would try
    an unreachable server five times.
    """
    try:
        _ask(["get", "--raw", "/version"], seconds=ANSWER_SECONDS)
    except ConfigError as error:
        if "(Forbidden)" not in str(error):  # this is an answer, too
            raise


def _ask(arguments: Sequence[str], text: str = "", seconds: int = WAIT_SECONDS) -> str:
    """Run kubectl and return its output.

    Raises:
        ConfigError: kubectl is missing, fails, or gets no reply. The message is one line with kubectl's text,
            without the log lines of its library.
    """
    command = ["kubectl", *arguments, f"--request-timeout={max(seconds // 2, ANSWER_SECONDS)}s"]
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(
            Problem(
                "kubectl",
                None,
                rule="does not exist on this machine",
                fix="install kubectl and choose a cluster, or use --dry-run",
            )
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            Problem(
                "kubectl",
                None,
                rule=f"got no reply from the cluster within {seconds} s",
                fix="check that it is up and is the right one: kubectl config current-context",
            )
        ) from None
    if done.returncode:
        # kubectl's library writes its own log lines to the same stream.
        lines = [line for line in done.stderr.splitlines() if not re.match(r"[EWI]\d{4} ", line)]
        reason = " ".join(" ".join(lines).split())[-500:] or f"exit status {done.returncode}"
        fix = next(
            (fix for pattern, fix in _FIXES if re.search(pattern, reason)),
            "correct [launch], or ask the cluster's administrators",
        )
        raise ConfigError(Problem("kubectl", None, f"failed: {reason}", fix))
    return done.stdout
