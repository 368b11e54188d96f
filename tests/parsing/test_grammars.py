"""Answers that follow the grammar of a format are calls of tools whose arguments follow their schemas."""

import json
import random
from collections.abc import Mapping

import jsonschema
import numpy as np
import pytest

from jaxserve.core.bundled import bundled_model_path
from jaxserve.core.errors import RequestError
from jaxserve.core.structured import StructuredOutput
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.parsing.formats.hermes import Hermes
from jaxserve.parsing.formats.pythonic import Pythonic
from jaxserve.parsing.formats.xml import Qwen3Coder
from jaxserve.parsing.grammar import tool_grammar
from jaxserve.parsing.tools import Tool, ToolUse
from jaxserve.structured.compiler import LLGrammarCompiler
from tests.parsing.writers import FORMS, WRITERS, parsed

ANSWERS, TOKENS = 4, 150  # for each grammar


def _object(properties: dict[str, object], required: list[str], **more: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


STRICT = (
    Tool(
        "get_weather",
        _object(
            {
                "days": {"type": "integer", "minimum": 0, "maximum": 20},
                "city": {"type": "string", "minLength": 1, "maxLength": 4},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            ["city"],
        ),
        strict=True,
    ),
    Tool(
        "search",
        _object(
            {
                "path": {"anyOf": [{"type": "string", "pattern": "^[a-c]{1,3}/x$"}, {"type": "null"}]},
                "options": _object({"deep": {"type": "boolean"}}, ["deep"]),
                "key": {"type": ["string", "integer"], "maxLength": 3},
                "list": {"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 2},
            },
            [],
        ),
        strict=True,
    ),
    Tool(
        "paint",
        _object(
            {
                "color": {"$ref": "#/$defs/Color"},
                "kind": {"oneOf": [{"const": "a"}, {"const": "b"}]},
                "level": {"enum": [1, "one", "1", None]},
            },
            ["color", "kind"],
            **{"$defs": {"Color": {"type": "string", "enum": ["red", 'a "b" \\']}}},
        ),
        strict=True,
    ),
    Tool("now"),
)
FREE = (Tool("write", _object({"text": {"type": "string", "format": "date"}, "é": {}}, ["text"])), Tool("any", {}))
every_format = pytest.mark.parametrize("name", FORMS)
parallel_or_not = pytest.mark.parametrize("parallel", [True, False])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(bundled_model_path())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> LLGrammarCompiler:
    return LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids)


class Walker:
    """A model that draws one of the tokens that a grammar allows, all alike."""

    def __init__(self, tokenizer: Tokenizer, compiler: LLGrammarCompiler, grammar: str):
        self._tokenizer, self._grammar = tokenizer, compiler.compile(StructuredOutput(grammar=grammar))
        self._random = random.Random(grammar)

    def answers(self, begin: str, special: Mapping[str, int]) -> list[str]:
        """Return complete answers that begin with a text, without those that are not complete after many tokens."""
        answers = [self._answer(begin, special) for _ in range(ANSWERS)]
        return [answer for answer in answers if answer is not None]

    def _answer(self, begin: str, special: Mapping[str, int]) -> str | None:
        matcher = self._grammar.start()
        tokens = self._encode(begin, special)
        for token in tokens:
            matcher.accept(token)
        assert not matcher.error
        mask = np.zeros(-(-self._tokenizer.vocab_size // 32), np.uint32)
        for _ in range(TOKENS):
            if matcher.ended:
                break
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            ends = [token for token in allowed if token in self._tokenizer.eos_token_ids]
            if ends and self._random.random() < 0.5:
                break
            token = self._random.choice(allowed)
            if token in ends:
                break
            matcher.accept(token)
            tokens.append(token)
        else:
            return None
        names = {token: text for text, token in special.items()}
        return b"".join(
            names[token].encode() if token in names else self._tokenizer.token_bytes(token) for token in tokens
        ).decode()

    def _encode(self, text: str, special: Mapping[str, int]) -> list[int]:
        for name, token in special.items():
            if name in text:
                before, after = text.split(name, 1)
                return [*self._encode(before, special), token, *self._encode(after, special)]
        return self._tokenizer.encode(text, add_special_tokens=False)


def check(name: str, use: ToolUse, answer: str) -> int:
    """Assert that an answer's calls follow their schemas, and return how many there are."""
    message = parsed(FORMS[name], answer, tools=use.tools)
    schemas = {tool.name: tool.parameters for tool in use.tools}
    for call in message.calls:
        schema = schemas[call.name]
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict), answer
        if schema is None:
            assert arguments == {}
        else:
            jsonschema.validate(arguments, dict(schema))
    if use.required:
        assert message.calls, answer
        assert not message.text.strip(), answer
    assert use.parallel or len(message.calls) <= 1
    return len(message.calls)


@every_format
@parallel_or_not
@pytest.mark.parametrize("tools", [STRICT, FREE], ids=["strict", "free"])
def test_required_calls_follow_their_schemas(
    name: str, parallel: bool, tools: tuple[Tool, ...], tokenizer: Tokenizer, compiler: LLGrammarCompiler
) -> None:
    use = ToolUse(tools, required=True, parallel=parallel)
    walker = Walker(tokenizer, compiler, tool_grammar(FORMS[name], use, {}))
    for answer in walker.answers("", {}):
        check(name, use, answer)


@every_format
def test_answer_ends_after_the_only_call_of_a_named_tool(
    name: str, tokenizer: Tokenizer, compiler: LLGrammarCompiler
) -> None:
    use = ToolUse((STRICT[3],), required=True, parallel=False, named=True)
    grammar = tool_grammar(FORMS[name], use, {})
    answers = Walker(tokenizer, compiler, grammar).answers("", {})
    assert answers
    for answer in answers:
        matcher = compiler.compile(StructuredOutput(grammar=grammar)).start()
        for token in tokenizer.encode(answer, add_special_tokens=False):
            matcher.accept(token)
        mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert set(allowed) <= set(tokenizer.eos_token_ids), answer
        assert check(name, use, answer) == 1


@every_format
@parallel_or_not
def test_an_answer_may_be_text_or_calls_that_follow_their_schemas(
    name: str, parallel: bool, tokenizer: Tokenizer, compiler: LLGrammarCompiler
) -> None:
    form, use = FORMS[name], ToolUse(STRICT, parallel=parallel)
    walker = Walker(tokenizer, compiler, tool_grammar(form, use, {}))
    for answer in walker.answers("Hello", {}):
        check(name, use, answer)
    begin = f"Hello {form.triggers[0]}" if not form.first else form.opening or form.first
    for answer in walker.answers(begin, {}):
        assert check(name, use, answer) >= 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "Hi <function="),
        ("granite", "Hi <tool_call>"),
        ("llama3_json", "Hi <|python_tag|>"),
        ("llama3_json", ' {"city"'),
        ("llama4_pythonic", "Hi <|python_start|>"),
        ("pythonic", "\n[1"),
        ("hermes", "Hi <tool_call>x"),
        ("deepseek_v31", "Hi <｜tool▁calls▁begin｜> "),
    ],
)
def test_text_beside_strict_tools_has_no_calls_that_are_not_held_to_schemas(
    name: str, text: str, tokenizer: Tokenizer, compiler: LLGrammarCompiler
) -> None:
    matcher = compiler.compile(StructuredOutput(grammar=tool_grammar(FORMS[name], ToolUse(STRICT), {}))).start()
    for token in tokenizer.encode(text, add_special_tokens=False):
        matcher.accept(token)
    assert matcher.error


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
def test_a_string_in_tags_ends_at_the_first_end_tag(
    name: str, tokenizer: Tokenizer, compiler: LLGrammarCompiler
) -> None:
    tool = Tool("f", _object({"text": {"type": "string"}, "end": {"const": "!"}}, ["text", "end"]))
    grammar = tool_grammar(FORMS[name], ToolUse((tool,), required=True), {})
    tag = FORMS[name].value_tags[1]  # type: ignore[attr-defined]
    for text, allowed in (("a<b></b> 'c'", True), (f"a{tag}b", False)):
        matcher = compiler.compile(StructuredOutput(grammar=grammar)).start()
        written = WRITERS[name]([("f", {"text": text, "end": "!"})])
        for token in tokenizer.encode(written, add_special_tokens=False):
            matcher.accept(token)
        assert (not matcher.error) == allowed


