"""Grammars that make an answer call tools, or that hold its calls to their schemas."""

import json
import re
from collections.abc import Iterator, Mapping

from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.tools import ToolUse


def tool_grammar(form: ToolFormat, use: ToolUse, special: Mapping[str, int], text: str = "") -> str:
    """Return a grammar in llguidance's form of Lark for an answer that may, or must, call tools.

    `special`: the ids of the tokenizer's special tokens by text, which a grammar names by id. `text`: a rule for
    answers without calls; "": any text, in which calls may be embedded.
    """
    start = _start_with(text, form, use, special) if text and not use.required else _start(form, use, special)
    return "\n".join(["%llguidance {}", *start, *_calls(form, use, special)]) + "\n"


def literal(text: str, special: Mapping[str, int]) -> str:
    """Return a text as an expression of Lark, in which special tokens are named by their ids."""
    if not text:
        return ""
    names = sorted((name for name in special if name in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def _start_with(text: str, form: ToolFormat, use: ToolUse, special: Mapping[str, int]) -> Iterator[str]:
    opening, closing, separator = (literal(t, special) for t in (form.opening, form.closing, form.separator))
    more = f"({separator} call)*" if use.parallel else ""
    yield f"start: text | {opening} call {more} {closing}"
    yield f"text: {text}"


def _start(form: ToolFormat, use: ToolUse, special: Mapping[str, int]) -> Iterator[str]:
    opening, closing, separator = (literal(t, special) for t in (form.opening, form.closing, form.separator))
    more = f"({separator} call)*" if use.parallel else ""
    if use.required:
        yield f"start: {opening} call {more} {closing}"
    elif not form.trigger:
        yield f"start: TEXT | {opening} call {more} {closing}"
        yield rf"TEXT: /[^{re.escape(form.first)}](.|\n)*/"
    else:
        # Each call has a trigger of its own, or one trigger opens all calls.
        section = f"triggered {more} {closing}" if form.opening else "triggered"
        yield f"start: ({section})* TEXT" if use.parallel and not form.opening else f"start: TEXT | {section}"
        yield r"TEXT: /(.|\n)*/"
        if form.trigger in special:
            yield f"trigger: TEXT {literal(form.trigger, special)}"
        else:
            yield f"trigger[lazy]: TEXT {literal(form.trigger, special)}"


def _calls(form: ToolFormat, use: ToolUse, special: Mapping[str, int]) -> Iterator[str]:
    numbers = range(len(use.tools))
    yield "call: " + " | ".join(f"call_{i}" for i in numbers)
    if form.trigger and not use.required:
        yield "triggered: trigger (" + " | ".join(f"rest_{i}" for i in numbers) + ")"
    for i, tool in enumerate(use.tools):
        before, after = form.before(tool.name), literal(form.after(), special)
        yield f"call_{i}: {literal(before, special)} arguments_{i} {after}"
        if form.trigger and not use.required:
            rest = (form.opening + before).removeprefix(form.trigger)
            yield f"rest_{i}: {literal(rest, special)} arguments_{i} {after}"
        yield f"arguments_{i}: {form.arguments(tool)}"
