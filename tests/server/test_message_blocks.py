"""Bodies of /v1/messages as the chat completions that they mean."""

from typing import Any

import pytest

from jaxserve.core.errors import RequestError
from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.schemas.message_blocks import num_blocks
from jaxserve.server.schemas.messages import MessagesBody
from tests.server.messages_support import ASK, WEATHER


def chat(*, reasons: bool = True, **fields: Any) -> ChatBody:
    body = MessagesBody.model_validate({"model": "fake", "max_tokens": 10, "messages": ASK, **fields})
    return body.chat(reasons=reasons)


def messages(*turns: tuple[str, Any], **fields: Any) -> list[tuple[str, str]]:
    """Return the role and the text of the messages that turns, of a role and a content each, become."""
    asked = chat(messages=[{"role": role, "content": content} for role, content in turns], **fields)
    return [(message.role, message.content) for message in asked.messages]


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def use(number: int, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "weather", "input": given}


def result(number: int, content: Any = "sunny", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": content, **more}


def refusal(*turns: tuple[str, Any], **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        messages(*turns, **fields)
    return raised.value


# system


def test_system_text_comes_first():
    assert messages(("user", "hi"), system="Be brief.") == [("system", "Be brief."), ("user", "hi")]


def test_system_blocks_are_joined_without_the_line_that_changes_in_every_request():
    blocks = [
        text("x-anthropic-billing-header: cc_version=2.1; cch=36ee5;"),
        text("You are an agent.", cache_control={"type": "ephemeral"}),
        text("Be brief."),
    ]
    assert messages(("user", "hi"), system=blocks)[0] == ("system", "You are an agent.\nBe brief.")


@pytest.mark.parametrize("system", ["", [], [text("")]])
def test_empty_system_text_is_left_out(system):
    assert messages(("user", "hi"), system=system) == [("user", "hi")]


def test_system_message_stays_in_its_place():
    assert messages(("user", "a"), ("system", "10 tokens left"), ("user", [text("b")])) == [
        ("user", "a"),
        ("system", "10 tokens left"),
        ("user", "b"),
    ]


def test_late_system_message_is_text_of_the_user_if_the_template_takes_none():
    turns = [("system", "Be brief."), ("user", "a"), ("system", "b"), ("assistant", "c"), ("system", [text("d")])]
    given = [{"role": role, "content": content} for role, content in turns]
    body = MessagesBody.model_validate({"max_tokens": 10, "messages": given})
    asked = body.chat(reasons=False, late_system=False)
    assert [(message.role, message.content) for message in asked.messages] == [
        ("system", "Be brief."),
        ("user", "a\n<system>\nb\n</system>"),
        ("assistant", "c"),
        ("user", "<system>\nd\n</system>"),
    ]


# turns


def test_text_blocks_are_lines_and_empty_ones_are_left_out():
    assert messages(("user", [text("a"), text(""), text("b")])) == [("user", "a\nb")]


def test_consecutive_messages_of_one_role_are_one_turn():
    assert messages(("user", "a"), ("user", [text("b")]), ("assistant", "c"), ("user", "d")) == [
        ("user", "a\nb"),
        ("assistant", "c"),
        ("user", "d"),
    ]


def test_last_message_of_the_assistant_is_continued():
    asked = chat(messages=[*ASK, {"role": "assistant", "content": "The answer is ("}])
    assert asked.continue_final_message
    assert not asked.add_generation_prompt
    assert asked.opening() == "The answer is ("


@pytest.mark.parametrize("content", [[use(1)], [{"type": "thinking", "thinking": "a", "signature": "s"}], ""])
def test_last_message_of_the_assistant_without_text_is_refused(content):
    assert refusal(("user", "hi"), ("assistant", content)).field == "messages.1"


# tools


def test_calls_and_their_results_are_messages_of_their_own():
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [text("See."), use(1, city="Bern"), use(2, city="Rome")]},
        {"role": "user", "content": [result(1), result(2, [text("rain"), text("wind")]), text("Well?")]},
    ]
    _, called, first, second, last = chat(messages=turns).messages
    assert called.content == "See."
    assert called.tool_calls == [
        {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}},
        {"id": "toolu_2", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}},
    ]
    assert (first.role, first.content, first.tool_call_id) == ("tool", "sunny", "toolu_1")
    assert (second.role, second.content, second.tool_call_id) == ("tool", "rain\nwind", "toolu_2")
    assert (last.role, last.content) == ("user", "Well?")


def test_results_come_before_the_text_of_their_turn():
    turns = messages(("user", "a"), ("assistant", [use(1)]), ("user", [text("b"), result(1)]))
    assert turns[2:] == [("tool", "sunny"), ("user", "b")]


def test_result_that_is_an_error_says_so():
    turns = messages(("user", "a"), ("assistant", [use(1)]), ("user", [result(1, "no such city", is_error=True)]))
    assert turns[-1] == ("tool", "Error: no such city")


@pytest.mark.parametrize("content", [None, "", []])
def test_result_may_be_empty(content):
    assert messages(("user", "a"), ("assistant", [use(1)]), ("user", [result(1, content)]))[-1] == ("tool", "")


def test_tools_become_functions():
    asked = chat(tools=[{**WEATHER, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}])
    function = {"name": "weather", "description": "Says it.", "parameters": WEATHER["input_schema"], "strict": True}
    assert asked.tools == [{"type": "function", "function": function}]


