"""The compose files: their schema, the files that they mount, and the server's options."""

import json
import re
import subprocess
import sys

import pytest

from tests.deploy.serve_line import DEPLOY, MARGIN_S, documents, longest_end, options

(COMPOSE,) = documents(DEPLOY / "compose.yaml")
(GPU,) = documents(DEPLOY / "compose.gpu.yaml")
SERVICES = COMPOSE["services"]


def test_files_follow_the_specification_of_compose():
    files = [str(DEPLOY / name) for name in ("compose.yaml", "compose.gpu.yaml")]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_server_can_end_before_it_is_killed():
    _, settings = options(SERVICES["jaxserve"]["command"])
    assert int(SERVICES["jaxserve"]["stop_grace_period"].removesuffix("s")) >= longest_end(settings) + MARGIN_S


@pytest.mark.parametrize("service", SERVICES)
def test_ports_are_open_to_this_machine_alone(service):
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[service]["ports"])


def test_mounted_files_and_volumes_exist():
    for service in SERVICES.values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


def test_prometheus_scrapes_the_server_and_grafana_shows_the_board():
    (prometheus,) = documents(DEPLOY / "prometheus" / "prometheus.yml")
    ((target,),) = (job["static_configs"][0]["targets"] for job in prometheus["scrape_configs"])
    host, port = target.split(":")
    assert host in SERVICES
    assert SERVICES[host]["ports"][0].endswith(f":{port}")
    assert all((DEPLOY / "prometheus" / name).exists() for name in prometheus["rule_files"])

    grafana = SERVICES["grafana"]
    (sources,) = documents(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    (boards,) = documents(DEPLOY / "grafana" / "provisioning" / "dashboards" / "jaxserve.yaml")
    folder = boards["providers"][0]["options"]["path"]
    source, shown = next(mount.split(":")[:2] for mount in grafana["volumes"] if "grafana.json" in mount)
    assert shown == f"{folder}/jaxserve.json" == grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads((DEPLOY / source).read_text())["title"] == "jaxserve"


def test_gpu_file_changes_the_server_alone():
    assert GPU["services"].keys() == {"jaxserve"}
    target = GPU["services"]["jaxserve"]["build"]["target"]
    assert re.search(rf"^FROM base AS {target}$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
