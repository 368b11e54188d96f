"""The work for an answer grows with its length and not with the square of it, whatever the model writes."""

import re
from collections.abc import Callable

import pytest

from jaxserve.parsing import parser as parser_module
from jaxserve.parsing.reasoning import ReasoningFormat
from jaxserve.parsing.source import Source
from tests.parsing.writers import FORMS, NOTE, WRITERS, parsed

LENGTH = 150  # characters
every_format = pytest.mark.parametrize("name", FORMS)


class CountingSource(Source):
    """A source that counts the characters that are looked at."""

    looked_at = 0

    def match(self, pattern: re.Pattern[str]) -> str:
        taken = super().match(pattern)
        CountingSource.looked_at += 1 + len(taken)
        return taken

    def take(self, count: int) -> str:
        taken = super().take(count)
        CountingSource.looked_at += 1 + len(taken)
        return taken

    def _find(self, ends: tuple[str, ...]) -> tuple[int, str]:
        begin, end = super()._find(ends)
        CountingSource.looked_at += begin + len(end) - self._at
        return begin, end


def work(run: Callable[[str], object], text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of characters that are looked at, those that are looked at twice counted twice."""
    monkeypatch.setattr(parser_module, "Source", CountingSource)
    monkeypatch.setattr(CountingSource, "looked_at", 0)
    run(text)
    return CountingSource.looked_at


def _trigger(name: str) -> str:
    return FORMS[name].triggers[0] if FORMS[name].triggers else FORMS[name].first


def patterns(name: str) -> list[str]:
    """Return texts that are repeated to make long answers in a format."""
    call = WRITERS[name]([("write_note", {"text": "ab", "tags": ["a", "b"]})])
    trigger = _trigger(name)
    heads = [call[: call.index("tags")], call[: call.index("write_note") + 3]]
    opened = ["", "  ", "[", "(", '{"', '{":"', '{"x":["', ' {"name":"f","arguments":{},"x":["', "<", "now", "now("]
    return ["word ", " \n", "<", "\\", trigger[:-1] or "[", call, *heads, *(trigger + text for text in opened)]


def assert_linear(run: Callable[[str], object], begin: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that an answer four times as long takes four times the work."""
    times = max(LENGTH // len(pattern), 4)
    short, long = (work(run, begin + pattern * number, monkeypatch) for number in (times, 4 * times))
    assert long < 5 * short, (begin, pattern, short, long)


@every_format
def test_work_is_linear(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern in patterns(name):
        assert_linear(lambda text: parsed(FORMS[name], text, tools=[NOTE]), "", pattern, monkeypatch)


@every_format
def test_work_is_linear_character_by_character(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern in patterns(name):
        assert_linear(lambda text: parsed(FORMS[name], *text, tools=[NOTE]), "", pattern, monkeypatch)


@every_format
def test_work_inside_calls_is_linear(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = WRITERS[name]([("write_note", {"text": "X"})])
    for begin in (_trigger(name), call[: call.index("X")]):
        for pattern in (
            "word ",
            "  ",
            "<",
            "\\",
            '"',
            '" x',
            '{"name"',
            ", 1",
            "[",
            "</",
            _trigger(name),
            *FORMS[name].ends,
        ):
            assert_linear(lambda text: parsed(FORMS[name], text, tools=[NOTE]), begin, pattern, monkeypatch)
            assert_linear(lambda text: parsed(FORMS[name], *text, tools=[NOTE]), begin, pattern, monkeypatch)


@pytest.mark.parametrize("pattern", ["<parameter=tags>", "<parameter=", "</function> x", "</tool_call>\n"])
def test_work_for_tags_in_values_is_linear(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = "<tool_call>\n<function=write_note>\n<parameter=text>\n"
    assert_linear(lambda text: parsed(FORMS["qwen3_coder"], *text, tools=[NOTE]), begin, pattern, monkeypatch)


@pytest.mark.parametrize("pattern", ["word ", "  ", "</think", "<think>", "</"])
def test_work_for_reasoning_is_linear(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = parser_module.AnswerFormat(ReasoningFormat("qwen3").after("<think>"))

    def run(text: str) -> None:
        parser = answers.parser()
        for character in text:
            parser.push(character)
        parser.finish()

    assert_linear(run, "", pattern, monkeypatch)
