"""The official Anthropic client against the server with scripted answers."""

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel
from starlette.testclient import TestClient

from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.messages_support import ASK, CALL, INVALID_CALL, UNENDED_CALL, WEATHER, scripted
from tests.server.serving import serving

EAGER = {**WEATHER, "eager_input_streaming": True}
STRICT = {**WEATHER, "strict": True}


@contextlib.contextmanager
def connected(engine: FakeClient | None, key: str = "unused", **options: Any):
    with (
        serving(engine, ServerSettings(**options)) as address,
        anthropic.Anthropic(base_url=address.url, api_key=key, max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def server():
    """Return a client and the engine whose answers it gets."""
    engine = scripted()
    with connected(engine) as client:
        yield client, engine


@pytest.fixture
def answers(server):
    """Return a function that sets the answer and returns the client."""
    client, engine = server

    def answering(script: str) -> anthropic.Anthropic:
        engine.script = script
        return client

    return answering


def whole(client, **fields):
    return client.messages.create(**{"model": "fake", "max_tokens": 2000, "messages": ASK, **fields})


def streamed(client, **fields):
    with client.messages.stream(**{"model": "fake", "max_tokens": 2000, "messages": ASK, **fields}) as stream:
        return stream.get_final_message()


def without_ids(message) -> dict[str, Any]:
    given = message.model_dump(exclude_none=True)
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in given.pop("content")]
    return {**{name: value for name, value in given.items() if name != "id"}, "content": blocks}


@dataclass(eq=False)
class StoppedClient(FakeClient):
    """A fake engine whose answers end with a stop string."""

    stop: str = "\n\nHuman"

    async def _steps(self, prompt, params, request_id, **options):
        assert self.stop in params.stop_strings
        async for output in super()._steps(prompt, params, request_id, **options):
            reason = self.stop if output.finished else None
            yield replace(output, outputs=tuple(replace(answer, stop_reason=reason) for answer in output.outputs))


def test_message_has_text_stop_reason_and_usage(answers):
    message = whole(answers("Hello 🦊"))
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello 🦊")]
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message._request_id.startswith("req_")
    assert message.usage.output_tokens == len("Hello 🦊".encode())
    assert message.usage.cache_read_input_tokens == 1
    assert message.usage.cache_creation_input_tokens == 0


@pytest.mark.parametrize(
    "script",
    [
        "plain",
        "<think>why\n</think>\n\nBecause.",
        "<think>never ended",
        CALL,
        f"<think>why</think>Let me see. {CALL}\n{CALL} Done.",
        "<tool_call>{bad</tool_call>",
        UNENDED_CALL,
    ],
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER]},
        {"tools": [STRICT], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"tools": [WEATHER], "max_tokens": 65},
        {"tools": [WEATHER], "thinking": {"type": "adaptive", "display": "omitted"}},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_stream_adds_up_to_the_whole_message(answers, script, fields):
    client = answers(script)
    assert without_ids(streamed(client, **fields)) == without_ids(whole(client, **fields))


@pytest.mark.parametrize("script", [INVALID_CALL, f"{INVALID_CALL}\n{CALL}", f"{CALL}{INVALID_CALL}"])
@pytest.mark.parametrize("max_tokens", [2000, 80])
def test_stream_of_input_that_is_not_json_adds_up_to_the_whole_message(answers, script, max_tokens):
    client, fields = answers(script), {"tools": [WEATHER], "max_tokens": max_tokens}
    assert without_ids(streamed(client, **fields)) == without_ids(whole(client, **fields))


def test_stream_helpers_yield_text_thinking_and_input(answers):
    client = answers(f"<think>why</think>See. {CALL}")
    with client.messages.stream(model="fake", max_tokens=500, messages=ASK, tools=[EAGER]) as stream:
        events = list(stream)
    assert "".join(event.thinking for event in events if event.type == "thinking") == "why"
    assert "".join(event.text for event in events if event.type == "text") == "See."
    inputs = [event.snapshot for event in events if event.type == "input_json"]
    assert inputs[-1] == {"city": "Zürich 🦊"}
    assert len(inputs) > 5
    assert [event.signature for event in events if event.type == "signature"] == ["unsigned"]
    assert events[-1].message.stop_reason == "tool_use"


def test_conversation_with_a_tool_goes_on_with_its_result(answers, server):
    client = answers(f"<think>why</think>See. {CALL}")
    message = whole(client, tools=[WEATHER])
    call = message.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    whole(client, tools=[WEATHER], messages=turns)
    assert call.input == {"city": "Zürich 🦊"}
    prompt = server[1].seen[-1][0].text
    assert prompt.startswith('TOOL {"type": "function", "function": {"name": "weather"')
    assert prompt.endswith(
        "user: hi\nassistant: <think>why</think>See."
        '<tool_call>{"name": "weather", "arguments": {"city": "Zürich 🦊"}}</tool_call>\ntool: sunny\n'
    )


