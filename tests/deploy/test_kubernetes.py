"""The manifests for Kubernetes: their schemas, and what they must agree on with the server and the image."""

import copy
import shutil
import subprocess

import kubernetes_validate
import pytest
import yaml

from jaxserve.server.http.auth import is_public
from tests.deploy.serve_line import DEPLOY, MARGIN_S, documents, longest_end, options

FOLDER = DEPLOY / "kubernetes"
FILES = sorted(path for path in FOLDER.glob("*/*.yaml") if path.name != "kustomization.yaml")
OBJECTS = {entry["kind"]: entry for path in (FOLDER / "cpu").glob("*.yaml") for entry in documents(path)}
POD = OBJECTS["Deployment"]["spec"]["template"]
(SERVER,) = POD["spec"]["containers"]


def merged(base, change):
    """Return an object with a strategic merge patch, as far as the manifests need it: containers merge by name."""
    if isinstance(base, dict) and isinstance(change, dict):
        return base | {key: merged(base.get(key), value) for key, value in change.items()}
    if isinstance(base, list) and base and isinstance(base[0], dict) and "name" in base[0]:
        changes = {entry["name"]: entry for entry in change}
        return [merged(entry, changes.get(entry["name"], {})) for entry in base]
    return change


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "cpu"], ids=lambda path: path.name)
def test_manifests_follow_the_schemas_of_kubernetes(path):
    for entry in documents(path):
        kubernetes_validate.validate(entry, kubernetes_validate.latest_version(), strict=True)


def test_gpu_patch_gives_a_valid_deployment():
    (patch,) = documents(FOLDER / "gpu" / "gpu.yaml")
    deployment = merged(copy.deepcopy(OBJECTS["Deployment"]), patch)
    kubernetes_validate.validate(deployment, kubernetes_validate.latest_version(), strict=True)
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert server["args"] == SERVER["args"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_kubectl_builds_the_manifests(variant):
    command = ["kubectl", "kustomize", str(FOLDER / variant)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kinds = {entry["kind"]: entry for entry in yaml.safe_load_all(built)}
    assert kinds.keys() == {"Deployment", "PersistentVolumeClaim", "Service"}
    (server,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server["image"] == {"cpu": "jaxserve:cpu", "gpu": "jaxserve:cuda12"}[variant]


def test_kustomizations_name_their_files():
    for path in FOLDER.glob("*/kustomization.yaml"):
        (content,) = documents(path)
        named = content["resources"] + [patch["path"] for patch in content.get("patches", [])]
        assert all((path.parent / name).exists() for name in named)
        beside = {file.name for file in path.parent.iterdir()} - {path.name}
        assert beside <= set(named)
    assert {path.name for path in FOLDER.iterdir()} == {"cpu", "gpu"}


def test_server_can_end_before_it_is_killed():
    _, settings = options(SERVER["args"])
    assert settings.host == "0.0.0.0"
    assert POD["spec"]["terminationGracePeriodSeconds"] >= longest_end(settings) + MARGIN_S
    # Endpoints are withdrawn before requests are refused.
    probe = SERVER["readinessProbe"]
    assert settings.shutdown_delay >= probe["periodSeconds"] * probe["failureThreshold"]


def test_probes_are_public_and_tell_ready_from_alive():
    paths = {name: SERVER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/live"}
    assert all(is_public(path) for path in paths.values())
    assert is_public(POD["metadata"]["annotations"]["prometheus.io/path"])


def test_names_agree():
    assert OBJECTS["Service"]["spec"]["selector"] == POD["metadata"]["labels"]
    assert OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"] == POD["metadata"]["labels"]
    ports = {port["name"]: port["containerPort"] for port in SERVER["ports"]}
    assert ports[OBJECTS["Service"]["spec"]["ports"][0]["targetPort"]] == 8000
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in SERVER["volumeMounts"]} == volumes.keys()
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == OBJECTS["PersistentVolumeClaim"]["metadata"]["name"]
    image = (DEPLOY / "Dockerfile").read_text()
    assert {mount["mountPath"] for mount in SERVER["volumeMounts"] if mount["name"] == "cache"} == {"/cache"}
    assert "VOLUME /cache" in image
    assert f"USER {POD['spec']['securityContext']['runAsUser']}:" in image
