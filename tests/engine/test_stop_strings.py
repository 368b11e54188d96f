"""Stop strings: the pieces of a stream join to the whole answer, and the search costs the same in any text."""

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.errors import RequestError
from jaxserve.core.request import FinishReason, Request, Sequence
from jaxserve.core.sampling import MAX_STRING, SamplingParams
from jaxserve.engine.outputs import RequestState
from jaxserve.engine.text import StopStrings, check_end, flush_text

LETTERS = st.text("ab", min_size=1, max_size=5)


class Pieces:
    """A detokenizer whose token i is the i-th piece of text."""

    def __init__(self, pieces: list[str]):
        self.pieces = pieces

    def push(self, token_ids) -> str:
        return "".join(self.pieces[token] for token in token_ids)

    def flush(self) -> str:
        return ""


def answer(pieces: list[str], params: SamplingParams) -> tuple[list[str], Sequence]:
    """Return what a stream shows after each token, and the sequence at its end."""
    request = Request("r", (0,), params, 0.0)
    stops = StopStrings(params.stop_strings) if params.stop_strings else None
    sequence = Sequence(request, 0, 0, max_total=len(pieces) + 1, detokenizer=Pieces(pieces), stops=stops)
    state, shown = RequestState(request, [sequence]), []
    for token in range(len(pieces)):
        sequence.tokens.append(token)
        check_end(sequence, token)
        if sequence.finish_reason is not None:
            flush_text(sequence)
        shown.append(state.take([sequence]).outputs[0].text)
        if sequence.finish_reason is not None:
            break
    return shown, sequence


def expected(pieces: list[str], params: SamplingParams) -> tuple[str, str | None]:
    """Return the text and the stop string by definition.

    Of the stop strings that end with the first possible token after `min_tokens`, the first to begin counts.
    """
    text = ""
    for number, piece in enumerate(pieces, start=1):
        before, text = text, text + piece
        ends = [
            (at, stop)
            for stop in params.stop_strings
            for at in range(len(text) - len(stop) + 1)
            if text.startswith(stop, at) and at + len(stop) > len(before)
        ]
        if ends and number > params.min_tokens:
            at, stop = min(ends)
            return text[: at + len(stop) if params.include_stop_str_in_output else at], stop
    return text, None


@settings(max_examples=400, derandomize=True)
@given(st.lists(st.text("ab", max_size=4), min_size=1, max_size=12), st.lists(LETTERS, max_size=3), st.data())
def test_streamed_text_equals_the_definition_for_any_stop_strings(pieces, stops, data) -> None:
    least, keep = data.draw(st.integers(0, len(pieces))), data.draw(st.booleans())
    params = SamplingParams(
        stop=stops, min_tokens=least, max_tokens=len(pieces), include_stop_str_in_output=keep, ignore_eos=True
    )
    shown, sequence = answer(pieces, params)
    assert ("".join(shown), sequence.stop_reason) == expected(pieces, params)
    assert "".join(shown) == sequence.text
    assert sequence.finish_reason is (FinishReason.LENGTH if sequence.stop_reason is None else FinishReason.STOP)


def test_stop_string_beginning_before_min_tokens_is_never_streamed() -> None:
    shown, sequence = answer(["x", "\n", "\n", "y"], SamplingParams(stop="\n\n", min_tokens=2))
    assert shown == ["x", "", ""]
    assert (sequence.text, sequence.stop_reason) == ("x", "\n\n")


def test_stop_string_complete_before_min_tokens_stays_in_the_text() -> None:
    shown, sequence = answer(["a.", "b.", "c", "."], SamplingParams(stop=".", min_tokens=3))
    assert shown == ["a.", "b.", "c", ""]
    assert sequence.text == "a.b.c"


def test_stop_search_costs_constant_work_per_character() -> None:
    class Counted(str):
        looked = 0

        def __getitem__(self, index):
            Counted.looked += 1
            return super().__getitem__(index)

    stop = Counted("a" * (MAX_STRING - 1) + "b")
    finder = StopStrings([stop])
    StopStrings([stop]).push("a")  # prepares what is the same for all texts
    Counted.looked = 0
    for _ in range(5000):
        assert finder.push("a") is None
    assert finder.begun == MAX_STRING - 1
    assert Counted.looked <= 4 * 5000
    assert finder.push("b") == (1 - MAX_STRING, stop)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_stop_strings_and_bad_words_longer_than_the_limit_are_refused(field: str) -> None:
    SamplingParams(**{field: ["a" * MAX_STRING]})
    with pytest.raises(RequestError, match=f"{field} has a string of 1025 characters, the limit is 1024") as caught:
        SamplingParams(**{field: ["short", "a" * (MAX_STRING + 1)]})
    assert (caught.value.field, caught.value.value, caught.value.limit) == (field, MAX_STRING + 1, MAX_STRING)
