"""The reasoning with which answers begin is told from the answer, however the answer arrives in pieces."""

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.reasoning import ReasoningSection
from jaxserve.parsing.events import ParsedMessage, Reasoning, Text
from jaxserve.parsing.parser import AnswerFormat
from jaxserve.parsing.reasoning import ReasoningFormat
from jaxserve.parsing.registry import REASONING_PARSERS
from jaxserve.parsing.tools import ToolUse
from tests.parsing.writers import FORMS, TOOLS, WRITERS, calls_of

TAGS = ReasoningFormat("tags")
every_parser = pytest.mark.parametrize("form", REASONING_PARSERS.values(), ids=lambda form: form.name)


def parsed(section: ReasoningSection | None, *pieces: str, tools: str | None = None) -> ParsedMessage:
    use = ToolUse(TOOLS) if tools else None
    parser = AnswerFormat(section, FORMS[tools] if tools else None, use).parser()
    events = [event for piece in pieces for event in parser.push(piece)]
    return ParsedMessage.of(events + parser.finish())


def parts(section: ReasoningSection | None, text: str) -> tuple[str, str]:
    """Return reasoning and text of an answer, which are the same for all its cuts."""
    whole = parsed(section, text)
    assert parsed(section, *text) == whole
    for cut in range(len(text)):
        assert parsed(section, text[:cut], text[cut:]) == whole
    return whole.reasoning, whole.text


@every_parser
def test_reasoning_in_tags_is_told_from_the_answer(form: ReasoningFormat) -> None:
    answer = f"\n{form.start}\nI see: <b> or\n\n[x]?\n\n{form.end}\n\nIt is {form.start} 4.\n"
    assert parts(form.after("Hello"), answer) == ("I see: <b> or\n\n[x]?", f"It is {form.start} 4.\n")


@every_parser
def test_a_prompt_may_begin_the_reasoning(form: ReasoningFormat) -> None:
    assert parts(form.after(f"Hello\n{form.start}\n"), f"I see.\n{form.end}\n\n4") == ("I see.", "4")
    assert parts(form.after(f"Hello\n{form.start}\n"), f"{form.start}I see.{form.end}4") == ("I see.", "4")


@every_parser
def test_a_prompt_may_end_the_reasoning(form: ReasoningFormat) -> None:
    assert form.after(f"Hello {form.start}\n\n{form.end}\n\n") is None


@every_parser
def test_an_answer_without_tags_is_reasoning_only_of_models_that_always_reason(form: ReasoningFormat) -> None:
    assert parts(form.after("Hello"), " It is 4. ") == (("It is 4.", "") if form.always else ("", " It is 4. "))


@every_parser
def test_reasoning_that_does_not_end_is_all_of_the_answer(form: ReasoningFormat) -> None:
    unfinished = form.end[:-1]
    assert parts(form.after("Hello"), f"{form.start} I think {unfinished}") == (f"I think {unfinished}", "")


def test_empty_reasoning_is_left_out() -> None:
    assert parsed(TAGS.after(""), "<think>\n\n</think>\n\n4") == ParsedMessage([Text("4")])


def test_tags_in_the_middle_of_an_answer_are_text() -> None:
    assert parts(TAGS.after("Hello"), "Use <think>a</think>.") == ("", "Use <think>a</think>.")


def test_granite_may_write_its_tags_in_another_way() -> None:
    form = REASONING_PARSERS["granite"]
    answer = "Here's my thought process:\nI see.\n\nHere is my response:\n4"
    assert parts(form.after("Hello"), answer) == ("I see.", "4")


def test_calls_in_reasoning_are_reasoning() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    message = parsed(TAGS.after("<think>"), f"I call {call}</think>\n\n{call}", tools="hermes")
    assert message.reasoning == f"I call {call}"
    assert calls_of(message) == [("now", {})]


@pytest.mark.parametrize(("name", "form"), [("hermes", "qwen3"), ("qwen3_coder", "qwen3"), ("kimi_k2", "kimi_k2")])
@pytest.mark.parametrize("rest", ["", "\nDone."])
def test_a_call_ends_reasoning_that_has_no_end(name: str, form: str, rest: str) -> None:
    section = REASONING_PARSERS[form].after("<think>")
    text = f"I plan with <tool_call> tags.\n{WRITERS[name]([('now', {}), ('get_weather', {'city': 'Rome'})])}{rest}"
    message = parsed(section, text, tools=name)
    assert parsed(section, *text, tools=name) == message
    assert message.reasoning == "I plan with <tool_call> tags."
    assert calls_of(message) == [("now", {}), ("get_weather", {"city": "Rome"})]
    assert message.text == rest.strip()


def test_reasoning_arrives_at_once() -> None:
    parser = AnswerFormat(TAGS.after("<think>")).parser()
    sent = [ParsedMessage.of(parser.push(piece)).reasoning for piece in ("a", " b", " ", "c </thi", "nk", "s> ")]
    assert sent == ["a", " b", "", " c", "", " </thinks>"]


def test_the_continuation_of_an_answer_knows_where_it_begins() -> None:
    assert TAGS.inside("<think>I see") == TAGS.section(begun=True)
    assert TAGS.inside("<think>I see</think> It") is None
    assert TAGS.inside("It is") is None
    assert TAGS.inside(" ") == TAGS.section()


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n", "§", "é "]), max_size=12),
    prompt=st.sampled_from(["", "<think>"]),
)
def test_any_answer_is_parsed_without_loss_and_alike_in_pieces(pieces: list[str], prompt: str) -> None:
    section, text = TAGS.after(prompt), "".join(pieces)
    whole = parsed(section, text)
    assert parsed(section, *text) == parsed(section, *pieces) == whole
    assert (whole.reasoning + whole.text).count("§") == text.count("§")
    assert not whole.reasoning or isinstance(whole.parts[0], Reasoning)
