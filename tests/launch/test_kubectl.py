"""What kubectl is asked, by a program in its place that writes it down; a real server: test_real_kubernetes.py."""

from __future__ import annotations

import json
import sys

import pods
import pytest
import yaml

from shardtrain.launch.platforms import kubectl
from shardtrain.utils.errors import ConfigError

PROGRAM = f"""#!{sys.executable}
import json, pathlib, sys
words = [word for word in sys.argv[1:] if not word.startswith("--request-timeout=")]
text = sys.stdin.read() if "--filename" in words else ""
kind = json.loads(text)["kind"] if text else ""
folder = pathlib.Path(__file__).parent
with (folder / "asked").open("a") as asked:
    print(" ".join(words), kind, file=asked)
for line in (folder / "refused").read_text().splitlines():
    found, _, told = line.partition(": ")
    if found == f"{{' '.join(words)}} {{kind}}".strip():
        print("E1122 02:15:04.5 1 memcache.go:265] noise", told, sep="\\n", file=sys.stderr)
        sys.exit(1)
print((folder / "pods").read_text() if "pods" in words else "")
"""
CREATE, DELETE = "create --filename -", "delete --ignore-not-found --wait=false --filename -"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Gives what has been asked so far; what the file ``refused`` names is refused."""
    (tmp_path / "refused").touch()
    (tmp_path / "pods").write_text("pod/run-0\n")
    (tmp_path / "kubectl").write_text(PROGRAM)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return lambda: [line.strip() for line in (tmp_path / "asked").read_text().splitlines()]


def manifests(tmp_path) -> str:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 5\n")
    return pods.manifests("trainjob", [], path)


def test_objects_are_created_in_their_order(tmp_path, asked):
    kubectl.create(manifests(tmp_path))
    assert asked() == ["get --raw /version", *(f"{CREATE} {k}" for k in ("ConfigMap", "TrainingRuntime", "TrainJob"))]


def test_what_was_created_before_a_refusal_is_taken_away_again(tmp_path, asked):
    (tmp_path / "refused").write_text(f"{CREATE} TrainJob: exceeded quota: few\n")
    with pytest.raises(ConfigError, match="exceeded quota: few; ask for less") as error:
        kubectl.create(manifests(tmp_path))
    assert "noise" not in str(error.value)
    assert asked()[-2:] == [f"{DELETE} TrainingRuntime", f"{DELETE} ConfigMap"]


def test_what_cannot_be_taken_away_is_named(tmp_path, asked):
    (tmp_path / "refused").write_text(f"{CREATE} TrainJob: forbidden\n{DELETE} ConfigMap: forbidden\n")
    with pytest.raises(ConfigError, match="configmap/shardtrain was made and could not be taken away"):
        kubectl.create(manifests(tmp_path))


def test_nothing_is_created_where_the_cluster_does_not_answer(tmp_path, asked):
    told = "The connection to the server a:1 was refused - did you specify the right host or port?"
    (tmp_path / "refused").write_text(f"get --raw /version: {told}\n")
    with pytest.raises(ConfigError, match="current-context"):
        kubectl.create(manifests(tmp_path))
    assert asked() == ["get --raw /version"]


def test_a_stop_takes_away_all_that_was_made(tmp_path, asked):
    assert kubectl.stop("team", "trainjob", "run") == 0
    beside = "configmaps,trainingruntimes.trainer.kubeflow.org"
    mine = "--selector app.kubernetes.io/name=shardtrain,app.kubernetes.io/instance=run"
    assert asked()[1:] == [
        "--namespace team delete trainjobs.trainer.kubeflow.org run --wait=false",
        f"--namespace team delete {beside} {mine} --wait=false --ignore-not-found",
    ]
    for manifest in yaml.safe_load_all(manifests(tmp_path)):
        labels = json.dumps(manifest["metadata"]["labels"])
        assert '"app.kubernetes.io/name": "shardtrain"' in labels and "app.kubernetes.io/instance" in labels


def test_logs_follow_the_pods_of_the_job_and_wait_for_none(tmp_path, asked):
    assert kubectl.logs("team", "trainjob", "run") == 0
    assert "logs --selector jobset.sigs.k8s.io/jobset-name=run --follow" in asked()[-1]
    (tmp_path / "pods").write_text("")
    with pytest.raises(ConfigError, match="no pods in team"):
        kubectl.logs("team", "trainjob", "run")


@pytest.mark.parametrize(
    ("kind", "names", "first"),
    [
        ("pytorchjob", ["pod/run-master-0", *(f"pod/run-worker-{node}" for node in range(1023))], "pod/run-master-0"),
        ("jobset", [f"pod/run-node-0-{node}-x{node:04}" for node in range(2048)], "pod/run-node-0-0-x0000"),
        ("trainjob", [f"pod/run-node-0-{node}-b{9999 - node}" for node in range(65)], "pod/run-node-0-0-b9999"),
    ],
)
def test_of_a_large_job_the_log_of_the_first_rank_is_followed(kind, names, first, tmp_path, asked, capfd):
    (tmp_path / "pods").write_text("\n".join(reversed(names)))
    assert kubectl.logs("team", kind, "run") == 0
    assert asked()[-1] == f"--namespace team logs {first} --follow"
    assert f"{len(names):,} pods: the log is that of {first}" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["kubernetes/team/deployment/run", "kubernetes/team/pytorchjob"])
def test_an_id_of_another_kind_is_refused(name):
    from shardtrain.launch import job_status

    with pytest.raises(ConfigError, match="id"):
        job_status.status(name)
