"""The events and errors of /v1/messages as they are sent."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.messages_support import ASK, CALL, INVALID_CALL, UNENDED_CALL, WEATHER, scripted
from tests.server.serving import serving

MESSAGES = "/v1/messages"


def http_of(script: str = "Hello", *, settings: dict[str, Any] | None = None, **options: Any):
    engine = scripted(script, **options)
    return TestClient(create_app(engine, ServerSettings(**(settings or {}))), raise_server_exceptions=False), engine


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": ASK, "max_tokens": 2000, **fields}


def whole(http: TestClient, **fields: Any) -> dict[str, Any]:
    response = http.post(MESSAGES, json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which must have its type as its name."""
    events = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def streamed(http: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = http.post(MESSAGES, json=body(stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_in(response.text)


def refusal(http: TestClient, **fields: Any) -> str:
    response = http.post(MESSAGES, json=body(**fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"
    return response.json()["error"]["message"]


# events


def test_stream_has_the_events_of_the_message_and_of_its_blocks():
    http, _ = http_of("<think>a</think>b")
    start, *events = streamed(http)
    assert start["type"] == "message_start"
    assert start["message"].pop("id").startswith("msg_")
    usage = {"input_tokens": 8, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1, "output_tokens": 1}
    assert start["message"] == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    signature = {"type": "signature_delta", "signature": "unsigned"}
    assert events == [
        {"type": "content_block_start", "index": 0, "content_block": thinking},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "a"}},
        {"type": "content_block_delta", "index": 0, "delta": signature},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_stop", "index": 1},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {**usage, "output_tokens": 17},
        },
        {"type": "message_stop"},
    ]


DELTAS = {
    "text": {"text_delta"},
    "thinking": {"thinking_delta", "signature_delta"},
    "tool_use": {"input_json_delta"},
}


@pytest.mark.parametrize(
    "script",
    [
        f"<think>why</think>{CALL}",
        f"a{CALL}\n{CALL}b{CALL}c",
        f"{INVALID_CALL} and {CALL}",
        UNENDED_CALL,
        "<tool_call>x",
    ],
)
def test_deltas_belong_to_the_open_block_and_blocks_are_numbered(script):
    http, _ = http_of(script)
    _, *events, _, _ = streamed(http, tools=[WEATHER])
    begun, open_block = 0, None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                assert event["index"] == begun
                begun, open_block = begun + 1, event["content_block"]["type"]
            case "content_block_delta":
                assert event["index"] == begun - 1
                assert event["delta"]["type"] in DELTAS[open_block]
            case "content_block_stop":
                assert event["index"] == begun - 1
                open_block = None
    assert begun > 0
    assert open_block is None


def input_deltas(http: TestClient, **fields: Any) -> list[str]:
    deltas = [event["delta"] for event in streamed(http, **fields) if event["type"] == "content_block_delta"]
    return [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]


def test_input_of_a_tool_is_sent_once_it_is_complete():
    http, _ = http_of(CALL)
    *earlier, last = input_deltas(http, tools=[WEATHER])
    assert last == '{"city": "Zürich 🦊"}'
    assert len(earlier) > 5
    assert set(earlier) == {""}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{**WEATHER, "eager_input_streaming": True}]},
        {"tools": [{**WEATHER, "strict": True}]},
        {"tools": [WEATHER], "tool_choice": {"type": "any"}},
    ],
)
def test_input_that_is_eager_or_follows_a_grammar_is_sent_as_it_arrives(fields):
    http, _ = http_of(CALL)
    deltas = input_deltas(http, **fields)
    assert len([delta for delta in deltas if delta]) > 5
    assert "".join(deltas) == '{"city": "Zürich 🦊"}'


def test_a_line_break_in_a_string_is_escaped():
    http, _ = http_of(INVALID_CALL)
    expected = {"city": "Zürich\n🦊"}
    assert whole(http, tools=[WEATHER])["content"][0]["input"] == expected
    assert json.loads("".join(input_deltas(http, tools=[WEATHER]))) == expected


def test_input_that_the_model_leaves_incomplete_is_wrapped():
    http, _ = http_of(UNENDED_CALL)
    message = whole(http, tools=[WEATHER])
    assert message["content"][0]["input"] == {"INVALID_JSON": '{"city": "Zürich", "days": 3'}


def test_input_that_is_cut_has_the_members_that_are_complete():
    http, _ = http_of(CALL.replace("}}", ', "note": "and so on"}}'))
    limit = {"tools": [WEATHER], "max_tokens": 85}
    message = whole(http, **limit)
    assert message["content"][0]["input"] == {"city": "Zürich 🦊"}
    assert message["stop_reason"] == "max_tokens"
    assert json.loads("".join(input_deltas(http, **limit))) == {"city": "Zürich 🦊"}


def test_answer_without_text_has_no_blocks():
    http, _ = http_of("<think>why</think>", template=None, settings={"reasoning_parser": "qwen3"})
    message = whole(http, thinking={"type": "disabled"}, max_tokens=9)
    assert message["content"] == []
    assert message["stop_reason"] == "max_tokens"


