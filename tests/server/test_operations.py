"""Probes, metrics, tokenization, model defaults, and the API description."""

from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from jaxserve import __version__
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.stream import AnswerReader, EventParser
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient, byte_tokenizer
from tests.server.serving import serving

PROMPTS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


READINESS = ("/health", "/ready", "/ping")


def probes(http) -> dict[str, tuple[int, str]]:
    """Return the status code and the status of each probe."""
    answers = {path: http.get(path) for path in (*READINESS, "/live")}
    return {path: (answer.status_code, answer.json()["status"]) for path, answer in answers.items()}


def readiness(code: int, status: str) -> dict[str, tuple[int, str]]:
    return dict.fromkeys(READINESS, (code, status))


def test_all_probes_fail_when_the_engine_makes_no_progress():
    client = FakeClient()
    http = TestClient(create_app(client, ServerSettings()))
    assert probes(http) == readiness(200, "serving") | {"/live": (200, "serving")}
    client.healthy = False
    assert probes(http) == readiness(503, "failed") | {"/live": (503, "failed")}
    for path in ("/health", "/live"):
        assert "no step has ended" in http.get(path).json()["reason"]


def test_ping_takes_post_as_sagemaker_sends_it():
    app = create_app(None, ServerSettings())
    http = TestClient(app)
    assert http.post("/ping").status_code == 503
    app.state.server.attach(FakeClient())
    assert http.post("/ping").status_code == 200


def test_server_that_loads_is_alive_but_not_ready_and_refuses_requests():
    app = create_app(None, ServerSettings())
    http = TestClient(app)
    assert probes(http) == readiness(503, "loading") | {"/live": (200, "loading")}
    assert int(http.get("/health").headers["retry-after"]) > 0
    assert http.get("/metrics").status_code == 200
    for answer in (http.get("/v1/models"), http.post("/v1/completions", json={"prompt": "a"})):
        assert answer.status_code == 503
        assert "loading" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
    app.state.server.attach(FakeClient())
    assert http.get("/ready").status_code == 200
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_all_probes_fail_when_the_engine_has_stopped():
    client = FakeClient()
    client.stopped = True
    http = TestClient(create_app(client, ServerSettings()))
    assert probes(http) == readiness(503, "stopped") | {"/live": (503, "stopped")}


def test_server_in_its_last_seconds_serves_but_is_not_ready():
    app = create_app(FakeClient(), ServerSettings())
    app.state.server.terminate()
    http = TestClient(app)
    assert probes(http) == readiness(503, "terminating") | {"/live": (200, "terminating")}
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_server_that_drains_is_alive_but_not_ready_and_refuses_requests():
    app = create_app(FakeClient(), ServerSettings())
    app.state.server.start_draining()
    http = TestClient(app)
    assert probes(http) == readiness(503, "draining") | {"/live": (200, "draining")}
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 503


def test_metrics_are_valid_prometheus_text(http):
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert families["jaxserve_num_requests_running"].samples[0].labels == {"engine": "0", "model_name": "fake"}


def test_version_endpoint_returns_the_package_version(http):
    assert http.get("/version").json() == {"version": __version__}


def test_every_served_model_name_is_accepted():
    settings = ServerSettings(served_model_names=("gpt-x", "alias"))
    http = TestClient(create_app(FakeClient(), settings))
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["gpt-x", "alias"]
    assert http.post("/v1/completions", json={"prompt": "a"}).json()["model"] == "gpt-x"
    assert http.post("/v1/completions", json={"prompt": "a", "model": "alias"}).json()["model"] == "alias"
    assert http.post("/v1/completions", json={"prompt": "a", "model": "fake"}).status_code == 404


