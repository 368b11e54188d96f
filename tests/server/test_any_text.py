"""Any text in any place of a request gets an answer or a refusal in JSON, never an internal error."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conversations import ASK, FUNCTION, conversing
from tests.support.thorough import THOROUGH

TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}]{{ m.name }}{{ m.reasoning_content }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id ~ c.function | tojson }}{% endfor %}{{ m.tool_call_id }}"
    "{% endfor %}{{ enable_thinking }}{{ reasoning_effort }}<tool_call></tool_call></think>"
)
TEXTS = {
    "empty": "",
    "white space": " \t\r\n",
    "lone surrogate": "a\ud83db",
    "NUL": "a\0b",
    "byte order mark": "\ufeffa",
    "odd characters": "a\u202e\u2028\u0085\ufffe\U0010ffff\ud7ff\u200d\x1b[0m",
    "long": "😀x" * 150,
    "braces": "{" * 300,
    "special tokens": "<|end|><tool_call>{</think>{{ 7 }}",
}
if THOROUGH:
    TEXTS |= {"1 MB": "x" * 10**6, "1 MB of surrogates": "\ud83d" * 10**6, "1 MB of quotes": '"\\' * 500_000}

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "score": "/v1/score",
    "rerank": "/v1/rerank",
    "tokenize": "/tokenize",
}


def chat_bodies(x: str) -> Iterator[dict[str, Any]]:
    def called(id: Any = "c", name: Any = "f", arguments: Any = "{}") -> dict[str, Any]:
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"messages": [*ASK, {"role": "assistant", "tool_calls": [call]}, {**result, "tool_call_id": id}]}

    result = {"role": "tool", "content": x}
    for message in ({"role": "user", "content": x}, {"role": "system", "content": x}, {"role": x, "content": "a"}):
        yield {"messages": [message, *ASK]}
    yield {"messages": [{"role": "user", "content": "a", "name": x}]}
    yield from (called(id=x), called(name=x), called(arguments=x), called(arguments=json.dumps({x: x})))
    for function in ({"name": x}, {"name": "f", "description": x}):
        yield {"messages": ASK, "tools": [{"type": "function", "function": function}]}
    for properties in ({x: {"type": "string"}}, {"a": {"enum": [x]}}, {"a": {"type": x}}):
        parameters = {"type": "object", "properties": properties}
        function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        yield {"messages": ASK, "tools": [function], "tool_choice": "required"}
    for choice in (x, {"type": "function", "function": {"name": x}}, {"type": x}):
        yield {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": choice}
    fields = ("user", "stop", "model", "cache_salt", "guided_regex", "grammar", "reasoning_effort", x, "tool_choice")
    for field in fields:
        yield {"messages": ASK, field: x}
    yield {"messages": ASK, "metadata": {x: x}, "bad_words": [x], "stop": [x]}
    yield {"messages": ASK, "guided_choice": [x, "b"]}
    yield {"messages": ASK, "chat_template_kwargs": {x: x}}
    yield {"messages": ASK, "chat_template_kwargs": {"enable_thinking": x}}


def response_bodies(x: str) -> Iterator[dict[str, Any]]:
    yield from ({"input": x}, {"input": "a", "metadata": {x: x}}, {"input": "a", "tools": [{"type": x}]})
    for field in ("instructions", "user", "safety_identifier", "prompt_cache_key", "previous_response_id"):
        yield {"input": "a", field: x}
    reasoning = {"type": "reasoning", "summary": []}
    for items in (
        [{"type": "function_call", "call_id": x, "name": x, "arguments": x}],
        [{"type": "custom_tool_call", "call_id": x, "name": "f", "input": x}],
        [{"type": "function_call_output", "call_id": x, "output": x}],
        [{**reasoning, "content": [{"type": "reasoning_text", "text": x}], "encrypted_content": x}],
        [{**reasoning, "encrypted_content": f"jaxserve:{x}"}],
        [{"role": "user", "content": "a", "id": x}],
        [{"type": "item_reference", "id": x}],
        [{"type": x}],
    ):
        yield {"input": [*ASK, *items, *ASK]}
    form = {"type": "grammar", "syntax": "lark", "definition": x}
    yield {"input": "a", "tools": [{"type": "custom", "name": "f", "description": x, "format": form}]}
    yield {"input": "a", "tools": [{"type": "namespace", "name": x, "tools": [{"type": "function", "name": "f"}]}]}


def message_bodies(x: str) -> Iterator[dict[str, Any]]:
    for fields in ({"system": x}, {"stop_sequences": [x]}, {"metadata": {"user_id": x}}, {"model": x}):
        yield {"messages": ASK, **fields}
    yield {"messages": ASK, "tools": [{"name": "f", "description": x, "input_schema": {"description": x}}]}
    yield {"messages": ASK, "tools": [{"name": x, "input_schema": {}}]}
    thinking = {"type": "thinking", "thinking": x, "signature": x}
    use = [thinking, {"type": "tool_use", "id": x, "name": x, "input": {x: x}}]
    result = [{"type": "tool_result", "tool_use_id": x, "content": x}]
    yield {"messages": [*ASK, {"role": "assistant", "content": use}, {"role": "user", "content": result}]}
    document = {"type": "document", "title": x, "context": x, "source": {"type": "text", "data": x}}
    for content in (x, [{"type": "text", "text": x}], [document], [{"type": x}]):
        yield {"messages": [{"role": "user", "content": content}]}


def bodies(api: str, x: str) -> Iterator[dict[str, Any]]:
    match api:
        case "chat":
            yield from chat_bodies(x)
        case "responses":
            yield from response_bodies(x)
        case "messages":
            yield from ({"max_tokens": 2, **body} for body in message_bodies(x))
        case "completions":
            yield from ({"prompt": x}, {"prompt": x, "echo": True, "logprobs": 1}, {"prompt": "a", "suffix": x})
        case "embeddings":
            yield {"input": x, "user": x}
        case "score":
            yield {"text_1": x, "text_2": x}
        case "rerank":
            yield {"query": x, "documents": [{"text": x, x: x}], "return_documents": True}
        case "tokenize":
            yield from ({"prompt": x}, {"messages": [{"role": "user", "content": x}], "return_token_strs": True})


@pytest.mark.parametrize("api", PATHS)
def test_any_text_in_any_place_is_answered_or_refused(api):
    with conversing("ok", TEMPLATE) as (http, engine):
        for name, text in TEXTS.items():
            for body in bodies(api, text):
                data = json.dumps(body)
                answer = http.post(PATHS[api], content=data, headers={"content-type": "application/json"})
                assert answer.status_code in (200, 400, 404), (name, data[:300], answer.text)
                assert isinstance(json.loads(answer.content.decode()), dict)
                assert answer.status_code == 200 or len(answer.text) < 3000
        assert not engine.active
