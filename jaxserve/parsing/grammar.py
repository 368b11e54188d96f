"""Grammars that make an answer call tools, or that hold its calls to their schemas."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain

from jaxserve.parsing.formats.base import ToolFormat
from jaxserve.parsing.lark import literal
from jaxserve.parsing.tools import ToolUse


def tool_grammar(form: ToolFormat, use: ToolUse, special: Mapping[str, int], text: str = "") -> str:
    """Return a grammar in llguidance's form of Lark for an answer that may, or must, call tools.

    `special`: the ids of the tokenizer's special tokens by text, which a grammar names by id. `text`: a rule for
    answers without calls; "": any text, in which calls may be embedded. Raise `RequestError` for a tool whose arguments
    cannot be held to its schema in this format.
    """
    triggered = not (use.required or text or form.first)
    lines = _start(form, use, special, text), _calls(form, use, special, triggered)
    return "\n".join(["%llguidance {}", *chain(*lines)]) + "\n"


def _start(form: ToolFormat, use: ToolUse, special: Mapping[str, int], text: str) -> Iterator[str]:
    opening, closing, separator = (literal(t, special) for t in (form.opening, form.closing, form.separator))
    more = f"({separator} call)*" if use.parallel else ""
    calls = f"{opening} call {more} {closing}"
    if use.required:
        yield f"start: {calls}"
    elif text:
        yield f"start: text | {calls}"
        yield f"text: {text}"
    elif form.first:
        yield f"start: TEXT | {calls}"
        yield rf"TEXT: /(\s*[^\s{re.escape(form.first)}](.|\n)*)?/{_without(form.triggers, special)}"
    else:
        # One trigger opens all calls, or each call has a trigger of its own.
        section = f"triggered {more} {closing}" if form.opening else "triggered"
        yield f"start: ({section})* TEXT" if use.parallel and not form.opening else f"start: TEXT | {section}"
        yield rf"TEXT: /(.|\n)*/{_without(form.triggers[1:], special)}"
        trigger = literal(form.triggers[0], special)
        yield f"trigger: TEXT {trigger}" if trigger.startswith("<") else f"trigger[lazy]: TEXT {trigger}"


def _without(texts: tuple[str, ...], special: Mapping[str, int]) -> str:
    """Return the rest of a terminal that matches no text with one of `texts`. Special tokens are never part of one."""
    shown = [re.escape(text).replace("/", r"\/") for text in texts if text not in special]
    return "".join(rf" & ~/(.|\n)*{text}(.|\n)*/" for text in shown)


def _calls(form: ToolFormat, use: ToolUse, special: Mapping[str, int], triggered: bool) -> Iterator[str]:
    numbers = range(len(use.tools))
    yield "call: " + " | ".join(f"call_{i}" for i in numbers)
    if triggered:
        yield "triggered: trigger (" + " | ".join(f"rest_{i}" for i in numbers) + ")"
    for i, tool in enumerate(use.tools):
        before, after = form.before(tool.name), literal(form.after(), special)
        yield f"call_{i}: {literal(before, special)} arguments_{i} {after}"
        if triggered:
            rest = (form.opening + before).removeprefix(form.triggers[0])
            yield f"rest_{i}: {literal(rest, special)} arguments_{i} {after}"
        yield from form.arguments(tool, f"arguments_{i}")
