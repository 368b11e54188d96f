"""Tokenizers at whose files the `tokenizers` library panics, which in Python is no `Exception`."""

import pytest
from tokenizers import Tokenizer as HfTokenizer, decoders, models

from jaxserve.core.errors import RequestError
from jaxserve.core.panics import LibraryPanicked, panics_as_exceptions
from jaxserve.engine.tokenizer import Tokenizer
from tests.engine.constructions import byte_fallback, byte_level

BYTES, STRIP = decoders.ByteLevel(), decoders.Strip(" ", 0, 1)


def failing(text: HfTokenizer) -> None:
    """Assert that the library panics, so that the tests are about something."""
    with pytest.raises(BaseException, match=r"index out of bounds|range") as raised:
        text.decode_batch([[], *([id] for id in range(text.get_vocab_size()))], skip_special_tokens=False)
    assert not isinstance(raised.value, Exception)


@pytest.mark.parametrize(
    "build",
    [
        lambda: byte_level(decoders.Sequence([BYTES, STRIP])),
        lambda: byte_level(decoders.Sequence([BYTES, decoders.Strip("a", 0, 2)])),
        lambda: byte_level(decoders.Strip("a", 2, 2)),
        lambda: byte_fallback(decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 3)),
    ],
)
def test_decoder_that_panics_gives_the_text_that_is_left(build) -> None:
    failing(build())
    tokenizer = Tokenizer(build())
    for text in ("", "a", "aa", "the fox", " "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = tokenizer.stream(start=True)
        pieces = [stream.push([id]) for id in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    assert "fox" in tokenizer.decode(tokenizer.encode("the fox", add_special_tokens=False)).replace(" ", "")
    for id in range(tokenizer.vocab_size):
        tokenizer.token_bytes(id)


def test_panic_becomes_an_ordinary_exception_and_interrupts_do_not() -> None:
    broken = byte_level(decoders.Sequence([BYTES, STRIP]))
    with pytest.raises(LibraryPanicked, match="index out of bounds"), panics_as_exceptions():
        broken.decode([])
    with pytest.raises(KeyboardInterrupt), panics_as_exceptions():
        raise KeyboardInterrupt


def test_text_that_the_vocabulary_cannot_write_is_refused() -> None:
    tokenizer = Tokenizer(HfTokenizer(models.WordLevel({"yes": 0, "no": 1}, unk_token="[UNK]")))
    assert tokenizer.encode("yes") == [0]
    with pytest.raises(RequestError, match=r"cannot encode this text: .*\[UNK\]"):
        tokenizer.encode("maybe")


@pytest.mark.parametrize("wrong", [5, None, ["a"], b"a", 1.5])
def test_what_is_no_text_is_refused_by_what_it_is(wrong) -> None:
    tokenizer = Tokenizer(byte_level())
    with pytest.raises(RequestError, match="must be a string"):
        tokenizer.encode(wrong)
    assert tokenizer.encode("a", None) == tokenizer.encode("a", False)
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode("a\ud800")
