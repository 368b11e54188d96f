"""Arguments of calls in JSON, which stay as the model writes them where they are valid and are made valid elsewhere."""

import json
import re
from collections import Counter

from jaxserve.parsing.events import ArgumentsDelta, CallBegun
from jaxserve.parsing.json_lookahead import COMMENTS, begins_set, ends_bare_value, ends_string
from jaxserve.parsing.json_text import FOREIGN_SPACE, Head, call_head, gap, member_key, value
from jaxserve.parsing.python_text import to_json
from jaxserve.parsing.source import Parsing, Source

CLOSERS = {"{": "}", "[": "]"}
JSON_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
GOES_ON = re.compile(r"[,:}\]]")  # what comes after a string in JSON
MARKS = re.compile(r"[!-/:-@\[-`{-~]+")  # such as the end of a Markdown block
COMMENT = re.compile(r"\s+(?://|# |/\*)")


def call_body(source: Source, head: Head, end: str = "", opening: str = "") -> Parsing[None]:
    """Yield the events of the call that has begun with `head`, and take it to its end (`arguments`)."""
    yield CallBegun(head.name)
    if head.arguments is None:
        yield from arguments(source, end, opening)
    else:
        yield ArgumentsDelta(head.arguments)
    yield from source.attempt(_rest(source))
    while (yield from source.attempt(source.spaced("}"))):
        pass  # models write one too many


def arguments(source: Source, end: str = "", opening: str = "") -> Parsing[None]:
    """Yield the arguments of a call, an object that comes next, as they arrive.

    They end with the object, or at `end`, which is not taken, or with the text. Only if the text ends in them are they
    not complete. `opening`: the text before the next call. `end` counts in a string, too, unless the string goes on to
    a quotation mark after which JSON goes on.
    """
    yield from _Arguments(source, end, opening).read()