def test_thinking_can_be_omitted():
    http, _ = http_of("<think>why</think>b")
    message = whole(http, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"})
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": "unsigned"}
    assert message["content"][1] == {"type": "text", "text": "b"}


def test_answer_that_fills_the_context_says_so():
    http, _ = http_of("long " * 100, max_model_len=64)
    message = whole(http, max_tokens=32_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert message["usage"]["output_tokens"] == 64 - 9
    assert whole(http, max_tokens=5)["stop_reason"] == "max_tokens"
    assert whole(http, max_tokens=64 - 9)["stop_reason"] == "max_tokens"


class WaitingClient(FakeClient):
    """A fake engine that generates nothing before `released` is set."""

    def __post_init__(self):
        super().__post_init__()
        self.released = threading.Event()

    async def _turn(self, count):
        while not self.released.is_set():
            await asyncio.sleep(0.01)


def test_silent_stream_sends_pings_before_the_message():
    engine, text = WaitingClient(), ""
    with (
        serving(engine, ServerSettings(sse_ping_interval=0.05)) as address,
        httpx.stream("POST", address.url + MESSAGES, json=body(stream=True, max_tokens=50), timeout=30) as response,
    ):
        for part in response.iter_text():
            text += part
            if text.count("event: ping") > 1:
                engine.released.set()
    types = [event["type"] for event in events_in(text)]
    assert types[:2] == ["ping", "ping"]
    assert next(kind for kind in types if kind != "ping") == "message_start"
    assert types[-1] == "message_stop"


def test_error_in_a_stream_is_its_last_event():
    http, _ = http_of(fail_after=3)
    response = http.post(MESSAGES, json=body(stream=True))
    *_, error = events_in(response.text)
    assert error == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine failed: a step raised"},
        "request_id": response.headers["request-id"],
    }


def test_late_system_message_reaches_a_model_whose_template_takes_none():
    template = (
        "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
        "{{ raise_exception('system messages come first') }}{% endif %}"
        "{{ message.role }}: {{ message.content }} {% endfor %}"
    )
    http, engine = http_of(template=template)
    whole(http, system="Be brief.", messages=[*ASK, {"role": "system", "content": "5 tokens left"}])
    assert engine.seen[-1][0].text == "system: Be brief. user: hi\n<system>\n5 tokens left\n</system> "


# errors


@pytest.mark.parametrize(
    ("method", "path", "request_options", "status", "kind"),
    [
        (
            "POST",
            MESSAGES,
            {"content": "{", "headers": {"content-type": "application/json"}},
            400,
            "invalid_request_error",
        ),
        ("POST", MESSAGES, {"json": {"max_tokens": 1}}, 400, "invalid_request_error"),
        ("POST", MESSAGES, {"content": "x"}, 415, "invalid_request_error"),
        ("GET", MESSAGES, {}, 405, "invalid_request_error"),
        ("POST", f"{MESSAGES}/batches", {"json": {}}, 404, "not_found_error"),
        ("POST", f"{MESSAGES}/count_tokens", {"json": {"model": "other", "messages": ASK}}, 404, "not_found_error"),
        ("POST", "/v1//messages/?beta=true", {"json": body(model="other")}, 404, "not_found_error"),
    ],
)
def test_every_error_has_the_envelope_and_its_request_id(method, path, request_options, status, kind):
    http, _ = http_of()
    response = http.request(method, path, **request_options)
    assert response.status_code == status
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == kind
    assert error["error"].keys() == {"type", "message"}
    assert error["request_id"] == response.headers["request-id"]


def test_other_paths_keep_their_envelope():
    http, _ = http_of()
    assert http.post("/v1/chat/completions", json={}).json()["error"]["param"] == "messages"


def test_missing_key_is_refused_in_the_envelope():
    http, _ = http_of(settings={"api_keys": ("right",)})
    response = http.post(MESSAGES, json=body())
    assert (response.status_code, response.json()["error"]["type"]) == (401, "authentication_error")
    assert http.post(MESSAGES, json=body(), headers={"authorization": "Bearer right"}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"temperature": -1}, "temperature is -1"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences has 17"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type is 'web_search_20250305'"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name is 'weather', as that of another tool"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools.0.name is 'a b': it must have"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema must be a JSON schema"),
        ({"tools": [{**WEATHER, "strict": 1}]}, "tools.0.strict must be true or false"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name is 'x'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type is"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type is"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort is"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type is"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}, "strict": True}}}, "format.strict is not"),
        ({"thinking": {"type": "enabled", "budget": 5}}, "thinking.budget is not a known field: did you mean"),
        ({"tool_choice": {"type": "auto", "parallel": False}}, "tool_choice.parallel is not a known field"),
        ({"messages": [{"role": "user", "content": "a", "prefix": True}]}, "prefix is not supported"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
        ({"container": "c"}, "container is not supported"),
        ({"stop": ["x"]}, "stop is not supported: use stop_sequences"),
        ({"n": 2}, "n is not supported"),
        ({"messages": []}, "messages has 0 entries"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role is"),
    ],
)
def test_refusal_names_the_field(fields, words):
    http, _ = http_of()
    assert words in refusal(http, **fields)


def test_tools_are_refused_without_a_format_for_calls():
    http, _ = http_of(settings={"tool_parser": "none"})
    assert "tools cannot be used" in refusal(http, tools=[WEATHER])


def test_reasoning_limit_reaches_the_engine():
    http, engine = http_of()
    whole(http, thinking={"type": "enabled", "budget_tokens": 1024})
    assert engine.seen[-1][1].reasoning.max_tokens == 1024
    whole(http, thinking={"type": "adaptive", "budget_tokens": 0})
    assert engine.seen[-1][1].reasoning.max_tokens is None


def test_reasoning_limit_holds_for_a_model_that_does_not_reason():
    http, engine = http_of(settings={"reasoning_parser": "none"})
    whole(http, thinking={"type": "enabled", "budget_tokens": 1024})
    assert engine.seen[-1][1].reasoning is None
