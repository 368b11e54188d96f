"""Conversations that a chat template refuses as they are reach it in other words, rewritten as little as possible."""

import json
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.errors import RequestError
from jaxserve.engine.chat_template import ChatTemplate
from jaxserve.engine.rewritings import calls_one_by_one, short_ids, taking_turns

SHOWN = (
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.id }}:{{ c.function.name }}){% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}"
)
CALLERS = "(m.role == 'tool' or m.tool_calls)"
TEMPLATES = {
    "any": "",
    # as Llama 3.1
    "one call": "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('single calls') }}{% endif %}",
    # as Mistral 7B
    "nine characters": "{% for c in m.tool_calls or [] %}{% if not c.id is defined or c.id | length != 9 %}"
    "{{ raise_exception('bad id') }}{% endif %}{% endfor %}"
    "{% if m.role == 'tool' and (m.tool_call_id or '') | length != 9 %}{{ raise_exception('bad id') }}{% endif %}",
    # as Mistral 7B, which does not count calls and results
    "turns": "{% if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.count = ns.count + 1 %}{% endif %}",
    # as Gemma 2
    "no system": "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
}
HI = {"role": "user", "content": "hi"}


@lru_cache
def template(*checks: str, tools: str = "{{ tools | tojson if tools }}") -> ChatTemplate:
    loop = "{% set ns = namespace(count=0) %}{% for m in messages %}"
    return ChatTemplate(f"{tools}{loop}{''.join(TEMPLATES[check] for check in checks)}{SHOWN}{{% endfor %}}")


def calls(*ids: Any, content: str = "") -> dict[str, Any]:
    made = [{"id": id, "type": "function", "function": {"name": f"f{id}", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(id: Any, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([calls("a", "b"), result("a", "1"), result("b", "2")], "(a:fa)<tool>1[a]<assistant>(b:fb)<tool>2[b]"),
        ([calls("a", "b"), result("b", "2"), result("a", "1")], "(a:fa)<tool>1[a]<assistant>(b:fb)<tool>2[b]"),
        ([calls("a", "b"), result("b", "2"), HI], "(a:fa)<assistant>(b:fb)<tool>2[b]<user>hi"),
        ([calls("a", "a"), result("a", "1"), result("a", "2")], "(a:fa)<tool>1[a]<assistant>(a:fa)<tool>2[a]"),
        ([calls("a", "b"), result("x", "?")], "(a:fa)<assistant>(b:fb)<tool>?[x]"),
        ([calls("a", "b", content="so"), HI], "so(a:fa)<assistant>(b:fb)<user>hi"),
    ],
)
def test_each_of_several_calls_has_a_message_and_its_result_follows(given, shown):
    assert template("one call").render([HI, *given]) == f"<user>hi<assistant>{shown}"


def test_ids_of_other_models_become_those_that_the_template_takes():
    prompt = template("nine characters").render(
        [HI, calls("call_1", "123456789"), result("123456789", "2"), result("call_1", "1")]
    )
    first = prompt.split("(")[1].split(":")[0]
    assert len(first) == 9
    assert prompt == f"<user>hi<assistant>({first}:fcall_1)(123456789:f123456789)<tool>2[123456789]<tool>1[{first}]"


@pytest.mark.parametrize("id", ["", None, 5])
def test_call_without_a_usable_id_belongs_to_its_result(id):
    shown = list(short_ids([calls(id, id), result(id, "1"), result(id, "2")]))
    ids = [call["id"] for call in shown[0]["tool_calls"]]
    assert [message["tool_call_id"] for message in shown[1:]] == ids
    assert all(len(id) == 9 for id in ids)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([HI, HI], "<user>hi\nhi"),
        ([HI, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], "<user>hi<assistant>a\nb"),
        (
            [HI, calls("a"), result("a", "1"), HI],
            "<user>hi<assistant>(a:fa)<tool>1[a]<assistant><user>hi",
        ),
        ([HI, calls("a"), HI], "<user>hi<assistant>(a:fa)<assistant><user>hi"),
    ],
)
def test_user_and_assistant_take_turns(given, shown):
    assert template("turns").render(given) == shown


