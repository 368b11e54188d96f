"""SageMaker's endpoint, and the reset of the prefix cache."""

import json

import httpx
import pytest
from starlette.testclient import TestClient

from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.serving import serving
from tests.server.test_request_metrics import counts

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/completions": {"prompt": "a", "max_tokens": 5},
    "/v1/embeddings": {"input": ["a", "bc"]},
    "/v1/score": {"text_1": "a", "text_2": ["b", "cd"]},
    "/v1/rerank": {"query": "a", "documents": ["b", "cd"]},
}


def without_ids(answer: httpx.Response) -> dict:
    return {key: value for key, value in answer.json().items() if key not in ("id", "created")}


@pytest.fixture(scope="module")
def http():
    with serving(FakeClient()) as address, httpx.Client(base_url=address.url) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_body_is_answered_as_by_the_endpoint_that_its_fields_belong_to(http, path):
    answer, expected = (http.post(at, json=BODIES[path]) for at in ("/invocations", path))
    assert (answer.status_code, without_ids(answer)) == (200, without_ids(expected))
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_stream_is_streamed(http, path):
    def events(at: str) -> list:
        lines = http.post(at, json=BODIES[path] | {"stream": True}).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-2]]

    assert events("/invocations") == events(path) != []


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"json": BODIES["/v1/completions"] | {"n": 0}}, 400),
        ({"json": BODIES["/v1/completions"] | {"model": "other"}}, 404),
        ({"content": json.dumps(BODIES["/v1/completions"])}, 415),
        ({"json": {"query": "a"}}, 400),
        ({"json": {}}, 400),
        ({"json": [1]}, 400),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ({"content": b"[" * 10_000, "headers": {"content-type": "application/json"}}, 400),
        ({"json": {"prompt": "a" * 100_000}}, 400),
    ],
)
def test_bodies_are_refused_as_by_the_endpoint(http, sent, status):
    answer = http.post("/invocations", **sent)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")


def test_other_methods_and_keys_are_those_of_all_endpoints(http):
    assert http.get("/invocations").status_code == 405
    with TestClient(create_app(FakeClient(), ServerSettings(api_keys=("key",), root_path="/llm"))) as guarded:
        body = BODIES["/v1/completions"]
        assert guarded.post("/invocations", json=body).status_code == 401
        for path in ("/invocations", "/llm/invocations/"):
            assert guarded.post(path, json=body, headers={"authorization": "Bearer key"}).status_code == 200
        assert counts(guarded.get("/metrics").text) == {
            ("POST", "/invocations", "2xx"): 2,
            ("POST", "/invocations", "4xx"): 1,
        }


def test_client_that_disconnects_ends_its_request_and_is_no_load_any_more():
    client = FakeClient(delay=3600, delay_after=2)
    settings = ServerSettings(sse_ping_interval=0.02)  # what is sent shows that the client is gone
    with serving(client, settings) as address, httpx.Client(base_url=address.url) as http:
        with http.stream("POST", "/invocations", json=BODIES["/v1/completions"] | {"stream": True}) as answer:
            lines = answer.iter_lines()  # which would close the connection if it were dropped
            next(lines)
            assert http.get("/load").json()["server_load"] == 1
        while http.get("/load").json()["server_load"] or not client.aborted:
            pass


def test_server_that_loads_refuses_invocations():
    assert TestClient(create_app(None, ServerSettings())).post("/invocations", json={"prompt": "a"}).status_code == 503


# -- the prefix cache


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        ({}, {}, 200),
        ({"host": "0.0.0.0"}, {}, 403),
        ({"api_keys": ("key",)}, {"authorization": "Bearer key"}, 403),
        ({"api_keys": ("key",), "admin_key": "admin"}, {"authorization": "Bearer key"}, 401),
        ({"api_keys": ("key",), "admin_key": "admin"}, {"authorization": "Bearer admin"}, 200),
    ],
)
@pytest.mark.parametrize(
    "path", ["/reset_prefix_cache", "/reset_prefix_cache/", "/reset_prefix_cache?reset_running_requests=true"]
)
def test_only_operators_reset_the_prefix_cache(settings, headers, status, path):
    client = FakeClient()
    http = TestClient(create_app(client, ServerSettings(**settings)), base_url="http://127.0.0.1")
    assert http.post(path, headers=headers).status_code == status
    assert client.resets == (status == 200)


def test_prefix_cache_cannot_be_reset_while_the_server_loads():
    http = TestClient(create_app(None, ServerSettings()), base_url="http://127.0.0.1")
    assert http.post("/reset_prefix_cache").status_code == 503
