"""What is not a valid call is text, and what has begun as one stays what the model has written."""

import json

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.parsing.events import ParsedMessage, Text
from jaxserve.parsing.formats.xml import XmlCalls
from tests.parsing.writers import FORMS, WRITERS, calls_of, parsed

CALL = [("get_weather", {"city": "Rome"})]

TEXTS = {
    "hermes": [
        "<tool_call></tool_call>",
        "<tool_call>get_weather</tool_call>",
        '<tool_call>{"name": "f", "arguments": 3}</tool_call>',
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name" "f"}</tool_call>',
        '<tool_call>{"name": "f", "argument": {}}</tool_call>',
        '<tool_call>{"name": "f", "x": [1, 2}</tool_call>',
        '<tool_call>{"name": "f", "x": 01, "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        "Use <tool_call> and </tool_call> as tags.",
        '</tool_call>{"name": "f", "arguments": {}}',
    ],
    "granite": [
        "<|tool_call|>[]",
        '<|tool_call|>{"name": "f"}',
        "<|tool_call|>[3]",
        "<tool_call>[now]",
    ],
    "jamba": ["<tool_calls>[]</tool_calls>", "<tool_calls></tool_calls>"],
    "phi4_mini_json": ["functools", "import functools", "functools[0]", "from functools import cache"],
    "internlm": ["<|action_start|> x", "<|action_start|><|plugin|>{}<|action_end|>"],
    "llama3_json": [
        '{"name": "Rome", "parameters": {}}',
        '{"name": "now"}',
        '{"parameters": {}, "name": "Rome"}',
        '{"city": "Rome"}',
        '["a", "b"]',
        '<|python_tag|>print("x")',
        'Like this: {"name": "now", "parameters": {}}',
    ],
    "mistral": [
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]now[ARGS]5",
        "[TOOL_CALLS][ARGS]{}",
        '[TOOL_CALLS]{"name": "now"}',
    ],
    "pythonic": [
        "[]",
        "[1, 2]",
        "[now]",
        "[now(]",
        "[now(1)]",
        "[later()]",
        "[get_weather(city)]",
        'now(city="x")',
        "[get_weather](https://example.com)",
        "Call [now()] for that.",
    ],
    "llama4_pythonic": ["<|python_start|>now()", "<|python_start|>[later()]<|python_end|>"],
    "olmo3": ["<function_calls></function_calls>", "<function_calls>\nlater()\n</function_calls>"],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n{}",
    ],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now{}", "<｜tool▁calls▁begin｜>now<｜tool▁sep｜>{}"],
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>now:0{}",
        "<|tool_calls_section_begin|><|tool_call_begin|>:0<|tool_call_argument_begin|>[]",
    ],
    "qwen3_coder": [
        "<tool_call>now</tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call>\n<function=now\n</tool_call>",
        "<function=later>\n</function>",  # no tool, and not in a tag
        "A <function=name> tag begins a call.",
        '<tool_call>{"name": "now"}</tool_call>',
    ],
    "glm45": [
        "<tool_call></tool_call>",
        "<tool_call>now <arg_value>",
        "<tool_call>a tag",
    ],
    "minimax_m2": ["<minimax:tool_call><invoke name=now>", '<invoke name="later"></invoke>'],
    "seed_oss": ["<seed:tool_call> x", "<function=later></function>"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
def test_what_is_no_call_is_text(name: str, text: str) -> None:
    for pieces in ([text], text):
        assert parsed(FORMS[name], *pieces) == ParsedMessage([Text(text)])


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name, texts in TEXTS.items() if not FORMS[name].first for text in texts],
)
def test_calls_after_what_is_none_are_found(name: str, text: str) -> None:
    message = parsed(FORMS[name], f"{text}\n\n{WRITERS[name](CALL)}")
    assert calls_of(message) == CALL
    assert message.text == text


