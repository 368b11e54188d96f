"""Log-probabilities of completions if tokens have equal text or no text."""

import pytest

from jaxserve.core.request import Logprob
from jaxserve.server.answers.logprobs import Offsets, format_completion_logprobs, token_writer
from tests.server.fake import byte_tokenizer

TEXTS = {1: "a", 2: "a", 3: "b", 4: "a"}


@pytest.mark.parametrize(
    ("step", "top"),
    [
        ({1: -1.0, 3: -2.0}, {"a": -1.0, "b": -2.0}),
        ({1: -3.0, 2: -1.0, 3: -2.0}, {"token_id:2": -1.0, "b": -2.0, "a": -3.0}),
        ({3: -3.0, 2: -1.0, 1: -2.0}, {"a": -1.0, "token_id:1": -2.0, "b": -3.0}),
        ({4: -9.0, 2: -1.0, 1: -2.0}, {"token_id:2": -1.0, "token_id:1": -2.0, "a": -9.0}),
    ],
)
def test_tokens_with_equal_text_all_appear_in_top_logprobs(step, top):
    sampled, *_ = step
    logprobs = format_completion_logprobs(
        [{token: Logprob(value) for token, value in step.items()}],
        [sampled],
        TEXTS.__getitem__,
        2,
        Offsets(byte_tokenizer().stream()),
    )
    assert logprobs["top_logprobs"] == [top]
    assert list(logprobs["top_logprobs"][0]) == list(top)
    assert top[logprobs["tokens"][0]] == logprobs["token_logprobs"][0] == step[sampled]


def test_bytes_that_are_not_utf8_are_written_in_openai_form():
    tokenizer = byte_tokenizer()
    (first, *_), (space,) = tokenizer.encode("🦊"), tokenizer.encode(" ")
    text = token_writer(tokenizer)
    assert text(first) == "bytes:\\xf0"
    assert text(space) == " "
