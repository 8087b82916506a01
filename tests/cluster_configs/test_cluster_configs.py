"""The files in ``cluster_configs/`` are what Kubernetes, KubeRay, Ray and EC2 take, and fit together."""

from __future__ import annotations

import copy
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import jsonschema
import pytest
import ray._private.ray_constants
import ray.dashboard.modules.job.job_supervisor
import ray.train.v2._internal.constants
import yaml
from botocore.validate import ParamValidator
from ray.autoscaler._private.util import prepare_config, validate_config

from raycheck.config import Settings
from raycheck.runtime.compat import TESTED_RAY_VERSIONS
from tests.cluster_configs import kuberay

FOLDER = Path(__file__).parents[2] / "cluster_configs"
CHECKOUT = FOLDER.parent
KUBERNETES_FILES = ("lab_s3.yaml", "raycluster.yaml", "rayjob.yaml")
FREE_FORM = ("annotations", "labels", "limits", "matchLabels", "nodeSelector", "rayStartParams", "requests")
"""Maps whose keys no schema knows."""


def documents(*names: str) -> list[dict[str, Any]]:
    return [each for name in names for each in yaml.safe_load_all((FOLDER / name).read_text())]


OBJECTS = documents(*KUBERNETES_FILES)
RAY_OBJECTS = [each for each in OBJECTS if each["apiVersion"] == "ray.io/v1"]
AWS = documents("aws.yaml")[0]


def name_of(document: dict[str, Any]) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


every_object = pytest.mark.parametrize("document", OBJECTS, ids=name_of)
every_ray_object = pytest.mark.parametrize("document", RAY_OBJECTS, ids=name_of)


def mappings(value: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each mapping below a value, with the name under which it stands."""
    if isinstance(value, dict):
        yield name, value
        for key, each in value.items():
            yield from mappings(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from mappings(each, name)


def variables(template: dict[str, Any]) -> dict[str, str]:
    """The environment of a pod's first container, as far as it is written there."""
    return {each["name"]: each.get("value", "") for each in template["spec"]["containers"][0].get("env", ())}


def runtime_variables(job: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    return found


# Kubernetes.


@every_object
def test_kubernetes_objects_have_known_fields_of_the_right_types(document):
    """Unknown fields count as errors: the server would drop them without a word."""
    assert kuberay.problems(document) == []


@every_object
def test_every_misspelled_field_is_refused(document):
    """One letter more in any field's name, at any depth, and the check above fails."""
    seen = set()
    for place, (name, mapping) in enumerate(mappings(document)):
        is_free = name in FREE_FORM or (name == "selector" and document["kind"] == "Service")
        for key in () if is_free or name == "stringData" else list(mapping):
            if (name, key) in seen:
                continue
            seen.add((name, key))
            wrong = copy.deepcopy(document)
            (_, target) = list(mappings(wrong))[place]
            target[f"{key}s"] = target.pop(key)
            assert kuberay.problems(wrong), f"{name}.{key}s went unseen"
    assert len(seen) > 3


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("RayJob", "spec.backoffLimit", "20"),
        ("RayJob", "spec.submissionMode", "K8sJob"),
        ("RayJob", "spec.rayClusterSpec.rayVersion", 2.6),
        ("RayJob", "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", 0),
        ("RayJob", "spec.rayClusterSpec.headGroupSpec.template.spec.terminationGracePeriodSeconds", "60s"),
        ("RayCluster", "spec.autoscalerOptions.version", "v3"),
        ("RayCluster", "spec.enableInTreeAutoscaling", "yes"),
        ("Deployment", "spec.replicas", "1"),
    ],
)
def test_values_of_the_wrong_type_are_refused(kind, path, value):
    """A number that must be text is the commonest slip in these files."""
    document = copy.deepcopy(next(each for each in OBJECTS if each["kind"] == kind))
    *above, last = path.split(".")
    target = document
    for name in above:
        target = target[name]
    assert last in target or path == "spec.submissionMode"
    target[last] = value
    assert kuberay.problems(document)


