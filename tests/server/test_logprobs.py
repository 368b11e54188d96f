"""The log-probabilities of completions, where tokens have the same text or none."""

import pytest

from jaxserve.core.request import Logprob
from jaxserve.server.logprobs import Offsets, format_completion_logprobs, token_writer
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
def test_every_token_of_one_text_is_told(step, top):
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


def test_bytes_that_are_no_text_are_written_as_openai_does():
    tokenizer = byte_tokenizer()
    (first, *_), (space,) = tokenizer.encode("🦊"), tokenizer.encode(" ")
    text = token_writer(tokenizer)
    assert text(first) == "bytes:\\xf0"
    assert text(space) == " "
