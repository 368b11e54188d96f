"""--replace-unsupported: histories with images, files and the work of tools that another server has run."""

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types.beta import BetaContentBlockParam
from hypothesis import given, settings, strategies as st
from openai.types.chat import ChatCompletionContentPartParam
from openai.types.responses import ResponseInputItemParam
from pydantic import BaseModel
from starlette.testclient import TestClient

from jaxserve.server.app import create_app
from jaxserve.server.schemas.left_out import MEDIA
from jaxserve.server.schemas.message_blocks import OTHER_BLOCKS, READABLE
from jaxserve.server.schemas.response_items import PREFIXES, REFERENCE
from jaxserve.server.settings import ServerSettings
from tests.server.answering import answering, last_prompt

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HEADER = "x-jaxserve-left-out"
PNG = "data:image/png;base64,iVBORw0KGgo="
USER = {"role": "user", "content": "hi"}


class Server:
    """A server with or without the option, and the prompt and the header of its last answer."""

    def __init__(self, **options: Any):
        self.engine = answering("Hello", max_model_len=100_000)
        self.http = TestClient(create_app(self.engine, ServerSettings(**options)))

    def ask(self, path: str, **body: Any) -> tuple[str, str | None]:
        """Return the prompt and what the header says."""
        answer = self.http.post(path, json={"max_tokens": 5, **body} if path == MESSAGES else body)
        assert answer.status_code == 200, answer.text
        return last_prompt(self.engine), answer.headers.get(HEADER)

    def refusal(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json={"max_tokens": 5, **body} if path == MESSAGES else body)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]


@pytest.fixture(scope="module")
def server() -> Server:
    return Server(replace_unsupported=True)


@pytest.fixture(scope="module")
def strict() -> Server:
    return Server()


def types_of(union: Any) -> Iterator[str]:
    """Yield the types of the items in a union of an official client's classes."""
    for kind in get_args(union):
        if get_args(kind):
            yield from types_of(kind)
        elif isinstance(kind, type):
            model = issubclass(kind, BaseModel)
            hint = kind.model_fields["type"].annotation if model else get_type_hints(kind)["type"]
            yield from (value for value in get_args(hint) if isinstance(value, str))


