"""What KubeRay's operator takes: a strict schema of the fields that we use or are near to using.

No package ships the published schema (a CustomResourceDefinition of 1 MB), so this one is
written by hand from the API of KubeRay 1.7: names, types and choices, nothing beyond. Pod
templates are checked against Kubernetes' own schema. `problems_published` checks a document
against the published definition itself, where somebody has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.34"
"""The version whose schema pods and other objects are held against."""

_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_ELSEWHERE = {"type": "object"}  # Kubernetes' own objects, checked with its schema.


def _record(*required: str, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": fields}


def _one_of(*choices: str) -> dict[str, Any]:
    return {"enum": choices}


_HEAD = _record(
    "template",
    template=_ELSEWHERE,
    rayStartParams=_TEXTS,
    serviceType=_one_of("ClusterIP", "NodePort", "LoadBalancer"),
    enableIngress=_FLAG,
    labels=_TEXTS,
    resources=_TEXTS,
)
_WORKERS = _record(
    "groupName",
    "template",
    "minReplicas",  # The operator refuses a group without them unless it scales by itself.
    "maxReplicas",
    groupName=_TEXT,
    template=_ELSEWHERE,
    rayStartParams=_TEXTS,
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    numOfHosts=_COUNT,
    idleTimeoutSeconds=_COUNT,
    priority={"type": "integer"},
    labels=_TEXTS,
    resources=_TEXTS,
)
_CLUSTER_SPEC = _record(
    "headGroupSpec",
    "rayVersion",  # Optional there; without it the operator guesses what the image can do.
    rayVersion=_TEXT,
    headGroupSpec=_HEAD,
    workerGroupSpecs={"type": "array", "minItems": 1, "items": _WORKERS},
    enableInTreeAutoscaling=_FLAG,
    autoscalerOptions=_record(
        version=_one_of("v1", "v2"),
        upscalingMode=_one_of("Default", "Aggressive", "Conservative"),
        idleTimeoutSeconds=_COUNT,
    ),
    authOptions=_record(mode=_one_of("disabled", "token"), secretName=_TEXT),
    suspend=_FLAG,
)
_JOB_SPEC = _record(
    "entrypoint",
    "rayClusterSpec",
    entrypoint=_TEXT,
    entrypointNumCpus={"type": "number"},
    entrypointNumGpus={"type": "number"},
    runtimeEnvYAML=_TEXT,
    metadata=_TEXTS,
    rayClusterSpec=_CLUSTER_SPEC,
    submissionMode=_one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    submitterConfig=_record(backoffLimit=_COUNT),
    backoffLimit=_COUNT,
    activeDeadlineSeconds=_COUNT,
    shutdownAfterJobFinishes=_FLAG,
    ttlSecondsAfterFinished=_COUNT,
    suspend=_FLAG,
)
SCHEMAS = {"RayCluster": _CLUSTER_SPEC, "RayJob": _JOB_SPEC}
"""The spec of each kind."""


def problems(document: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a Kubernetes object, KubeRay's included; unknown fields are wrong."""
    if document.get("apiVersion") != "ray.io/v1":
        return _kubernetes_problems(document)
    if document.get("kind") not in SCHEMAS:
        return [f"kind {document.get('kind')!r} is none of {', '.join(SCHEMAS)}"]
    whole = _record(
        "spec",
        "metadata",
        apiVersion=_TEXT,
        kind=_TEXT,
        metadata=_ELSEWHERE,
        spec=SCHEMAS[document["kind"]],
    )
    found = _schema_problems(document, whole)
    if found:
        return found
    found = _kubernetes_problems({"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]})
    for template in pod_templates(document):
        found += _kubernetes_problems({"apiVersion": "v1", "kind": "PodTemplate", "template": template})
    return found


def problems_published(document: Mapping[str, Any], folder: Path) -> list[str]:
    """Return what is wrong with a KubeRay object by its published definition, read strictly.

    Args:
        document: The object.
        folder: Has ``ray.io_rayjobs.yaml`` and ``ray.io_rayclusters.yaml``, as KubeRay's chart does.
    """
    schema = published_schema(document["kind"], folder)
    return _schema_problems(document["spec"], schema["properties"]["spec"])


def published_schema(kind: str, folder: Path) -> dict[str, Any]:
    """Return a published definition of version v1, with fields that it does not name refused."""
    text = (folder / f"ray.io_{kind.lower()}s.yaml").read_text()
    definition = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = next(v for v in definition["spec"]["versions"] if v["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    _refuse_unknown(schema)
    return schema


def cluster_spec(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cluster that a RayCluster is or a RayJob asks for."""
    spec: dict[str, Any] = document["spec"]
    return spec.get("rayClusterSpec", spec)


def pod_templates(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the templates of the head's and the workers' pods."""
    spec = cluster_spec(document)
    yield spec["headGroupSpec"]["template"]
    for group in spec.get("workerGroupSpecs", ()):
        yield group["template"]


def _schema_problems(value: Any, schema: Any) -> list[str]:
    errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in errors]


def _kubernetes_problems(document: Mapping[str, Any]) -> list[str]:
    try:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{error.json_path}: {error.message}"]
    except (kubernetes_validate.SchemaNotFoundError, KeyError) as error:
        return [f"not an object that Kubernetes knows: {error!r}"]
    return []


def _refuse_unknown(schema: Any) -> None:
    if isinstance(schema, list):
        for each in schema:
            _refuse_unknown(each)
    elif isinstance(schema, dict):
        is_open = schema.get("x-kubernetes-preserve-unknown-fields")
        if "properties" in schema and "additionalProperties" not in schema and not is_open:
            schema["additionalProperties"] = False
        for each in schema.values():
            _refuse_unknown(each)
