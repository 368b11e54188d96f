"""Every format of tool calls gives back the calls that a model has written, however the answer arrives in pieces."""

import json
import random
from itertools import product

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.parsing.events import ArgumentsDelta, TextDelta
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.parsing.tools import ToolUse
from tests.parsing.writers import FORMS, TOOLS, WRITERS, Calls, calls_of, parsed
from tests.support.thorough import some

CASES: dict[str, Calls] = {
    "one call": [("get_weather", {"city": "Paris", "days": 3})],
    "two calls": [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome", "unit": "celsius"})],
    "no arguments": [("now", {}), ("get_weather", {"city": "Oslo"}), ("now", {})],
    "unicode": [("get_weather", {"city": "Zürich 東京 🌦️ \u2028"})],
    "nested": [
        ("write_note", {"meta": {"a": [{"b": {}}, [], [1, -2.5e-3, None, True]], "ключ": "]}"}, "tags": ["x", ""]})
    ],
    "escapes": [("write_note", {"text": 'a "b" \\ \\n c\nd\te\'f\' \\\\" {"x": [', "draft": False})],
    "tags in strings": [
        ("write_note", {"text": "<tool_call>{</tool_call> <function=now> [now()] <｜tool▁calls▁begin｜> [TOOL"})
    ],
    "null and numbers": [("write_note", {"title": None, "weight": 1.0, "draft": True})],
}
every_format = pytest.mark.parametrize("name", FORMS)
every_case = pytest.mark.parametrize("case", CASES)
some_of_both = pytest.mark.parametrize(("name", "case"), some(product(FORMS, CASES), 60))


@every_format
@every_case
def test_calls_are_parsed(name: str, case: str) -> None:
    message = parsed(FORMS[name], WRITERS[name](CASES[case]))
    assert calls_of(message) == list(CASES[case])
    assert not message.text


@every_format
@every_case
def test_pieces_change_nothing(name: str, case: str) -> None:
    text = WRITERS[name](CASES[case])
    if not FORMS[name].first:
        text = f"Let me see. < [ {{\n\n{text}\n\n Done.\n{text}\n"
    assert parsed(FORMS[name], *text) == parsed(FORMS[name], text)


@some_of_both
def test_an_answer_may_be_cut_anywhere(name: str, case: str) -> None:
    text = WRITERS[name](CASES[case])
    if not FORMS[name].first:
        text = f"I see. < [ {{\n\n{text}\n Done."
    whole = parsed(FORMS[name], text)
    for cut in range(len(text)):
        assert parsed(FORMS[name], text[:cut], text[cut:]) == whole


@some_of_both
def test_an_answer_may_end_anywhere(name: str, case: str) -> None:
    text = WRITERS[name](CASES[case])
    for length in range(len(text)):
        begun = parsed(FORMS[name], text[:length])
        if length % 5 == 0:
            assert parsed(FORMS[name], *text[:length]) == begun
        if not begun.calls:
            assert begun.text.strip() in ("", text[:length].strip())
        for (tool, arguments), call in zip(CASES[case], begun.calls, strict=False):
            assert call.name == tool
            if call is not begun.calls[-1]:
                assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.first])
def test_text_around_calls_stays_without_the_white_space_between(name: str) -> None:
    calls = WRITERS[name](CASES["two calls"])
    message = parsed(FORMS[name], f"  I look it up:\n\n{calls}\n\nThat is it.\n{calls}\n")
    assert calls_of(message) == [*CASES["two calls"]] * 2
    assert message.text == "  I look it up:\n\nThat is it."


@every_format
def test_without_parallel_calls_only_the_first_is_sent(name: str) -> None:
    message = parsed(FORMS[name], WRITERS[name](CASES["two calls"]) + " Done.", parallel=False)
    assert calls_of(message) == [*CASES["two calls"]][:1]
    assert not message.text


@every_format
def test_arguments_arrive_before_the_call_is_complete(name: str) -> None:
    words = "a long text, word by word, in which nothing is special"
    text = WRITERS[name]([("write_note", {"draft": True, "text": words})])
    parser = AnswerFormat(None, FORMS[name], ToolUse(TOOLS)).parser()
    sent = ""
    for character in text[: text.index(words) + 20]:
        sent += "".join(event.text for event in parser.push(character) if isinstance(event, ArgumentsDelta))
    value = "" if "pythonic" in name or name == "olmo3" else f'"{words[:20]}'  # a keyword at a time, or all of it
    assert sent == '{"draft": true, "text": ' + value


@every_format
def test_text_arrives_at_once(name: str) -> None:
    parser = AnswerFormat(None, FORMS[name], ToolUse(TOOLS)).parser()
    assert "".join(event.text for word in "Hello, how are you?" for event in parser.push(word)) == "Hello, how are you?"


def test_several_calls_may_share_a_tag() -> None:
    calls = "<function=now>\n</function>\n" * 2
    message = parsed(FORMS["qwen3_coder"], f"<tool_call>\n{calls}</tool_call>")
    assert calls_of(message) == [("now", {})] * 2
    assert not message.text


def test_an_answer_in_json_arrives_at_once_where_calls_are_json() -> None:
    parser = AnswerFormat(None, FORMS["llama3_json"], ToolUse(TOOLS)).parser()
    assert [event.text for event in parser.push('{"cities": ["Ro') if isinstance(event, TextDelta)] == [
        '{"cities": ["Ro'
    ]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
notes = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(alphabet=st.characters(codec="utf-8"), max_size=30).filter(lambda text: "</" not in text),
        "tags": st.lists(st.text(max_size=5), max_size=3),
        "meta": st.dictionaries(st.text(max_size=5), values, max_size=3),
        "draft": st.booleans(),
    },
)


@every_format
@settings(max_examples=40, deadline=None)
@given(arguments=st.lists(notes, min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_any_arguments_come_back(name: str, arguments: list[dict[str, object]], seed: int) -> None:
    calls = [("write_note", each) for each in arguments]
    text = WRITERS[name](calls)
    cuts = sorted(random.Random(seed).sample(range(len(text)), min(5, len(text))))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert calls_of(parsed(FORMS[name], *pieces)) == calls
