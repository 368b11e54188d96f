"""The text of a sequence, token by token, and the tokens and stop strings that end it."""

from collections import abc
from functools import lru_cache

from jaxserve.core.request import FinishReason, Sequence


class StopStrings:
    """A search for stop strings in a growing text.

    Each character and stop string costs one step of Knuth, Morris and Pratt's search (amortized), for any lengths.
    """

    def __init__(self, stops: abc.Sequence[str]):
        self._stops = tuple(stops)
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text ends with

    @property
    def begun(self) -> int:
        """The number of characters at the end of the text that may become a stop string."""
        return max(self._matched)

    def push(self, new: str) -> tuple[int, str] | None:
        """Add to the text, and return the start and the value of the first stop string that this completes, or None.

        The start is relative to the new text, and negative if the stop string begins in the text before it.
        """
        found: list[tuple[int, str]] = []
        for index, stop in enumerate(self._stops):
            borders, matched, begin = _borders(stop), self._matched[index], None
            for end, character in enumerate(new, start=1):
                while matched and stop[matched] != character:
                    matched = borders[matched]
                if stop[matched] == character:
                    matched += 1
                if matched == len(stop):
                    begin = end - matched if begin is None else begin
                    matched = borders[matched]
            self._matched[index] = matched
            if begin is not None:
                found.append((begin, stop))
        return min(found, default=None)


@lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """Return, for each prefix of the text, the length of its longest proper prefix that is also its suffix."""
    borders = [0, 0]
    for character in text[1:]:
        length = borders[-1]
        while length and text[length] != character:
            length = borders[length]
        borders.append(length + (text[length] == character))
    return tuple(borders)


def append_text(sequence: Sequence, token: int, *, may_stop: bool = False) -> str | None:
    """Add a token's text to a sequence. Return the stop string that ends the sequence with this token, or None.

    The text is cut before the stop string, or after it if the request includes stop strings in its output. A stop
    string that is complete before the sequence may stop is ordinary text. `sequence.held` becomes the number of
    characters at the end of the text that may become a stop string and must not be returned yet.
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
    """Add the text that the detokenizer still holds to a sequence, and release all held text."""
    if sequence.detokenizer is not None and sequence.stop_reason is None:
        sequence.text += sequence.detokenizer.flush()
    sequence.held = 0


def check_end(sequence: Sequence, token: int) -> None:
    """Add the text of a sequence's newest token, and set `finish_reason` if it is the last one within the limits."""
    params = sequence.request.params
    may_stop = len(sequence.tokens) - sequence.num_prompt > params.min_tokens
    if may_stop and token in sequence.stop_ids:
        sequence.finish_reason = FinishReason.STOP
        if token in (params.stop_token_ids or ()):
            sequence.stop_reason = token
            if params.include_stop_str_in_output:
                append_text(sequence, token)
        return
    if sequence.detokenizer is not None:
        stop = append_text(sequence, token, may_stop=may_stop)
        if stop is not None:
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop
            return
    if sequence.matcher is not None and sequence.matcher.ended:
        sequence.finish_reason = FinishReason.STOP  # nothing may follow
    elif len(sequence.tokens) >= sequence.limit:
        sequence.finish_reason = FinishReason.LENGTH
