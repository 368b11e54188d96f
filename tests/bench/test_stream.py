import pytest

from jaxserve.bench.stream import EventParser

STREAM = (
    '\ufeffdata: {"text": "é"}\n\n: a comment\r\n\r\ndata:two\rdata: lines\r\r'
    "event: message\nid: 7\ndata:  kept space\n\n\n\ndata\n\ndata: 日本\r\n\r\n"
).encode()
EVENTS = ['{"text": "é"}', "two\nlines", " kept space", "", "日本"]


def parse(*chunks: bytes) -> list[str]:
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.close()


def test_every_form_of_line_is_read():
    assert parse(STREAM) == EVENTS


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64])
def test_a_split_anywhere_changes_nothing(size):
    assert parse(*(STREAM[i : i + size] for i in range(0, len(STREAM), size))) == EVENTS


def test_every_split_in_two_changes_nothing():
    for cut in range(len(STREAM) + 1):
        assert parse(STREAM[:cut], STREAM[cut:]) == EVENTS


def test_an_event_is_there_as_soon_as_its_empty_line_is():
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\r") == ["a"]
    assert parser.feed(b"\ndata: b\r\n\r") == ["b"]


def test_a_stream_that_breaks_off_gives_what_it_had():
    assert parse(b"data: [DONE]") == ["[DONE]"]
    assert parse(b"data: [DONE]\n") == ["[DONE]"]


def test_broken_utf_8_does_not_end_the_stream():
    assert parse(b"data: \xff\n\ndata: b\n\n") == ["\ufffd", "b"]
