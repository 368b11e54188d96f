"""Paths and methods as clients and proxies write them, compressed bodies, and request ids."""

import gzip
import json
import re
import zlib

import httpx
import pytest
from starlette.testclient import TestClient

from jaxserve.core.errors import ConfigError
from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from jaxserve.server.unknown_paths import FAMILIES, FOREIGN
from tests.server.fake import FakeClient
from tests.server.fake_control import FakeControl
from tests.server.serving import raw_request, serving

JSON = {"content-type": "application/json"}
BODY = b'{"prompt": "a"}'
PAGES = (
    "/health",
    "/ready",
    "/ping",
    "/live",
    "/metrics",
    "/version",
    "/v1/models",
    "/v1/models/fake",
    "/openapi.json",
)
WEB_PAGES = ("/docs", "/dashboard")


def client(**settings) -> TestClient:
    app = create_app(FakeClient(control=FakeControl()), ServerSettings(**settings))
    return TestClient(app, base_url="http://127.0.0.1", follow_redirects=False)


# HEAD


@pytest.mark.parametrize("path", [*PAGES, *WEB_PAGES, "/", "/favicon.ico", "/pages/chat.js", "/dashboard/main.js"])
def test_head_equals_get_without_the_body(http, path):
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 0


def test_head_works_for_operator_paths_and_endless_streams():
    with (
        serving(FakeClient(control=FakeControl())) as address,
        httpx.Client(base_url=address.url, timeout=30) as http,
    ):
        for path in ("/admin/status", "/admin/plan", "/admin/decisions", "/admin/ledger", "/dashboard/events"):
            answer = http.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert http.get("/health").status_code == 200  # on the same connection


def test_head_needs_the_key_like_get():
    http = client(api_keys=("key",), admin_key="admin")
    assert http.head("/v1/models").status_code == 401
    assert http.head("/admin/plan").status_code == 401
    assert http.head("/health").status_code == 200


