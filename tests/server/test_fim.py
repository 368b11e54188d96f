"""/v1/completions with a suffix: the model fills in the middle."""

from dataclasses import dataclass

import httpx
import pytest

from jaxserve.engine.fim import FORMS
from jaxserve.engine.tokenizer import Tokenizer
from tests.engine.test_fim import byte_level
from tests.server.fake import FakeClient
from tests.server.serving import serving

COMPLETIONS = "/v1/completions"
QWEN = FORMS[1]
BODY = {"prompt": "def f(", "suffix": "  return x", "max_tokens": 4}
WRITTEN = "<|fim_prefix|>def f(<|fim_suffix|>  return x<|fim_middle|>"


@dataclass(eq=False)
class QwenClient(FakeClient):
    """A fake engine of a model with Qwen's tokens for filling in the middle."""

    script: str = "x):\n"

    def __post_init__(self) -> None:
        self.tokenizer: Tokenizer = byte_level(*QWEN.markers, "<|file_sep|>")
        super().__post_init__()

    @property
    def last(self) -> tuple[str, object]:
        """The latest prompt as text with its markers, and its parameters."""
        prompt, params, _, _ = self.seen[-1]
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False), params


@pytest.fixture(scope="module")
def qwen():
    return QwenClient()


@pytest.fixture(scope="module")
def coder(qwen):
    with serving(qwen) as address, httpx.Client(base_url=address.url, timeout=30) as client:
        yield client


def choices(response: httpx.Response) -> list[dict]:
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def refusal(response: httpx.Response) -> dict:
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_prompt_has_the_models_form(coder, qwen):
    answer = coder.post(COMPLETIONS, json=BODY).json()
    assert qwen.last[0] == WRITTEN
    assert answer["choices"][0]["text"] == "x):\n"
    assert answer["usage"]["prompt_tokens"] == len("def f(" + "  return x") + 3


def test_answer_also_ends_at_the_forms_end_tokens(coder, qwen):
    coder.post(COMPLETIONS, json=BODY | {"stop_token_ids": [5]})
    ends = {qwen.tokenizer.token_id(token) for token in (*QWEN.markers, "<|file_sep|>")}
    assert set(qwen.last[1].stop_token_ids) == {5} | ends


def test_ignore_eos_also_ignores_the_forms_end_tokens(coder, qwen):
    coder.post(COMPLETIONS, json=BODY | {"ignore_eos": True})
    assert qwen.last[1].stop_token_ids is None


@pytest.mark.parametrize("suffix", ["", None])
def test_empty_suffix_changes_nothing(coder, qwen, suffix):
    assert choices(coder.post(COMPLETIONS, json=BODY | {"suffix": suffix}))[0]["text"] == "x):\n"
    assert qwen.last[0] == "def f("
    assert qwen.last[1].stop_token_ids is None


def test_every_prompt_of_a_list_gets_the_suffix(coder, qwen):
    found = choices(coder.post(COMPLETIONS, json=BODY | {"prompt": ["a", "b"], "n": 2}))
    assert [choice["index"] for choice in found] == [0, 1, 2, 3]
    texts = [qwen.tokenizer.decode(prompt.token_ids, False) for prompt, *_ in qwen.seen[-2:]]
    assert sorted(texts) == [f"<|fim_prefix|>{p}<|fim_suffix|>  return x<|fim_middle|>" for p in "ab"]


def test_prompt_may_be_token_ids(coder, qwen):
    found = coder.post(COMPLETIONS, json=BODY | {"prompt": qwen.tokenizer.encode("def f("), "echo": True})
    assert qwen.last[0] == WRITTEN
    assert choices(found)[0]["text"] == "def f(x):\n"


def test_stream_equals_the_whole_answer(coder):
    with coder.stream("POST", COMPLETIONS, json=BODY | {"stream": True, "echo": True}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    text = "".join(httpx.Response(200, text=event).json()["choices"][0]["text"] for event in events)
    assert text == choices(coder.post(COMPLETIONS, json=BODY | {"echo": True}))[0]["text"] == "def f(x):\n"


def test_echoed_logprobs_are_those_of_the_prompt_without_markers_and_suffix(coder):
    choice = choices(coder.post(COMPLETIONS, json=BODY | {"echo": True, "logprobs": 1}))[0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "def f(x):\n"
    assert logprobs["text_offset"] == list(range(len(choice["text"])))
    assert None not in logprobs["token_logprobs"]  # a marker precedes the first token


def test_prompt_can_be_scored_alone(coder):
    choice = choices(coder.post(COMPLETIONS, json=BODY | {"echo": True, "logprobs": 1, "max_tokens": 0}))[0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == "def f("


def test_prompt_logprobs_and_token_ids_are_those_of_the_whole_prompt(coder, qwen):
    choice = choices(coder.post(COMPLETIONS, json=BODY | {"prompt_logprobs": 1, "return_token_ids": True}))[0]
    assert choice["prompt_token_ids"] == list(qwen.seen[-1][0].token_ids)
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])


def test_truncation_keeps_what_is_nearest_to_the_gap(coder, qwen):
    body = BODY | {"prompt": "abcdefgh", "suffix": "stuvwxyz", "truncate_prompt_tokens": 11, "echo": True}
    assert choices(coder.post(COMPLETIONS, json=body))[0]["text"] == "cdefghx):\n"
    assert qwen.last[0] == "<|fim_prefix|>cdefgh<|fim_suffix|>st<|fim_middle|>"
    choices(coder.post(COMPLETIONS, json=body | {"prompt": "a" * 9999, "truncate_prompt_tokens": -1}))
    assert len(qwen.seen[-1][0].token_ids) == qwen.info.max_model_len - 4


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": "a" * 512}, "prompt"),
        ({"suffix": "a" * 512}, "prompt"),
        ({"suffix": "a" * 99_999}, "suffix"),
        ({"suffix": 5}, "suffix"),
        ({"suffix": ["a"]}, "suffix"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"max_tokens": 512}, "max_tokens"),
    ],
    ids=str,
)
def test_refusal_names_the_field(coder, change, field):
    assert refusal(coder.post(COMPLETIONS, json=BODY | change))["param"] == field


def test_lone_surrogate_in_a_suffix_is_shown_as_a_replacement_character(coder):
    content = b'{"prompt": "a", "suffix": "\\ud800"}'
    assert coder.post(COMPLETIONS, content=content, headers={"content-type": "application/json"}).status_code == 200


def test_model_without_the_tokens_refuses_a_suffix_and_names_them(http):
    error = refusal(http.post(COMPLETIONS, json=BODY))
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "<|fim_prefix|> <|fim_suffix|> <|fim_middle|>" in error["message"]
