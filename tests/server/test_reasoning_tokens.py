"""The tokens of reasoning, as chat completions and responses count them."""

import json

import pytest
from starlette.testclient import TestClient

from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from tests.server.answering import REASONING, answering, call

SETTINGS = ServerSettings(reasoning_parser="qwen3")
CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def usages(script: str, **fields) -> list[dict]:
    """Return the usage of a chat completion: whole, at the end of a stream, and in its last event with a choice."""
    http = TestClient(create_app(answering(script), SETTINGS))
    asked = {"messages": CHAT, **fields}
    whole = http.post("/v1/chat/completions", json=asked).json()["usage"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    text = http.post("/v1/chat/completions", json={**asked, "stream": True, "stream_options": options}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return [whole, events[-1]["usage"], events[-2]["usage"]]


def in_responses(script: str, **fields) -> int:
    http = TestClient(create_app(answering(script), SETTINGS))
    usage = http.post("/v1/responses", json={"input": "hi", **fields}).json()["usage"]
    return usage["output_tokens_details"]["reasoning_tokens"]


@pytest.mark.parametrize(
    "script",
    [
        REASONING + "Here.",
        "<think>\n🦊 ü\n</think>\n\n🦊",
        "<think>cut",
        "<think>\n</think>",
        "no reasoning",
        "none, but </think> a tag",
        "<think>a</think><think>b</think>c",
        "<think>\n" + call("f", city="x") + "\n</think>\n" + call("f", city="y"),
        "",
        REASONING + call("f", city="x"),
        "<think>\nplan\n" + call("f", city="x"),
    ],
)
@pytest.mark.parametrize("limit", [None, 3, 20])
def test_reasoning_tokens_are_those_of_responses(script: str, limit: int | None):
    expected = in_responses(script, max_output_tokens=limit)
    counted = usages(script, max_tokens=limit)
    assert [usage["completion_tokens_details"]["reasoning_tokens"] for usage in counted] == [expected] * 3


def test_reasoning_tokens_of_several_answers_are_added():
    script = REASONING + "Here."
    counted = usages("  " + script, n=3)  # each answer begins a character later
    one = len(REASONING.rstrip())
    assert [usage["completion_tokens_details"]["reasoning_tokens"] for usage in counted] == [3 * one + 3] * 3


def test_reasoning_that_is_not_shown_is_counted():
    counted = usages(REASONING + "Here.", include_reasoning=False)
    assert [usage["completion_tokens_details"]["reasoning_tokens"] for usage in counted] == [len(REASONING) - 2] * 3


def test_calls_of_a_stream_are_those_of_the_whole_answer_after_reasoning():
    http = TestClient(create_app(answering(REASONING + call("f", city="Zürich 🦊")), SETTINGS))
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "tools": TOOLS}).json()
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Zürich 🦊"}'
    assert answer["choices"][0]["message"]["reasoning_content"] == "Where is it?"