@every_ray_object
def test_published_definitions_agree(document):
    """KubeRay's own definition takes our objects, and knows every field that our schema knows."""
    if "KUBERAY_CRDS" not in os.environ:
        pytest.skip("KUBERAY_CRDS does not name a folder with KubeRay's CustomResourceDefinitions")
    folder = Path(os.environ["KUBERAY_CRDS"])
    assert kuberay.problems_published(document, folder) == []
    wrong = copy.deepcopy(document)
    kuberay.cluster_spec(wrong)["workerGroupSpec"] = kuberay.cluster_spec(wrong).pop("workerGroupSpecs")
    assert kuberay.problems_published(wrong, folder)
    published = kuberay.published_schema(document["kind"], folder)["properties"]["spec"]
    assert_known(kuberay.SCHEMAS[document["kind"]], published, document["kind"])


def assert_known(ours: dict[str, Any], published: dict[str, Any], path: str) -> None:
    if ours.get("type") == "array":
        assert_known(ours["items"], published["items"], f"{path}[]")
    for name, field in ours.get("properties", {}).items():
        assert name in published["properties"], f"{path}.{name}"
        there = published["properties"][name]
        assert "type" not in field or field["type"] == there["type"], f"{path}.{name}"
        if "enum" in field and "enum" in there:
            assert set(field["enum"]) <= set(there["enum"]), f"{path}.{name}"
        assert_known(field, there, f"{path}.{name}")


def test_what_objects_refer_to_is_there():
    """Secrets, claims and accounts that pods name are defined in these files."""
    defined = {(each["kind"], each["metadata"]["name"]) for each in OBJECTS}
    wanted = set()
    for name, mapping in mappings(OBJECTS):
        if name in ("secretRef", "secretKeyRef"):
            wanted.add(("Secret", mapping["name"]))
        if "claimName" in mapping:
            wanted.add(("PersistentVolumeClaim", mapping["claimName"]))
        if "serviceAccountName" in mapping:
            wanted.add(("ServiceAccount", mapping["serviceAccountName"]))
    assert len(wanted) == 3
    assert wanted <= defined
    secret = next(each for each in OBJECTS if each["kind"] == "Secret")
    service = next(each for each in OBJECTS if each["kind"] == "Service")
    port = service["spec"]["ports"][0]["port"]
    assert secret["stringData"]["AWS_ENDPOINT_URL"] == f"http://{service['metadata']['name']}:{port}"


# What the settings come to.


