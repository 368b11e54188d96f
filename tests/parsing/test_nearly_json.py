"""Arguments that are nearly JSON: each value arrives as it is, and none gives keys that nobody has written."""

import json

import pytest
from hypothesis import example, given, settings, strategies as st

from jaxserve.parsing.python_text import to_json
from jaxserve.parsing.tools import Tool
from tests.parsing.writers import FORMS, WRITERS, parsed
from tests.support.thorough import THOROUGH

TOOLS = [Tool("f", {"properties": {"p": {}, "q": {}}}), Tool("g", {"properties": {"x": {}}})]
IN_JSON = [name for name in FORMS if '"p": "VALUE"' in WRITERS[name]([("f", {"p": "VALUE"})])]
LAST = ("g", {"x": [1, "y"]})
in_json = pytest.mark.parametrize("name", IN_JSON)
EXAMPLES = 100 if THOROUGH else 10


def value_of(name: str, written: str, *, alone: bool = False) -> object:
    """Return the value that is read where a model has written this text, before another parameter and another call."""
    given = {"p": "VALUE"} if alone else {"p": "VALUE", "q": 1}
    text = WRITERS[name]([("f", given), LAST]).replace('"VALUE"', written)
    message = parsed(FORMS[name], text, tools=TOOLS)
    assert parsed(FORMS[name], *text, tools=TOOLS) == message
    assert not message.text
    (first, arguments), last = ((call.name, json.loads(call.arguments)) for call in message.calls)
    assert (first, last) == ("f", LAST)
    assert arguments.pop("q", 1) == 1
    assert list(arguments) == ["p"]
    return arguments["p"]


