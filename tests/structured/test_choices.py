"""Lists of choices up to the limit can be used, wherever they stand."""

import json
import random
from itertools import product

import pytest

from jaxserve.core.errors import RequestError
from jaxserve.core.structured import MAX_CHOICES, StructuredOutput

draw = random.Random(1)
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
LISTS = {
    "numbered": [f"value {i}" for i in range(MAX_CHOICES)],
    "random": ["".join(draw.choices(ALPHABET, k=16)) for _ in range(MAX_CHOICES)],
    "a long prefix": [f"{'the same beginning of all ' * 5}{i}" for i in range(1500)],
    "scripts": ["".join(draw.choices("äöß日本語😀🎉é", k=6)) + str(i) for i in range(MAX_CHOICES)],
}


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *(("choice", name) for name in LISTS),
        *product(("enum", "anyOf", "structural_tag", "%json"), ("random",)),
    ],
)
def test_as_many_choices_as_the_limit_says_can_be_used(follows, form: str, name: str) -> None:
    texts = LISTS[name]
    quote = "" if form in ("choice", "structural_tag") else '"'
    match form:
        case "choice":
            asked = StructuredOutput(choice=texts)
        case "enum":
            asked = StructuredOutput(json={"enum": texts[:8000]}, strict=True)
        case "anyOf":
            asked = StructuredOutput(json={"anyOf": [{"const": text} for text in texts[:4000]]}, strict=True)
        case "%json":
            asked = StructuredOutput(grammar=f"start: %json {json.dumps({'enum': texts[:8000]})}")
        case _:
            elements = [{"type": "const_string", "value": text} for text in texts[:3000]]
            asked = StructuredOutput(structural_tag={"format": {"type": "or", "elements": elements}})
    for index in (0, 1, 999, 1400):
        assert follows(asked, f"{quote}{texts[index]}{quote}")
    assert not follows(asked, f"{quote}other{quote}")


def test_choices_may_have_any_characters_and_be_empty(follows) -> None:
    texts = ["", 'a"b', "\\", "/", "a\nb", "\t", "*+?.()[]{}|^$&~-#", "\x00", " ", "<|im_end|>", "é😀"]
    asked = StructuredOutput(choice=texts)
    assert [text for text in texts if not follows(asked, text)] == []
    assert not follows(asked, "a")
    assert not follows(asked, "..")
    assert follows(StructuredOutput(choice=[""]), "")


def test_more_choices_are_refused_with_the_limit() -> None:
    with pytest.raises(RequestError, match=str(MAX_CHOICES)):
        StructuredOutput(choice=["a"] * (MAX_CHOICES + 1))