def test_examples_of_input_are_part_of_the_schema():
    asked = chat(tools=[{**WEATHER, "input_examples": [{"city": "Bern"}]}])
    assert asked.tools[0]["function"]["parameters"]["examples"] == [{"city": "Bern"}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
def test_tool_choice(choice, expected):
    asked = chat(tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert asked.tool_choice == expected
    assert not asked.parallel_tool_calls
    assert chat(tools=[WEATHER], tool_choice=choice).parallel_tool_calls


# other blocks


def test_thinking_is_reasoning_and_encrypted_thinking_is_left_out():
    blocks = [
        {"type": "thinking", "thinking": "why", "signature": "s"},
        {"type": "redacted_thinking", "data": "EmwK"},
        text("Because."),
    ]
    asked = chat(messages=[*ASK, {"role": "assistant", "content": blocks}, *ASK])
    assert (asked.messages[1].reasoning_content, asked.messages[1].content) == ("why", "Because.")


def test_documents_and_search_results_are_text_below_their_titles():
    plain = {"type": "text", "media_type": "text/plain", "data": "one"}
    documents = [
        {"type": "document", "title": "T", "context": "C", "source": plain},
        {"type": "document", "source": {"type": "content", "content": [text("two")]}},
        {"type": "document", "source": {"type": "content", "content": "three"}, "citations": {"enabled": False}},
        {"type": "search_result", "title": "S", "source": "https://example.org", "content": [text("four")]},
    ]
    assert messages(("user", documents)) == [("user", "T\nC\none\ntwo\nthree\nS\nhttps://example.org\nfour")]


@pytest.mark.parametrize(
    ("block", "field", "words"),
    [
        ({"type": "image", "source": {}}, "messages.0.content.1.type", "is 'image'"),
        ({"type": "web_search_tool_result"}, "messages.0.content.1.type", "is 'web_search_tool_result'"),
        ({"type": "document", "source": {"type": "base64"}}, "messages.0.content.1.source.type", "is 'base64'"),
        (
            {"type": "document", "source": {"type": "content", "content": "x"}, "citations": {"enabled": True}},
            "messages.0.content.1.citations.enabled",
            "citations are not supported",
        ),
        ({"type": "text"}, "messages.0.content.1", "is not a valid text block"),
        ({"text": "a"}, "messages.0.content.1", "must be a content block"),
        ({"type": "tool_result"}, "messages.0.content.1.tool_use_id", "must be the id"),
        (result(1, 3), "messages.0.content.1.content", "must be a string or a list of content blocks"),
        (result(1, [{"type": "image"}]), "messages.0.content.1.content.0.type", "is 'image'"),
    ],
)
def test_refusal_names_the_block_of_a_user(block, field, words):
    error = refusal(("user", [text("a"), block]))
    assert error.field == field
    assert str(error).startswith(field)
    assert words in str(error)


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({**use(1), "id": 3}, "messages.1.content.0.id"),
        ({**use(1), "name": None}, "messages.1.content.0.name"),
        ({"type": "server_tool_use"}, "messages.1.content.0.type"),
    ],
)
def test_refusal_names_the_block_of_an_assistant(block, field):
    assert refusal(("user", "hi"), ("assistant", [block]), ("user", "go on")).field == field


def test_refusal_names_the_block_of_the_system_text():
    assert refusal(("user", "hi"), system=[{"type": "image"}]).field == "system.0.type"


# other fields


@pytest.mark.parametrize(
    ("thinking", "enabled", "budget"),
    [
        (None, None, None),
        ({"type": "enabled", "budget_tokens": 1024}, True, 1024),
        ({"type": "adaptive", "budget_tokens": 0}, True, None),
        ({"type": "disabled"}, False, None),
    ],
)
def test_thinking_switches_reasoning_and_limits_it(thinking, enabled, budget):
    asked = chat(thinking=thinking)
    assert (asked.enable_thinking, asked.thinking_token_budget) == (enabled, budget)
    assert chat(thinking=thinking, reasons=False).thinking_token_budget is None


@pytest.mark.parametrize(
    ("effort", "expected"), [("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "high"), ("max", "high")]
)
def test_effort_is_one_that_templates_know(effort, expected):
    assert chat(output_config={"effort": effort}).reasoning_effort == expected


@pytest.mark.parametrize("place", [{"output_config": "format"}, {"output_format": None}])
def test_format_is_structured_output(place):
    form = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    ((name, inner),) = place.items()
    asked = chat(**{name: {inner: form} if inner else form})
    assert asked.structured().json == WEATHER["input_schema"]


def test_two_formats_are_refused():
    form = {"type": "json_schema", "schema": {}}
    assert refusal(("user", "hi"), output_config={"format": form}, output_format=form).field == "output_format"


def test_sampling_fields_are_passed_on():
    given = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "priority": -1, "cache_salt": "a"}
    asked = chat(stop_sequences=["x"], **given)
    assert {name: getattr(asked, name) for name in given} == given
    assert (asked.stop, asked.max_tokens) == (["x"], 10)


def test_request_of_a_coding_agent_is_accepted():
    asked = chat(
        system=[text("You are an agent.", cache_control={"type": "ephemeral", "ttl": "1h"})],
        messages=[{"role": "user", "content": [text("hi", cache_control={"type": "ephemeral"}, citations=None)]}],
        tools=[{**WEATHER, "eager_input_streaming": True, "defer_loading": False}],
        metadata={"user_id": "u"},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "xhigh"},
        service_tier="auto",
        temperature=1,
        stream=True,
    )
    assert [message.content for message in asked.messages] == ["You are an agent.", "hi"]


def test_blocks_inside_of_others_count_for_the_cost_of_a_body():
    text = {"type": "text", "text": "a"}
    inner = {"type": "tool_result", "tool_use_id": "x", "content": [text] * 10}
    document = {"type": "document", "source": {"type": "content", "content": [text] * 5}}
    assert [num_blocks(content) for content in ("a", [text] * 3, [inner, text], [document])] == [1, 3, 12, 6]
