"""API keys, and public paths for probes."""

import httpx
import pytest

from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.serving import raw_request, serving

KEYS = ("first-key", "schlüssel")
CLOSED = ("/v1/models", "/v1/chat/completions", "/openapi.json", "/version", "/nothing")
WEB_PAGES = ("/", "/favicon.ico", "/docs", "/pages/chat.js", "/dashboard", "/dashboard/dom.js")
OPEN = ("/health", "/ready", "/ping", "/live", "/metrics", *WEB_PAGES)


@pytest.fixture(scope="module")
def guarded():
    settings = ServerSettings(api_keys=KEYS, cors_origins=("https://app.example",))
    with serving(FakeClient(), settings) as address, httpx.Client(base_url=address.url) as client:
        yield client


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_api_key_is_accepted(guarded, key, scheme):
    headers = {"authorization": f"{scheme} {key}".encode()}
    assert guarded.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer wrong",
        b"Bearer first-ke",
        b"Bearer first-keyy",
        b"first-key",
        b"Basic first-key",
        b"Bearer first-key first-key",
        b"Bearer \xff\xfe\xfd",
        "Bearer schl\u00fcssel".encode("latin-1"),
        b"Bearer " + b"x" * 30_000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/openapi.json", "/version", "/nothing"])
def test_missing_or_wrong_api_key_returns_401(guarded, authorization, path):
    headers = {} if authorization is None else {"authorization": authorization}
    answer = guarded.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert not any(key in answer.text for key in KEYS)


def test_two_authorization_headers_are_refused(guarded):
    headers = [("authorization", "Bearer first-key"), ("authorization", "Bearer wrong")]
    assert guarded.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("path", OPEN)
def test_probes_need_no_key(guarded, path):
    assert guarded.get(path).status_code == 200


@pytest.mark.parametrize("host", ["x/health?", "x/metrics", "127.0.0.1/health#", "/ready", "?"])
def test_host_header_does_not_open_a_guarded_path(guarded, host):
    assert guarded.get("/v1/models", headers={"host": host}).status_code in (400, 401)


@pytest.mark.parametrize("path", ["/health/../v1/models", "//health/v1/models", "/v1/models?/health", "/health/x"])
def test_path_similar_to_a_public_one_is_guarded(guarded, path):
    assert guarded.get(path, follow_redirects=True).status_code in (401, 404)


def test_large_body_without_key_is_refused_before_it_is_read():
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1073741824"
    with serving(FakeClient(), ServerSettings(api_keys=KEYS)) as address:
        assert raw_request(address, head).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("header", ["api-key", "x-api-key", "X-Api-Key"])
def test_api_key_is_accepted_in_headers_of_other_apis(guarded, header):
    assert guarded.get("/v1/models", headers={header: "first-key"}).status_code == 200
    assert guarded.get("/v1/models", headers={header: "wrong"}).status_code == 401
    assert guarded.get("/v1/models", headers={header: "Bearer first-key"}).status_code == 401
    both = {header: "first-key", "authorization": "Bearer of-the-proxy"}
    assert guarded.get("/v1/models", headers=both).status_code == 200
    twice = [(header, "wrong"), (header, "first-key")]
    assert guarded.get("/v1/models", headers=twice).status_code == 401


def test_private_network_preflight_is_allowed_for_allowed_origins_only(guarded):
    asked = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    answer = guarded.options("/v1/chat/completions", headers={"origin": "https://app.example", **asked})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-private-network"] == "true"
    answer = guarded.options("/v1/chat/completions", headers={"origin": "https://other.example", **asked})
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


def test_preflight_needs_no_key_and_names_the_origin(guarded):
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    answer = guarded.options("/v1/chat/completions", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"


def test_keys_are_not_in_the_settings_representation():
    assert not any(key in repr(ServerSettings(api_keys=KEYS)) for key in KEYS)
