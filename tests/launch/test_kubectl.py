"""Requests to kubectl, recorded by a stub program. test_real_kubernetes.py tests against a real API server."""

from __future__ import annotations

import sys

import pods
import pytest
import yaml

from shardtrain.launch.platforms import kubectl
from shardtrain.utils.errors import ConfigError

PROGRAM = f"""#!{sys.executable}
import json, pathlib, sys
arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--request-timeout=")]
text = sys.stdin.read() if "--filename" in arguments else ""
kind = json.loads(text)["kind"] if text else ""
folder = pathlib.Path(__file__).parent
with (folder / "requests").open("a") as requests:
    print(" ".join(arguments), kind, file=requests)
for line in (folder / "refused").read_text().splitlines():
    request, _, reason = line.partition(": ")
    if request == f"{{' '.join(arguments)}} {{kind}}".strip():
        print("E1122 02:15:04.5 1 memcache.go:265] noise", reason, sep="\\n", file=sys.stderr)
        sys.exit(1)
print((folder / "pods").read_text() if "pods" in arguments else "")
"""
CREATE = "create --filename -"
DELETE = "delete --ignore-not-found --wait=false --filename -"


@pytest.fixture
def requests(tmp_path, monkeypatch):
    """Function that returns the requests so far. The stub refuses each request listed in the file ``refused``."""
    (tmp_path / "refused").touch()
    (tmp_path / "pods").write_text("pod/run-0\n")
    (tmp_path / "kubectl").write_text(PROGRAM)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return lambda: [line.strip() for line in (tmp_path / "requests").read_text().splitlines()]


def manifests(tmp_path) -> str:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 5\n")
    return pods.manifests("trainjob", [], path)


def test_objects_are_created_in_their_order(tmp_path, requests):
    kubectl.create(manifests(tmp_path))
    assert requests() == [
        "get --raw /version",
        *(f"{CREATE} {k}" for k in ("ConfigMap", "TrainingRuntime", "TrainJob")),
    ]


def test_a_refused_create_deletes_the_earlier_objects(tmp_path, requests):
    (tmp_path / "refused").write_text(f"{CREATE} TrainJob: exceeded quota: few\n")
    with pytest.raises(ConfigError, match="exceeded quota: few; request less") as error:
        kubectl.create(manifests(tmp_path))
    assert "noise" not in str(error.value)
    assert requests()[-2:] == [f"{DELETE} TrainingRuntime", f"{DELETE} ConfigMap"]


def test_an_object_that_cannot_be_deleted_is_named(tmp_path, requests):
    (tmp_path / "refused").write_text(
        f"{CREATE} TrainJob: forbidden\n{DELETE} ConfigMap: forbidden\n"
    )

    with pytest.raises(
        ConfigError, match="configmap/shardtrain was created and could not be removed"
    ):
        kubectl.create(manifests(tmp_path))


def test_an_unreachable_cluster_creates_nothing(tmp_path, requests):
    message = (
        "The connection to the server a:1 was refused - did you specify the right host or port?"
    )
    (tmp_path / "refused").write_text(f"get --raw /version: {message}\n")

    with pytest.raises(ConfigError, match="current-context"):
        kubectl.create(manifests(tmp_path))
    assert requests() == ["get --raw /version"]


def test_stop_deletes_every_created_object(tmp_path, requests):
    assert kubectl.stop("team", "trainjob", "run") == 0

    objects = "configmaps,trainingruntimes.trainer.kubeflow.org"
    labels = "--selector app.kubernetes.io/name=shardtrain,app.kubernetes.io/instance=run"
    assert requests()[1:] == [
        "--namespace team delete trainjobs.trainer.kubeflow.org run --wait=false",
        f"--namespace team delete {objects} {labels} --wait=false --ignore-not-found",
    ]

    for manifest in yaml.safe_load_all(manifests(tmp_path)):
        manifest_labels = manifest["metadata"]["labels"]
        assert manifest_labels["app.kubernetes.io/name"] == "shardtrain"
        assert "app.kubernetes.io/instance" in manifest_labels


def test_logs_follow_the_pods_of_the_job_and_require_one(tmp_path, requests):
    assert kubectl.logs("team", "trainjob", "run") == 0
    assert "logs --selector jobset.sigs.k8s.io/jobset-name=run --follow" in requests()[-1]

    (tmp_path / "pods").write_text("")
    with pytest.raises(ConfigError, match="no pods in team"):
        kubectl.logs("team", "trainjob", "run")


@pytest.mark.parametrize(
    ("kind", "names", "first"),
    [
        (
            "pytorchjob",
            ["pod/run-master-0", *(f"pod/run-worker-{node}" for node in range(1023))],
            "pod/run-master-0",
        ),
        (
            "jobset",
            [f"pod/run-node-0-{node}-x{node:04}" for node in range(2048)],
            "pod/run-node-0-0-x0000",
        ),
        (
            "trainjob",
            [f"pod/run-node-0-{node}-b{9999 - node}" for node in range(65)],
            "pod/run-node-0-0-b9999",
        ),
    ],
)
def test_logs_of_a_large_job_follow_the_first_rank(kind, names, first, tmp_path, requests, capfd):
    (tmp_path / "pods").write_text("\n".join(reversed(names)))
    assert kubectl.logs("team", kind, "run") == 0
    assert requests()[-1] == f"--namespace team logs {first} --follow"
    assert f"{len(names):,} pods: showing the log of {first}" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["kubernetes/team/deployment/run", "kubernetes/team/pytorchjob"])
def test_an_id_of_another_kind_of_object_is_rejected(name):
    from shardtrain.launch import job_status

    with pytest.raises(ConfigError, match="id"):
        job_status.status(name)
