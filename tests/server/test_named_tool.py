"""A tool that the client names is called exactly once, in every API, whole and as a stream."""

from typing import Any

import pytest

from tests.server.conversations import APIS, ASK, FUNCTION, MODES, calls_in, conversing, hermes

TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call></tool_call>"
SCRIPT = "\n".join([hermes('{"city": "Bern"}')] * 3)
NAME = FUNCTION["name"]
NAMED: dict[str, dict[str, Any]] = {
    "chat": {"type": "function", "function": {"name": NAME}},
    "responses": {"type": "function", "name": NAME},
    "messages": {"type": "tool", "name": NAME},
}
ALLOWED = {"type": "function", "name": NAME}
REQUIRED: dict[str, Any] = {
    "chat": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED["chat"]]}},
    "responses": {"type": "allowed_tools", "mode": "required", "tools": [ALLOWED]},
    "messages": {"type": "any"},
}
WAYS = [(api, mode) for api in APIS for mode in MODES if mode != "background" or api == "responses"]
PARALLEL = {"chat": {"parallel_tool_calls": True}, "responses": {"parallel_tool_calls": True}, "messages": {}}


@pytest.mark.parametrize(("api", "mode"), WAYS)
def test_named_tool_is_called_once_and_required_tools_may_be_called_again(api, mode):
    with conversing(SCRIPT, TEMPLATE) as (http, engine):
        for more in ({}, PARALLEL[api]):
            added = APIS[api](http, mode, ASK, strip=True, tool_choice=NAMED[api], **more)
            assert calls_in(api, added) == [NAME]
            assert ")*" not in engine.seen[-1][1].structured.text.split("call:")[0]
        added = APIS[api](http, mode, ASK, strip=True, tool_choice=REQUIRED[api])
        assert calls_in(api, added) == [NAME] * 3
        assert ")*" in engine.seen[-1][1].structured.text.split("call:")[0]


@pytest.mark.parametrize("stream", [False, True])
def test_answer_of_a_named_tool_ends_with_stop_as_openai_says(stream):
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": ASK, "tools": tools, "stream": stream}
    with conversing(SCRIPT, TEMPLATE) as (http, _):
        named = http.post("/v1/chat/completions", json=body | {"tool_choice": NAMED["chat"]}).text
        required = http.post("/v1/chat/completions", json=body | {"tool_choice": "required"}).text
    assert '"finish_reason":"stop"' in named
    assert named.count(f'"name":"{NAME}"') == 1
    assert '"finish_reason":"tool_calls"' in required
