"""Manifests have no unknown key and no wrong type according to the published models of their kinds.

The models are from the package kubeflow-trainer-api (2.3.0), which is generated from the CRDs. They drop unknown keys,
so a manifest must be unchanged after a round trip. The few fields of PyTorchJob are transcribed from kubeflow-training
1.9.4. Its pods are checked like the others.
"""

from __future__ import annotations

import importlib

import pytest
import yaml
from kube_schemas import ELASTIC_POLICY, PYTORCHJOB, RUN_POLICY

from shardtrain import config
from shardtrain.launch.job import to_job
from shardtrain.launch.platforms import kubernetes

pytest.importorskip(
    "kubeflow_trainer_api", reason="kubeflow-trainer-api (the dev extra) has the published models"
)

EVERYTHING = [
    "--launch.name=run", "--launch.nodes=4", "--launch.devices_per_node=8", "--launch.image=reg/run:1",
    '--launch.mounts=["data:/data", "data:/cache", "models:/models:ro"]', "--launch.shared_memory_gib=16",
    "--launch.cpus_per_node=96", "--launch.memory_gib_per_node=512", "--launch.workdir=/app", "--launch.fabric=efa",
    "--launch.secrets.HF_TOKEN=hub/token", "--launch.kubernetes.queue=team", "--launch.kubernetes.namespace=ml",
    "--launch.kubernetes.service_account=trainer", "--launch.kubernetes.image_pull_secret=registry",
    "--launch.kubernetes.priority_class=high", '--launch.kubernetes.node_selector=["gpu=h100"]',
]  # fmt: skip
LEAST = ["--launch.image=reg/run:1"]


def manifests(kind: str, arguments: list[str], path=None) -> list[dict]:
    options = [*arguments, f"--launch.kubernetes.kind={kind}"]
    loaded = config.load(path, options)
    assert not config.check(loaded)
    job = to_job(loaded, options, kubernetes.CONFIG_PATH)
    return list(yaml.safe_load_all(kubernetes.render(job, loaded.config.launch)))


def returned(module: str, name: str, data: dict) -> dict:
    """Return a manifest after a round trip through a published model."""
    model = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), name)
    return model.from_dict(data).to_dict()


def assert_pod(template: dict) -> None:
    assert (
        returned("io_k8s_api_core_v1_pod_template_spec", "IoK8sApiCoreV1PodTemplateSpec", template)
        == template
    )


def assert_fields(data: dict, fields: dict[str, type]) -> None:
    assert {key: type(value) for key, value in data.items()} == {key: fields[key] for key in data}


@pytest.fixture(params=[EVERYTHING, LEAST], ids=["everything", "least"])
def arguments(request):
    return request.param


def test_a_trainjob_and_its_runtime_match_kubeflow_trainer(arguments):
    runtime, job = manifests("trainjob", arguments)
    assert (
        returned("trainer_v1alpha1_training_runtime", "TrainerV1alpha1TrainingRuntime", runtime)
        == runtime
    )
    assert returned("trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob", job) == job
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]

    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]
    assert_pod(pod)
    # The operator sets PET_* only in the container `node` of the step `trainer`.
    assert node["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert [container["name"] for container in pod["spec"]["containers"]] == ["node"]


def test_a_jobset_matches_its_published_model(arguments):
    (job,) = manifests("jobset", arguments)
    assert returned("jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet", job) == job

    (node,) = job["spec"]["replicatedJobs"]
    inner = node["template"]["spec"]
    assert inner["parallelism"] == inner["completions"]
    assert inner["completionMode"] == "Indexed"
    assert_pod(inner["template"])

    # With several nodes, each needs the address of the first one.
    container = inner["template"]["spec"]["containers"][0]
    names = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
    if inner["completions"] > 1:
        assert names["SHARDTRAIN_NNODES"] == "4"
        assert names["SHARDTRAIN_RDZV_ENDPOINT"] == "run-node-0-0.run:29500", (
            "must be the stable name of the first pod"
        )


@pytest.mark.parametrize("more", [[], ["--launch.min_nodes=1"]])
def test_a_pytorchjob_matches_the_training_operator(arguments, more):
    (job,) = manifests("pytorchjob", [*arguments, *more])
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert_fields(job["spec"], PYTORCHJOB)
    assert_fields(job["spec"]["runPolicy"], RUN_POLICY)
    assert_fields(job["spec"].get("elasticPolicy", {}), ELASTIC_POLICY)
    for role, replica in job["spec"]["pytorchReplicaSpecs"].items():
        assert role in ("Master", "Worker")
        assert_fields(replica, {"replicas": int, "restartPolicy": str, "template": dict})
        assert_pod(replica["template"])
        # The operator sets the rendezvous variables only in the container `pytorch`.
        assert [container["name"] for container in replica["template"]["spec"]["containers"]] == [
            "pytorch"
        ]


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset"])
def test_every_mounted_volume_exists_including_the_configuration(tmp_path, kind):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 5\n")
    config_map, *others = manifests(kind, EVERYTHING, path)

    schema = ("io_k8s_api_core_v1_config_map", "IoK8sApiCoreV1ConfigMap")
    assert returned(*schema, config_map) == config_map

    for pod in _pods(others):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = container["volumeMounts"]
        assert {mount["name"] for mount in mounts} == set(volumes)
        assert volumes["config"]["configMap"]["name"] == config_map["metadata"]["name"]
        assert container["command"][5] == "/etc/shardtrain/config.toml"
        paths = sorted(mount["mountPath"] for mount in mounts)
        assert paths == ["/cache", "/data", "/dev/shm", "/etc/shardtrain", "/models"]


def _pods(node: object) -> list[dict]:
    if isinstance(node, dict):
        pods_below = [pod for value in node.values() for pod in _pods(value)]
        return [node, *pods_below] if "containers" in node else pods_below
    return [pod for value in node for pod in _pods(value)] if isinstance(node, list) else []


def test_a_wrong_key_is_detected():
    (job,) = manifests("jobset", LEAST)
    job["spec"]["replicatedJob"] = []
    assert returned("jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet", job) != job
