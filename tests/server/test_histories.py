"""Whatever the server has answered, in any API and any way, it accepts back in the next request of the conversation."""

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.engine.chat_template import ChatTemplate
from tests.parsing.writers import WRITERS
from tests.server.conversations import APIS, ASK, FUNCTION, MODES, calls_in, conversing, hermes

CHAT = "/v1/chat/completions"
HEAD = "{% for message in messages %}[{{ message.role }}]{{ message.reasoning_content }}{{ message.content }}"
CALL = "{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.id }})"
TOOLS = "{{ tools | tojson if tools }}"
TEMPLATES = {
    "members": f"{TOOLS}{HEAD}{CALL}{{% for k, v in call.function.arguments | items %}}{{{{ k }}}}="
    "{{ v | tojson }} {% endfor %}{% endfor %}{% endfor %}",
    "method": f"{TOOLS}{HEAD}{CALL}{{% for k, v in call.function.arguments.items() %}}{{{{ k ~ v }}}}{{% endfor %}}"
    "{% endfor %}{% endfor %}",
    "tojson": f"{TOOLS}{HEAD}{CALL}{{{{ call.function.arguments | tojson }}}}{{% endfor %}}{{% endfor %}}",
    "function": f"{TOOLS}{HEAD}{CALL}{{{{ call.function | tojson }}}}{{% endfor %}}{{% endfor %}}",
    "string": f"{TOOLS}{HEAD}{CALL}{{{{ ' ' + call.function.arguments + ' ' }}}}{{% endfor %}}{{% endfor %}}",
    "either": f"{TOOLS}{HEAD}{CALL}{{% if call.function.arguments is string %}}{{{{ call.function.arguments }}}}"
    "{% else %}{{ call.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}",
    "printed": f"{TOOLS}{HEAD}{CALL}{{{{ call.function.arguments }}}}{{% endfor %}}{{% endfor %}}",
    "no tools": f"{HEAD}{{% endfor %}}",
    "one call": f"{TOOLS}{HEAD}{{% if (message.tool_calls or []) | length > 1 %}}{{{{ raise_exception('one call') }}}}"
    f"{{% endif %}}{CALL}{{{{ call.function | tojson }}}}{{% endfor %}}{{% endfor %}}",
    "nine characters": f"{TOOLS}{HEAD}{CALL}{{% if call.id | length != 9 %}}{{{{ raise_exception('bad id') }}}}"
    "{% endif %}{{ call.function | tojson }}{% endfor %}{% endfor %}",
}
OBJECTS = {'{"city": "Bern"}': {"city": "Bern"}, "": {}, "{}": {}, '{"a": 1, "a": [2]}': {"a": [2]}}
NO_OBJECTS = [
    '{"value": ',
    '{"a": 1,}',
    '{"a": "x\ny"}',
    '"x"',
    "[1]",
    "null",
    "NaN",
    '{"a": NaN}',
    '{"a": ' * 5000,
    '{"a": ' + "[" * 400 + "]" * 400 + "}",
    '{"a": ' + "9" * 5000 + "}",
    "{'a': 1}",
    '{"a": 1} {"a": 2}',
]
SURROGATES = {'{"a": "\\ud83d"}': "\ufffd", '{"a": "\ude00x"}': "\ufffdx", '{"a": "\\ud83d\\ude00"}': "😀"}
every_template = pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
WAYS = [(api, mode) for api in APIS for mode in MODES if mode != "background" or api == "responses"]
every_mode = pytest.mark.parametrize(("api", "mode"), WAYS)


def history_with(arguments: Any, **fields: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [*ASK, {"role": "assistant", "content": "", "tool_calls": [call], **fields}]


# arguments in templates


@every_template
@pytest.mark.parametrize("arguments", NO_OBJECTS)
def test_arguments_that_are_no_object_are_shown_in_one(template, arguments):
    prompt = ChatTemplate(template).render(history_with(arguments))
    assert "INVALID_JSON" in prompt
    assert prompt.encode()


@pytest.mark.parametrize("name", ["tojson", "function", "string", "printed", "no tools"])
@pytest.mark.parametrize(("arguments", "value"), OBJECTS.items())
def test_arguments_that_are_an_object_are_shown_as_json(name, arguments, value):
    prompt = ChatTemplate(TEMPLATES[name]).render(history_with(arguments))
    assert json.dumps(value) in prompt


@every_template
@pytest.mark.parametrize(("arguments", "text"), SURROGATES.items())
def test_prompt_is_valid_unicode_whatever_stands_in_arguments(template, arguments, text):
    assert text in ChatTemplate(template).render(history_with(arguments)).encode().decode()


@every_template
def test_lone_surrogates_anywhere_in_a_request_are_replacement_characters(template):
    half = "x\ud83d"
    message = history_with(half, content=half, reasoning_content=half, name=half)[1]
    message["tool_calls"][0] |= {"id": half, "function": {"name": half, "arguments": json.dumps({half: half})}}
    result = {"role": "tool", "tool_call_id": half, "content": [{"type": "text", "text": half}]}
    with conversing("ok", template) as (http, engine):
        data = json.dumps({"messages": [{"role": "user", "content": half}, message, result]})
        answer = http.post(CHAT, content=data, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        prompt = engine.seen[-1][0].text
        assert "x\ufffd" in prompt.encode().decode()


def test_pairs_of_surrogates_and_escaped_backslashes_stay():
    with conversing("ok", TEMPLATES["tojson"]) as (http, engine):
        data = rb'{"messages": [{"role": "user", "content": "\ud83d\ude00 \\ud83d \ude00\ud83d"}]}'
        assert http.post(CHAT, content=data, headers={"content-type": "application/json"}).status_code == 200
        assert "😀 \\ud83d \ufffd\ufffd" in engine.seen[-1][0].text


# fields


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"content": [{"type": "refusal", "refusal": "I cannot"}]}, "I cannot"),
        ({"content": None, "refusal": "I cannot"}, "I cannot"),
        ({"content": None}, ""),
        ({"content": "a", "tool_calls": []}, "a"),
        ({"content": "a", "function_call": None, "audio": None, "annotations": [], "refusal": None}, "a"),
        ({"content": "a", "parsed": {"a": 1}, "logprobs": None, "index": 0, "stop_reason": "x", "usage": {}}, "a"),
        ({"content": "a", "reasoning_content": "r", "reasoning": "r", "model": "m", "token_ids": [1]}, "ra"),
    ],
    ids=str,
)
def test_what_clients_write_of_an_answer_is_accepted(fields, shown):
    with conversing("ok", TEMPLATES["tojson"]) as (http, engine):
        answer = http.post(CHAT, json={"messages": [*ASK, {"role": "assistant", **fields}, *ASK]})
        assert answer.status_code == 200, answer.text
        assert f"{shown}[user]hi" in engine.seen[-1][0].text


