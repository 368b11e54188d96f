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


def test_events_with_every_kind_of_line_are_read():
    assert parse(STREAM) == EVENTS


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64])
def test_events_split_at_any_size_are_the_same(size):
    assert parse(*(STREAM[i : i + size] for i in range(0, len(STREAM), size))) == EVENTS


def test_events_split_at_any_place_are_the_same():
    for cut in range(len(STREAM) + 1):
        assert parse(STREAM[:cut], STREAM[cut:]) == EVENTS


def test_event_is_returned_with_its_empty_line():
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\r") == ["a"]
    assert parser.feed(b"\ndata: b\r\n\r") == ["b"]


def test_close_returns_an_unfinished_event():
    assert parse(b"data: [DONE]") == ["[DONE]"]
    assert parse(b"data: [DONE]\n") == ["[DONE]"]


def test_invalid_utf_8_does_not_end_the_stream():
    assert parse(b"data: \xff\n\ndata: b\n\n") == ["\ufffd", "b"]
