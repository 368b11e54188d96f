"""What leaves a parser is valid Unicode, whatever a model escapes, and however its answer is cut into pieces."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.parsing.events import ParsedMessage
from tests.parsing.writers import FORMS, WRITERS, parsed

ESCAPES = [r"\ud83d", r"\ude00", r"\uD83D\uDE00", r"\u00e9", "\\\\", r"\"", r"\n", "a", "u", "d83d", "é", "😀"]


def mended(value: str) -> str:
    """Return a text with lone surrogates replaced."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def arguments(name: str, text: str, *, whole: bool) -> dict[str, str]:
    """Return the arguments of a call in which the text of a JSON string stands for X."""
    call = WRITERS[name]([("write_note", {"text": "X", "title": "é"})]).replace("'X'", '"X"').replace("X", text)
    message = parsed(FORMS[name], call) if whole else parsed(FORMS[name], *call)
    assert_valid(message)
    found = json.loads(message.calls[0].arguments)
    assert isinstance(found, dict)
    return found


def assert_valid(message: ParsedMessage) -> None:
    for text in (message.text, *(call.name + call.arguments for call in message.calls)):
        text.encode()


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral_11", "deepseek_v3", "jamba", "pythonic", "olmo3"])
@settings(max_examples=25, deadline=None)
@given(text=st.lists(st.sampled_from(ESCAPES), max_size=8).map("".join))
def test_escapes_of_surrogates_become_characters(name: str, text: str) -> None:
    expected = {"text": mended(json.loads(f'"{text}"')), "title": "é"}
    assert arguments(name, text, whole=True) == arguments(name, text, whole=False) == expected


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic", "olmo3"])
def test_escapes_of_python_become_characters(name: str) -> None:
    call = WRITERS[name]([("write_note", {"text": "X"})]).replace("X", r"\ud83d\ude00 \ud83d")
    assert json.loads(parsed(FORMS[name], call).calls[0].arguments) == {"text": "😀 \ufffd"}


@pytest.mark.parametrize("end", [r"\ud83d", r"\ud83d\u", r"\ud83d\ud", "\\", r"\u", r"\ud8"])
def test_an_escape_at_the_end_of_an_answer_waits_for_nothing(end: str) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + end
    for message in (parsed(FORMS["hermes"], text), parsed(FORMS["hermes"], *text)):
        assert message.calls[0].arguments == '{"a": "' + end.replace(r"\ud83d", "\ufffd")


@pytest.mark.parametrize("escape", [r"\ud83d\ude00", r"\ud83d"])
def test_names_are_valid_unicode(escape: str) -> None:
    text = f'<tool_call>{{"name": "f{escape}", "arguments": "{{\\"{escape}\\": 1}}"}}</tool_call>'
    message = parsed(FORMS["hermes"], text)
    assert_valid(message)
    expected = mended(json.loads(f'"{escape}"'))
    assert message.calls[0].name == f"f{expected}"
    assert json.loads(message.calls[0].arguments) == {expected: 1}