def message(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": [*parts]}


# every type that the official clients know


@pytest.mark.parametrize("kind", sorted({*types_of(ResponseInputItemParam)} - {*PREFIXES, REFERENCE}))
def test_every_item_of_responses_is_read_or_its_refusal_names_the_option(server, strict, kind):
    for item in ({"type": kind, "id": "i1"}, {"type": kind, "id": "i1", "call_id": "c1", "status": "completed"}):
        prompt, _ = server.ask(RESPONSES, input=[USER, item, USER])
        assert prompt.count("[user]hi") == 2
        error = strict.refusal(RESPONSES, input=[USER, item, USER])
        assert (error["param"], "--replace-unsupported" in error["message"]) == ("input.1.type", True)


@pytest.mark.parametrize("kind", sorted({*types_of(BetaContentBlockParam)} - {*READABLE, *OTHER_BLOCKS}))
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_every_block_of_messages_is_read_or_its_refusal_names_the_option(server, strict, kind, role):
    turns = [USER, message(role, {"type": kind}), USER]
    prompt, left_out = server.ask(MESSAGES, messages=turns)
    name = left_out.removesuffix("=1")
    assert f"[{name.replace('_', ' ')} left out]" in prompt
    assert "--replace-unsupported" in strict.refusal(MESSAGES, messages=turns)["message"]


@pytest.mark.parametrize("kind", sorted({*types_of(ChatCompletionContentPartParam)} - {"text"}))
@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_every_part_of_chat_is_read_or_its_refusal_names_the_option(server, strict, kind, role):
    turns = [USER, message(role, {"type": "text", "text": "see"}, {"type": kind, kind: {}})]
    prompt, left_out = server.ask(CHAT, messages=turns)
    name = left_out.removesuffix("=1")
    assert f"[{role}]see\n[{name} left out]\n" in prompt
    assert "--replace-unsupported" in strict.refusal(CHAT, messages=turns)["message"]


# what stands in their place


def test_text_files_keep_their_text(server):
    data = "data:text/markdown;charset=utf-8;base64,IyBIaQ=="
    files = [{"type": "file", "file": {"filename": "a.md", "file_data": data}}]
    assert server.ask(CHAT, messages=[message("user", *files)]) == ("[user]a.md\n# Hi\n[assistant]", None)
    files = [{"type": "input_file", "filename": "a.md", "file_data": data}]
    assert server.ask(RESPONSES, input=[message("user", *files)]) == ("[user]a.md\n# Hi\n[assistant]", None)
    assert server.ask(RESPONSES, input=[message("user", {**files[0], "file_data": "data:text/plain,%23%20Hi"})]) == (
        "[user]a.md\n# Hi\n[assistant]",
        None,
    )
    source = {"type": "base64", "media_type": "text/plain", "data": "IyBIaQ=="}
    files = [{"type": "document", "title": "a.md", "source": source}]
    assert server.ask(MESSAGES, messages=[message("user", *files)]) == ("[user]a.md\n# Hi\n[assistant]", None)


@pytest.mark.parametrize("data", ["data:text/plain;base64,!", "data:text/plain;base64,/w==", "data:application/pdf,x"])
def test_files_of_anything_else_are_left_out(server, data):
    part = {"type": "input_file", "filename": "a.pdf", "file_data": data}
    prompt, left_out = server.ask(RESPONSES, input=[message("user", part)])
    assert (prompt, left_out) == ("[user]a.pdf\n[file left out]\n[assistant]", "file=1")


def test_image_in_a_result_of_a_tool_leaves_the_text_beside_it(server):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "done"}, {"type": "image_url", "image_url": {"url": PNG}}]
    turns = [USER, {"role": "assistant", "tool_calls": [call]}, {**message("tool", *parts), "tool_call_id": "c1"}]
    assert server.ask(CHAT, messages=turns)[0].endswith("[tool]done\n[image left out]\n[assistant]")

    items = [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": PNG}]},
    ]
    prompt, left_out = server.ask(RESPONSES, input=[USER, *items])
    assert prompt.endswith('"arguments": {}}</tool_call>\n[tool][image left out]\n[assistant]')
    assert left_out == "image=1"

    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": {}}]}
    turns = [USER, message("assistant", {"type": "tool_use", "id": "c1", "name": "f", "input": {}})]
    prompt, left_out = server.ask(MESSAGES, messages=[*turns, message("user", result)])
    assert prompt.endswith("[tool][image left out]\n[assistant]")
    assert left_out == "image=1"


def test_search_of_another_server_keeps_its_query_and_its_results(server):
    found = {"type": "web_search_result", "title": "Rivers", "url": "https://r.example", "encrypted_content": "Zm9v"}
    blocks = [
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "Aare"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [found]},
    ]
    prompt, left_out = server.ask(MESSAGES, messages=[USER, message("assistant", *blocks), USER])
    expected = '[server tool use: web_search]\n{"query":"Aare"}\n[web search tool result]\nRivers\nhttps://r.example'
    assert prompt == f"[user]hi\n[assistant]I search.\n{expected}\n[user]hi\n[assistant]"
    assert left_out is None

    items = [
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "Aare"}},
        {"type": "file_search_call", "id": "fs", "queries": ["Aare"], "results": [{"filename": "r", "text": "long"}]},
        {"type": "code_interpreter_call", "id": "ci", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]},
        {"type": "mcp_call", "id": "m", "server_label": "s", "name": "f", "arguments": "{}", "output": "ok"},
    ]
    prompt, left_out = server.ask(RESPONSES, input=[USER, *items, USER])
    for kept in ('"query":"Aare"', '["Aare"]\nr\nlong', "[code interpreter call]\n1+1\n2", "[mcp call: f]\n{}\nok"):
        assert kept in prompt
    assert left_out is None