def test_tokenize_and_detokenize_round_trip(http):
    answer = http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == 3
    assert answer["token_strs"] == ["a", "\ufffd", "\ufffd"]
    assert answer["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "aé"}


def test_tokenize_renders_messages(http):
    messages = [{"role": "user", "content": "hi"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "User: hi\nAssistant:"}


def test_request_overrides_sampling_defaults_of_the_model():
    client = FakeClient(default_sampling={"temperature": 0.6, "top_k": 20})
    http = TestClient(create_app(client, ServerSettings()))
    http.post("/v1/completions", json={"prompt": "a", "top_k": 5})
    params = client.seen[0][1]
    assert (params.temperature, params.top_k) == (0.6, 5)


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/chat/completions", {}, 20),
        ("/v1/chat/completions", {"max_tokens": 5}, 5),
        ("/v1/chat/completions", {"max_tokens": 50}, 20),
        ("/v1/completions", {}, 16),
        ("/v1/completions", {"max_tokens": 50}, 20),
    ],
)
def test_answer_is_at_most_as_long_as_the_model_default(path, body, tokens):
    client = FakeClient()
    client.info = replace(client.info, max_new_tokens=20)
    http = TestClient(create_app(client, ServerSettings()))
    answer = http.post(path, json={**PROMPTS[path], **body})
    assert answer.status_code == 200
    assert client.seen[0][1].max_tokens == tokens


def test_default_answer_length_leaves_room_for_the_prompt():
    client = FakeClient(max_model_len=64)
    client.info = replace(client.info, max_new_tokens=60)
    http = TestClient(create_app(client, ServerSettings()))
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a" * 20}]})
    prompt, params, *_ = client.seen[0]
    assert params.max_tokens == 64 - len(prompt.token_ids)


QWEN = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}"
)


def test_message_role_that_the_template_drops_is_refused():
    tokenizer = Tokenizer(byte_tokenizer()._tokenizer, chat_template=QWEN)
    http = TestClient(create_app(FakeClient(tokenizer=tokenizer), ServerSettings()))

    def ask(role):
        messages = [{"role": role, "content": "be brief"}, {"role": "user", "content": "hi"}]
        return http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})

    tokens = ask("developer").json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "<system>be brief<user>hi"}
    error = ask("critic").json()["error"]
    assert error["param"] == "messages"
    assert "'critic'" in error["message"]


def test_openapi_has_the_request_bodies(http):
    paths = http.get("/openapi.json").json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        assert "application/json" in paths[path]["post"]["requestBody"]["content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_stream_ends_with_done_after_an_error(path):
    body = {**PROMPTS[path], "stream": True}
    for client in (FakeClient(), FakeClient(fail_after=2), FakeClient(fail_after=2, failure=ValueError("a bug"))):
        with serving(client) as address:
            answer = httpx.post(address.url + path, json=body)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: ") and "\n" not in event for event in events[:-1])
        assert ('"error"' in events[-3]) == (client.fail_after is not None)
        assert "a bug" not in answer.text


@pytest.mark.parametrize("body", ['{"prompt": "a", "n": 0}', '{"prompt": 5}', '{"prompt": "a", "n": "1"}', "{"])
def test_refused_request_is_counted_as_rejection(body):
    with serving(FakeClient()) as address:
        answer = httpx.post(f"{address.url}/v1/completions", content=body, headers={"content-type": "application/json"})
        metrics = httpx.get(f"{address.url}/metrics").text
    assert answer.status_code == 400
    assert 'admission_rejections_total{model_name="fake",reason="invalid"} 1.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
def test_bug_before_the_first_token_returns_500(stream):
    with serving(FakeClient(fail_after=0, failure=ValueError("secret"))) as address:
        answer = httpx.post(f"{address.url}/v1/completions", json={"prompt": "a", "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert answer.headers["connection"] == "close"  # uvicorn cuts it: clients must not reuse it


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_benchmark_counts_the_tokens_of_a_stream(path, usage):
    script = "plain text"
    body = {**PROMPTS[path], "stream": True, "max_tokens": 50}
    with serving(FakeClient(script=script)) as address:
        answer = httpx.post(
            address.url + path, json=body | ({"stream_options": {"include_usage": True}} if usage else {})
        )
    record = RequestRecord(0, 0.0, 0.0, input_tokens=1)
    seen = AnswerReader(record)
    for time, data in enumerate(EventParser().feed(answer.content)):
        seen.feed(data, float(time))
    seen.close()
    assert (record.error, record.text) == (None, script)
    assert record.output_tokens == len(record.chunk_times_s) == len(script)
