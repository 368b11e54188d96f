"""Requests for the log-probabilities of a prompt alone, of which no token is generated, whole and as a stream."""

import json
from typing import Any

import httpx
import pytest

from tests.server.answering import answering
from tests.server.serving import serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
WINDOW = 60
TEMPLATE = len("[user]\n[assistant]")  # tokens of a conversation besides its text


@pytest.fixture(scope="module")
def http():
    fake = answering("never", max_model_len=WINDOW)
    with serving(fake) as address, httpx.Client(base_url=address.url, timeout=60) as client:
        yield client


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("own", [{}, {"logprobs": True, "top_logprobs": 2}, {"response_format": {"type": "text"}}])
def test_chat_of_no_tokens_has_the_log_probabilities_of_its_prompt(http, limit, own, n):
    body = HELLO | {limit: 0, "prompt_logprobs": 1, "n": n} | own
    answer, events = whole(http, CHAT, body), streamed(http, CHAT, body)
    tokens = TEMPLATE + len("hi")
    assert [choice["message"]["content"] for choice in answer["choices"]] == [""] * n
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"] == events[-1]["usage"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (tokens, 0)
    assert len(answer["prompt_logprobs"]) == tokens
    assert answer["prompt_logprobs"][0] is None
    shown = [event["prompt_logprobs"] for event in events if event.get("prompt_logprobs")]
    assert shown
    assert all(found == answer["prompt_logprobs"] for found in shown)
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == ""
    ends = {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}
    assert ends == dict.fromkeys(range(n), "length")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", ["ab", [64, 65], ["ab", "abc"]], ids=str)
@pytest.mark.parametrize("logprobs", [0, 1, 2, None])
def test_echo_of_no_tokens_has_the_log_probabilities_of_its_prompt(http, prompt, logprobs, n):
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": logprobs, "n": n}
    answer, events = whole(http, COMPLETIONS, body), streamed(http, COMPLETIONS, body)
    texts = ["ab", "abc"] if prompt == ["ab", "abc"] else ["ab"]
    assert [choice["text"] for choice in answer["choices"]] == [text for text in texts for _ in range(n)]
    assert answer["usage"] == events[-1]["usage"]
    assert answer["usage"]["completion_tokens"] == 0
    for choice in answer["choices"]:
        of_choice = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in of_choice) == choice["text"]
        assert [each["finish_reason"] for each in of_choice if each["finish_reason"]] == ["length"]
        assert choice["finish_reason"] == "length"
        found = [each["logprobs"] for each in of_choice if each["logprobs"]]
        assert found == ([] if logprobs is None else [choice["logprobs"]])
        if logprobs is not None:
            assert choice["logprobs"]["tokens"] == list(choice["text"])
            assert choice["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, lambda n: {"messages": [{"role": "user", "content": "a" * (n - TEMPLATE)}], "prompt_logprobs": 1}),
        (COMPLETIONS, lambda n: {"prompt": "a" * n, "echo": True, "logprobs": 1}),
        (COMPLETIONS, lambda n: {"prompt": "a" * n, "prompt_logprobs": 1}),
    ],
)
def test_prompt_of_no_tokens_may_fill_the_context(http, path, body, stream):
    for size, status in ((WINDOW, 200), (WINDOW + 1, 400)):
        answer = http.post(path, json=body(size) | {"max_tokens": 0, "stream": stream})
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"] == (
        f"This model's maximum context length is {WINDOW} tokens (max_model_len). However, the prompt has "
        f"{WINDOW + 1} tokens"
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        (CHAT, HELLO | {"logprobs": True}),
        (CHAT, HELLO | {"prompt_logprobs": False}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 1}),
    ],
)
@pytest.mark.parametrize("tokens", [0, -2])
def test_answer_that_shows_nothing_needs_a_token(http, path, body, tokens, stream):
    answer = http.post(path, json=body | {"max_tokens": tokens, "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"max_tokens is {tokens}: it must be at least 1, or -1 for as many as fit; 0 needs prompt_logprobs, or echo in "
        "/v1/completions"
    )
