"""Whatever a model leaves out of its markup, or writes twice, the other calls arrive as they are."""

import json
import re

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.parsing.tools import Tool
from tests.parsing.writers import FORMS, WRITERS, parsed
from tests.support.thorough import THOROUGH

FIRST, MIDDLE, LAST = ("get_weather", {"city": "Paris"}), ("write_note", {"text": "a b"}), ("now", {})
MARKUP = re.compile(r"<[^<>]+>|\[[A-Z_]+\]|```(?:json)?|[\"'{}\[\](),:=]")
OWN_TAGS = [  # the formats in which each call has a tag of its own
    *("hermes", "internlm", "mistral_11", "deepseek_v3", "deepseek_v31", "kimi_k2"),
    *("qwen3_coder", "glm45", "glm47", "minimax_m2", "seed_oss"),
]
every_format = pytest.mark.parametrize("name", FORMS)


def parts(name: str) -> tuple[str, str, str]:
    """Return an answer with three calls as the text before the middle one's arguments, up to its end, and the rest."""
    text = WRITERS[name]([FIRST, MIDDLE, LAST])
    begin = text.index("write_note") + len("write_note")
    end = text.index("a b") + 4
    return text[:begin], text[begin:end], text[end:]


def damaged(text: str, position: int, *, twice: bool) -> str:
    """Return a text without one of its pieces of markup, or with one of them twice."""
    found = list(MARKUP.finditer(text))
    if not found:
        return text
    each = found[position % len(found)]
    return text[: each.start()] + each.group() * 2 * twice + text[each.end() :]


@every_format
@settings(max_examples=100 if THOROUGH else 12, deadline=None)
@given(position=st.integers(0, 99), twice=st.booleans())
def test_calls_before_lost_markup_arrive(name: str, position: int, twice: bool) -> None:
    before, middle, after = parts(name)
    text = before + damaged(middle + after, position, twice=twice)
    message = parsed(FORMS[name], text)
    assert parsed(FORMS[name], *text) == message
    calls = [(call.name, call.arguments) for call in message.calls]
    assert (calls[0][0], json.loads(calls[0][1])) == FIRST
    for _, arguments in calls[:-1]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", OWN_TAGS)
@settings(max_examples=100 if THOROUGH else 12, deadline=None)
@given(position=st.integers(0, 99), second=st.none() | st.integers(0, 99), twice=st.booleans())
def test_calls_after_lost_markup_arrive(name: str, position: int, second: int | None, twice: bool) -> None:
    before, middle, after = parts(name)
    middle = damaged(middle, position, twice=twice)
    middle = middle if second is None else damaged(middle, second, twice=False)
    message = parsed(FORMS[name], before + middle + after)
    for call in message.calls:
        assert isinstance(json.loads(call.arguments), dict)
    assert (message.calls[0].name, json.loads(message.calls[0].arguments)) == FIRST
    assert (message.calls[-1].name, json.loads(message.calls[-1].arguments)) == LAST


SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "z": {"type": ["integer", "null"]},
        "list": {"type": "array"},
        "any": {},
    }
}


def arguments(name: str, values: dict[str, str], change: tuple[str, str] = ("", "")) -> object:
    """Return the arguments of a call with some values, in the text of which something is replaced."""
    text = WRITERS[name]([("f", values)]).replace(*change, 1)
    message = parsed(FORMS[name], f"{text}\nDone.", tools=[Tool("f", SCHEMA)])
    assert parsed(FORMS[name], *text, "\nDone.", tools=[Tool("f", SCHEMA)]) == message
    assert message.text == "Done."
    return json.loads(message.calls[0].arguments)


IN_JSON = [name for name in FORMS if '"city": "Paris"' in WRITERS[name]([FIRST])]


@pytest.mark.parametrize("name", IN_JSON)
@pytest.mark.parametrize("space", ["\xa0", "\u2028", "\u3000", "\x0b", "\f", "\x85", " \u2003\n"], ids=ascii)
def test_white_space_that_json_does_not_know_separates_as_well(name: str, space: str) -> None:
    call = WRITERS[name]([("f", {"n": 5, "list": [1, None], "any": f"a{space}b"})])
    begin = call.index('{"n"')
    for text in ("{", '"n"', ":", "5", ",", "[", "null", "]", '"any"'):
        at = call.index(text, begin) + len(text)
        message = parsed(FORMS[name], call[:at] + space + call[at:], tools=[Tool("f", SCHEMA)])
        assert [json.loads(each.arguments) for each in message.calls] == [
            {"n": 5, "list": [1, None], "any": f"a{space}b"}
        ]
        assert not message.text


TAGS = pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "glm47", "minimax_m2", "seed_oss"])


def _tag(name: str) -> str:
    return "</arg_value>" if name.startswith("glm") else "</parameter>"


@TAGS
def test_a_value_ends_without_its_tag(name: str) -> None:
    assert arguments(name, {"city": "Paris", "n": "5"}, (_tag(name), "")) == {"city": "Paris", "n": 5}
    assert arguments(name, {"city": "Paris"}, (_tag(name), "")) == {"city": "Paris"}
    assert arguments(name, {"n": "5", "city": "Paris"}, (_tag(name), "")) == {"city": "Paris", "n": 5}


@TAGS
@pytest.mark.parametrize(
    "text", ["<parameter=x>", "<arg_key>x</arg_key>", "</tool_call> is", "a </function> b", "\n<a>"]
)
def test_a_value_may_look_like_markup(name: str, text: str) -> None:
    assert arguments(name, {"city": f"see {text} here", "n": "5"}) == {"city": f"see {text} here", "n": 5}


@TAGS
def test_a_value_without_a_text_is_none_unless_it_may_be_a_string(name: str) -> None:
    empty = dict.fromkeys(SCHEMA["properties"], "")
    assert arguments(name, empty) == {"city": "", "z": None, "any": ""}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss", "pythonic", "olmo3"])
@pytest.mark.parametrize("text", ["+4915112345", "2024+01", "1_0", "01", "1j", "'a' 'b'", "0x10", "b'x'", "1 2", "NaN"])
def test_values_arrive_letter_for_letter(name: str, text: str) -> None:
    written = WRITERS[name]([("f", {"any": "VALUE"})]).replace("'VALUE'", text).replace("VALUE", text)
    message = parsed(FORMS[name], written, tools=[Tool("f", SCHEMA)])
    assert json.loads(message.calls[0].arguments) == {"any": text}


@pytest.mark.parametrize("gap", ["\n", "; ", ", ", " ", ";\n<|python_tag|>"])
def test_calls_of_llama_follow_each_other(gap: str) -> None:
    call = '{"name": "now", "parameters": {}}'
    message = parsed(FORMS["llama3_json"], call + gap + call)
    assert [each.name for each in message.calls] == ["now", "now"]
    assert not message.text