@pytest.mark.parametrize(
    ("name", "text", "arguments", "rest"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }</tool_call>x', '{"a": null }', "x"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>x', '{"a": [1]}', "x"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>', '{"a": "x"}', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "{}", ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} x</tool_call> y </tool_call>', "{}", "x y </tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}', "{}", ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', '{"a": [1', ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {a: nope}} and so on', '{"a": "nope"}', "and so on"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{'a': 1}", '{"a": 1}', ""),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, nope]', '{"a": 1}', ", nope]"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}}]]', '{"a": 1}', ""),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{1<｜tool▁call▁end｜>.",
            '{"1": null}',
            ".",
        ),
        ("pythonic", "[get_weather(city=here, days=1 + 1)]", '{"city": "here", "days": "1 + 1"}', ""),
        ("pythonic", "[get_weather(city='x', 5)]", '{"city": "x"}', ""),
        ("pythonic", "[get_weather(city='x'] then", '{"city": "x"}', "then"),
        ("pythonic", "[get_weather(city='x', and then", '{"city": "x"', "and then"),
        ("pythonic", "[get_weather(city='x'), later()]", '{"city": "x"}', ", later()]"),
        ("pythonic", "[get_weather(city='x", '{"city": \'x', ""),
        ("pythonic", "[get_weather(city='x' days=3)]", '{"city": "x", "days": 3}', ""),
        ("pythonic", "[get_weather(city='x, days=3)]", '{"city": "\'x", "days": 3}', ""),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter></tool_call>", '{"a": 1}', ""),
        ("qwen3_coder", "<tool_call><function=f>x</function>", "{}", ""),
        ("qwen3_coder", "<tool_call><function=f> is a call", "{}", "is a call"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1", '{"a": 1', ""),
        ("qwen3_coder", "<function=write_note><parameter=text>ab", '{"text": "ab', ""),
        ("qwen3_coder", "<function=write_note><parameter=text>ab\n</para", '{"text": "ab', ""),
        ("qwen3_coder", "<function=now></function>\n<function=name> it", "{}", "<function=name> it"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a: [5]</function></tool_call>x", "{}", "x"),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a: [5]</parameter><parameter=b>1</function>",
            '{"b": 1}',
            "",
        ),
        ("glm45", "<tool_call>f<arg_key>a</arg_key>1</tool_call>", '{"a": 1}', ""),
        ("glm45", "<tool_call>f<arg_key>a<arg_value>1</tool_call>", '{"a": 1}', ""),
    ],
)
def test_arguments_that_have_begun_are_valid_as_far_as_they_go(name: str, text: str, arguments: str, rest: str) -> None:
    for pieces in ([text], text):
        message = parsed(FORMS[name], *pieces)
        assert [call.arguments for call in message.calls] == [arguments]
        assert message.text == rest


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"id": [{}], "name": "f", "parameters": {"a": 1}, "x": {"y": 2}}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', {}),
        ("hermes", '<tool_call>\n\n {"name":\n"f","arguments":{"a":1}\n}\n\n</tool_call>', {"a": 1}),
        ("granite", '<tool_call> [ {"name": "f", "arguments": {"a": 1}} ]', {"a": 1}),
        ("llama3_json", ' <|python_tag|>{"type": "function", "name": "now", "arguments": {"a": 1}}', {"a": 1}),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', {"a": 1}),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}', {"a": 1}),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcDEF123"}]', {"a": 1}),
        ("pythonic", " [ get_weather( a = 1, ) ] ", {"a": 1}),
        ("llama4_pythonic", "[get_weather(a=1)]", {"a": 1}),
        ("pythonic", "[get_weather(a=(1, 'x', {'b': None,}), c=true)]", {"a": [1, "x", {"b": None}], "c": True}),
        ("pythonic", "[get_weather(a='''it's \"x\"''', b='\\x41\\u00e9\\n')]", {"a": 'it\'s "x"', "b": "Aé\n"}),
        ("kimi_k2", "<|tool_calls_section_begin|> <|tool_call_begin|> now <|tool_call_argument_begin|> {}", {}),
        ("qwen3_coder", "<function=get_weather>\n<parameter=days>\n3\n</parameter>\n</function>", {"days": 3}),
        ("qwen3_coder", "<function=write_note><parameter=text>\n\n a\n\n</parameter></function>", {"text": "\n a\n"}),
        ("qwen3_coder", "<function=write_note><parameter=text>5</parameter></function>", {"text": "5"}),
        ("qwen3_coder", "<function=write_note><parameter=draft>True</parameter></function>", {"draft": True}),
        ("qwen3_coder", "<function=write_note><parameter=weight>much</parameter></function>", {"weight": "much"}),
        ("qwen3_coder", "<function=write_note><parameter=title>5</parameter></function>", {"title": "5"}),
        (
            "qwen3_coder",
            "<function=write_note><parameter=meta>{'a': None}</parameter></function>",
            {"meta": {"a": None}},
        ),
        ("qwen3_coder", "<tool_call><function=f><parameter=x>NaN</parameter></function></tool_call>", {"x": "NaN"}),
    ],
)
def test_what_models_vary_is_understood(name: str, text: str, expected: dict[str, object]) -> None:
    for pieces in ([text], text):
        message = parsed(FORMS[name], *pieces)
        assert [json.loads(call.arguments) for call in message.calls] == [expected]
        assert not message.text


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        *(
            ("hermes", text)
            for text in ("<t", "<tool_call", "<tool_call>", '<tool_call>{"na', '<tool_call>{"name": "f"')
        ),
        *(("qwen3_coder", text) for text in ("<tool_call>\n<func", "<function=no", "<tool_call>\n<function=now")),
        *(("mistral", text) for text in ("[TOOL", "[TOOL_CALLS]", "[TOOL_CALLS]now[AR", "[TOOL_CALLS]now[CALL_ID]abc")),
        *(("glm45", text) for text in ("<tool_call>", "<tool_call>now", "<tool_call>now\n<arg_")),
        ("internlm", "<|action_start|><|plug"),
        ("llama4_pythonic", "<|python_start|>[now("),
        ("olmo3", "<function_calls>\nnow"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="now'),
        ("seed_oss", "<seed:tool_call>\n<function="),
    ],
)
def test_markup_with_which_an_answer_breaks_off_is_no_text(name: str, cut: str) -> None:
    for pieces in ([f"I see.\n{cut}"], f"I see.\n{cut}"):
        message = parsed(FORMS[name], *pieces)
        assert message.text.rstrip() == "I see."
        assert not message.calls


