"""``shardtrain launch kubernetes`` against a real API server: what it creates, what it refuses, what stays behind.

kube-apiserver 1.20 checks pods as a cluster does; the operators' kinds are checked against their published models.
No operator runs and no kubelet, so no pod does, and of logs there is only their absence. Indexed jobs are of 1.21.
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
    "memory": ["--launch.shared_memory_gib=16", "--launch.memory_gib_per_node=64", "--launch.cpus_per_node=8"],
    "selector": ['--launch.kubernetes.node_selector=["node.kubernetes.io/instance-type=p5.48xlarge", "gpu=h100"]'],
    "queue": ["--launch.kubernetes.queue=team", "--launch.kubernetes.priority_class=high"],
    "account": ["--launch.kubernetes.service_account=trainer", "--launch.kubernetes.image_pull_secret=registry"],
    "elastic": ["--launch.min_nodes=1", "--max_restarts=3"],
}
CASES = [(kind, name) for kind in RESOURCES for name in EXTRAS if name != "elastic" or kind == "pytorchjob"]

pytestmark = pytest.mark.skipif(bool(kube_server.missing()), reason=kube_server.missing())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with kube_server.server(tmp_path_factory.mktemp("kube")) as found:
        high = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 9}
        found.create(namespace("ml"), high)
        yield found


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 5  # café\n")
    return path


def namespace(name: str) -> dict:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def launch(kubeconfig: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    names = {**os.environ, "PYTHONPATH": str(ROOT), "KUBECONFIG": str(kubeconfig), "HOME": str(kubeconfig.parent)}
    command = [sys.executable, "-m", "shardtrain", "launch", *map(str, words)]
    return subprocess.run(
        command, env=names, cwd=ROOT, capture_output=True, text=True, timeout=patience.seconds(120), check=False
    )


def words_of(kind: str, name: str, where: str, *more: str) -> list[str]:
    place = [f"--launch.kubernetes.kind={kind}", f"--launch.kubernetes.namespace={where}"]
    return [*PLAIN, *place, f"--name={name}", *more]


def ours(server, where: str) -> list[str]:
    """What a launch can leave behind in a namespace; the certificate that newer clusters put there is not ours."""
    kinds = ",".join(["configmaps", "trainingruntimes.trainer.kubeflow.org", *RESOURCES.values()])
    done = server.kubectl("get", kinds, "--namespace", where, "--output", "name")
    assert done.returncode == 0, done.stderr
    return [name for name in done.stdout.split() if "kube-root-ca" not in name]


def assert_refused(done: subprocess.CompletedProcess[str], *told: str) -> None:
    assert done.returncode == 2, (done.stdout, done.stderr)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1 and done.stdout == "", (done.stdout, done.stderr)
    for word in told:
        assert word in done.stderr


def holds(kept: object, sent: object) -> bool:
    """Whether the server has kept all that was sent; it adds defaults, and drops what it does not know."""
    if isinstance(sent, dict):
        return isinstance(kept, dict) and all(key in kept and holds(kept[key], sent[key]) for key in sent)
    if isinstance(sent, list):
        return isinstance(kept, list) and len(kept) == len(sent) and all(map(holds, kept, sent))
    return kept == sent


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_job_is_created_shown_and_stopped_and_the_server_keeps_all_that_was_sent(server, config_file, kind, name):
    words = ["kubernetes", config_file, *words_of(kind, f"run-{name}", "ml", *EXTRAS[name])]
    done = launch(server.config(), *words)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    assert job == f"kubernetes/ml/{kind}/run-{name}" and done.stderr == ""
    for sent in yaml.safe_load_all(launch(server.config(), *words, "--dry-run").stdout):
        group, _, version = sent["apiVersion"].rpartition("/")
        plural = ".".join(filter(None, [f"{sent['kind'].lower()}s", group]))
        kept = server.get(plural, sent["metadata"]["name"], "--namespace", "ml")
        assert holds(kept, sent), (version, sent, kept)
    shown = launch(server.config(), "status", job)
    assert shown.returncode == 0 and f"run-{name}" in shown.stdout
    assert launch(server.config(), "stop", job).returncode == 0
    assert ours(server, "ml") == []


def pods_of(kind: str, name: str, config_file: Path) -> list[dict]:
    """The pods of a manifest, each with what its operator adds: a name, and a PyTorchJob's restartPolicy."""
    done = launch(config_file, "kubernetes", config_file, "--dry-run", *words_of(kind, "run", "ml", *EXTRAS[name]))
    assert done.returncode == 0, done.stderr
    found = []

    def walk(node: object, policy: str) -> None:
        if isinstance(node, dict):
            policy = node.get("restartPolicy", policy)
            if "containers" in node:
                found.append({"restartPolicy": policy, **node})
            for value in node.values():
                walk(value, policy)
        elif isinstance(node, list):
            for value in node:
                walk(value, policy)

    walk(list(yaml.safe_load_all(done.stdout)), "")
    return found


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_pods_are_taken_by_the_server_as_they_stand_in_the_manifest(server, config_file, kind, name):
    for spec in pods_of(kind, name, config_file):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "run-0", "namespace": "ml"}, "spec": spec}
        job = {**pod, "apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"spec": spec}, "backoffLimit": 0}}
        for one in (pod, job):
            done = server.kubectl("create", "--dry-run=server", "--filename", "-", text=json.dumps(one))
            assert done.returncode == 0, done.stderr


def test_the_server_finds_what_schemas_do_not(server, config_file):
    """A law on the test: were a volume missing or a key wrong, this server would say so."""
    (spec, *_) = pods_of("jobset", "mounts", config_file)
    spec["volumes"] = spec["volumes"][:-1]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "run", "namespace": "ml"}, "spec": spec}
    done = server.kubectl("create", "--dry-run=server", "--filename", "-", text=json.dumps(pod))
    assert done.returncode and "volumeMounts" in done.stderr and "Not found" in done.stderr
    wrong = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "a", "namespace": "ml"}}
    done = server.kubectl("create", "--filename", "-", text=json.dumps({**wrong, "spec": {"replicatedJob": []}}))
    assert done.returncode and 'unknown field "replicatedJob"' in done.stderr


