"""JSON before the arguments of a call is taken if it is valid, and only then."""

import json

from hypothesis import example, given, settings, strategies as st

from jaxserve.parsing.json_text import value
from jaxserve.parsing.source import Source

PARTS = ["{", "}", "[", "]", ":", ",", '"a"', '"\\n"', '"\\x"', '"', "1", "-0.5e3", "01", "true", "nul", " ", "\n", "é"]


def is_value(text: str) -> bool:
    """Return whether a text is taken as one value."""
    source = Source()
    source.push(text + ";")  # so that a number is known to end
    source.complete = True
    try:
        next(value(source))
    except StopIteration as end:
        return bool(end.value == text)
    raise AssertionError("waits for more of a text that is complete")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=9).map("".join))
@example('{"a", "a": 1}')
@example("[1,]")
@example('{"a": 1,}')
@example("[,1]")
@example('{"a": {"a": [1, {}], "b": ""}}')
@example("{1: 1}")
def test_a_value_is_taken_if_it_is_json(text: str) -> None:
    assert is_value(text.rstrip()) == is_json(text.rstrip())