@in_json
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1,000", "1,000"),
        ("Paris, France", "Paris, France"),
        ("first line\nsecond line", "first line\nsecond line"),
        ("datetime(2020, 1, 1)", "datetime(2020, 1, 1)"),
        ("f(x, [1])", "f(x, [1])"),
        ("(1, (2, 3))", [1, [2, 3]]),
        ("http://x/y#z", "http://x/y#z"),
        ("#fff", "#fff"),
        ("1 + 1", "1 + 1"),
        ("1e400", "1e400"),
        ("9" * 5000, "9" * 5000),
        ('"He said "hi", then "bye" to me"', 'He said "hi", then "bye" to me'),
        ('"a" "b"', 'a" "b'),
        ("'it's'", "it's"),
        ('["say "hi" now", "b"]', ['say "hi" now', "b"]),
        ('"""a "b"\n\'c\' """', "a \"b\"\n'c' "),
        ('""', ""),
        ("{1, 2}", "{1, 2}"),
        ('{"a", "b"}', '{"a", "b"}'),
        ("[{1}, {'a': 1}]", ["{1}", {"a": 1}]),
        ('{"a": {"b"}}', {"a": '{"b"}'}),
        ("{ }", {}),
        ("5 // a comment", 5),
        ("[1, # a comment: with a colon\n 2 /* and one, too */]", [1, 2]),
        ('"x" /* c */', "x"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_a_value_arrives_as_it_is_written(name: str, written: str, value: object) -> None:
    assert value_of(name, f"{written}\n" if "//" in written else written) == value


BARE = st.text(alphabet="ab15 .,+-_&*x\n", min_size=1, max_size=14).map(lambda text: text.strip(", \n") or "a")


@in_json
@settings(max_examples=EXAMPLES, deadline=None)
@given(text=BARE)
@example(text="1,0")
def test_a_text_without_quotes_arrives_letter_for_letter(name: str, text: str) -> None:
    found = to_json(text, exact=True)
    assert value_of(name, text) == (text if found is None else json.loads(found))


@in_json
@settings(max_examples=EXAMPLES, deadline=None)
@given(words=st.lists(st.text(alphabet="ab ,.!", min_size=1, max_size=6), min_size=3, max_size=3))
def test_a_string_may_have_quotes_that_are_not_escaped(name: str, words: list[str]) -> None:
    text = 'x"y'.join(words) if not any(word.strip(" ,") == "" for word in words) else 'a "b" c'
    assert value_of(name, f'"{text}"') == text


@in_json
@settings(max_examples=EXAMPLES, deadline=None)
@given(value=st.text(max_size=20) | st.lists(st.text(max_size=5), max_size=3))
def test_json_stays_as_it_is(name: str, value: object) -> None:
    for alone in (True, False):
        assert value_of(name, json.dumps(value, ensure_ascii=False), alone=alone) == value


LISTS = {
    **dict.fromkeys(("granite", "jamba", "mistral"), ("{", "}, ")),
    **dict.fromkeys(("pythonic", "llama4_pythonic"), ("", ", ")),
    "llama3_json": ("{", "}; "),
    "olmo3": ("", "\n"),
}
DAMAGED = {
    "{": [
        '{"nam": "g", "arguments": {"x": 1}}',
        '{"name": g}',
        '{"name": "g"}',
        "null",
        '{"name": "g", "arguments": 5}',
    ],
    "": ["g(5)", "later()", "g", "g(x)"],
}


@pytest.mark.parametrize("name", LISTS)
def test_calls_after_one_without_a_valid_head_arrive(name: str) -> None:
    kind, _ = LISTS[name]
    calls = [("f", {"p": 1}), ("g", {"x": "§"}), ("f", {"p": 2})]
    whole = WRITERS[name](calls)
    begin, end = whole.index("§"), whole.index("§")
    begin = whole.rindex('{"name"' if kind else "g(", 0, begin)
    end = whole.index("}}" if kind else ")", end) + (2 if kind else 1)
    for damaged in DAMAGED[kind]:
        text = whole[:begin] + damaged + whole[end:]
        message = parsed(FORMS[name], text, tools=TOOLS)
        assert parsed(FORMS[name], *text, tools=TOOLS) == message
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [calls[0], calls[2]]
        assert damaged in message.text


@pytest.mark.parametrize("name", ["granite", "jamba", "mistral", "phi4_mini_json", "pythonic"])
def test_text_after_the_end_of_a_list_is_text(name: str) -> None:
    text = WRITERS[name]([("f", {"p": 1})]) + ' Like {"name": "f", "arguments": {"p": 2}}, f(p=2).'
    message = parsed(FORMS[name], text, tools=TOOLS)
    assert len(message.calls) == 1
    assert message.text == 'Like {"name": "f", "arguments": {"p": 2}}, f(p=2).'


@pytest.mark.parametrize("name", ["granite", "jamba", "mistral", "phi4_mini_json", "llama3_json"])
def test_a_call_after_a_string_without_its_end_arrives(name: str) -> None:
    text = WRITERS[name]([("f", {"p": "Paris"}), LAST]).replace('Paris"', "Paris")
    message = parsed(FORMS[name], text, tools=TOOLS)
    assert parsed(FORMS[name], *text, tools=TOOLS) == message
    (first, arguments), last = ((call.name, json.loads(call.arguments)) for call in message.calls)
    assert arguments["p"].startswith("Paris")
    assert (first, last) == ("f", LAST)


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic", "olmo3"])
@pytest.mark.parametrize("text", ["1,000", "Paris, France", "a, b, c", "1, 2"])
def test_a_comma_without_a_keyword_after_it_belongs_to_a_value_without_quotes(name: str, text: str) -> None:
    assert (
        parsed(FORMS[name], WRITERS[name]([("f", {"p": "§", "q": 1})]).replace("'§'", text), tools=TOOLS).calls
        == parsed(FORMS[name], WRITERS[name]([("f", {"p": text, "q": 1})]), tools=TOOLS).calls
    )


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
@pytest.mark.parametrize("between", ["a {} b", "x{}y", "['{}']", "{}."])
def test_a_value_may_have_its_own_end_tag_within_a_line(name: str, between: str) -> None:
    tag = "</arg_value>" if name.startswith("glm") else "</parameter>"
    text = between.replace("{}", tag)
    for values in ({"p": text}, {"p": text, "q": "z"}):
        written = WRITERS[name]([("f", values)])
        message = parsed(
            FORMS[name], written, tools=[Tool("f", {"properties": {key: {"type": "string"} for key in "pq"}})]
        )
        assert [json.loads(call.arguments) for call in message.calls] == [values]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
@pytest.mark.parametrize("text", ['"a\nb"', "'a\nb'", "['a\n']"])
def test_a_value_that_is_no_literal_since_its_line_breaks_is_text(name: str, text: str) -> None:
    (call,) = parsed(FORMS[name], WRITERS[name]([("f", {"p": text})]), tools=TOOLS).calls
    assert json.loads(call.arguments) == {"p": text}
