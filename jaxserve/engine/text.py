"""Text of a sequence: detokenization token by token, and stop strings."""

from collections import abc
from functools import lru_cache

from jaxserve.core.request import Sequence


class StopStrings:
    """Looks for stop strings in a text that grows.

    A step of Knuth, Morris and Pratt's search for each character and stop string, however long text and strings are.
    """

    def __init__(self, stops: abc.Sequence[str]):
        self._stops = tuple(stops)
        self._matched = [0] * len(self._stops)  # how much of each stop string the end of the text is

    @property
    def begun(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string, but not all of it."""
        return max(self._matched)

    def push(self, new: str) -> tuple[int, str] | None:
        """Adds to the text. Return the stop string that this completes and that begins first, and where it begins
        relative to the new text: below 0 in the text before. Mutates.
        """
        found: list[tuple[int, str]] = []
        for number, stop in enumerate(self._stops):
            borders, matched, begin = _borders(stop), self._matched[number], None
            for end, character in enumerate(new, start=1):
                while matched and stop[matched] != character:
                    matched = borders[matched]
                if stop[matched] == character:
                    matched += 1
                if matched == len(stop):
                    begin = end - matched if begin is None else begin
                    matched = borders[matched]
            self._matched[number] = matched
            if begin is not None:
                found.append((begin, stop))
        return min(found, default=None)


@lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """For each length of a beginning of the text: how much of its end is also its beginning, but not all of it."""
    borders = [0, 0]
    for character in text[1:]:
        length = borders[-1]
        while length and text[length] != character:
            length = borders[length]
        borders.append(length + (text[length] == character))
    return tuple(borders)


def append_text(sequence: Sequence, token: int, *, may_stop: bool = False) -> str | None:
    """Adds a token's text. Return the stop string that ends the sequence with it, if any. Mutates.

    With a stop string found, the text is cut before it (or after it, as the request asks). One that is complete before
    the sequence may stop is text like any other. `sequence.held` is how much of the text's end could still become a
    stop string and is not to be shown yet.
    """
    if sequence.detokenizer is None:
        return None
    new = sequence.detokenizer.push((token,))
    start = len(sequence.text)
    sequence.text += new
    if sequence.stops is None or not new:
        return None
    found = sequence.stops.push(new)
    if found is None or not may_stop:
        sequence.held = sequence.stops.begun
        return None
    begin, stop = start + found[0], found[1]
    sequence.text = sequence.text[: begin + len(stop) if sequence.params.include_stop_str_in_output else begin]
    sequence.held = 0
    return stop


def flush_text(sequence: Sequence) -> None:
    """Adds what the detokenizer still holds and shows everything. Mutates."""
    if sequence.detokenizer is not None and sequence.stop_reason is None:
        sequence.text += sequence.detokenizer.flush()
    sequence.held = 0