@pytest.mark.parametrize("message", [{"role": "user", "content": None}, {"role": "system"}], ids=str)
def test_content_that_is_needed_is_named(message):
    with conversing("ok", TEMPLATES["tojson"]) as (http, _):
        answer = http.post(CHAT, json={"messages": [*ASK, message]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"messages.{len(ASK)}.content"


@pytest.mark.parametrize("kind", [{"type": None}, {}, {"type": "function", "index": 0}], ids=str)
def test_type_of_a_call_may_be_missing(kind):
    call = {"id": "1", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}, **kind}
    with conversing("ok", TEMPLATES["tojson"]) as (http, _):
        answer = http.post(CHAT, json={"messages": [*ASK, {"role": "assistant", "tool_calls": [call]}]})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("given", [None, "", '{"a": ', "text", [1], 5, {"a": None}], ids=str)
def test_input_of_any_form_is_shown_as_an_object(given):
    with conversing("ok", TEMPLATES["members"]) as (http, engine):
        use = {"type": "tool_use", "id": "t", "name": "f", "input": given}
        result = {"type": "tool_result", "tool_use_id": "t", "content": "ok"}
        conversation = [*ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        answer = http.post("/v1/messages", json={"messages": conversation, "max_tokens": 5})
        assert answer.status_code == 200, answer.text
        empty = given in (None, "")
        assert ("=" in engine.seen[-1][0].text) is not empty


# whole conversations


@every_mode
@pytest.mark.parametrize("arguments", ['{"a": 1,}', '{"a": "\\ud83d"}'])
def test_agent_goes_on_after_any_call(api, mode, arguments):
    script = f"<think>\nhm\n</think>\n\n{hermes(arguments)}"
    with conversing(script, TEMPLATES["members"] + "<tool_call></tool_call></think>") as (http, _):
        history = [*ASK]
        for _ in range(2):
            added = APIS[api](http, mode, history, strip=False)
            history += added
            assert calls_in(api, added) == [FUNCTION["name"]]


@every_mode
@pytest.mark.parametrize("name", ["one call", "nine characters"])
def test_agent_goes_on_after_two_calls_whatever_the_template_takes(api, mode, name):
    script = "\n".join([hermes('{"city": "Bern"}'), hermes('{"city": "Chur"}')])
    with conversing(script, TEMPLATES[name] + "<tool_call></tool_call>", tool_parser="hermes") as (http, engine):
        added = APIS[api](http, mode, ASK, strip=False)
        assert len(calls_in(api, added)) == 2
        engine.script = "ok"
        APIS[api](http, mode, [*ASK, *added], strip=False)
        prompt = engine.seen[-1][0].text
        bern, between, chur = prompt.partition("Bern")[0], prompt.partition("Bern")[2], prompt.partition("Chur")[2]
        assert bern.endswith('"arguments": {"city": "')
        assert ("[tool]ok[assistant]" in between.partition("Chur")[0]) is (name == "one call")
        assert chur.count("[tool]ok") == (1 if name == "one call" else 2)


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"tool_calls": [{"type": "custom"}]}, "messages.0.tool_calls.0.type", "must be function"),
        ({"tool_calls": [{"function": {"name": None}}]}, "messages.0.tool_calls.0", "has a name and arguments"),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "messages.0.content",
            "content.1 is 'image_url'",
        ),
    ],
)
def test_refusal_of_a_history_says_what_is_wrong_and_what_is_right(message, param, says):
    with conversing("ok", TEMPLATES["tojson"]) as (http, _):
        error = http.post(CHAT, json={"messages": [{"role": "assistant", **message}]}).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert says in error["message"]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_answer_is_accepted_back(data):
    name = data.draw(st.sampled_from([*WRITERS]))
    city = data.draw(st.sampled_from(["Bern", 'a "b" \\', "x\ny", "</parameter>", "😀", "\\ud83d", ""]))
    whole = WRITERS[name]([("get_weather", {"city": city}), ("get_weather", {})])
    script = data.draw(st.sampled_from(["", "<think>a</think>", "Let me see. "])) + whole
    script = script[: data.draw(st.integers(1, len(script)))]
    api, mode = data.draw(st.sampled_from(WAYS))
    template, strip = TEMPLATES[data.draw(st.sampled_from([*TEMPLATES]))], data.draw(st.booleans())
    parsers = {"tool_parser": name.removesuffix("_11"), "reasoning_parser": "qwen3"}
    with conversing(script, template, **parsers) as (http, engine):
        added = APIS[api](http, mode, ASK, strip=strip)
        engine.script = "ok"
        APIS[api](http, mode, [*ASK, *added], strip=strip)