class ToolUser(FakeClient):
    """A fake engine that calls a tool once and then says what it returned."""

    async def generate(self, prompt, params, **options):
        self.script = "It is sunny." if "tool: sunny" in prompt.text else CALL
        async for output in super().generate(prompt, params, **options):
            yield output


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_runs_tools_until_the_answer(stream):
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Say the weather of a city."""
        return f"sunny in {city}"

    engine = ToolUser(max_model_len=8192, tokenizer=scripted().tokenizer)
    with connected(engine) as client:
        options = {"model": "fake", "max_tokens": 500, "messages": ASK, "tools": [weather], "betas": ["any"]}
        last = client.beta.messages.tool_runner(**options, stream=stream).until_done()
    assert last.content[0].text == "It is sunny."
    assert "tool: sunny in Zürich 🦊" in engine.seen[-1][0].text


def test_stop_sequence_is_named():
    engine = StoppedClient("Hello")
    with connected(engine) as client:
        for message in (whole(client, stop_sequences=[engine.stop]), streamed(client, stop_sequences=[engine.stop])):
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", engine.stop)


def test_counted_tokens_are_those_of_the_message(answers):
    client = answers("Hello")
    fields = {"messages": ASK, "tools": [WEATHER], "system": "Be brief.", "thinking": {"type": "disabled"}}
    count = client.messages.count_tokens(model="fake", **fields)
    usage = whole(client, **fields).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_parse_asks_for_the_schema_and_returns_the_object(answers, server):
    class Place(BaseModel):
        city: str

    client = answers('{"city": "Zürich"}')
    message = client.messages.parse(model="fake", max_tokens=100, messages=ASK, output_format=Place)
    assert message.parsed_output == Place(city="Zürich")
    assert server[1].seen[-1][1].structured.json["properties"]["city"]["type"] == "string"


def test_models_are_listed_and_retrieved(answers):
    client = answers("")
    (model,) = client.models.list()
    assert (model.type, model.id, model.display_name, model.lifecycle) == ("model", "fake", "fake", "active")
    assert model.created_at.timestamp() == 1
    assert model.max_input_tokens == 8192
    assert client.models.retrieve("fake") == model
    with pytest.raises(anthropic.NotFoundError, match="'claude' is not served here") as error:
        client.models.retrieve("claude")
    assert error.value.body["type"] == "error"


def test_models_come_in_pages_in_both_directions():
    names = tuple("abcde")
    with connected(scripted(), served_model_names=names) as client:
        page = client.models.list(limit=2)
        assert (page.first_id, page.last_id, page.has_more) == ("a", "b", True)
        assert [model.id for model in page] == [*names]
        assert [model.id for model in client.models.list(limit=2, before_id="e").data] == ["c", "d"]
        assert [model.id for model in client.models.list(limit=3, before_id="e")] == ["b", "c", "d", "a"]
        assert not client.models.list(after_id="d").has_more
        assert not client.models.list(before_id="b").has_more
        for wrong in ({"after_id": "x"}, {"limit": 0}, {"before_id": "a", "after_id": "b"}):
            with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
                client.models.list(**wrong)


def test_models_have_openais_form_without_the_version_of_anthropics_api():
    http = TestClient(create_app(scripted(), ServerSettings()))
    assert http.get("/v1/models").json()["object"] == "list"
    assert http.get("/v1/models/x").json()["error"]["code"] == "model_not_found"
    assert http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["first_id"] == "fake"


@pytest.mark.parametrize(
    ("fields", "error", "kind", "words"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens is 0"),
        ({"model": "claude"}, anthropic.NotFoundError, "not_found_error", "'claude' is not served here"),
        (
            {"messages": [{"role": "user", "content": "long " * 2000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "prompt is too long",
        ),
    ],
)
@pytest.mark.parametrize("ask", [whole, streamed])
def test_refused_request_raises_the_error_of_its_kind(answers, ask, fields, error, kind, words):
    client = answers("Hello")
    with pytest.raises(error) as raised:
        ask(client, **fields)
    assert raised.value.type == kind
    assert words in raised.value.api_message
    assert raised.value.request_id == raised.value.body["request_id"]


def test_key_is_sent_as_x_api_key():
    with connected(scripted(), "right", api_keys=("right",)) as client:
        assert whole(client).content
    with (
        connected(scripted(), "wrong", api_keys=("right",)) as client,
        pytest.raises(anthropic.AuthenticationError) as raised,
    ):
        whole(client)
    assert raised.value.type == "authentication_error"


def test_full_queue_is_an_overload_to_be_tried_again_later():
    with connected(scripted(capacity=0)) as client, pytest.raises(anthropic.OverloadedError) as raised:
        whole(client)
    assert raised.value.type == "overloaded_error"
    assert raised.value.response.headers["retry-after"] == "3"


def test_loading_server_is_unavailable():
    with connected(None) as client, pytest.raises(anthropic.ServiceUnavailableError) as raised:
        whole(client)
    assert raised.value.type == "overloaded_error"


def test_large_body_is_too_large():
    with (
        connected(scripted(), max_body_mb=0.001) as client,
        pytest.raises(anthropic.RequestTooLargeError) as raised,
    ):
        whole(client, messages=[{"role": "user", "content": "x" * 5000}])
    assert raised.value.type == "request_too_large"


def test_failure_of_the_engine_is_an_api_error():
    with connected(scripted(fail_after=0)) as client, pytest.raises(anthropic.InternalServerError) as raised:
        whole(client)
    assert raised.value.type == "api_error"


def test_failure_in_a_stream_raises_an_error():
    with connected(scripted(fail_after=3)) as client, pytest.raises(anthropic.APIStatusError) as raised:
        streamed(client)
    assert raised.value.type == "api_error"
    assert "the engine failed" in raised.value.api_message