class _Arguments:
    """A reader that writes nothing but the beginning of a valid object.

    It also reads what models write in place of JSON: single or three quotes, no quotes, names and tuples of Python,
    line breaks and quotation marks in strings, comments. It writes commas, colons and brackets that are missing, and
    null for a value that is, and leaves out those that are too many.
    """

    def __init__(self, source: Source, end: str, opening: str):
        self._source, self._end, self._opening = source, end, opening
        self._brackets: list[str] = []  # the closing ones of those that are open
        self._open: Counter[str] = Counter()  # how many of each kind there are
        self._last = ""  # what came last: a bracket, a comma, which is held back, a colon, "key" or "value"
        self._gap = ""  # white space and a comma, which are written with what follows them
        first = re.escape(end[:1])
        self._words = {
            "key": re.compile(rf"[^:,{{}}\[\]\n{first}]+"),
            "value": re.compile(rf"[^,{{}}\[\]\n{first}]+"),
            "set": re.compile(rf"[^{{}}{first}]+"),
        }
        self._runs = {quote: re.compile(rf'[^\\\x00-\x1f"{quote}{{{first}]+') for quote in "\"'"}

    def read(self) -> Parsing[None]:
        """Yield the arguments."""
        source = self._source
        while not self._last or self._brackets:
            self._gap += yield from gap(source)
            character = yield from source.peek()
            if not character:
                return
            if (yield from self._ends()):
                yield ArgumentsDelta(self._close(0))
            elif character == "{" and self._wants_value() and (yield from source.look(begins_set(source))):
                yield from self._set()
            elif character in "{}[],:":
                yield ArgumentsDelta(self._mark(source.take(1)))
            elif character in "\"'":
                yield from self._string(character)
            elif self._last == ":" or not (yield from source.attempt(self._comment())):
                yield from self._bare()

    def _comment(self) -> Parsing[bool | None]:
        """Take a comment, None if none comes next."""
        begin = yield from self._source.one_of(COMMENTS)
        if begin:
            yield from self._source.until(("*/" if begin == "/*" else "\n",))
        return bool(begin) or None

    def _ends(self) -> Parsing[bool]:
        """Return whether the call ends here, or the next one begins where a key is expected."""
        if self._end and (yield from self._source.comes(self._end)):
            return True
        if not self._wants_key() or (yield from self._source.peek()) != "{":
            return False
        return (yield from self._source.look(call_head(self._source))) is not None

    def _wants_key(self) -> bool:
        return self._brackets[-1:] == ["}"] and self._last not in ("key", ":")

    def _wants_value(self) -> bool:
        return self._last == ":" or self._brackets[-1:] == ["]"]

    def _before(self) -> str:
        """Return what comes before a key or value, with a comma or colon that is missing."""
        missing = {"value": ",", "key": ":"}.get(self._last, "")
        gap, self._gap = self._gap or " " * len(missing), ""
        return missing + gap

    def _mark(self, mark: str) -> str:
        """Return what a bracket, comma or colon adds."""
        if mark in CLOSERS:
            text = ('"": ' if self._wants_key() else "").join((self._before(), mark))
            self._brackets.append(CLOSERS[mark])
            self._open[CLOSERS[mark]] += 1
            self._last = mark
            return text
        if mark in "}]":
            if not self._open[mark]:
                return ""
            depth = len(self._brackets) - 1
            while self._brackets[depth] != mark:  # those in between are closed, too, so that each is seen once
                depth -= 1
            return self._close(depth)
        if mark == ":":
            text, self._gap = (self._gap + ":", "") if self._last == "key" else ("", self._gap)
            self._last = ":" if text else self._last
            return text
        text = self._missing_value()
        if self._last == "value":
            self._gap, self._last = self._gap + ",", ","
        return text

    def _close(self, depth: int) -> str:
        """Return the end of all brackets but `depth` that are open."""
        text = self._missing_value() + self._gap.replace(",", "")
        closed = self._brackets[depth:]
        del self._brackets[depth:]
        self._open.subtract(closed)
        text += "".join(reversed(closed))
        self._gap, self._last = "", "value"
        return text

    def _missing_value(self) -> str:
        """Return null if a key has no value."""
        text = {"key": ": null", ":": " null"}.get(self._last, "")
        self._last = "value" if text else self._last
        return text

    def _bare(self) -> Parsing[None]:
        """Yield what has no quotes when it is complete: a literal, or a text that lacks them."""
        source, kind = self._source, "key" if self._wants_key() else "value"
        text = yield from self._bare_text(kind)
        word = text.rstrip()
        follows = yield from source.peek()
        if kind == "key" and self._last == "value" and follows != ":" and MARKS.fullmatch(word):
            return  # neither a part of the value before nor a key
        before = self._before()
        if not follows:  # the text breaks off
            yield ArgumentsDelta(before + text)
        elif kind == "value" and (found := _literal(word)) is not None:
            yield ArgumentsDelta(before + found)
        else:
            if kind == "key" and word[-1:] in ('"', "'"):
                word = word[:-1]  # the first quotation mark is missing
            yield ArgumentsDelta(before + json.dumps(word, ensure_ascii=False))
        self._gap, self._last = FOREIGN_SPACE.sub(" ", text[len(text.rstrip()) :]), kind

    def _set(self) -> Parsing[None]:
        """Yield a set of Python as a text, since JSON has none."""
        source, text, depth = self._source, "", 0
        while True:
            text += yield from source.run(self._words["set"])
            mark = yield from source.peek()
            if not mark or (mark == self._end[:1] and (yield from source.comes(self._end))):
                break
            text += source.take(1)
            depth += {"{": 1, "}": -1}.get(mark, 0)
            if not depth:
                break
        written = json.dumps(text, ensure_ascii=False)
        yield ArgumentsDelta(self._before() + (written if mark else written[:-1]))
        self._last = "value"

    def _bare_text(self, kind: str) -> Parsing[str]:
        """Take what has no quotes, up to a mark of JSON that is no part of it."""
        source, text = self._source, ""
        depth = 0  # of round brackets
        while True:
            words = yield from source.run(self._words[kind])
            text, depth = text + words, depth + words.count("(") - words.count(")")
            character = yield from source.peek()
            if not character:
                return text
            if character == self._end[:1]:
                ended = yield from source.comes(self._end)
            elif kind == "key":
                ended = True
            elif depth > 0:
                ended = not (yield from source.look(self._goes_on_inside()))
            elif "/*" in words and "*/" not in words:
                ended = False
            else:
                in_object = self._brackets[-1:] == ["}"]
                ended = character not in ",\n" or not in_object or (yield from source.look(ends_bare_value(source)))
            if ended:
                return text
            text += source.take(1)

    def _goes_on_inside(self) -> Parsing[bool]:
        """Return whether another round bracket comes before anything that ends a value in any case."""
        return (yield from self._source.until(("(", ")", "}", "\n", *filter(None, (self._end,))))) in ("(", ")")

    def _string(self, quote: str) -> Parsing[None]:
        """Yield a string as it arrives."""
        source, kind = self._source, "key" if self._wants_key() else "value"
        run = self._runs[quote]
        if kind == "value" and (yield from source.comes(quote * 3)):
            quote *= 3
        source.take(len(quote))
        yield ArgumentsDelta(self._before() + '"')
        goes_on = not self._end
        while True:
            yield ArgumentsDelta(source.match(run))
            character = yield from source.peek()
            if not character:
                return
            if (yield from source.comes(quote)) and (yield from source.look(self._ends_string(quote, kind))):
                source.take(len(quote))
                break
            if character == "{" and quote == '"' and (yield from source.look(call_head(source, needs_arguments=True))):
                break  # the next call, as its quotation marks are not escaped
            if character == "\\":
                yield ArgumentsDelta((yield from self._escape()))
            elif not goes_on and (yield from source.comes(self._end)):
                if not (goes_on := (yield from source.look(self._string_goes_on(quote)))):
                    break
            elif not run.match(character):
                yield ArgumentsDelta(json.dumps(source.take(1), ensure_ascii=False)[1:-1])
        self._last = kind
        yield ArgumentsDelta('"')

    def _ends_string(self, quote: str, kind: str) -> Parsing[bool]:
        """Return whether the quotation mark that comes next is the end of a string."""
        if kind == "key" or len(quote) == 3:
            return True
        ends = tuple(filter(None, (self._end, self._opening)))
        return (yield from ends_string(self._source, quote, ends, in_object=self._brackets[-1] == "}"))

    def _escape(self) -> Parsing[str]:
        """Take an escape and return it as JSON: as it is if it is one, otherwise as a backslash and a character."""
        source = self._source
        escape = yield from source.peek(2)
        if escape == "\\u":
            escape = yield from source.peek(6)
        if JSON_ESCAPE.fullmatch(escape) or len(escape) < 2 or (source.complete and source.ahead == len(escape)):
            return source.take(len(escape))
        if escape == "\\'":
            return source.take(2)[1]
        return source.take(1) + "\\"

    def _string_goes_on(self, quote: str) -> Parsing[bool]:
        """Return whether a string in which the end of a call comes next has its quotation mark after that."""
        source = self._source
        ends = tuple(filter(None, (quote, "\\", self._opening)))
        while True:
            _, mark, done = yield from source.piece(ends)
            if mark == "\\":
                yield from source.peek()
                source.take(1)
            elif mark == quote:
                yield from source.space()
                return bool(GOES_ON.match((yield from source.peek())))
            elif (done and not mark) or (mark and (yield from source.look(self._begins_object()))):
                return False

    def _begins_object(self) -> Parsing[bool]:
        """Return whether an object comes next, which is no part of a string: its quotation marks are not escaped."""
        if (yield from self._source.spaced("{")) is None:
            return False
        return (yield from self._source.spaced('"')) is not None


def _literal(word: str) -> str | None:
    """Return a literal without quotes as JSON, also one before a comment, None for a text."""
    found = to_json(word, exact=True)
    return to_json(COMMENT.split(word)[0], exact=True) if found is None else found


def _rest(source: Source) -> Parsing[bool | None]:
    """Take what follows the arguments in a call's object: further fields, which mean nothing, and its end."""
    while True:
        yield from source.space()
        if (yield from source.literal("}")):
            return True
        if not (yield from source.literal(",")):
            return None
        if (yield from member_key(source)) is None or (yield from value(source)) is None:
            return None
