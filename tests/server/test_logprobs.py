"""Log-probabilities of completions if tokens have equal text or no text."""

import json

import httpx
import pytest

from jaxserve.core.request import Logprob
from jaxserve.server.answers.logprobs import Offsets, format_completion_logprobs, token_writer
from tests.server.fake import FakeClient, byte_tokenizer
from tests.server.serving import serving

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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_character_that_a_prompt_begins_is_written_once(monkeypatch, stream, echo):
    client = FakeClient()
    ids = client.tokenizer.encode("a🦊")
    monkeypatch.setattr(client.tokenizer, "encode", lambda text: ids[-2:])  # of the script
    body = {"prompt": ids[:-2], "max_tokens": 2, "logprobs": 1, "echo": echo, "stream": stream}
    with serving(client) as address, httpx.Client(base_url=address.url, timeout=30) as http:
        response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith(("data: {", "{"))]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert "".join(choice["text"] for choice in choices) == ("a🦊" if echo else "🦊")
    offsets = [offset for choice in choices for offset in (choice["logprobs"] or {"text_offset": ()})["text_offset"]]
    assert offsets == ([0, 1, 1, 1, 1] if echo else [0, 0])