def test_the_fields_of_a_pytorchjob_that_other_tests_know_are_those_of_the_package():
    types = {"int": int, "str": str, "bool": bool}
    for name, known in (("PyTorchJobSpec", PYTORCHJOB), ("RunPolicy", RUN_POLICY), ("ElasticPolicy", ELASTIC_POLICY)):
        found, keys, _ = kube_server.kube_schemas.fields(kube_server.MODELS, f"KubeflowOrgV1{name}")
        for attribute, written in found.items():
            expected = types.get(written, list if written.startswith("list") else dict)
            assert known[keys[attribute]] is expected, attribute
        assert set(known) == set(keys.values())


@pytest.mark.parametrize("kind", RESOURCES)
def test_what_is_refused_leaves_nothing_behind(server, config_file, kind):
    where, plural = f"full-{kind}", RESOURCES[kind]
    hard = {f"count/{plural}": "0"}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few", "namespace": where}}
    server.create(namespace(where), {**quota, "spec": {"hard": hard}})
    # what the quota's controller would write
    status = {"status": {"hard": hard, "used": dict.fromkeys(hard, "0")}}
    patch = ["patch", "resourcequota", "few", "--namespace", where, "--subresource=status", "--type=merge"]
    done = server.kubectl(*patch, "--patch", json.dumps(status))
    assert done.returncode == 0, done.stderr
    done = launch(server.config(), "kubernetes", config_file, *words_of(kind, "run", where))
    assert_refused(done, "exceeded quota", f"count/{plural}", "ask for less")
    assert ours(server, where) == []


def test_a_name_that_is_taken_is_reported_and_what_has_it_stays(server, config_file):
    words = ["kubernetes", config_file, *words_of("trainjob", "taken", "ml")]
    assert launch(server.config(), *words).returncode == 0
    before = ours(server, "ml")
    assert_refused(launch(server.config(), *words), "already exists", "--name")
    # another kind has no configuration file of this name to trip over, but a runtime
    assert_refused(launch(server.config(), "kubernetes", *words_of("trainjob", "taken", "ml")), "already exists")
    assert ours(server, "ml") == before
    assert launch(server.config(), "stop", "kubernetes/ml/trainjob/taken").returncode == 0