@every_ray_object
def test_a_node_drains_within_the_time_that_its_pod_has(document):
    """Ray is done draining, and has time to end, before Kubernetes kills the pod."""
    for template in kuberay.pod_templates(document):
        drain_s = float(variables(template)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert 0 < drain_s <= template["spec"]["terminationGracePeriodSeconds"] - 15
        # AWS gives 120 s, and the news take some of them.
        assert template["spec"]["terminationGracePeriodSeconds"] <= 115


@every_ray_object
def test_the_head_stops_jobs_in_order_and_takes_no_training(document):
    """SIGINT and more than Ray's three seconds; no CPU for workers."""
    head = kuberay.cluster_spec(document)["headGroupSpec"]
    assert variables(head["template"])["RAY_JOB_STOP_SIGNAL"] == "SIGINT"
    assert int(variables(head["template"])["RAY_JOB_STOP_WAIT_TIME_S"]) > 3
    assert head["rayStartParams"]["num-cpus"] == "0"


@every_ray_object
def test_pods_have_a_memory_limit_that_they_also_request_and_no_cpu_limit(document):
    """A pod that uses what it did not request is the first to be evicted."""
    for template in kuberay.pod_templates(document):
        resources = template["spec"]["containers"][0]["resources"]
        assert resources["limits"]["memory"] == resources["requests"]["memory"]
        assert "cpu" in resources["requests"]
        assert "cpu" not in resources["limits"]


@every_ray_object
def test_worker_groups_have_a_range_and_ray_is_a_tested_version(document):
    spec = kuberay.cluster_spec(document)
    for group in spec["workerGroupSpecs"]:
        least, most = group["minReplicas"], group["maxReplicas"]
        assert 0 <= least <= group.get("replicas", least) <= most
        assert most > 0
    assert spec["rayVersion"].rpartition(".")[0] in TESTED_RAY_VERSIONS


def test_a_lost_cluster_is_followed_by_a_new_one_with_the_same_run():
    """Retries, clean-up, a fixed run name, storage outside, and settings that raycheck takes."""
    job = next(each for each in OBJECTS if each["kind"] == "RayJob")
    assert job["spec"]["backoffLimit"] > 0
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    found = runtime_variables(job)
    assert found["RUN_NAME"]
    assert found["STORAGE_PATH"].startswith("s3://")
    assert found["RAY_TRAIN_CALLBACKS"] == "raycheck.AutoCheckpoint"
    Settings.from_json(found["RAYCHECK_SETTINGS"])
    assert all(isinstance(value, str) for value in found.values())


def test_this_ray_reads_the_variables_that_are_set():
    """A renamed variable would be ignored without a word."""
    sources = "".join(
        inspect.getsource(module)
        for module in (
            ray._private.ray_constants,
            ray.dashboard.modules.job.job_supervisor,
            ray.train.v2._internal.constants,
        )
    )
    text = "".join(path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix == ".yaml")
    names = set(re.findall(r"\bRAY_(?!HEAD_IP)[A-Z_]+\b", text))
    assert len(names) == 5
    assert [name for name in sorted(names) if f'"{name}"' not in sources] == []


# AWS.


@pytest.fixture(scope="module")
def run_instances() -> Any:
    """The shape of EC2's RunInstances."""
    return botocore.session.Session().get_service_model("ec2").operation_model("RunInstances").input_shape


def node_problems(node_type: dict[str, Any], shape: Any) -> str:
    request = {**node_type["node_config"], "MinCount": 1, "MaxCount": 1}
    report: str = ParamValidator().validate(request, shape).generate_report()
    return report


def test_ray_up_takes_the_file(monkeypatch):
    """Ray's own check, defaults filled in; nothing is asked of AWS."""
    monkeypatch.chdir(CHECKOUT)
    validate_config(prepare_config(copy.deepcopy(AWS)))
    for target, source in AWS["file_mounts"].items():
        assert (CHECKOUT / source).is_dir(), target


@pytest.mark.parametrize("place", ["", "docker", "available_node_types.spot_gpu"])
def test_ray_up_refuses_a_misspelled_field(place):
    wrong = copy.deepcopy(AWS)
    target = wrong
    for name in filter(None, place.split(".")):
        target = target[name]
    target["worker_start_ray_command"] = []
    with pytest.raises(jsonschema.ValidationError, match="worker_start_ray_command"):
        validate_config(prepare_config(wrong))


@pytest.mark.parametrize("name", sorted(AWS["available_node_types"]))
def test_ec2_takes_the_nodes(name, run_instances):
    """The part that Ray does not look at, checked with the model that AWS publishes."""
    node_type = AWS["available_node_types"][name]
    assert node_problems(node_type, run_instances) == ""
    assert node_type["node_config"]["IamInstanceProfile"]["Name"]
    for key in node_type["node_config"]:
        wrong = copy.deepcopy(node_type)
        wrong["node_config"][f"{key}s"] = wrong["node_config"].pop(key)
        assert f"{key}s" in node_problems(wrong, run_instances)


def test_workers_are_on_spot_and_the_head_is_not():
    types = AWS["available_node_types"]
    assert types["spot_gpu"]["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
    assert "InstanceMarketOptions" not in types[AWS["head_node_type"]]["node_config"]
    assert types[AWS["head_node_type"]]["resources"]["CPU"] == 0
    assert AWS["provider"]["cache_stopped_nodes"] is False
    start = " ".join(AWS["head_start_ray_commands"])
    assert "RAY_JOB_STOP_SIGNAL=SIGINT" in start
    assert "drain_on_spot_notice.py" in " ".join(AWS["worker_start_ray_commands"])


def test_the_readme_names_every_file():
    text = (FOLDER / "README.md").read_text()
    for path in FOLDER.iterdir():
        assert path.name == "README.md" or f"]({path.name})" in text, path.name