def test_calls_of_unknown_tools_and_their_results_are_calls_of_functions(server):
    items = [
        {"type": "local_shell_call", "id": "l", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "lo", "call_id": "c1", "output": "a.txt"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "/", "stderr": "", "outcome": {}}]},
        {"type": "apply_patch_call", "call_id": "c3", "operation": {"type": "delete_file", "path": "x"}},
        {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed"},
        {"type": "computer_call", "call_id": "c4", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "c4", "output": {"type": "computer_screenshot", "image_url": PNG}},
    ]
    prompt, left_out = server.ask(RESPONSES, input=[USER, *items])
    assert prompt == (
        "[user]hi\n"
        '[assistant]<tool_call>{"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}}</tool_call>\n'
        "[tool]a.txt\n"
        '[assistant]<tool_call>{"name": "shell", "arguments": {"commands": ["pwd"]}}</tool_call>\n'
        "[tool]/\n"
        '[assistant]<tool_call>{"name": "apply_patch", "arguments": {"type": "delete_file", "path": "x"}}</tool_call>\n'
        "[tool]completed\n"
        '[assistant]<tool_call>{"name": "computer", "arguments": {"type": "screenshot"}}</tool_call>\n'
        "[tool][image left out]\n[assistant]"
    )
    assert left_out == "image=1"


def test_custom_calls_and_audio_of_an_assistant_in_a_chat_are_read(server, strict):
    call = {"id": "c1", "type": "custom", "custom": {"name": "sh", "input": "ls"}}
    turns = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "x"}]
    assert '"arguments": {"input": "ls"}' in server.ask(CHAT, messages=turns)[0]
    assert "--replace-unsupported" in strict.refusal(CHAT, messages=turns)["message"]
    turns = [USER, {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}, USER]
    assert "[assistant][audio left out]\n" in server.ask(CHAT, messages=turns)[0]
    assert "--replace-unsupported" in strict.refusal(CHAT, messages=turns)["message"]


def test_documents_lose_their_citations(server, strict):
    block = {"type": "document", "source": {"type": "text", "data": "body"}, "citations": {"enabled": True}}
    assert server.ask(MESSAGES, messages=[message("user", block)]) == ("[user]body\n[assistant]", "citations=1")
    assert "--replace-unsupported" in strict.refusal(MESSAGES, messages=[message("user", block)])["message"]


def test_type_that_a_client_makes_up_neither_breaks_the_header_nor_the_prompt(server):
    kinds = ["Ü\r\nset-cookie: a", "x" * 100, "", "<|end|>", *(f"kind_{i}" for i in range(40))]
    prompt, left_out = server.ask(CHAT, messages=[message("user", *({"type": kind} for kind in kinds))])
    assert left_out.startswith("item=4, kind_0=1")
    assert left_out.count("=") == 16
    assert prompt.count(" left out]") == len(kinds)
    assert "<|end|>" not in prompt
    assert "set-cookie" not in prompt


@pytest.mark.parametrize("part", [{"type": "text", "text": 5}, {"type": "text"}, {"text": "a"}, 5, {"type": 5}])
def test_parts_that_are_not_valid_are_still_refused(server, part):
    server.refusal(CHAT, messages=[{"role": "user", "content": [part]}])
    server.refusal(RESPONSES, input=[{"role": "user", "content": [part]}])
    server.refusal(MESSAGES, messages=[{"role": "user", "content": [part]}])


# where it is said


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_header_says_what_was_left_out_whole_and_in_streams(server, path, stream):
    kind = {CHAT: "image_url", MESSAGES: "image", RESPONSES: "input_image"}[path]
    name = "input" if path == RESPONSES else "messages"
    turn = message("user", {"type": kind}, {"type": kind})
    body = {name: [turn], "stream": stream} | ({"max_tokens": 5} if path == MESSAGES else {})
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200
    assert answer.headers[HEADER] == "image=2"
    assert HEADER not in server.http.post(path, json=body | {name: [USER]}).headers


