"""A server with the parsers of the documentation's example: whole, streamed, in each API, and with required calls."""

import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import ConfigError
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from jaxserve.structured.compiler import LLGrammarCompiler
from tests.server.answering import answering

PAGE = Path(__file__).parents[2] / "docs" / "parsers.md"
EXAMPLE = next(code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "ToolFormat" in code)
ANSWER = '<< Bern, then. >>Wait.\n<call>get_weather: {"city": "Bern"}</call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("plugin") / "colon.py"
    file.write_text(EXAMPLE)
    return file


@pytest.fixture(scope="module")
def served(file):
    engine = answering(ANSWER)
    settings = ServerSettings(tool_parser_plugin=file, reasoning_parser_plugin=file)
    return TestClient(create_app(engine, settings)), engine


def test_whole_chat_has_the_call_and_the_reasoning(served):
    message = served[0].post("/v1/chat/completions", json={"messages": ASK, "tools": [TOOL]}).json()["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    (call,) = message["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    assert message["message"]["content"] == "Wait."
    assert message["message"]["reasoning_content"] == "Bern, then."


def test_stream_adds_up_to_the_same(served):
    text = served[0].post("/v1/chat/completions", json={"messages": ASK, "tools": [TOOL], "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["name"] == "get_weather"
    assert "".join(call["arguments"] for call in calls) == '{"city": "Bern"}'
    assert "".join(delta.get("content") or "" for delta in deltas) == "Wait."
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Bern, then."


def test_other_apis_have_the_same_parts(served):
    http, _ = served
    tool = {"name": "get_weather", "input_schema": SCHEMA}
    blocks = http.post("/v1/messages", json={"messages": ASK, "tools": [tool], "max_tokens": 200}).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert blocks[-1]["input"] == {"city": "Bern"}
    response = http.post("/v1/responses", json={"input": "hi", "tools": [{"type": "function", **TOOL["function"]}]})
    assert [item["type"] for item in response.json()["output"]] == ["reasoning", "message", "function_call"]


def test_required_calls_are_held_by_a_grammar_of_the_format(served):
    http, engine = served
    body = {"messages": ASK, "tools": [TOOL], "tool_choice": "required"}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    tokenizer = Tokenizer.load(bundled_model_path())
    grammar = LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids).compile(engine.seen[-1][1].structured)

    def accepts(answer: str) -> bool:
        matcher = grammar.start()
        for token in tokenizer.encode(answer, add_special_tokens=False):
            matcher.accept(token)
        return not matcher.error

    assert accepts('<call>get_weather: {"city": "Bern"}</call>\n<call>get_weather: {"city": "Thun"}</call>')
    for wrong in ("Bern", "<call>get_time: {}", '<call>get_weather: {"city": 5', "<call>get_weather: {}</call>"):
        assert not accepts(wrong), wrong


def test_plugin_that_is_wrong_ends_the_start(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("import nothing_of_this_name\n")
    for option in ("tool_parser_plugin", "reasoning_parser_plugin"):
        with pytest.raises(ConfigError, match=rf"wrong.py:1: .* \(--{option.replace('_', '-')}\)"):
            ServerSettings(**{option: file})