def test_result_written_as_text_and_what_the_user_says_after_it_are_one_turn():
    prompt = template("turns", "no system", tools="").render(
        [HI, calls("a"), result("a", "1"), HI], tools=[{"type": "function", "function": {"name": "fa"}}]
    )
    assert "<system>" not in prompt
    assert prompt.endswith("<user><tool_response>\n1\n</tool_response>\nhi")
    assert prompt.startswith("<user>You can call functions.")


def test_system_message_begins_the_text_of_the_user_if_the_template_takes_none():
    given = [{"role": "system", "content": "Be brief."}, HI]
    assert template("no system").render(given) == "<user>Be brief.\n\nhi"
    assert template("any").render(given) == "<system>Be brief.<user>hi"


def test_messages_are_rewritten_only_as_far_as_the_template_needs():
    given = [{"role": "system", "content": "s"}, HI, HI, calls("a", "b"), result("a", "1"), result("b", "2")]
    as_given = "<system>s<user>hi<user>hi<assistant>(a:fa)(b:fb)<tool>1[a]<tool>2[b]"
    assert template("any").render(given) == as_given
    assert template("turns").render(given) == as_given.replace("hi<user>hi", "hi\nhi")
    single = as_given.replace("(b:fb)<tool>1[a]", "<tool>1[a]<assistant>(b:fb)")
    assert template("one call").render(given) == single
    assert template("no system").render(given) == as_given.replace("<system>s<user>", "<user>s\n\n")
    everything = template(*TEMPLATES).render(given)
    assert everything.startswith("<user>s\n\nhi\nhi<assistant>(")
    assert everything.count("<assistant>") == 2


def test_refusal_of_a_conversation_in_any_words_is_that_of_the_given_ones():
    with pytest.raises(RequestError, match="roles must alternate"):
        template("turns").render([{"role": "assistant", "content": "I begin"}, HI])
    with pytest.raises(RequestError, match="leaves out message 0"):
        ChatTemplate("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}").render(
            [{"role": "system", "content": "s"}, HI]
        )


def test_answer_is_continued_in_rewritten_messages():
    begun = {"role": "assistant", "content": "It is"}
    given = [HI, calls("a", "b"), result("a", "1"), result("b", "2"), begun]
    prompt = template("one call").render(given, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("<tool>2[b]<assistant>It is")


ids = st.sampled_from(["a", "b", "call_1", "abcdefghi", "", None, 7, "\ud83d"])
messages = st.one_of(
    st.just(HI),
    st.builds(lambda text: {"role": "assistant", "content": text}, st.sampled_from(["", "said"])),
    st.builds(lambda some: calls(*some), st.lists(ids, min_size=1, max_size=3)),
    st.builds(result, ids, st.sampled_from(["", "1", "2"])),
)


@settings(max_examples=60, deadline=None)
@given(conversation=st.lists(messages, max_size=8), checks=st.sets(st.sampled_from([*TEMPLATES])))
def test_conversation_that_the_user_begins_is_never_refused_and_keeps_all_calls_and_results(conversation, checks):
    prompt = template(*sorted(checks)).render([HI, *conversation])
    named = [call["function"]["name"] for message in conversation for call in message.get("tool_calls", ())]
    assert [prompt.count(f":{name})") for name in named] == [named.count(name) for name in named] or "\ufffd" in prompt
    assert prompt.count("<tool>") == sum(message["role"] == "tool" for message in conversation)


@pytest.mark.parametrize("rewriting", [calls_one_by_one, short_ids, taking_turns])
def test_rewriting_takes_linear_time(rewriting):
    many = 2_000
    given = [HI] * many + [calls(*range(many)), *(result(id, "x") for id in reversed(range(many)))]
    comparisons = 0

    class Counted(str):
        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    given = [{**message, "role": Counted(message["role"])} for message in given]
    assert json.dumps(list(rewriting(given)))
    assert comparisons < 20 * len(given)
