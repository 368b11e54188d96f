"""Conversations by the official clients, inside the test's process: an answer becomes a part of the next request."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anthropic
import openai
from starlette.testclient import TestClient

from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient, byte_tokenizer

ASK = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Says it.", "parameters": PARAMETERS}
TOOL = {"name": "get_weather", "input_schema": PARAMETERS}
MODES = ("whole", "stream", "background")


@contextlib.contextmanager
def conversing(script: str, template: str, **options: Any) -> Iterator[tuple[TestClient, FakeClient]]:
    """Yield a client of a server whose model answers with `script`, and its engine."""
    engine = FakeClient(script, max_model_len=100_000, tokenizer=byte_tokenizer(template))
    app = create_app(engine, ServerSettings(**options))
    with TestClient(app, raise_server_exceptions=False) as http:
        yield http, engine


def chat(http: TestClient, mode: str, history: Sequence[Any], *, strip: bool, **fields: Any) -> list[Any]:
    """Return the messages to add to a chat's history: the answer, and a result for each of its calls."""
    client = openai.OpenAI(http_client=http, base_url="http://testserver/v1", api_key="none", max_retries=0)
    asked = {"model": "fake", "messages": [*history], "tools": [{"type": "function", "function": FUNCTION}], **fields}
    if mode == "stream":
        with client.chat.completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    calls = message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in calls]
    return [message.model_dump(exclude_none=strip), *results] if calls else [message.model_dump(exclude_none=strip)]


def responses(http: TestClient, mode: str, history: Sequence[Any], *, strip: bool, **fields: Any) -> list[Any]:
    """Return the items to add to the input of the Responses API."""
    client = openai.OpenAI(http_client=http, base_url="http://testserver/v1", api_key="none", max_retries=0)
    asked = {"model": "fake", "input": [*history], "tools": [{"type": "function", **FUNCTION}], **fields}
    asked["include"] = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    if mode == "stream":
        with client.responses.stream(**asked) as stream:
            response = stream.get_final_response()
    else:
        response = client.responses.create(**asked, background=mode == "background")
        while response.status in ("queued", "in_progress"):
            response = client.responses.retrieve(response.id)
    assert response.status in ("completed", "incomplete"), response
    calls = [item for item in response.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    return [*(item.model_dump(exclude_none=strip) for item in response.output), *results]


def messages(http: TestClient, mode: str, history: Sequence[Any], *, strip: bool, **fields: Any) -> list[Any]:
    """Return the messages to add to a conversation of the Messages API."""
    client = anthropic.Anthropic(http_client=http, base_url="http://testserver", api_key="none", max_retries=0)
    asked = {"model": "fake", "max_tokens": 5000, "messages": [*history], "tools": [TOOL], **fields}
    if mode == "stream":
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
        for block in message.content
        if block.type == "tool_use"
    ]
    answer = message.model_dump(exclude_none=strip)
    return [answer, {"role": "user", "content": results or "go on"}]


APIS: dict[str, Callable[..., list[Any]]] = {"chat": chat, "responses": responses, "messages": messages}


def calls_in(api: str, added: Sequence[Any]) -> list[str]:
    """Return the names of the calls in what an answer added to a history."""
    if api == "chat":
        return [call["function"]["name"] for call in added[0].get("tool_calls") or []]
    if api == "responses":
        return [item["name"] for item in added if item.get("type") == "function_call"]
    return [block["name"] for block in added[0]["content"] if block["type"] == "tool_use"]


def hermes(arguments: str) -> str:
    """Return a call whose arguments are any text."""
    return f'<tool_call>\n{{"name": {json.dumps(FUNCTION["name"])}, "arguments": {arguments}}}\n</tool_call>'
