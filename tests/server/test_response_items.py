"""The input of a response: what prompt its items become, and which items are refused."""

import httpx
import pytest

from jaxserve.core.errors import RequestError
from jaxserve.server.schemas.response_items import messages_of, reasoning_text, seal
from tests.server.answering import answering
from tests.server.serving import serving

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "42"}


def messages(*items, instructions=None):
    return messages_of([(f"input.{index}", item) for index, item in enumerate(items)], instructions)


def call_message(**fields):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **fields}


@pytest.mark.parametrize(
    "content",
    [
        "a\nb",
        [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}],
        [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}, {"type": "refusal", "refusal": "b"}],
    ],
)
@pytest.mark.parametrize("kind", [{}, {"type": "message"}, {"type": "message", "id": "msg_1", "status": "completed"}])
def test_message_has_a_text_or_text_parts(content, kind):
    for role in ("user", "assistant"):
        assert messages({"role": role, "content": content, **kind}) == [{"role": role, "content": "a\nb"}]


def test_instructions_and_leading_developer_messages_are_one_message():
    developer = {"role": "developer", "content": "Be kind."}
    system = {"role": "system", "content": "Be quick."}
    expected = [{"role": "system", "content": "Be brief.\n\nBe kind.\n\nBe quick."}]
    assert messages(developer, system, instructions="Be brief.") == expected
    assert messages(developer) == [{"role": "developer", "content": "Be kind."}]


def test_later_developer_message_stays_in_its_place():
    developer = {"role": "developer", "content": "Now be kind."}
    assert messages(USER, developer, instructions="x") == [{"role": "system", "content": "x"}, USER, developer]


def test_reasoning_text_and_calls_of_a_turn_are_one_message():
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    second = {**CALL, "call_id": "d"}
    turn = messages(USER, reasoning, text, CALL, second, OUTPUT, {**OUTPUT, "call_id": "d"})
    assert [message["role"] for message in turn] == ["user", "assistant", "tool", "tool"]
    assert (turn[1]["reasoning_content"], turn[1]["content"]) == ("hm", "I look.")
    assert [call["id"] for call in turn[1]["tool_calls"]] == ["c", "d"]


def test_text_after_a_call_belongs_to_the_same_message():
    text = {"role": "assistant", "content": "Done?"}
    assert messages(CALL, text, OUTPUT) == [
        call_message(content="Done?"),
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ]


def test_turns_of_an_assistant_in_succession_are_messages_of_their_own():
    text = {"role": "assistant", "content": "One."}
    assert messages(text, text) == [text, text]
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert len(messages(text, reasoning, text)) == 2


def test_output_of_a_call_is_a_text_or_text_parts():
    parts = [{"type": "input_text", "text": "42"}]
    assert messages({**OUTPUT, "output": parts}) == messages(OUTPUT)


def test_custom_call_is_a_call_with_its_text_as_argument():
    item = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 'say "hi"'}
    (message,) = messages(item)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"input": "say \\"hi\\""}'}
    output = {**OUTPUT, "type": "custom_tool_call_output"}
    assert messages(output) == messages(OUTPUT)


def test_reasoning_is_its_content_or_what_was_sealed_or_its_summary():
    content, summary = [{"type": "reasoning_text", "text": "c"}], [{"type": "summary_text", "text": "s"}]
    assert reasoning_text({"content": content, "summary": summary, "encrypted_content": seal("e")}) == "c"
    assert reasoning_text({"content": None, "summary": summary, "encrypted_content": seal("é")}) == "é"
    assert reasoning_text({"summary": summary, "encrypted_content": "gAAAAunknown"}) == "s"
    assert reasoning_text({"summary": [], "encrypted_content": "jaxserve:!!"}) == ""
    assert messages({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}) == []


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({}, "input.0.type"),
        ({"type": "web_search_call", "id": "ws_1"}, "input.0.type"),
        ({"type": ["message"]}, "input.0.type"),
        ({"role": "tool", "content": "x"}, "input.0.role"),
        ({"role": "user"}, "input.0.content"),
        ({"role": "user", "content": 5}, "input.0.content"),
        ({"role": "user", "content": ["x"]}, "input.0.content.0.type"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input.0.content.0.type"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input.0.content.0.type"),
        ({"role": "user", "content": [{"type": "input_text", "text": None}]}, "input.0.content.0.text"),
        ({**CALL, "name": 5}, "input.0.name"),
        ({**CALL, "arguments": {}}, "input.0.arguments"),
        ({**CALL, "call_id": None}, "input.0.call_id"),
        ({**CALL, "namespace": 5}, "input.0.namespace"),
        ({**OUTPUT, "output": None}, "input.0.output"),
        ({**OUTPUT, "output": [{"type": "input_image"}]}, "input.0.output.0.type"),
        ({**OUTPUT, "call_id": 5}, "input.0.call_id"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 5}, "input.0.input"),
        ({"type": "reasoning", "summary": 5}, "input.0.summary"),
        ({"type": "reasoning", "summary": [], "content": [{"type": "x"}]}, "input.0.content.0.type"),
    ],
)
def test_item_that_is_not_valid_is_refused_by_field(item, field):
    with pytest.raises(RequestError) as refused:
        messages(item)
    assert refused.value.field == field
    assert str(refused.value).startswith(field if field != "input.0.type" or item else "input.0 ")


def test_refused_item_is_a_400_that_names_it():
    with serving(answering("ok")) as address:
        answer = httpx.post(f"{address.url}/v1/responses", json={"input": [USER, {"type": "mcp_call"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input.1.type"
    assert answer.json()["error"]["code"] == "unsupported_parameter"
