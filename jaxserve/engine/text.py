"""Text of a sequence: detokenization token by token, and stop strings."""

from jaxserve.core.request import Sequence


def append_text(sequence: Sequence, token: int, stops: tuple[str, ...] = ()) -> str | None:
    """Adds a token's text; returns the one of `stops` that it completes, if any. Mutates.

    With a stop string found, the text is cut before it (or after it, as the request asks). `sequence.held` is how much
    of the text's end could still become a stop string and is not to be shown yet.
    """
    if sequence.detokenizer is None:
        return None
    return _extend(sequence, sequence.detokenizer.push((token,)), stops)


def flush_text(sequence: Sequence) -> None:
    """Adds what the detokenizer still holds and shows everything. Mutates."""
    if sequence.detokenizer is not None and sequence.stop_reason is None:
        sequence.text += sequence.detokenizer.flush()
    sequence.held = 0


def _extend(sequence: Sequence, new: str, stops: tuple[str, ...]) -> str | None:
    start = len(sequence.text)
    sequence.text += new
    if not stops or not new:
        return None
    longest = max(map(len, stops))
    found = _first_stop(sequence.text, stops, max(start - longest + 1, 0))
    if found is not None:
        at, stop = found
        sequence.text = sequence.text[: at + len(stop) if sequence.params.include_stop_str_in_output else at]
        sequence.held = 0
        return stop
    sequence.held = _possible_stop(sequence.text, stops, longest)
    return None


def _first_stop(text: str, stops: tuple[str, ...], start: int) -> tuple[int, str] | None:
    """Position and value of the stop string that begins first at or after `start`."""
    found = [(at, stop) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(found, default=None)


def _possible_stop(text: str, stops: tuple[str, ...], longest: int) -> int:
    """Length of the longest end of the text that is the beginning of a stop string."""
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
