"""The Grafana board can be imported, and asks for nothing that is not exported."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.telemetry import ControlState, EngineMetrics, KVCapacity, Snapshot

BOARD = json.loads((Path(__file__).resolve().parents[2] / "docs" / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
VARIABLES = {variable["name"]: variable for variable in BOARD["templating"]["list"]}


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of every series that an engine exports, by name."""
    metrics = EngineMetrics("tiny")
    instance = metrics.instance()
    instance.follow(lambda: Snapshot(layers_by_precision={"int4": 2}))
    metrics.follow_control(lambda: ControlState({"0": KVCapacity(1, 2, 0.5)}, {("morph", "done"): 1}))
    metrics.rejected("invalid")
    metrics.transition("SwapPrecision", "done", 0.5)
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title}-{t['refId']}" for title, t in TARGETS])
def test_query_names_exported_metrics_and_labels(exported, title, target):
    names = re.findall(r"jaxserve_\w+", target["expr"])
    assert names
    assert set(names) <= exported.keys()
    known = set.intersection(*(exported[name] for name in names)) | SCRAPED
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in group.split(", ")}
    assert grouped <= known
    shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    assert shown <= (grouped - {"le"} if "sum" in target["expr"] else known)


def test_board_covers_what_is_worth_watching():
    asked = {name for _, target in TARGETS for name in re.findall(r"jaxserve_(\w+)", target["expr"])}
    assert asked >= {
        "num_requests_running",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "kv_capacity_tokens",
        "kv_capacity_max_tokens",
        "kv_capacity_max_seconds",
        "layers_by_precision",
        "transitions_total",
        "decisions_total",
    }


def test_source_of_the_data_is_chosen_in_the_board():
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    sources = [panel["datasource"] for panel in PANELS] + [target["datasource"] for _, target in TARGETS]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    used = {name for _, target in TARGETS for name in re.findall(r"\$(\w+)", target["expr"])}
    assert used == VARIABLES.keys() - {"datasource"} | {"__rate_interval"}


def test_variables_are_filled_from_an_exported_metric(exported):
    for name in ("model_name", "instance"):
        (metric,) = re.findall(r"jaxserve_\w+", VARIABLES[name]["definition"])
        assert metric in exported


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    assert set(Counter(panel["id"] for panel in BOARD["panels"]).values()) == {1}
    cells: Counter[tuple[int, int]] = Counter()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns = range(place["x"], place["x"] + place["w"])
        cells.update((x, y) for x in columns for y in range(place["y"], place["y"] + place["h"]))
    assert max(cells.values()) == 1