def test_a_namespace_or_a_kind_that_is_not_there_is_named(server, config_file):
    done = launch(server.config(), "kubernetes", config_file, *words_of("pytorchjob", "run", "nowhere"))
    assert_refused(done, 'namespaces "nowhere" not found', "launch.kubernetes.namespace")
    mine = next(
        one
        for one in kube_server.kube_schemas.definitions(kube_server.MODELS)
        if one["spec"]["names"]["kind"] == "JobSet"
    )
    assert server.kubectl("delete", "crd", mine["metadata"]["name"]).returncode == 0
    try:
        done = launch(server.config(), "kubernetes", config_file, *words_of("jobset", "run", "ml"))
        assert_refused(done, "launch.kubernetes.kind")
        assert_refused(launch(server.config(), "status", "kubernetes/ml/jobset/run"), "install its operator")
    finally:
        server.define(mine)
    assert ours(server, "ml") == []


def allow(server, where: str, *rules: tuple[str, str, list[str]]) -> None:
    """Let ``someone`` do these things (group, resource, verbs) in a new namespace."""
    group = "rbac.authorization.k8s.io"
    given = [{"apiGroups": [one], "resources": [what], "verbs": verbs} for one, what, verbs in rules]
    metadata = {"name": "some", "namespace": where}
    subject = {"kind": "User", "name": "someone", "apiGroup": group}
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": given}
    binding = {**role, "kind": "RoleBinding", "subjects": [subject]}
    del binding["rules"]
    server.create(namespace(where), role, {**binding, "roleRef": {"kind": "Role", "name": "some", "apiGroup": group}})


def test_a_right_that_is_missing_is_reported_and_nothing_stays_that_may_be_taken_away(server, config_file):
    allow(server, "guest", ("", "configmaps", ["create", "delete", "get"]))
    done = launch(server.config("someone"), "kubernetes", config_file, *words_of("pytorchjob", "run", "guest"))
    assert_refused(done, "forbidden", "pytorchjobs", "someone", "ask who runs the cluster")
    assert ours(server, "guest") == []
    allow(server, "writer", ("", "configmaps", ["create"]))
    done = launch(server.config("someone"), "kubernetes", config_file, *words_of("pytorchjob", "run", "writer"))
    assert_refused(done, "forbidden", "configmap/run was made and could not be taken away")
    assert ours(server, "writer") == ["configmap/run"]


def test_a_job_that_is_gone_and_one_without_pods_are_reported_at_once(server, config_file):
    for verb in ("status", "logs", "stop"):
        began = time.monotonic()
        assert_refused(launch(server.config(), verb, "kubernetes/ml/pytorchjob/gone"), "not found", "has ended")
        assert time.monotonic() - began < patience.seconds(ANSWER_SECONDS)
    done = launch(server.config(), "kubernetes", config_file, *words_of("jobset", "early", "ml"))
    job = done.stdout.strip()
    assert_refused(launch(server.config(), "logs", job), "has no pods")
    assert server.kubectl("delete", "jobset", "early", "--namespace", "ml").returncode == 0
    assert ours(server, "ml") == ["configmap/early"]
    assert_refused(launch(server.config(), "stop", job), "not found")
    assert ours(server, "ml") == [], "stop takes away what a job that was deleted by hand has left"


@pytest.mark.parametrize("verb", ["kubernetes", "status", "logs", "stop"])
@pytest.mark.parametrize("state", ["nobody listens", "nobody answers", "no such context", "no such user"])
def test_a_cluster_that_cannot_be_asked_is_reported_within_the_limit(server, tmp_path, config_file, state, verb):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are taken, and nothing is ever said
        port = silent.getsockname()[1]
        if state == "nobody listens":
            silent.close()
        broken = kube_server.kubeconfig(f"http://127.0.0.1:{port}", context="old" if "context" in state else "test")
        broken = kube_server.kubeconfig(server.url, token="wrong") if "user" in state else broken
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(broken))
        words = [config_file, *words_of("jobset", "run", "ml")] if verb == "kubernetes" else ["kubernetes/ml/jobset/a"]
        began = time.monotonic()
        done = launch(path, verb, *words)
        seconds = time.monotonic() - began
    told = {"context": "use-context", "user": "log in", "nobody": "current-context"}
    assert_refused(done, "kubectl", next(words for name, words in told.items() if name in state))
    assert seconds < ANSWER_SECONDS