@every_format
def test_text_beside_calls_may_have_a_grammar_of_its_own(
    name: str, tokenizer: Tokenizer, compiler: LLGrammarCompiler
) -> None:
    use = ToolUse(STRICT)
    grammar = tool_grammar(FORMS[name], use, {}, '%json {"const": "fine"}')
    walker = Walker(tokenizer, compiler, grammar)
    assert set(walker.answers('"f', {})) == {'"fine"'}
    for answer in walker.answers("", {}):
        assert answer == '"fine"' or check(name, use, answer)


@every_format
def test_markers_may_be_special_tokens(name: str, tokenizer: Tokenizer, compiler: LLGrammarCompiler) -> None:
    form = FORMS[name]
    padding = next(token for token in tokenizer.special_ids if token not in tokenizer.eos_token_ids)
    special = {text: padding for text in form.markers[:1] if "tool" in text.lower() or "action" in text}
    for use in (ToolUse(STRICT, required=True), ToolUse(STRICT)):
        walker = Walker(tokenizer, compiler, tool_grammar(form, use, special))
        begin = "" if use.required or form.first else f"Hi {form.triggers[0]}"
        for answer in walker.answers(begin, special):
            assert check(name, use, answer) >= bool(begin)


# Of the others, the grammars are narrower than what models write: strings in double quotes, white space at one place.
@pytest.mark.parametrize(
    "name",
    [
        *("hermes", "granite", "jamba", "phi4_mini_json", "llama3_json", "mistral_11", "deepseek_v3", "deepseek_v31"),
        *("qwen3_coder", "glm45", "glm47", "seed_oss"),
    ],
)
def test_grammars_allow_what_models_write(name: str, tokenizer: Tokenizer, compiler: LLGrammarCompiler) -> None:
    text = WRITERS[name]([("now", {}), ("get_weather", {"days": 3, "city": "Rome", "unit": "celsius"}), ("now", {})])
    for use in (ToolUse(STRICT, required=True), ToolUse(STRICT)):
        matcher = compiler.compile(StructuredOutput(grammar=tool_grammar(FORMS[name], use, {}))).start()
        for token in tokenizer.encode(text, add_special_tokens=False):
            matcher.accept(token)
        assert not matcher.error


@pytest.mark.parametrize("form", [Qwen3Coder(), Pythonic()], ids=lambda form: form.name)
def test_a_strict_tool_that_cannot_be_enforced_is_refused(form: Pythonic | Qwen3Coder) -> None:
    for schema, keyword in (
        ({**_object({"a": {}}, []), "minProperties": 1}, "minProperties"),
        (_object({"a b=": {"type": "string"}, "<a>": {}}, []), "a"),
    ):
        use = ToolUse((Tool("f", schema, strict=True, place="tools[0]"),))
        with pytest.raises(RequestError, match=keyword) as error:
            tool_grammar(form, use, {})
        assert error.value.field == "tools[0]"


def test_a_strict_format_of_a_string_is_refused_only_where_strings_are_not_json() -> None:
    use = ToolUse((Tool("f", _object({"day": {"type": "string", "format": "date"}}, ["day"]), strict=True),))
    assert "date" in tool_grammar(Hermes(), use, {})
    with pytest.raises(RequestError, match="format"):
        tool_grammar(Qwen3Coder(), use, {})
