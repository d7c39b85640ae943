"""Definitions of PyTorchJob, TrainJob and JobSet for a real API server, from the models that their projects publish.

TrainJob, its runtime and JobSet are kubeflow-trainer-api's pydantic models; PyTorchJob's are those of the wheel
kubeflow-training, read and never imported: it needs the whole client of Kubernetes. A structural schema (the form that
CustomResourceDefinitions have to have) holds no references, and the server drops keys that it does not name.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ANYTHING = {"x-kubernetes-preserve-unknown-fields": True}
# published as classes that hold one of several types
_EITHER = ("ResourceQuantity", "IntOrString")
# the fields of PyTorchJob, for tests that have no such wheel; test_real_kubernetes.py holds them against it
PYTORCHJOB = {"elasticPolicy": dict, "nprocPerNode": str, "pytorchReplicaSpecs": dict, "runPolicy": dict}
RUN_POLICY = {
    "activeDeadlineSeconds": int, "backoffLimit": int, "cleanPodPolicy": str, "managedBy": str,
    "schedulingPolicy": dict, "suspend": bool, "ttlSecondsAfterFinished": int,
}  # fmt: skip
ELASTIC_POLICY = {
    "maxReplicas": int, "maxRestarts": int, "metrics": list, "minReplicas": int, "nProcPerNode": int,
    "rdzvBackend": str, "rdzvConf": list, "rdzvHost": str, "rdzvId": str, "rdzvPort": int, "standalone": bool,
}  # fmt: skip
_PLAIN = {"int": "integer", "str": "string", "bool": "boolean", "float": "number"}


def definitions(models: Path) -> list[dict]:
    """All four CustomResourceDefinitions; ``models`` is the folder of kubeflow-training's models."""
    trainer = ("trainer.kubeflow.org", "v1alpha1")
    return [
        _definition("kubeflow.org", "v1", "PyTorchJob", {"spec": pytorchjob(models, "KubeflowOrgV1PyTorchJobSpec")}),
        _definition(*trainer, "TrainJob", published("TrainerV1alpha1TrainJob")["properties"]),
        _definition(*trainer, "TrainingRuntime", published("TrainerV1alpha1TrainingRuntime")["properties"]),
        _definition("jobset.x-k8s.io", "v1alpha2", "JobSet", published("JobsetV1alpha2JobSet")["properties"]),
    ]


def _definition(group: str, version: str, kind: str, properties: dict) -> dict:
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "required": ["spec"], "properties": {"spec": properties["spec"], "status": ANYTHING}}
    one = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    # the server wants a word on groups of Kubernetes' own
    metadata = {"name": f"{plural}.{group}", "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}}
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [one]}
    kinds = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return {**kinds, "metadata": metadata, "spec": spec}


def published(name: str) -> dict:
    """The structural schema of a model of kubeflow-trainer-api."""
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    whole = getattr(importlib.import_module(f"kubeflow_trainer_api.models.{module}"), name).model_json_schema()
    return _structural(whole, whole.get("$defs", {}))


def _structural(node: dict, types: dict) -> dict:
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name.endswith(_EITHER):
            return {"x-kubernetes-int-or-string": True}
        return _structural(types[name], types)
    if "anyOf" in node:
        (only,) = [one for one in node["anyOf"] if one != {"type": "null"}] or [{}]
        return _structural(only, types)
    if node.get("type") == "array":
        return {"type": "array", "items": _structural(node["items"], types)}
    if node.get("type") == "object" and "properties" in node:
        properties = {key: _structural(one, types) for key, one in node["properties"].items()}
        required = {"required": node["required"]} if node.get("required") else {}
        return {"type": "object", "properties": properties} | required
    if node.get("type") == "object" and isinstance(node.get("additionalProperties"), dict):
        return {"type": "object", "additionalProperties": _structural(node["additionalProperties"], types)}
    if node.get("type") in (None, "object"):
        return dict(ANYTHING)
    return {"type": node["type"]} | ({"format": node["format"]} if "format" in node else {})


def pytorchjob(models: Path, name: str) -> dict:
    """The structural schema of a class of kubeflow-training, and of those that it holds."""
    types, keys, required = fields(models, name)
    properties = {keys[attribute]: _of_wheel(models, written) for attribute, written in types.items()}
    return {"type": "object", "properties": properties} | ({"required": required} if required else {})


def fields(models: Path, name: str) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Types and keys by attribute, and the keys that must be there, as the source of a generated class says."""
    (path,) = (one for one in models.glob("*.py") if one.stem.replace("_", "") == name.lower())
    text = path.read_text()
    (tree,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    tables = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    types, keys = (ast.literal_eval(tables[one]) for one in ("openapi_types", "attribute_map"))
    required = [keys[found] for found in re.findall(r"client_side_validation and (\w+) is None", text)]
    return types, keys, required


def _of_wheel(models: Path, written: str) -> dict:
    if written in _PLAIN:
        return {"type": _PLAIN[written]}
    if found := re.fullmatch(r"list\[(.+)\]", written):
        return {"type": "array", "items": _of_wheel(models, found[1])}
    if found := re.fullmatch(r"dict\(str, (.+)\)", written):
        return {"type": "object", "additionalProperties": _of_wheel(models, found[1])}
    if written == "V1PodTemplateSpec":
        return published("IoK8sApiCoreV1PodTemplateSpec")
    return pytorchjob(models, written) if written.startswith("KubeflowOrgV1") else dict(ANYTHING)
