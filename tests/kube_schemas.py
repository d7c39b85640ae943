"""Definitions of PyTorchJob, TrainJob and JobSet for a real API server, from the published models of their projects.

TrainJob, its runtime and JobSet are pydantic models of kubeflow-trainer-api. PyTorchJob is a class of the wheel
kubeflow-training, which is parsed but not imported, because an import needs the full Kubernetes client. A
CustomResourceDefinition requires a structural schema, which has no references. The server drops keys that the schema
does not contain.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ANYTHING = {"x-kubernetes-preserve-unknown-fields": True}
# wrapper classes in the published models: a value has one of several types
_EITHER = ("ResourceQuantity", "IntOrString")
# the fields of PyTorchJob, for tests without the wheel; test_real_kubernetes.py compares them with the wheel
PYTORCHJOB = {
    "elasticPolicy": dict,
    "nprocPerNode": str,
    "pytorchReplicaSpecs": dict,
    "runPolicy": dict,
}
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
    """Return all four CustomResourceDefinitions. ``models`` is the folder of kubeflow-training's models."""
    trainer = ("trainer.kubeflow.org", "v1alpha1")
    return [
        _definition(
            "kubeflow.org",
            "v1",
            "PyTorchJob",
            {"spec": pytorchjob(models, "KubeflowOrgV1PyTorchJobSpec")},
        ),
        _definition(*trainer, "TrainJob", published("TrainerV1alpha1TrainJob")["properties"]),
        _definition(
            *trainer, "TrainingRuntime", published("TrainerV1alpha1TrainingRuntime")["properties"]
        ),
        _definition(
            "jobset.x-k8s.io", "v1alpha2", "JobSet", published("JobsetV1alpha2JobSet")["properties"]
        ),
    ]


def _definition(group: str, version: str, kind: str, properties: dict) -> dict:
    plural = f"{kind.lower()}s"
    schema = {
        "type": "object",
        "required": ["spec"],
        "properties": {"spec": properties["spec"], "status": ANYTHING},
    }
    definition = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    # API groups under k8s.io and kubernetes.io require this annotation.
    metadata = {
        "name": f"{plural}.{group}",
        "annotations": {"api-approved.kubernetes.io": "unapproved, a test"},
    }
    spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [definition]}
    kinds = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return {**kinds, "metadata": metadata, "spec": spec}


def published(name: str) -> dict:
    """Return the structural schema of a model of kubeflow-trainer-api."""
    module_name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    module = importlib.import_module(f"kubeflow_trainer_api.models.{module_name}")
    schema = getattr(module, name).model_json_schema()
    return _structural(schema, schema.get("$defs", {}))


def _structural(node: dict, types: dict) -> dict:
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name.endswith(_EITHER):
            return {"x-kubernetes-int-or-string": True}
        return _structural(types[name], types)
    kind = node.get("type")
    additional = node.get("additionalProperties")
    if "anyOf" in node:
        # The alternatives are null and at most one schema.
        (alternative,) = [schema for schema in node["anyOf"] if schema != {"type": "null"}] or [{}]
        return _structural(alternative, types)
    if kind == "array":
        return {"type": "array", "items": _structural(node["items"], types)}
    if kind == "object" and "properties" in node:
        properties = {key: _structural(schema, types) for key, schema in node["properties"].items()}
        schema = {"type": "object", "properties": properties}
        if node.get("required"):
            schema["required"] = node["required"]
        return schema
    if kind == "object" and isinstance(additional, dict):
        return {"type": "object", "additionalProperties": _structural(additional, types)}
    if kind in (None, "object"):
        return dict(ANYTHING)
    if "format" in node:
        return {"type": kind, "format": node["format"]}
    return {"type": kind}


def pytorchjob(models: Path, name: str) -> dict:
    """Return the structural schema of a class of kubeflow-training, including nested classes."""
    types, keys, required = fields(models, name)
    properties = {
        keys[attribute]: _of_wheel(models, type_name) for attribute, type_name in types.items()
    }
    return {"type": "object", "properties": properties} | (
        {"required": required} if required else {}
    )


def fields(models: Path, name: str) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Parse a generated class. Return types by attribute, JSON keys by attribute, and the required keys."""
    (path,) = (file for file in models.glob("*.py") if file.stem.replace("_", "") == name.lower())
    text = path.read_text()
    (class_node,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    tables = {}
    for node in class_node.body:
        if isinstance(node, ast.Assign):
            tables[ast.unparse(node.targets[0])] = node.value
    types = ast.literal_eval(tables["openapi_types"])
    keys = ast.literal_eval(tables["attribute_map"])

    # A setter rejects None for a required attribute.
    attributes = re.findall(r"client_side_validation and (\w+) is None", text)
    return types, keys, [keys[attribute] for attribute in attributes]


def _of_wheel(models: Path, type_name: str) -> dict:
    if type_name in _PLAIN:
        return {"type": _PLAIN[type_name]}
    if match := re.fullmatch(r"list\[(.+)\]", type_name):
        return {"type": "array", "items": _of_wheel(models, match[1])}
    if match := re.fullmatch(r"dict\(str, (.+)\)", type_name):
        return {"type": "object", "additionalProperties": _of_wheel(models, match[1])}
    if type_name == "V1PodTemplateSpec":
        return published("IoK8sApiCoreV1PodTemplateSpec")
    return (
        pytorchjob(models, type_name) if type_name.startswith("KubeflowOrgV1") else dict(ANYTHING)
    )
