"""``shardtrain launch kubernetes`` against a real API server: objects created, requests refused, objects left behind.

kube-apiserver 1.20 validates pods like a real cluster, and the operators' kinds against their published models. Without
an operator and a kubelet, no pod runs and there are no logs. Indexed jobs need 1.21.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import kube_server
import patience
import pytest
import yaml
from kube_schemas import ELASTIC_POLICY, PYTORCHJOB, RUN_POLICY

from shardtrain.launch.platforms.kubectl import RESOURCES

ROOT = Path(__file__).parents[2]
ANSWER_SECONDS = 10
PLAIN = ["--nodes=2", "--launch.devices_per_node=8", "--launch.image=reg/run:1"]
MOUNTS = ["data:/data", "data:/cache", "models:/models:ro"]
EXTRAS = {
    "plain": [],
    "secrets": ["--launch.secrets.HF_TOKEN=hub/token", "--launch.env.HF_HOME=/data/hf"],
    "mounts": [f"--launch.mounts={json.dumps(MOUNTS)}", "--launch.workdir=/data/run"],
    "memory": [
        "--launch.shared_memory_gib=16",
        "--launch.memory_gib_per_node=64",
        "--launch.cpus_per_node=8",
    ],
    "selector": [
        '--launch.kubernetes.node_selector=["node.kubernetes.io/instance-type=p5.48xlarge", "gpu=h100"]'
    ],
    "queue": ["--launch.kubernetes.queue=team", "--launch.kubernetes.priority_class=high"],
    "account": [
        "--launch.kubernetes.service_account=trainer",
        "--launch.kubernetes.image_pull_secret=registry",
    ],
    "elastic": ["--launch.min_nodes=1", "--max_restarts=3"],
}
CASES = [
    (kind, name)
    for kind in RESOURCES
    for name in EXTRAS
    if name != "elastic" or kind == "pytorchjob"
]

pytestmark = pytest.mark.skipif(bool(kube_server.missing()), reason=kube_server.missing())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with kube_server.server(tmp_path_factory.mktemp("kube")) as api_server:
        high = {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "high"},
            "value": 9,
        }
        api_server.create(namespace("ml"), high)
        yield api_server


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 5  # café\n")
    return path


def namespace(name: str) -> dict:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def launch(kubeconfig: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    names = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "KUBECONFIG": str(kubeconfig),
        "HOME": str(kubeconfig.parent),
    }
    command = [sys.executable, "-m", "shardtrain", "launch", *map(str, arguments)]
    return subprocess.run(
        command,
        env=names,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        check=False,
    )


def arguments_of(kind: str, name: str, where: str, *more: str) -> list[str]:
    place = [f"--launch.kubernetes.kind={kind}", f"--launch.kubernetes.namespace={where}"]
    return [*PLAIN, *place, f"--name={name}", *more]


def ours(server, where: str) -> list[str]:
    """Objects that a launch left in a namespace, without the certificate that newer clusters create there."""
    kinds = ",".join(["configmaps", "trainingruntimes.trainer.kubeflow.org", *RESOURCES.values()])
    result = server.kubectl("get", kinds, "--namespace", where, "--output", "name")
    assert result.returncode == 0, result.stderr
    return [name for name in result.stdout.split() if "kube-root-ca" not in name]


def assert_refused(result: subprocess.CompletedProcess[str], *texts: str) -> None:
    assert result.returncode == 2, (result.stdout, result.stderr)
    errors = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1 and result.stdout == "", (result.stdout, result.stderr)
    for text in texts:
        assert text in result.stderr


def is_stored(stored: object, sent: object) -> bool:
    """True if the server stored everything that was sent. It adds defaults and drops unknown fields."""
    if isinstance(sent, dict):
        return isinstance(stored, dict) and all(
            key in stored and is_stored(stored[key], sent[key]) for key in sent
        )
    if isinstance(sent, list):
        return (
            isinstance(stored, list)
            and len(stored) == len(sent)
            and all(map(is_stored, stored, sent))
        )
    return stored == sent


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_job_is_created_shown_and_stopped_and_the_server_stores_every_field(
    server, config_file, kind, name
):
    arguments = ["kubernetes", config_file, *arguments_of(kind, f"run-{name}", "ml", *EXTRAS[name])]
    result = launch(server.config(), *arguments)
    assert result.returncode == 0, result.stderr

    job = result.stdout.strip()
    assert job == f"kubernetes/ml/{kind}/run-{name}"
    assert result.stderr == ""

    # The server has each field of each manifest.
    dry_run = launch(server.config(), *arguments, "--dry-run")
    for sent in yaml.safe_load_all(dry_run.stdout):
        group, _, version = sent["apiVersion"].rpartition("/")
        plural = ".".join(filter(None, [f"{sent['kind'].lower()}s", group]))
        stored = server.get(plural, sent["metadata"]["name"], "--namespace", "ml")
        assert is_stored(stored, sent), (version, sent, stored)

    status = launch(server.config(), "status", job)

    assert status.returncode == 0
    assert f"run-{name}" in status.stdout
    assert launch(server.config(), "stop", job).returncode == 0
    assert ours(server, "ml") == []


def pods_of(kind: str, name: str, config_file: Path) -> list[dict]:
    """Pod specs of a manifest, with the restartPolicy that the operator of a PyTorchJob adds."""
    result = launch(
        config_file,
        "kubernetes",
        config_file,
        "--dry-run",
        *arguments_of(kind, "run", "ml", *EXTRAS[name]),
    )
    assert result.returncode == 0, result.stderr
    specs = []

    def walk(node: object, policy: str) -> None:
        if isinstance(node, dict):
            policy = node.get("restartPolicy", policy)
            if "containers" in node:
                specs.append({"restartPolicy": policy, **node})
            for value in node.values():
                walk(value, policy)
        elif isinstance(node, list):
            for value in node:
                walk(value, policy)

    walk(list(yaml.safe_load_all(result.stdout)), "")
    return specs


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_server_accepts_the_pods_of_the_manifest(server, config_file, kind, name):
    for spec in pods_of(kind, name, config_file):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "run-0", "namespace": "ml"},
            "spec": spec,
        }
        job = {
            **pod,
            "apiVersion": "batch/v1",
            "kind": "Job",
            "spec": {"template": {"spec": spec}, "backoffLimit": 0},
        }
        for manifest in (pod, job):
            result = server.kubectl(
                "create", "--dry-run=server", "--filename", "-", text=json.dumps(manifest)
            )
            assert result.returncode == 0, result.stderr


def test_the_server_finds_errors_that_schemas_miss(server, config_file):
    """The tests of this file rely on it: the server rejects a missing volume and a key of no schema."""
    (spec, *_) = pods_of("jobset", "mounts", config_file)
    spec["volumes"] = spec["volumes"][:-1]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "run", "namespace": "ml"},
        "spec": spec,
    }
    result = server.kubectl("create", "--dry-run=server", "--filename", "-", text=json.dumps(pod))

    assert result.returncode
    assert "volumeMounts" in result.stderr
    assert "Not found" in result.stderr

    # A real field is "replicatedJobs". Fields that no schema has are refused, not dropped.
    wrong = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "a", "namespace": "ml"},
        "spec": {"replicatedJob": []},
    }
    result = server.kubectl("create", "--filename", "-", text=json.dumps(wrong))

    assert result.returncode
    assert 'unknown field "replicatedJob"' in result.stderr


def test_the_fields_of_a_pytorchjob_match_the_published_package():
    types = {"int": int, "str": str, "bool": bool}
    for name, known in (
        ("PyTorchJobSpec", PYTORCHJOB),
        ("RunPolicy", RUN_POLICY),
        ("ElasticPolicy", ELASTIC_POLICY),
    ):
        types_of_fields, keys, _ = kube_server.kube_schemas.fields(
            kube_server.MODELS, f"KubeflowOrgV1{name}"
        )
        for attribute, written in types_of_fields.items():
            expected = types.get(written, list if written.startswith("list") else dict)
            assert known[keys[attribute]] is expected, attribute
        assert set(known) == set(keys.values())


@pytest.mark.parametrize("kind", RESOURCES)
def test_a_refused_launch_leaves_no_objects(server, config_file, kind):
    where = f"full-{kind}"
    plural = RESOURCES[kind]
    hard = {f"count/{plural}": "0"}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few", "namespace": where},
    }
    server.create(namespace(where), {**quota, "spec": {"hard": hard}})
    # The quota's controller would write this status.
    status = {"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}}
    patch = [
        "patch",
        "resourcequota",
        "few",
        "--namespace",
        where,
        "--subresource=status",
        "--type=merge",
    ]
    result = server.kubectl(*patch, "--patch", json.dumps(status))

    assert result.returncode == 0, result.stderr

    result = launch(server.config(), "kubernetes", config_file, *arguments_of(kind, "run", where))
    assert_refused(result, "exceeded quota", f"count/{plural}", "request less")
    assert ours(server, where) == []


def test_a_name_in_use_is_reported_and_its_objects_stay(server, config_file):
    arguments = ["kubernetes", config_file, *arguments_of("trainjob", "taken", "ml")]
    assert launch(server.config(), *arguments).returncode == 0

    before = ours(server, "ml")
    assert_refused(launch(server.config(), *arguments), "already exists", "--name")
    # Without a configuration file there is no ConfigMap of that name, but the runtime exists.
    assert_refused(
        launch(server.config(), "kubernetes", *arguments_of("trainjob", "taken", "ml")),
        "already exists",
    )
    assert ours(server, "ml") == before
    assert launch(server.config(), "stop", "kubernetes/ml/trainjob/taken").returncode == 0


def test_a_missing_namespace_or_kind_is_named(server, config_file):
    arguments = arguments_of("pytorchjob", "run", "nowhere")
    result = launch(server.config(), "kubernetes", config_file, *arguments)

    assert_refused(result, 'namespaces "nowhere" not found', "launch.kubernetes.namespace")

    # Without its definition, the server does not know a kind, as without its operator.
    definitions = kube_server.kube_schemas.definitions(kube_server.MODELS)
    by_kind = {definition["spec"]["names"]["kind"]: definition for definition in definitions}
    jobset = by_kind["JobSet"]

    assert server.kubectl("delete", "crd", jobset["metadata"]["name"]).returncode == 0

    try:
        arguments = arguments_of("jobset", "run", "ml")
        result = launch(server.config(), "kubernetes", config_file, *arguments)
        assert_refused(result, "launch.kubernetes.kind")

        status = launch(server.config(), "status", "kubernetes/ml/jobset/run")
        assert_refused(status, "install its operator")
    finally:
        server.define(jobset)

    assert ours(server, "ml") == []


def allow(server, where: str, *rules: tuple[str, str, list[str]]) -> None:
    """Create a namespace in which the user ``someone`` has these rights: (group, resource, verbs)."""
    group = "rbac.authorization.k8s.io"
    rights = [
        {"apiGroups": [api], "resources": [resource], "verbs": verbs}
        for api, resource, verbs in rules
    ]
    metadata = {"name": "some", "namespace": where}
    subject = {"kind": "User", "name": "someone", "apiGroup": group}
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rights}
    binding = {**role, "kind": "RoleBinding", "subjects": [subject]}
    del binding["rules"]
    server.create(
        namespace(where),
        role,
        {**binding, "roleRef": {"kind": "Role", "name": "some", "apiGroup": group}},
    )


def test_a_missing_right_is_reported_and_created_objects_are_deleted(server, config_file):
    # A user who may create the ConfigMap and not the job: the ConfigMap is deleted again.
    allow(server, "guest", ("", "configmaps", ["create", "delete", "get"]))
    arguments = arguments_of("pytorchjob", "run", "guest")
    result = launch(server.config("someone"), "kubernetes", config_file, *arguments)

    assert_refused(
        result, "forbidden", "pytorchjobs", "someone", "ask the cluster's administrators"
    )
    assert ours(server, "guest") == []

    # A user who may not delete it either is told that it is left.
    allow(server, "writer", ("", "configmaps", ["create"]))
    arguments = arguments_of("pytorchjob", "run", "writer")
    result = launch(server.config("someone"), "kubernetes", config_file, *arguments)

    assert_refused(result, "forbidden", "configmap/run was created and could not be removed")
    assert ours(server, "writer") == ["configmap/run"]


def test_a_deleted_job_and_one_without_pods_are_reported_immediately(server, config_file):
    for verb in ("status", "logs", "stop"):
        began = time.monotonic()
        assert_refused(
            launch(server.config(), verb, "kubernetes/ml/pytorchjob/gone"), "not found", "has ended"
        )
        assert time.monotonic() - began < patience.seconds(ANSWER_SECONDS)
    result = launch(
        server.config(), "kubernetes", config_file, *arguments_of("jobset", "early", "ml")
    )
    job = result.stdout.strip()

    assert_refused(launch(server.config(), "logs", job), "has no pods")
    assert server.kubectl("delete", "jobset", "early", "--namespace", "ml").returncode == 0
    assert ours(server, "ml") == ["configmap/early"]
    assert_refused(launch(server.config(), "stop", job), "not found")
    assert ours(server, "ml") == [], (
        "stop also deletes the remains of a job that was deleted by hand"
    )


@pytest.mark.parametrize("verb", ["kubernetes", "status", "logs", "stop"])
@pytest.mark.parametrize(
    "state", ["nobody listens", "nobody answers", "no such context", "no such user"]
)
def test_an_unreachable_cluster_is_reported_within_the_limit(
    server, tmp_path, config_file, state, verb
):
    arguments = ["kubernetes/ml/jobset/a"]
    if verb == "kubernetes":
        arguments = [config_file, *arguments_of("jobset", "run", "ml")]
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never replies
        port = silent.getsockname()[1]
        if state == "nobody listens":
            silent.close()
        context = "old" if "context" in state else "test"
        broken = kube_server.kubeconfig(f"http://127.0.0.1:{port}", context=context)
        if "user" in state:
            broken = kube_server.kubeconfig(server.url, token="wrong")
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(broken))
        began = time.monotonic()
        result = launch(path, verb, *arguments)
        seconds = time.monotonic() - began

    fixes = {
        "nobody listens": "current-context",
        "nobody answers": "current-context",
        "no such context": "use-context",
        "no such user": "log in",
    }
    assert_refused(result, "kubectl", fixes[state])
    assert seconds < ANSWER_SECONDS