def test_wrong_method_returns_405_with_the_allowed_methods(http):
    answer = http.head("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    answer = http.post("/health")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert answer.json()["error"]["message"] == "method POST is not allowed at '/health': choose from GET, HEAD"


# slashes


@pytest.mark.parametrize("path", ["/v1/completions/", "//v1/completions", "/v1//completions", "///v1///completions//"])
def test_extra_slashes_are_served_without_a_redirect(http, path):
    answer = http.post(f"http://{http.base_url.netloc.decode()}{path}", content=BODY, headers=JSON)
    assert answer.status_code == 200
    assert answer.json()["object"] == "text_completion"


@pytest.mark.parametrize("host", ["http://x", "http://127.0.0.1:8000", "HTTPS://x", "http://user@[::1]:80"])
def test_target_that_is_a_whole_url_is_served(address, host):
    for path, status in {"/health": b"200", "//v1/models/": b"200", "/nothing": b"404", "": b"200"}.items():
        answer = raw_request(address, b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close" % (host + path).encode())
        assert answer.startswith(b"HTTP/1.1 " + status)


def test_target_that_is_a_whole_url_does_not_open_a_guarded_path():
    with serving(FakeClient(), ServerSettings(api_keys=("key",))) as address:
        for target in (b"http://x/v1/models", b"http://x/health/../v1/models", b"http:///v1/models", b"http:/health"):
            answer = raw_request(address, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close")
            assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("path", [f"{path}/" for path in PAGES])
def test_trailing_slash_is_ignored(path):
    http = client()
    assert http.get(path).status_code == 200
    assert http.get(path).headers["content-type"] == http.get(path.rstrip("/")).headers["content-type"]


def test_models_with_trailing_slash_returns_the_list(http):
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()


@pytest.mark.parametrize("name", ["org/model", "/folder/model", "model/"])
def test_model_name_with_slashes_is_found(name):
    http = client(served_model_names=(name,))
    for path in (name, name.replace("/", "%2F")):
        assert http.get(f"/v1/models/{path}").json()["id"] == name


@pytest.mark.parametrize("path", ["//admin/plan", "/admin//plan", "/admin/plan/", "/%2Fadmin/plan", "/admin%2Fplan"])
def test_extra_slashes_do_not_open_a_guarded_path(path):
    http = client(admin_key="admin", api_keys=("key",))
    address = f"http://127.0.0.1{path}"
    assert http.get(address, headers={"authorization": "Bearer key"}).status_code == 401
    assert http.get(address, headers={"authorization": "Bearer admin"}).status_code == 200


def test_dashboard_with_trailing_slash_redirects_to_working_links(http):
    answer = http.get("/dashboard/")
    assert (answer.status_code, answer.headers["location"]) == (307, "../dashboard")
    assert http.get("/dashboard/", follow_redirects=True).url.path == "/dashboard"


# unknown paths


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/moderations", "OpenAI's API of moderations is not served, no endpoint here has its purpose"),
        ("/v1/fine_tuning/jobs/1/events", "OpenAI's API of fine tuning is not served, no endpoint here"),
        ("/v1/audio/transcriptions", "no endpoint here has its purpose"),
        ("/v1/batches/batch_1/cancel", "use the command jaxserve run-batch"),
        ("/api/chat", "Ollama's API is not served, use /v1/chat/completions;"),
        ("/api/generate", "Ollama's API is not served, use /v1/completions;"),
        ("/api/tags", "use /v1/models;"),
        ("/api/embeddings", "Ollama's API is not served, use /v1/embeddings;"),
        ("/api/pull", "Ollama's API is not served, no endpoint here has its purpose"),
        ("/api/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/generate", "use /v1/completions;"),
        ("/generate_stream", "use /v1/completions with stream true;"),
        ("/infill", "llama.cpp's API is not served, use /v1/completions with suffix;"),
        ("/slots/0", "use /metrics;"),
        ("/get_model_info", "SGLang's API is not served, use /v1/models;"),
        ("/pooling", "vLLM's API is not served, use /v1/embeddings;"),
        ("/v2/chat", "Cohere's API is not served, use /v1/chat/completions;"),
        ("/v1beta/models/gemini-pro:generateContent", "Gemini's API is not served, use /v1/chat/completions;"),
        ("/v1beta/openai/chat/completions", "did you mean /v1/chat/completions?"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completions/1", "did you mean /v1/chat/completions?"),
        ("/openai/deployments/fake/completions", "did you mean /v1/completions?"),
        ("/v1/responses/a/b", "did you mean /v1/responses?"),
        ("/v1/v1/completions", "did you mean /v1/completions?"),
        ("/models", "did you mean /v1/models?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/", "/docs describes all"),  # for clients that want JSON
        ("/generated", "/docs describes all"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unknown_path_returns_404_with_the_endpoints(http, method, path, hint):
    answer = http.request(method, path, content=BODY, headers={**JSON, "accept": "application/json"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")
    assert repr(path) in error["message"]
    assert hint in error["message"]
    assert "/v1/chat/completions" in error["message"]


def test_every_hint_names_a_path_that_is_served(http):
    for foreign in (*FOREIGN.values(), *FAMILIES.values()):
        for path in re.findall(r"/[\w/]+", foreign.instead):
            assert http.get(path).status_code in (200, 405), path


def test_long_unknown_path_is_shortened_in_the_error(http):
    assert len(http.get("/" + "x" * 30_000).content) < 1000


# a proxy's prefix


@pytest.mark.parametrize("prefix", ["", "/llm", "/llm/llm", "/llm/"])
def test_root_path_prefix_is_optional(prefix):
    http = client(root_path="/llm")
    assert http.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "fake"
    assert http.post(f"{prefix}/v1/completions", content=BODY, headers=JSON).status_code == 200
    assert http.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert http.get(f"{prefix}/health").status_code == 200
    assert http.get(f"{prefix}x/v1/models").status_code == 404 if prefix else True


@pytest.mark.parametrize("prefix", ["", "/llm", "/llm/llm", "/llm//llm"])
def test_root_path_prefix_does_not_open_a_guarded_path(prefix):
    http = client(root_path="/llm", api_keys=("key",), admin_key="admin")
    assert http.get(f"{prefix}/v1/models").status_code == 401
    assert http.get(f"{prefix}/admin/plan", headers={"authorization": "Bearer key"}).status_code == 401
    assert http.get(f"{prefix}/health").status_code == 200


def test_pages_behind_a_prefix_have_links_that_lead_there():
    http = client(root_path="/llm")
    assert http.get("/llm").headers["location"] == "llm/"  # to which the links of the page are relative
    assert http.get("/llm/docs/").headers["location"] == "../docs"
    for page in ("/llm/", "/llm/docs", "/llm/dashboard"):
        parts = re.findall(r'(?:src|href)="([^"#]+)"', http.get(page).text)
        assert len(parts) >= 3
        for part in parts:
            assert not part.startswith("/")
            assert http.get(f"/llm/{part}").status_code == 200, part


@pytest.mark.parametrize("root_path", ["llm", "/llm/", "/"])
def test_malformed_root_path_is_refused(root_path):
    with pytest.raises(ConfigError, match="--root-path"):
        ServerSettings(root_path=root_path)


# compressed bodies


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


COMPRESSED = [("gzip", gzip.compress), ("X-GZip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)]


@pytest.mark.parametrize(("encoding", "compress"), COMPRESSED)
@pytest.mark.parametrize("size", [1, 500_000])
def test_compressed_body_is_decompressed(http, encoding, compress, size):
    body = json.dumps({"prompt": "a", "user": "x" * size}).encode()
    headers = JSON | {"content-encoding": encoding}
    assert http.post("/v1/completions", content=compress(body), headers=headers).status_code == 200


@pytest.mark.parametrize(("encoding", "compress"), COMPRESSED)
def test_compressed_body_is_limited_by_its_decompressed_size(encoding, compress):
    http = client(max_body_mb=1)
    for size, status in ((2**20 - 15, 400), (2**20, 413), (50 * 2**20, 413)):
        body = compress(b'{"x": "' + b"x" * size + b'"}')
        answer = http.post("/v1/completions", content=body, headers=JSON | {"content-encoding": encoding})
        assert answer.status_code == status


DAMAGED = {
    "not compressed": BODY,
    "cut off": gzip.compress(BODY)[:-4],
    "bytes after the end": gzip.compress(BODY) + b"x",
    "magic alone": b"\x1f\x8b",
}


@pytest.mark.parametrize("body", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_compressed_body_is_refused(http, body):
    answer = http.post("/v1/completions", content=body, headers=JSON | {"content-encoding": "gzip"})
    assert answer.status_code == 400
    assert "gzip (header content-encoding)" in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip", "x" * 5000])
def test_unknown_content_encoding_returns_415(http, encoding):
    answer = http.post("/v1/completions", content=BODY, headers=JSON | {"content-encoding": encoding})
    assert answer.status_code == 415
    assert "content-encoding" in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "gzip, deflate"


def test_identity_content_encoding_is_accepted(http):
    headers = JSON | {"content-encoding": "identity"}
    assert http.post("/v1/completions", content=BODY, headers=headers).status_code == 200


# request ids


@pytest.mark.parametrize("path", ["/health", "/v1/nothing", "/v1/models"])
def test_request_id_of_the_client_is_returned(http, path):
    assert http.get(path, headers={"x-request-id": "trace-1"}).headers.get_list("x-request-id") == ["trace-1"]


@pytest.mark.parametrize("stream", [False, True])
def test_request_id_of_the_client_replaces_the_servers(http, stream):
    body = {"prompt": "a", "stream": stream}
    for _ in range(2):  # it may come twice
        answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "trace-1"})
        assert answer.status_code == 200
        assert answer.headers.get_list("x-request-id") == ["trace-1"]
    assert http.post("/v1/completions", json=body).headers["x-request-id"].startswith("cmpl-")


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 129, b"\xff", b"a\x7f"])
def test_long_or_unprintable_request_id_is_not_returned(address, given):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    answer = raw_request(address, head + b"X-Request-Id: " + given + b"\r\nContent-Length: 15", BODY)
    assert b"x-request-id: cmpl-" in answer or answer.startswith(b"HTTP/1.1 400 ")
