"""Fields of /v1/responses: each is supported, or refused by its name."""

import httpx
import pytest

from jaxserve.server.schemas.responses import INCLUDABLE
from tests.server.answering import answering, last_prompt, tool
from tests.server.serving import serving

FUNCTION = tool("f")


@pytest.fixture(scope="module")
def fake():
    return answering("ok")


@pytest.fixture(scope="module")
def post(fake):
    with serving(fake) as address, httpx.Client(base_url=address.url) as client:
        yield lambda **fields: client.post("/v1/responses", json={"input": "hi", **fields})


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("input", {"input": None}),
        ("input", {"input": 5}),
        ("input", {"input": []}),
        ("input", {"input": [{"type": "reasoning", "summary": []}]}),
        ("input", {"input": [5]}),
        ("model", {"model": "other"}),
        ("conversation", {"conversation": "conv_1"}),
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
        ("context_management", {"context_management": [{"type": "compaction"}]}),
        ("moderation", {"moderation": {"model": "m"}}),
        ("n", {"n": 2}),
        ("messages", {"messages": [{"role": "user", "content": "hi"}]}),
        ("max_tokens", {"max_tokens": 5}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("reasoning_effort", {"reasoning_effort": "low"}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("include", {"include": ["everything"]}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("max_output_tokens", {"max_output_tokens": 100_000}),
        ("top_logprobs", {"top_logprobs": 1000}),
        ("temperature", {"temperature": -1}),
        ("truncation", {"truncation": "middle"}),
        ("metadata", {"metadata": {str(n): "" for n in range(17)}}),
        ("stream_options", {"stream_options": {"include_obfuscation": True}}),
        ("background", {"background": True, "store": False}),
        ("previous_response_id", {"previous_response_id": "resp_unknown"}),
        ("reasoning.effort", {"reasoning": {"effort": "extreme"}}),
        ("reasoning.context", {"reasoning": {"context": "all_turns"}}),
        ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
        ("reasoning.efort", {"reasoning": {"efort": "low"}}),
        ("text.formt", {"text": {"formt": {"type": "json_object"}}}),
        ("text.verbosity", {"text": {"verbosity": "low"}}),
        ("text.format.type", {"text": {"format": {"type": "yaml"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}),
        (
            "structured_outputs.regex",
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        ),
        ("tools.0.type", {"tools": [{"type": "file_search", "vector_store_ids": ["x"]}]}),
        ("tools.0.type", {"tools": [{"type": "web_search"}]}),
        ("tools.1.type", {"tools": [FUNCTION, {"type": "mcp", "server_label": "x"}]}),
        ("tools.0.type", {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}),
        ("tools.0.type", {"tools": [{"type": "computer_use_preview"}]}),
        ("tools.0.type", {"tools": [{"type": "image_generation"}]}),
        ("tools.0.type", {"tools": [{"function": {"name": "f"}}]}),
        ("tools.0.name", {"tools": [{"type": "function"}]}),
        ("tools.1.name", {"tools": [FUNCTION, FUNCTION]}),
        ("tools.0.parameters", {"tools": [{**FUNCTION, "parameters": []}]}),
        ("tools.0.defer_loading", {"tools": [{**FUNCTION, "defer_loading": True}]}),
        ("tools.0.format", {"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]}),
        ("tools.0.tools", {"tools": [{"type": "namespace", "name": "n"}]}),
        ("tools.0.tools.1.type", {"tools": [{"type": "namespace", "name": "n", "tools": [FUNCTION, {"type": "mcp"}]}]}),
        ("tools.1.tools.0.name", {"tools": [FUNCTION, {"type": "namespace", "name": "n", "tools": [tool("!")]}]}),
        ("tools.0.tools.0.name", {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [FUNCTION], "tool_choice": "sometimes"}),
        ("tool_choice.name", {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}),
        ("tool_choice.type", {"tools": [FUNCTION], "tool_choice": {"type": "file_search"}}),
        ("tool_choice.tools.0", {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [{}]}}),
        (
            "tool_choice.tools",
            {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        ),
    ],
)
def test_refusal_names_the_field(post, field, fields):
    answer = post(**fields)
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert field.split(".")[-1] in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"include": list(INCLUDABLE)},
        {
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
            "parallel_tool_calls": True,
        },
        {"reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "medium"}},
        {"reasoning": None, "text": None, "tools": [], "tool_choice": "auto", "metadata": None, "instructions": None},
        {"service_tier": "flex", "safety_identifier": "x", "prompt_cache_retention": "24h", "max_tool_calls": 1},
        {"client_metadata": {"a": "b"}, "n": 1, "conversation": None, "prompt": None},
        {"stream": False, "stream_options": None, "background": False, "truncation": "auto"},
        {"tools": [{**FUNCTION, "strict": True}]},
        {"tools": [{**FUNCTION, "strict": None, "description": None, "parameters": None}]},
        {"text": {"format": {"type": "text"}}},
    ],
    ids=str,
)
def test_field_without_another_effect_is_accepted(post, fields):
    assert post(**fields).status_code == 200, post(**fields).text


def test_stream_options_are_accepted_with_a_stream(post):
    assert post(stream=True, stream_options={"include_obfuscation": False}).status_code == 200


def test_effort_none_switches_thinking_off(fake, post):
    template = "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"
    other = answering("ok")
    other.tokenizer = type(other.tokenizer)(other.tokenizer._tokenizer, chat_template=template)
    with serving(other) as address:
        url = f"{address.url}/v1/responses"
        httpx.post(url, json={"input": "hi", "reasoning": {"effort": "none"}}).raise_for_status()
        assert last_prompt(other) == "hi False none"
        httpx.post(url, json={"input": "hi", "reasoning": {"effort": "high"}}).raise_for_status()
        assert last_prompt(other) == "hi  high"


def test_sealed_reasoning_comes_back_in_the_prompt():
    fake = answering("<think>secret plan</think>ok")
    with serving(fake) as address:
        url = f"{address.url}/v1/responses"
        asked = {"store": False, "include": ["reasoning.encrypted_content"]}
        reasoning = httpx.post(url, json={"input": "hi", **asked}).json()["output"][0]
        plain = httpx.post(url, json={"input": "hi"}).json()["output"][0]
        returned = {name: reasoning[name] for name in ("type", "id", "summary", "encrypted_content")}
        httpx.post(url, json={"input": [returned, {"role": "user", "content": "go on"}]}).raise_for_status()
    assert "encrypted_content" not in plain
    assert "<think>secret plan</think>" in last_prompt(fake)


def test_body_of_another_media_type_is_refused(post):
    with serving(answering("ok")) as address:
        answer = httpx.post(f"{address.url}/v1/responses", content=b'{"input": "hi"}')
    assert answer.status_code == 415
