"""Values that models write as Python or JSON become JSON."""

import json

import pytest
from hypothesis import given, strategies as st

from jaxserve.parsing.python_text import to_json


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-2.50e3", -2500.0),
        ("+1", 1),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
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
            "1 2",
            "--1",
            "1e",
            "b'a'",
            "((",
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


@given(values)
def test_what_python_writes_comes_back(value: object) -> None:
    found = to_json(repr(value))
    assert found is not None
    assert json.loads(found) == value


@given(values)
def test_json_stays_as_it_is(value: object) -> None:
    text = json.dumps(value, indent=1)
    assert to_json(text) == text
