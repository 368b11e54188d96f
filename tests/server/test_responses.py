"""The Responses API, whole and as a stream, with the official OpenAI client."""

import json
import re
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming.responses import ResponseStream
from pydantic import BaseModel

from jaxserve.core.errors import EngineFailed, QueueFull
from jaxserve.server.settings import ServerSettings
from tests.server.answering import REASONING, answering, call, last_prompt, tool
from tests.server.fake import FakeClient
from tests.server.serving import serving

SCRIPT = f"{REASONING}I look it up.\n{call('weather', city='Zürich')}\n{call('time')}"
TOOLS = [tool("weather"), tool("time")]
WITH_LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
# Answers of every kind: reasoning, text, calls, nothing at all, calls of unknown tools and calls that are cut.
SCRIPTS = [
    SCRIPT,
    FakeClient.script,
    f"{REASONING}Only text.",
    call("weather", city="x"),
    f"Before {call('weather')} after",
    REASONING,
    " ",
    call("unknown"),
    call("weather", city="x")[:-20],
]


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def events_of(url: str, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, and check that each is named by its type."""
    answer = httpx.post(f"{url}/v1/responses", json={"input": "hi", "stream": True, **body})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def without_ids(value: Any) -> Any:
    """Return JSON in which random ids are replaced by their prefixes."""
    return json.loads(re.sub(r'"(\w+_)[0-9a-f]{24,32}"', r'"\1"', json.dumps(value)))


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output items that the deltas of a stream add up to."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind, index = event["type"], event.get("output_index")
        if kind == "response.output_item.added":
            assert index == len(items)
            items.append(event["item"])
        elif kind == "response.content_part.added":
            items[index]["content"].append(event["part"])
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            part = items[index]["content"][event["content_index"]]
            part["text"] += event["delta"]
            part.setdefault("logprobs", []).extend(event.get("logprobs", ()))
        elif kind == "response.function_call_arguments.delta":
            items[index]["arguments"] += event["delta"]
    for item in items:
        for part in item.get("content", ()):
            if part["type"] == "reasoning_text":
                part.pop("logprobs", None)
    return items


def test_answer_with_reasoning_text_and_calls():
    with serving(answering(SCRIPT)) as address, connect(address.url) as client:
        response = client.responses.create(model="fake", input="Weather?", instructions="Be brief.", tools=TOOLS)
    reasoning, message, weather, time = response.output
    assert response.status == "completed"
    assert reasoning.content[0].text == "Where is it?"
    assert response.output_text == message.content[0].text == "I look it up."
    assert (weather.name, json.loads(weather.arguments)) == ("weather", {"city": "Zürich"})
    assert (time.name, json.loads(time.arguments)) == ("time", {})
    assert weather.call_id != time.call_id
    assert [item.id.split("_")[0] for item in response.output] == ["rs", "msg", "fc", "fc"]


def test_instructions_and_input_are_the_prompt():
    fake = answering("ok")
    with serving(fake) as address, connect(address.url) as client:
        client.responses.create(model="fake", input="Weather?", instructions="Be brief.")
    assert last_prompt(fake) == "[system]Be brief.\n[user]Weather?\n[assistant]"


def test_response_repeats_what_was_asked():
    asked = {
        "instructions": "x",
        "metadata": {"a": "b"},
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "tools": TOOLS,
        "tool_choice": "auto",
        "truncation": "auto",
        "user": "me",
        "prompt_cache_key": "key",
        "temperature": 0.5,
        "top_p": 0.9,
    }
    with serving(answering("ok")) as address, connect(address.url) as client:
        response = client.responses.create(model="fake", input="hi", reasoning={"effort": "low"}, **asked)
    given = json.loads(response.model_dump_json())
    assert {name: given[name] for name in asked if name != "tools"} == {k: v for k, v in asked.items() if k != "tools"}
    assert [t["name"] for t in given["tools"]] == ["weather", "time"]
    assert given["reasoning"]["effort"] == "low"


def test_usage_counts_the_tokens_of_the_reasoning():
    with serving(answering(SCRIPT)) as address, connect(address.url) as client:
        usage = client.responses.create(model="fake", input="hi", tools=TOOLS).usage
    assert usage.output_tokens == len(SCRIPT.encode())  # one token per byte
    assert usage.output_tokens_details.reasoning_tokens == len(REASONING.rstrip())
    assert usage.input_tokens_details.cached_tokens == 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_answer_without_reasoning_has_no_reasoning_tokens():
    with serving(answering("  Hello")) as address, connect(address.url) as client:
        usage = client.responses.create(model="fake", input="hi").usage
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_events_have_openais_order():
    with serving(answering(f"{REASONING}ok{call('weather')}")) as address:
        events = events_of(address.url, tools=TOOLS)
    names = [event["type"].removeprefix("response.") for event in events]
    once = [name for index, name in enumerate(names) if names[index - 1 : index] != [name]]
    assert once == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["output"] == events[1]["response"]["output"] == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_stream_adds_up_to_the_response(script):
    with serving(answering(script)) as address:
        for asked in ({}, WITH_LOGPROBS, {"max_output_tokens": 40}, {"tools": TOOLS[:1]}, {"tools": []}):
            body = {"tools": TOOLS, **asked}
            events = events_of(address.url, **body)
            whole = httpx.post(f"{address.url}/v1/responses", json={"input": "hi", **body}).json()
            last = events[-1]
            assert last["type"] == f"response.{whole['status']}"
            times = {"created_at": 0, "completed_at": 0}
            assert without_ids(last["response"] | times) == without_ids(whole | times)
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            assert done == last["response"]["output"]
            assert [item | {"status": ""} for item in folded(events)] == [item | {"status": ""} for item in done]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_done_events_repeat_what_the_deltas_added_up_to():
    with serving(answering(SCRIPT)) as address:
        events = events_of(address.url, tools=TOOLS, **WITH_LOGPROBS)
    items = folded(events)
    for event in events:
        item = items[event["output_index"]] if "output_index" in event else {}
        if event["type"] in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == item["content"][0]["text"]
            assert event.get("logprobs", []) == item["content"][0].get("logprobs", [])
        elif event["type"] == "response.content_part.done":
            assert event["part"] == item["content"][0]
        elif event["type"] == "response.function_call_arguments.done":
            assert event["arguments"] == item["arguments"]
            assert event["item_id"] == item["id"]


def test_log_probabilities_are_those_of_the_texts_tokens():
    with serving(answering(SCRIPT)) as address, connect(address.url) as client:
        response = client.responses.create(model="fake", input="hi", tools=TOOLS, **WITH_LOGPROBS)
    part = response.output[1].content[0]
    assert "".join(entry.token for entry in part.logprobs) == part.text == "I look it up."
    assert {len(entry.top_logprobs) for entry in part.logprobs} == {2}


def test_client_accumulates_the_stream():
    with serving(answering(SCRIPT)) as address, connect(address.url) as client:
        stream_of_events = client.responses.stream(model="fake", input="hi", tools=TOOLS)
        with stream_of_events as stream:
            assert isinstance(stream, ResponseStream)
            deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
    assert deltas == final.output_text == "I look it up."
    assert final.output[2].name == "weather"


class Place(BaseModel):
    city: str


def test_client_parses_structured_text():
    fake = answering('{"city": "Bern"}')
    with serving(fake) as address, connect(address.url) as client:
        parsed = client.responses.parse(model="fake", input="hi", text_format=Place)
        with client.responses.stream(model="fake", input="hi", text_format=Place) as stream:
            streamed = stream.get_final_response()
    assert parsed.output_parsed == streamed.output_parsed == Place(city="Bern")
    structured = fake.seen[-1][1].structured
    assert json.loads(structured.text)["required"] == ["city"]
    assert parsed.text.format.name == "Place"


def test_json_object_constrains_the_answer():
    fake = answering("{}")
    with serving(fake) as address, connect(address.url) as client:
        client.responses.create(model="fake", input="hi", text={"format": {"type": "json_object"}})
    assert fake.seen[-1][1].structured.kind == "json_object"


def test_answer_cut_by_max_output_tokens_is_incomplete():
    with serving(answering(SCRIPT)) as address, connect(address.url) as client:
        response = client.responses.create(model="fake", input="hi", tools=TOOLS, max_output_tokens=45)
        events = events_of(address.url, tools=TOOLS, max_output_tokens=45)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert response.usage.output_tokens == 45
    assert events[-1]["type"] == "response.incomplete"


def test_empty_answer_is_an_empty_message():
    with serving(answering("<think></think>")) as address, connect(address.url) as client:
        response = client.responses.create(model="fake", input="hi")
        with client.responses.stream(model="fake", input="hi") as stream:
            streamed = stream.get_final_response()
    assert response.output_text == streamed.output_text == ""
    assert response.output[-1].type == streamed.output[-1].type == "message"


def test_custom_tool_gets_its_text():
    text = 'print("hi")\n'
    fake = answering(call("python", input=text))
    tools = [{"type": "custom", "name": "python", "description": "Runs code."}]
    with serving(fake) as address, connect(address.url) as client:
        (item,) = client.responses.create(model="fake", input="hi", tools=tools).output
        events = events_of(address.url, tools=tools)
    assert (item.type, item.name, item.input) == ("custom_tool_call", "python", text)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == text
    assert [e["input"] for e in events if e["type"] == "response.custom_tool_call_input.done"] == [text]
    assert events[-1]["response"]["output"][0]["input"] == text


def test_grammar_of_a_custom_tool_is_shown_to_the_model():
    fake = answering("ok")
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "begin" /[a-z]+/'}
    with serving(fake) as address, connect(address.url) as client:
        tools = [{"type": "custom", "name": "patch", "description": "Patches.", "format": form}]
        client.responses.create(model="fake", input="hi", tools=tools)
    assert "/[a-z]+/" in last_prompt(fake)


def test_tools_in_a_namespace_are_called_by_both_names():
    fake = answering(call("files__read", city="x"))
    tools = [{"type": "namespace", "name": "files", "description": "Files.", "tools": [tool("read"), tool("write")]}]
    with serving(fake) as address, connect(address.url) as client:
        (item,) = client.responses.create(model="fake", input="hi", tools=tools).output
        assert (item.namespace, item.name) == ("files", "read")
        answer = {"type": "function_call_output", "call_id": item.call_id, "output": "text"}
        client.responses.create(model="fake", input=[item, answer])
    assert '<tool_call>{"name": "files__read"' in last_prompt(fake)


def test_calls_can_be_forced_and_limited():
    fake = answering(call("weather"))
    choices = [
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    ]
    with serving(fake) as address, connect(address.url) as client:
        for choice in choices:
            client.responses.create(model="fake", input="hi", tools=TOOLS, tool_choice=choice)
            assert fake.seen[-1][1].structured.kind == "grammar"
        client.responses.create(model="fake", input="hi", tools=TOOLS, tool_choice="none")
    assert fake.seen[-1][1].structured is None
    assert "[tools]" not in last_prompt(fake)


def test_parallel_tool_calls_false_ends_with_the_first_call():
    with serving(answering(SCRIPT)) as address, connect(address.url) as client:
        response = client.responses.create(model="fake", input="hi", tools=TOOLS, parallel_tool_calls=False)
    assert [item.name for item in response.output if item.type == "function_call"] == ["weather"]


def test_sampling_fields_reach_the_engine():
    fake = answering("ok")
    asked = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 3, "stop": ["x"], "ignore_eos": True}
    asked["allowed_token_ids"] = [5, 6]
    with serving(fake) as address, connect(address.url) as client:
        client.responses.create(
            model="fake", input="hi", temperature=0.3, top_p=0.8, max_output_tokens=9, extra_body=asked
        )
    params = fake.seen[-1][1]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.3, 0.8, 9)
    assert list(params.allowed_token_ids) == [5, 6]
    assert (params.top_k, params.min_p, params.repetition_penalty, params.seed) == (5, 0.1, 1.1, 3)
    assert params.stop_strings == ("x",)


def test_input_tokens_are_those_of_the_prompt():
    fake = answering("ok")
    with serving(fake) as address, connect(address.url) as client:
        asked = {"model": "fake", "input": "hi", "instructions": "Be brief.", "tools": TOOLS}
        count = client.responses.input_tokens.count(**asked)
        response = client.responses.create(**asked)
    assert count.object == "response.input_tokens"
    assert count.input_tokens == response.usage.input_tokens == len(last_prompt(fake))


def test_refused_stream_has_its_http_status():
    with serving(answering("ok", capacity=0)) as address:
        answer = httpx.post(f"{address.url}/v1/responses", json={"input": "hi", "stream": True})
    assert answer.status_code == 503
    assert "the queue is full" in answer.json()["error"]["message"]


def test_error_in_a_stream_is_an_event_and_fails_the_response():
    with serving(answering("Hello", fail_after=2)) as address:
        *_, error, failed = events = events_of(address.url)
    assert error["type"] == "error"
    assert error["code"] == "engine_failed"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert "a step raised" in failed["response"]["error"]["message"]
    assert failed["response"]["output"][0]["content"][0]["text"] == "He"
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_refusal_after_a_comment_is_a_failed_response():
    fake = answering("Hello", fail_after=0, delay=0.2, failure=QueueFull("full"))
    with serving(fake, ServerSettings(sse_ping_interval=0.05)) as address:
        answer = httpx.post(f"{address.url}/v1/responses", json={"input": "hi", "stream": True})
    names = re.findall(r"^event: (\S+)$", answer.text, re.MULTILINE)
    assert names == ["response.created", "response.in_progress", "error", "response.failed"]
    assert '"code":"rate_limit_exceeded"' in answer.text


def test_error_of_a_response_that_does_not_stream_is_an_http_error():
    with serving(answering("Hello", fail_after=2, failure=EngineFailed("broken"))) as address:
        answer = httpx.post(f"{address.url}/v1/responses", json={"input": "hi"})
    assert answer.status_code == 500
    assert "broken" in answer.json()["error"]["message"]