def test_log_names_what_is_left_out_once(server, caplog):
    caplog.set_level("INFO", logger="jaxserve")
    turn = message("user", {"type": "video_url"}, {"type": "kind_of_this_test"})
    for _ in range(3):
        server.ask(CHAT, messages=[turn, turn])
    assert caplog.text.count("left out are kind_of_this_test, video (--replace-unsupported)") == 1


def test_responses_that_are_kept_can_be_continued(server):
    item = {"type": "image_generation_call", "id": "ig_1", "result": "iVBORw0KGgo=", "status": "completed"}
    first = server.http.post(RESPONSES, json={"input": [USER, item, USER]}).json()
    assert server.http.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"][1]["id"] == "ig_1"
    prompt, _ = server.ask(RESPONSES, input="more", previous_response_id=first["id"])
    assert "[image generation call left out]\n[user]hi\n[assistant]Hello\n[user]more" in prompt
    reference = {"type": "item_reference", "id": "ig_1"}
    assert "[image generation call left out]" in server.ask(RESPONSES, input=[reference, USER])[0]


def test_tokens_of_such_conversations_are_counted(server):
    turns = [message("user", {"type": "image", "source": {}})]
    answer = server.http.post(f"{MESSAGES}/count_tokens", json={"messages": turns})
    assert answer.json()["input_tokens"] == len("[user][image left out]\n[assistant]")
    assert answer.headers[HEADER] == "image=1"
    parts = [message("user", {"type": "image_url", "image_url": {"url": PNG}})]
    assert server.http.post("/tokenize", json={"messages": parts}).headers[HEADER] == "image=1"
    items = [message("user", {"type": "input_image", "image_url": PNG})]
    assert server.http.post(f"{RESPONSES}/input_tokens", json={"input": items}).headers[HEADER] == "image=1"


def test_option_stays_off_for_operators_and_without_it_nothing_changes(strict):
    answer = strict.http.post(CHAT, json={"messages": [USER]})
    assert HEADER not in answer.headers
    assert json.loads(answer.text)["choices"][0]["message"]["content"] == "Hello"


# anything


KINDS = st.sampled_from(
    [*MEDIA, *READABLE, *OTHER_BLOCKS, "content", "base64", "x_call", "x_call_output", "message", "function_call"]
)
FIELDS = st.sampled_from(
    [
        *("type", "source", "data", "media_type", "file", "file_data", "filename", "title", "citations", "enabled"),
        *("content", "output", "text", "arguments", "input", "action", "call_id", "id", "name", "role", "url", "audio"),
        *("tool_use_id", "custom", "function", "status", "encrypted_content", "transcript", "tool_calls"),
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.sampled_from(["a", "text/plain", "YQ==", "data:text/plain,a"])
VALUES = st.recursive(
    KINDS | SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=5),
    max_leaves=10,
)
OBJECTS = st.dictionaries(FIELDS, VALUES, min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(others=OBJECTS, kind=KINDS, role=st.sampled_from(["user", "assistant", "tool"]))
def test_whatever_a_history_has_is_read_or_refused_without_500(server, others, kind, role):
    item = {**others, "type": kind}
    for path, body in (
        (CHAT, {"messages": [USER, {"role": role, "content": [item]}, {"role": "assistant", **others}]}),
        (f"{RESPONSES}/input_tokens", {"input": [USER, item, message("user", item)]}),
        (f"{MESSAGES}/count_tokens", {"messages": [USER, {"role": "assistant", "content": [item]}]}),
    ):
        answer = server.http.post(path, json=body)  # which raises what the server does not expect
        assert answer.status_code in (200, 400), (body, answer.text)


def test_deep_content_is_no_error(server):
    value: Any = "x"
    for _ in range(60):
        value = {"type": "tool_result", "tool_use_id": "t", "content": [value, {"type": "image"}]}
    value = {"type": "web_fetch_tool_result", "content": value}
    for path in (CHAT, MESSAGES):
        prompt, _ = server.ask(path, messages=[USER, message("assistant", value), USER])
        assert "[image left out]" in prompt
