"""Arbitrary JSON bodies get 200 or a 4xx with an error envelope, never a 500."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.schemas.completions import CompletionBody
from jaxserve.server.schemas.messages import MessagesBody, PromptBody
from jaxserve.server.schemas.other import DetokenizeBody, EmbeddingBody, TokenizeBody
from jaxserve.server.schemas.response_items import PREFIXES, REFERENCE, ROLES, TEXTS
from jaxserve.server.schemas.responses import ResponsesBody
from jaxserve.server.schemas.scoring import RerankBody, ScoreBody

BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
    "/v1/completions": CompletionBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": PromptBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/score": ScoreBody,
    "/v1/rerank": RerankBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
VALID = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "text_1": "hi",
    "text_2": ["hi", "ho"],
    "query": "hi",
    "tokens": [1, 2],
    "max_tokens": 4,
    "max_output_tokens": 4,
}
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
small = st.integers(-3, 40) | st.floats(-2, 3) | st.sampled_from(["", "stop", "user", "text", "auto", "base64"])
values = st.recursive(
    scalars | small,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.sampled_from(["type", "role", "content", "5", "text"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_arbitrary_body_is_served_or_refused_without_500(http, path, data):
    names = sorted(BODIES[path].model_fields)
    changes = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=3))
    base = {
        name: value for name, value in VALID.items() if name in names and not (name == "prompt" and path == "/tokenize")
    }
    if path == "/v1/rerank":
        base["documents"] = ["hi", {"text": "ho"}]
    body = json.dumps(base | changes)
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


TYPES = ["text", "tool_use", "tool_result", "thinking", "document", "content", "search_result", "image", "enabled"]
NAMES = [
    "type",
    "text",
    "id",
    "name",
    "input",
    "tool_use_id",
    "content",
    "is_error",
    "source",
    "data",
    "title",
    "thinking",
]
blocks = st.recursive(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TYPES) | small | scalars, max_size=5),
    lambda inner: st.dictionaries(
        st.sampled_from(NAMES), st.sampled_from(TYPES) | inner | st.lists(inner, max_size=3), max_size=5
    ),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "system"]), st.lists(blocks, max_size=3)),
        min_size=1,
        max_size=3,
    )
)
def test_arbitrary_content_blocks_are_read_or_refused_without_500(http, turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    answer = http.post("/v1/messages/count_tokens", json={"messages": messages})
    assert answer.status_code in (200, 400), (messages, answer.text)


# Items and tools of responses whose fields often have valid values.
PART_TYPES = st.sampled_from([*TEXTS, "reasoning_text", "summary_text", "input_image"])
PARTS = st.fixed_dictionaries({"type": PART_TYPES, "text": st.text(max_size=3) | values}) | values
CONTENT = st.text(max_size=3) | st.lists(PARTS, max_size=3)
TOOL_NAMES = st.sampled_from(["f", "g", ""])
FIELDS = {
    "type": st.sampled_from([*PREFIXES, REFERENCE, "function", "custom", "namespace", "web_search_call"]) | values,
    "role": st.sampled_from(ROLES) | values,
    "content": CONTENT | values,
    "summary": CONTENT | values,
    "output": CONTENT | values,
    "name": TOOL_NAMES | values,
    "namespace": TOOL_NAMES | values,
    "call_id": TOOL_NAMES | values,
    "arguments": st.sampled_from(["{}", '{"a": 1}', "["]) | values,
    "input": TOOL_NAMES | values,
    "id": TOOL_NAMES | values,
    "encrypted_content": st.sampled_from(["jaxserve:YQ==", "jaxserve:!"]) | values,
    "format": values,
    "parameters": values,
}
objects = st.dictionaries(st.sampled_from(sorted(FIELDS)), st.none(), min_size=1).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)


@settings(max_examples=60, deadline=None)
@given(items=st.lists(objects, max_size=4), tools=st.lists(objects, max_size=2), choice=TOOL_NAMES | objects)
def test_arbitrary_items_and_tools_are_served_or_refused_without_500(http, items, tools, choice):
    asked = {"input": "hi", "tools": tools}
    for body in ({"input": items}, asked, asked | {"tool_choice": choice}):
        answer = http.post("/v1/responses", json=body | {"max_output_tokens": 4})
        assert answer.status_code in (200, 400), (body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
