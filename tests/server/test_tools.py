"""Tool calls and reasoning in chat completions, with scripted answers."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from jaxserve.structured.compiler import LLGrammarCompiler
from tests.server.fake import FakeClient, byte_tokenizer

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🦊"}}\n</tool_call>'
# Shows tools, calls and results in its own way, and opens the reasoning unless it is turned off.
TEMPLATE = (
    "{% for tool in tools or [] %}TOOL {{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif open_thinking %}<think>\n{% endif %}"
)


def http_of(script: str = CALL, template: str | None = TEMPLATE, **options: Any) -> tuple[TestClient, FakeClient]:
    engine = FakeClient(script, max_model_len=8192, tokenizer=byte_tokenizer(template))
    return TestClient(create_app(engine, ServerSettings(**options))), engine


def whole(http: TestClient, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json={"messages": ASK, "max_tokens": 2000, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(http: TestClient, **fields: Any) -> dict[str, Any]:
    """Return the sum of the chunks of a stream, as clients add them up."""
    response = http.post(CHAT, json={"messages": ASK, "max_tokens": 2000, "stream": True, **fields})
    assert response.status_code == 200, response.text
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    message: dict[str, Any] = {"content": ""}
    for chunk in chunks:
        choice = chunk["choices"][0]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": call["type"], "function": {"name": "", "arguments": ""}})
            for name, text in call["function"].items():
                calls[call["index"]]["function"][name] += text
    return {"message": message, "finish_reason": chunks[-1]["choices"][0]["finish_reason"]}


def calls_in(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = choice["message"].get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def refusal(http: TestClient, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json={"messages": ASK, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


# answers


def test_call_is_returned_apart_from_the_text():
    http, _ = http_of(f"Let me see.\n{CALL}")
    choice = whole(http, tools=[WEATHER])
    assert choice["message"]["content"] == "Let me see."
    assert calls_in(choice) == [("weather", '{"city": "Zürich 🦊"}')]
    assert choice["finish_reason"] == "tool_calls"
    call = choice["message"]["tool_calls"][0]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")


def test_answer_of_calls_alone_has_no_content():
    http, _ = http_of(f"{CALL}\n{CALL}")
    choice = whole(http, tools=[WEATHER])
    assert choice["message"]["content"] is None
    assert len(calls_in(choice)) == 2
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


@pytest.mark.parametrize(
    "script",
    [
        CALL,
        f"a {CALL}\n{CALL} b",
        "plain",
        "<tool_call>{bad</tool_call>",
        CALL[:-30],
        f"<think>why\n</think>\n\n{CALL}",
    ],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_stream_adds_up_to_the_whole_answer(script, parallel):
    http, _ = http_of(script)
    fields = {"tools": [WEATHER], "parallel_tool_calls": parallel}
    choice, sum_of_chunks = whole(http, **fields), streamed(http, **fields)
    assert calls_in(sum_of_chunks) == calls_in(choice)
    assert sum_of_chunks["message"]["content"] == (choice["message"]["content"] or "")
    assert sum_of_chunks["message"].get("reasoning_content") == choice["message"].get("reasoning_content")
    assert sum_of_chunks["finish_reason"] == choice["finish_reason"]


def test_arguments_are_streamed_before_the_call_is_complete():
    http, _ = http_of()
    body = {"messages": ASK, "tools": [WEATHER], "stream": True, "max_tokens": len(CALL.encode()) - 30}
    text = http.post(CHAT, json=body).text
    assert text.count('"arguments"') > 5


def test_calls_after_the_first_are_left_out_without_parallel_calls():
    http, _ = http_of(f"{CALL}\n{CALL}")
    assert len(calls_in(whole(http, tools=[WEATHER], parallel_tool_calls=False))) == 1


def test_answer_that_reaches_its_limit_inside_a_call_ends_with_length():
    http, _ = http_of()
    choice = whole(http, tools=[WEATHER], max_tokens=len(CALL.encode()) - 30)
    assert choice["finish_reason"] == "length"
    assert calls_in(choice)[0][0] == "weather"


def test_malformed_call_is_text():
    http, _ = http_of("<tool_call>{bad</tool_call>")
    choice = whole(http, tools=[WEATHER])
    assert choice["message"]["content"] == "<tool_call>{bad</tool_call>"
    assert calls_in(choice) == []
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_text_like_a_call_is_text_without_tools(fields):
    http, _ = http_of()
    assert whole(http, **fields)["message"]["content"] == CALL


def test_token_ids_and_logprobs_of_calls_are_complete_in_a_stream():
    http, _ = http_of()
    body = {"messages": ASK, "tools": [WEATHER], "max_tokens": 2000, "logprobs": True, "return_token_ids": True}
    choice = http.post(CHAT, json=body).json()["choices"][0]
    text = http.post(CHAT, json=body | {"stream": True}).text
    chunks = [json.loads(line[6:])["choices"][0] for line in text.split("\n\n") if line.startswith("data: {")]
    assert [token for chunk in chunks for token in chunk.get("token_ids") or ()] == choice["token_ids"]
    logprobs = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert logprobs == choice["logprobs"]["content"]


# prompts


def prompt_of(engine: FakeClient) -> str:
    return engine.tokenizer.decode(engine.seen[-1][0].token_ids, skip_special_tokens=False)


def test_template_gets_tools_calls_and_results():
    http, engine = http_of("ok")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    whole(http, messages=messages, tools=[{"type": "function", "function": {**WEATHER["function"], "strict": False}}])
    prompt = prompt_of(engine)
    assert f"TOOL {json.dumps(WEATHER)}\n" in prompt
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>' in prompt
    assert "tool: sunny" in prompt


def test_template_without_tools_gets_them_in_messages():
    http, engine = http_of(
        CALL, template="{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    results = [{"role": "tool", "tool_call_id": i, "content": text} for i, text in (("1", "sunny"), ("2", "cold"))]
    messages = [{"role": "system", "content": "Be brief."}, *ASK]
    history = [{"role": "assistant", "content": "I look.", "tool_calls": [call, call]}, *results]
    choice = whole(http, messages=[*messages, *history], tools=[WEATHER])
    assert calls_in(choice) == [("weather", '{"city": "Zürich 🦊"}')]
    prompt = prompt_of(engine)
    assert prompt.startswith("[system]Be brief.\n\n")
    assert json.dumps(WEATHER) in prompt
    assert (
        '[assistant]I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n' in prompt
    )
    assert prompt.endswith("[user]<tool_response>\nsunny\n</tool_response>\n<tool_response>\ncold\n</tool_response>")


def test_tools_are_left_out_of_the_prompt_if_none_may_be_called():
    http, engine = http_of("ok")
    whole(http, tools=[WEATHER], tool_choice="none")
    assert "TOOL" not in prompt_of(engine)


def test_tokenize_counts_tools():
    http, _ = http_of()
    with_tools = http.post("/tokenize", json={"messages": ASK, "tools": [WEATHER]}).json()["count"]
    assert with_tools > http.post("/tokenize", json={"messages": ASK}).json()["count"] + 100


# what is enforced


def grammar_for(**fields: Any) -> str | None:
    http, engine = http_of()
    whole(http, **fields)
    structured = engine.seen[-1][1].structured
    return None if structured is None else structured.text


def test_free_calls_are_not_constrained():
    assert grammar_for(tools=[WEATHER, TIME]) is None
    assert grammar_for(tools=[WEATHER, TIME], tool_choice="auto") is None


def test_required_calls_follow_a_grammar_of_all_tools():
    grammar = grammar_for(tools=[WEATHER, TIME], tool_choice="required")
    assert "TEXT" not in grammar
    assert '\\"weather\\"' in grammar
    assert '\\"time\\"' in grammar


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "time"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}},
    ],
)
def test_named_tool_is_the_only_one_in_the_grammar(choice):
    grammar = grammar_for(tools=[WEATHER, TIME], tool_choice=choice)
    assert "TEXT" not in grammar
    assert "weather" not in grammar
    assert '\\"time\\"' in grammar


def test_allowed_tools_keep_the_model_from_calling_others():
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}}
    grammar = grammar_for(tools=[WEATHER, TIME], tool_choice=choice)
    assert "TEXT" in grammar
    assert "weather" not in grammar


def test_strict_tool_is_constrained_also_if_the_model_may_choose():
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    grammar = grammar_for(tools=[strict, TIME])
    assert "TEXT" in grammar
    assert '"required": ["city"]' in grammar


def test_arguments_are_an_object_whatever_else_the_schema_allows():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": ["object", "null"]}}}
    assert '"type": "object"' in grammar_for(tools=[tool], tool_choice="required")


def test_schemas_of_strict_tools_are_parts_and_others_can_be_left_out():
    http, engine = http_of()
    strict = {"type": "function", "function": {**TIME["function"], "strict": True}}
    whole(http, tools=[WEATHER, strict], tool_choice="required")
    asked = engine.seen[-1][1].structured
    assert [part.place for part in asked.parts] == ["tools.1.function.parameters"]
    assert '"city"' in asked.grammar
    together = asked.fallback(lambda demands: [""] * len(demands))  # each can be used alone
    assert '"city"' not in together.grammar
    assert together.parts == asked.parts


def test_only_the_tool_at_fault_loses_its_schema():
    http, engine = http_of()
    names = ["f0", "f1", "f2"]
    tools = [{"type": "function", "function": {**WEATHER["function"], "name": name}} for name in names]
    whole(http, tools=tools, tool_choice="required")
    asked = engine.seen[-1][1].structured

    def kept(demand) -> list[bool]:
        lines = demand.grammar.splitlines()
        return [any(line.startswith(f"arguments_{i}:") and '"city"' in line for line in lines) for i in range(3)]

    first = asked.fallback(lambda demands: ["faulty" if "f1" in each.grammar else "" for each in demands])
    assert (kept(asked), kept(first)) == ([True] * 3, [True, False, True])
    assert first.dropped == ["tools.1.function.parameters (faulty)"]
    assert kept(first.fallback(None)) == [False] * 3


@pytest.mark.parametrize(
    "faulty",
    [
        {"pattern": "("},
        {"minLength": 2, "pattern": "^a$"},
        {"minLength": 5, "maxLength": 2},
        {"pattern": "\\d{1000000}"},
    ],
)
def test_a_schema_of_which_no_grammar_can_be_made_leaves_those_of_other_tools(faulty, caplog):
    engine = FakeClient(CALL, max_model_len=8192, tokenizer=byte_tokenizer(TEMPLATE))
    http = TestClient(create_app(engine, ServerSettings(tool_parser="qwen3_coder")))
    odd = {"type": "object", "properties": {"s": {"type": "string", **faulty}}}
    tools = [WEATHER, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    whole(http, tools=tools, tool_choice="required")
    tokenizer = engine.tokenizer
    LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids).compile(engine.seen[-1][1].structured)
    (record,) = [each.getMessage() for each in caplog.records if "not held" in each.getMessage()]
    assert "tools.1.function.parameters (" in record
    assert "tools.0" not in record


def test_what_is_left_out_of_the_schema_of_a_tool_is_named_for_the_log():
    http, engine = http_of()
    odd = {"type": "any", "required": None, "properties": {"a": {"uniqueItems": True, "minimum": -(2**63)}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
    whole(http, tools=[WEATHER, tool], tool_choice="required")
    place = "tools.1.function.parameters"
    dropped = {f"{place}/required", f"{place}/properties/a/uniqueItems", f"{place}/properties/a/minimum"}
    assert set(engine.seen[-1][1].structured.dropped) == dropped


@pytest.mark.parametrize("kind", ["any", 5, ["any", "null"], []])
def test_a_type_that_does_not_exist_is_only_refused_for_a_strict_tool(kind):
    http, _ = http_of()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
    whole(http, tools=[tool], tool_choice="required")
    tool["function"]["strict"] = True
    assert http.post(CHAT, json={"messages": ASK, "tools": [tool]}).status_code == 400


@pytest.mark.parametrize("pattern", ["^(?!x)", "a(?<=x)", "^x\\b", "^(x).*\\1"])
def test_patterns_that_look_around_are_left_out_unless_strict(pattern):
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    strict = {"type": "function", "function": {**tool["function"], "name": "g", "strict": True}}
    grammar = grammar_for(tools=[tool, strict], tool_choice="required")
    assert grammar.count(json.dumps(pattern)) == 1


def test_response_format_applies_to_answers_without_calls():
    schema = {"type": "object", "properties": {"marker": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    grammar = grammar_for(tools=[WEATHER], response_format=form)
    assert '"marker"' in grammar
    assert '\\"weather\\"' in grammar


# refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools.0.function.parameters"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            "tools.0.function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": 5}}]}, "tools.0.function.strict"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": 5}}]},
            "tools.0.function.description",
        ),
        ({"tools": [TIME, TIME]}, "tools.1.function.name"),
        ({"tools": [TIME] * 2000}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [TIME], "regex": "a"}, "regex"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.1.tool_calls.0"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": 5}]}, "messages.1.tool_calls"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ],
)
def test_wrong_field_is_named(fields, param):
    http, _ = http_of()
    assert refusal(http, **fields)["param"] == param


def test_tools_are_refused_if_the_server_runs_without_a_parser():
    http, _ = http_of(tool_parser="none")
    assert "--tool-parser none" in refusal(http, tools=[TIME])["message"]


def test_tools_are_refused_if_the_template_shows_an_unknown_format():
    http, _ = http_of(template="{{ tools }}{{ messages }}")
    assert "--tool-parser" in refusal(http, tools=[TIME])["message"]


def test_parser_by_name_is_used_whatever_the_template_shows():
    http, _ = http_of(template="{{ tools }}{{ messages }}", tool_parser="hermes")
    assert len(calls_in(whole(http, tools=[WEATHER]))) == 1


# reasoning

THOUGHT = "<think>\nhmm, <b>\n</think>\n\nanswer"


def test_reasoning_is_returned_apart_from_the_text():
    http, _ = http_of(THOUGHT)
    message = whole(http)["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm, <b>", "answer")
    assert message["reasoning"] == message["reasoning_content"]


def test_answer_continues_the_reasoning_that_the_prompt_opens():
    http, _ = http_of(THOUGHT.removeprefix("<think>"))
    message = whole(http, chat_template_kwargs={"open_thinking": True})["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm, <b>", "answer")


def test_answer_has_no_reasoning_if_the_prompt_closes_it():
    http, _ = http_of("a </think> b")
    message = whole(http, enable_thinking=False)["message"]
    assert message["content"] == "a </think> b"
    assert "reasoning_content" not in message


def test_reasoning_may_be_left_out():
    http, _ = http_of(THOUGHT)
    for choice in (whole(http, include_reasoning=False), streamed(http, include_reasoning=False)):
        assert choice["message"]["content"] == "answer"
        assert "reasoning_content" not in choice["message"]


def test_reasoning_stays_in_the_text_without_a_parser():
    http, _ = http_of(THOUGHT, reasoning_parser="none")
    assert whole(http)["message"]["content"] == THOUGHT


def test_budget_and_tags_reach_the_engine():
    http, engine = http_of(THOUGHT)
    whole(http, thinking_token_budget=7, chat_template_kwargs={"open_thinking": True})
    section = engine.seen[-1][1].reasoning
    assert (section.start, section.end, section.begun, section.max_tokens) == ("<think>", "</think>", True, 7)


def test_budget_is_refused_for_a_model_without_reasoning():
    http, _ = http_of(template="{{ messages }}")
    assert refusal(http, thinking_token_budget=7)["param"] == "thinking_token_budget"


@pytest.mark.parametrize("content", ["<think>so far ", [{"type": "text", "text": "<think>so far "}]])
def test_continued_answer_may_begin_inside_its_reasoning(content):
    http, _ = http_of("still</think>answer")
    messages = [*ASK, {"role": "assistant", "content": content}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    message = whole(http, **fields)["message"]
    assert (message["reasoning_content"], message["content"]) == ("still", "answer")


def test_ids_of_kimi_count_the_calls_of_the_conversation():
    call = "<|tool_call_begin|>functions.weather:9<|tool_call_argument_begin|>{}<|tool_call_end|>"
    http, _ = http_of(f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>", tool_parser="kimi_k2")
    earlier = {"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [earlier]}, {"role": "tool", "content": "5"}]
    calls = whole(http, messages=messages, tools=[WEATHER])["message"]["tool_calls"]
    assert [each["id"] for each in calls] == ["functions.weather:1", "functions.weather:2"]


def test_arguments_may_not_have_more_items_than_a_body(http):
    def asked(items: int) -> list[dict]:
        arguments = json.dumps({"a": [1] * items, "b": ",,[{" * 50_000})
        calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}] * 2
        return [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "hi"}]

    assert refusal(http, messages=asked(5000))["code"] == "context_length_exceeded"
    assert refusal(http, messages=asked(30_000))["param"] == "messages.0.tool_calls.1.function.arguments"
