"""Values that models write as Python or JSON become JSON."""

import ast
import json

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.parsing.python_text import to_json
from tests.support.thorough import THOROUGH


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-2.50e3", -2500.0),
        ("+1", 1),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("0x1F", 31),
        ("{'a': true}", {"a": True}),
        (r"'\N{BULLET}'", "•"),
        ("'a\nb'", "a\nb"),
        ("True", True),
        ("null", None),
        ("'a'", "a"),
        ('"a"', "a"),
        ("'a\"b\\'c'", "a\"b'c"),
        (r"'\x41\u00e9\U0001f600\101\n\t\\'", "Aé😀A\n\t\\"),
        (r'"\d\/"', "\\d\\/"),
        (r'"\ud83d\ude00"', "😀"),
        ("'''a\n'b''c'''", "a\n'b''c"),
        ('"""a"b"""', 'a"b'),
        ("''", ""),
        ("[1, 'a', None,]", [1, "a", None]),
        ("{'a': {'b': []}, }", {"a": {"b": []}}),
        ("(1, 2)", [1, 2]),
        ("(1,)", [1]),
        ("()", []),
        (" [ ]", []),
        ("('a')", "a"),
        ("[('a'), ((1), 2), (())]", ["a", [1, 2], []]),
        ("['[', '}', \"','\"]", ["[", "}", "','"]),
    ],
)
def test_literals_become_json(text: str, value: object) -> None:
    found = to_json(text)
    assert found is not None
    assert json.loads(found) == value


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "x",
            "1 + 1",
            "[1",
            "1]",
            "[1)",
            "{1: 2}",
            "{1, 2}",
            "'a",
            "'a' 'b'",
            "f(1)",
            "[,]",
            "[1,,2]",
            "(,)",
            ",",
        ),
        *(
            "nan",
            "inf",
            "1e400",
            "[-1E999]",
            "1" * 400 + ".5",
            "1 2",
            "--1",
            "1e",
            "b'a'",
            "((",
            "1+1",
            "1 -1",
            "12+.5",
            "1.2.3",
            "1_",
            "01",
            "[1 'a']",
            "['a' 'b']",
            "(1)(2)",
            "[1](2)",
            "{'a': 1 'b': 2}",
            "{('a': 1)}",
            "(1: 2)",
            "1j",
            "NaN",
            "\u0661",
            "1\u00a0",
            r"'\x4'",
            r"'\u12'",
            r"'\N{no such name}'",
            "1" * 5000 + "_0",
            "[" * 100_000,
            "[" * 100_000 + "]" * 100_000,
        ),
    ],
)
def test_anything_else_is_none(text: str) -> None:
    assert to_json(text) is None


@given(st.text())
def test_no_text_is_an_error(text: str) -> None:
    found = to_json(text)
    assert found is None or json.loads(found) is not NotImplemented


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.parametrize("text", ["+4915112345", "1_0", ".5", "5.", "0x10", "(212)", "[+1]", "{'a': true}", "('a')"])
def test_what_may_be_a_string_is_a_number_only_if_json_says_so(text: str) -> None:
    assert to_json(text, exact=True) is None
    assert to_json(text) is not None


@pytest.mark.parametrize("text", ["1" * 400, "1.10", "-0", "1e5", "1E+05", '{"a": 1.0, "a": 2.50}', "[ 1,\n2 ]"])
def test_json_keeps_each_letter(text: str) -> None:
    assert to_json(text) == to_json(text, exact=True) == text


PARTS = [
    *("1", "0", "-", "+", ".", "_", "e5", "0x", "j", "'a'", '"b"', "'", "b", "r", "True", "true", "None", "null"),
    *("nan", "NaN", "[", "]", "(", ")", "{", "}", ",", ":", " ", "#", "\\", "\u0661", "\u00a0", "\\N{DIGIT ONE}"),
]


@settings(max_examples=1000 if THOROUGH else 200, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=9).map("".join))
def test_a_value_is_read_as_a_whole_or_not_at_all(text: str) -> None:
    found = to_json(text, exact=True)
    if found is not None:
        try:
            value = json.loads(text)
        except ValueError:
            value = json.loads(json.dumps(ast.literal_eval(text.strip())))
        assert json.loads(found) == value


@given(values)
def test_what_python_writes_comes_back(value: object) -> None:
    found = to_json(repr(value))
    assert found is not None
    assert json.loads(found) == value


@given(values)
def test_json_stays_as_it_is(value: object) -> None:
    text = json.dumps(value, indent=1)
    assert to_json(text) == text