@pytest.mark.parametrize("text", ["It is fun", "a <", "x[", "1 < 2", "f[t"])
@pytest.mark.parametrize("name", ["hermes", "phi4_mini_json", "mistral", "qwen3_coder"])
def test_words_at_the_end_of_an_answer_stay(name: str, text: str) -> None:
    assert parsed(FORMS[name], text) == ParsedMessage([Text(text)])


# Pieces of each format, from which answers are put together in any order. "§" stands for what must not get lost. It
# is on a line of its own, since strings in further fields of a call, which are left out, have no line breaks, and it
# begins with what no name has, since the name of a call that breaks off is left out, too.
def _fragments(name: str) -> list[str]:
    form, call = FORMS[name], WRITERS[name](CALL)
    marks = ["\n;§\n", " ", "\n", "a", "{", "}", "[", "]", ", ", "now", "get_weather", '"', "\\", "<"]
    triggers = [text for trigger in form.triggers for text in (trigger, trigger[:-1])]
    begun = [call[:length] for length in range(0, len(call), 7)]
    ends = [call[length:] for length in range(0, len(call), 7)]
    return list(dict.fromkeys([*marks, *triggers, form.opening, form.closing, *begun, *ends]))


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=70, deadline=None)
@given(data=st.data())
def test_any_answer_is_parsed_without_loss_and_alike_in_pieces(name: str, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from(_fragments(name)), max_size=12))
    text = "".join(pieces)
    whole = parsed(FORMS[name], text)
    assert parsed(FORMS[name], *text) == whole
    assert parsed(FORMS[name], *pieces) == whole
    kept = whole.text + "".join(call.name + call.arguments for call in whole.calls)
    if not whole.calls:
        assert text.startswith(kept)  # but for the beginning of a call at the end
    if not isinstance(FORMS[name], XmlCalls):  # what is not in tags between tags is left out
        assert kept.count("§") == text.count("§")


@pytest.mark.parametrize("name", FORMS)
def test_deep_nesting_is_no_error(name: str) -> None:
    for text in ("[" * 5000, '{"a": ' * 5000, "(" * 5000):
        call = (
            WRITERS[name]([("write_note", {"meta": "§"})]).replace('"§"', text).replace("'§'", text).replace("§", text)
        )
        for begin in (call, *(trigger + text for trigger in FORMS[name].triggers)):
            parsed(FORMS[name], begin)


@pytest.mark.parametrize("text", ['{"a":' * 30_000 + "}" * 30_000, '{"a":' * 30_000 + "]" * 30_000, "{" * 30_000])
def test_deep_arguments_are_no_error(text: str) -> None:
    message = parsed(FORMS["hermes"], f'<tool_call>{{"name": "f", "arguments": {text}</tool_call>')
    assert message.calls[0].arguments.count("{") == message.calls[0].arguments.count("}") == 30_000


@pytest.mark.parametrize("name", FORMS)
def test_answer_that_breaks_off_after_a_call_has_no_markup_in_its_text(name: str) -> None:
    written = WRITERS[name](
        [("get_weather", {"city": "Bern", "days": 3}), ("now", {}), ("get_weather", {"city": "Thun"})]
    )
    cuts = [parsed(FORMS[name], written[:length]) for length in range(len(written) + 1)]
    begun = [message for message in cuts if message.calls]
    assert len(begun) > len(written) / 2
    assert {message.text.strip() for message in begun} <= {"", "<", "["}  # which may be signs of their own
    assert [len(message.calls) for message in begun] == sorted(len(message.calls) for message in begun)
    assert len(begun[-1].calls) == 3
