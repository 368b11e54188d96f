"""Prometheus' configuration and alert rules, by its own tool, and by the metrics that a server exports."""

import re
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.telemetry import ControlState, EngineMetrics, KVCapacity, Snapshot
from tests.deploy.serve_line import DEPLOY, documents

FOLDER = DEPLOY / "prometheus"
RULES = [rule for group in documents(FOLDER / "alerts.yml")[0]["groups"] for rule in group["rules"]]
BY_PROMETHEUS = {"up", "instance", "job"}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")


def promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_configuration_is_valid():
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_settings_in_comments_are_valid(tmp_path):
    text = (FOLDER / "prometheus.yml").read_text()
    assert "# scheme: https" in text
    (tmp_path / "tls.yml").write_text(re.sub(r"^( *)# (\w+: \S.*)$", r"\1\2", text, flags=re.MULTILINE))
    promtool("check", "config", "--syntax-only", str(tmp_path / "tls.yml"))


@needs_promtool
def test_alerts_fire_when_they_should():
    promtool("test", "rules", "alerts_test.yml")


def test_each_alert_asks_for_metrics_and_labels_that_exist():
    metrics = EngineMetrics("tiny")
    metrics.instance().follow(lambda: Snapshot(layers_by_precision={"int4": 2}))
    metrics.follow_control(lambda: ControlState({"0": KVCapacity(1, 2, 0.5)}, {("morph", "done"): 1}))
    metrics.rejected("invalid")
    metrics.transition("SwapPrecision", "done", 0.5)
    families = text_string_to_metric_families(metrics.render().decode())
    exported = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    for rule in RULES:
        names = set(re.findall(r"jaxserve_\w+", rule["expr"]))
        assert names <= exported.keys(), rule["alert"]
        known = set().union(*(exported[name] for name in names)) | BY_PROMETHEUS
        used = {label for group in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in group.split(", ")}
        used |= set(re.findall(r"(\w+)=\"", rule["expr"]))
        used |= set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert used <= known, rule["alert"]


def test_each_alert_says_what_happened_and_what_to_do():
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
