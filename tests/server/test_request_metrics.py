"""Metrics of the HTTP server and its process: what is counted, under which labels, and in which formats."""

import gzip

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from jaxserve.telemetry import EngineMetrics
from tests.server.fake import FakeClient
from tests.server.serving import serving

SENT = (
    "GET /v1/models",
    "GET /v1/models/a/b",
    "GET /v1/models/",
    "POST /v1/completions",
    "GET /nothing",
    "BREW /version",
)


def counts(text: str, name: str = "jaxserve_http_requests_total") -> dict[tuple[str, str, str], float]:
    """Return the number of requests by method, handler and status, without those that are 0."""
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return {(s.labels["method"], s.labels["handler"], s.labels["status"]): s.value for s in samples if s.value}


@pytest.fixture
def http():
    return TestClient(create_app(FakeClient(), ServerSettings()))


def test_requests_are_counted_by_method_endpoint_and_kind_of_status(http):
    for request in SENT:
        method, path = request.split()
        http.request(method, path, json={"prompt": "a"} if method == "POST" else None)
    assert counts(http.get("/metrics").text) == {
        ("GET", "/v1/models", "2xx"): 2,
        ("GET", "/v1/models/{name}", "4xx"): 1,
        ("POST", "/v1/completions", "2xx"): 1,
        ("GET", "none", "4xx"): 1,
        ("none", "none", "4xx"): 1,
    }
    assert counts(http.get("/metrics").text)["GET", "/metrics", "2xx"] == 1


def test_requests_that_guards_refuse_are_counted():
    http = TestClient(create_app(FakeClient(), ServerSettings(api_keys=("key",), max_body_mb=0.001)))
    http.get("/v1/models")
    http.get("/admin/status")
    http.post("/v1/completions", content=b" " * 5000, headers={"authorization": "Bearer key"})
    assert counts(http.get("/metrics").text) == {
        ("GET", "/v1/models", "4xx"): 1,
        ("GET", "/admin/status", "4xx"): 1,
        ("POST", "/v1/completions", "4xx"): 1,
    }


def test_failures_are_counted(http):
    failing = TestClient(
        create_app(FakeClient(fail_after=0, failure=ValueError("a bug")), ServerSettings()),
        raise_server_exceptions=False,
    )
    assert failing.post("/v1/completions", json={"prompt": "a"}).status_code == 500
    assert counts(failing.get("/metrics").text)["POST", "/v1/completions", "5xx"] == 1


def test_duration_of_a_stream_ends_with_its_last_event():
    with serving(FakeClient(script="abc", delay=0.02)) as address:
        httpx.post(f"{address.url}/v1/completions", json={"prompt": "a", "stream": True})
        text = httpx.get(f"{address.url}/metrics").text
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("handler") == "/v1/completions" and family.type == "histogram"
    }
    assert samples["jaxserve_http_request_duration_seconds_count"] == 1
    assert samples["jaxserve_http_request_duration_seconds_sum"] > 0.06


def test_series_do_not_grow_with_what_clients_send(http):
    def number_of_series() -> int:
        return len(http.get("/metrics").text.splitlines())

    def send(number: int) -> None:
        for path in (
            f"/{number}",
            f"/v1/{number}",
            f"/v1/models/{number}",
            f"/v1/responses/{number}",
            f"/dashboard/{number}",
        ):
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", f"M{number}"):
                http.request(method, path, headers={"host": f"host{number}", "user-agent": str(number)})

    send(0)
    number_of_series()
    before = number_of_series()
    for number in range(1, 8):
        send(number)
    assert number_of_series() == before


def test_counters_begin_at_0(http):
    text = http.get("/metrics").text
    for series in (
        'jaxserve_http_requests_total{handler="/v1/chat/completions",method="POST",status="5xx"}',
        'jaxserve_admission_rejections_total{model_name="fake",reason="queue_full"}',
        'jaxserve_compilations_total{model_name="fake",tier="ahead"}',
        'jaxserve_transitions_total{kind="SwapPrecision",model_name="fake",outcome="failed"}',
        'jaxserve_kv_exchange_bytes_total{model_name="fake"}',
        'jaxserve_request_success_total{engine="0",finished_reason="error",model_name="fake"}',
    ):
        assert f"{series} 0.0" in text.splitlines()


def test_metrics_of_the_process_and_the_build_are_shown(http):
    text = http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6
    assert families["process_open_fds"].samples[0].value < families["process_max_fds"].samples[0].value
    assert {"process_cpu_seconds", "process_start_time_seconds", "process_virtual_memory_bytes"} <= families.keys()
    assert families["jaxserve_build_info"].samples[0].labels["version"]


def test_server_that_loads_shows_its_own_metrics():
    http = TestClient(create_app(None, ServerSettings()))
    http.post("/v1/completions", json={"prompt": "a"})
    text = http.get("/metrics").text
    assert counts(text) == {("POST", "/v1/completions", "5xx"): 1}
    assert "process_cpu_seconds_total" in text
    assert "num_requests_running" not in text


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("jaxserve", {"jaxserve_http_requests_total"}),
        ("vllm", {"http_requests_total"}),
        ("both", {"jaxserve_http_requests_total", "http_requests_total"}),
    ],
)
def test_requests_have_the_names_of_the_prefix(prefix, names):
    client = FakeClient()
    client._metrics = EngineMetrics("fake", prefix=prefix)
    http = TestClient(create_app(client, ServerSettings()))
    http.get("/version")
    text = http.get("/metrics").text
    shown = {name for name in ("jaxserve_http_requests_total", "http_requests_total") if counts(text, name)}
    assert shown == names
    assert "\nprocess_open_fds " in text


@pytest.mark.parametrize("prefix", ["jaxserve", "vllm", "both"])
def test_openmetrics_is_valid_and_has_the_same_values(prefix):
    client = FakeClient()
    client._metrics = EngineMetrics("fake", prefix=prefix)
    for name in ("0", "1"):
        client._metrics.instance(name).follow(client.snapshot)
    http = TestClient(create_app(client, ServerSettings()))
    http.post("/v1/completions", json={"prompt": "a"})
    plain = http.get("/metrics")
    answer = http.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert answer.text.endswith("# EOF\n")

    def values(families) -> dict:
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if not family.name.startswith("process_") and sample.labels.get("handler") != "/metrics"
        }

    assert values(openmetrics_families(answer.text)) == values(text_string_to_metric_families(plain.text))


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("identity", False),
        ("", False),
        ("gzip;q=0", False),
        ("br", False),
    ],
)
def test_page_is_compressed_for_those_who_ask_for_it(accepted, compressed):
    with (
        serving(FakeClient()) as address,
        httpx.stream("GET", f"{address.url}/metrics", headers={"accept-encoding": accepted}) as answer,
    ):
        body = b"".join(answer.iter_raw())
    assert (answer.headers.get("content-encoding") == "gzip") == compressed
    assert answer.headers["vary"] == "accept, accept-encoding"
    text = (gzip.decompress(body) if compressed else body).decode()
    assert "jaxserve_num_requests_running" in text
    assert len(text) > 5 * len(body) or not compressed
