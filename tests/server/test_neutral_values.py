"""Values that ask for nothing are accepted, in every API; what a page of another origin may read."""

import httpx
import pytest

from jaxserve.core.errors import RequestError
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.admission import check_request
from jaxserve.server.settings import ServerSettings
from tests.server.answering import answering
from tests.server.fake import FakeClient, byte_tokenizer
from tests.server.serving import serving

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
BASES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}
OWN_FORMS = {
    "/v1/messages": {
        "parallel_tool_calls",
        "max_tokens",
        "reasoning_effort",
        "tool_choice",
        "functions",
        "function_call",
        "modalities",
        "guided_choice",
        "suffix",
    }
}
GENERATION = {
    "stop": (None, []),
    "stream_options": (None, {}, {"include_usage": False}),
    "stream": (None, False),
    "n": (None, 1),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "seed": (None, -1),
    "bad_words": (None, []),
    "stop_token_ids": (None, []),
    "tools": (None, []),
    "tool_choice": ("none", "auto", {"type": "none"}, {"type": "auto"}),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "include_reasoning": (None, True),
    "skip_special_tokens": (None, True),
    "thinking_token_budget": (None, -1),
    "response_format": (None, {}, {"type": "text"}),
    "reasoning_effort": (None, "none"),
    "modalities": (["text"],),
    "store": (None, False),
    "service_tier": (None, "auto"),
    "prediction": (None, {}),
    "metadata": (None, {}),
    "parallel_tool_calls": (None, True, False),
    "user": (None, ""),
    "structured_outputs": (None, {}),
    "guided_choice": (None, []),
    "best_of": (None, 1),
    "top_logprobs": (None, 0),
    "logprobs": (None, False),
    "prompt_logprobs": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "max_tokens": (None,),
}


@pytest.mark.parametrize("path", BASES)
def test_values_that_ask_for_nothing_are_accepted(path):
    with serving(answering("hello")) as address, httpx.Client(base_url=address.url, timeout=30) as http:
        refused = {
            (name, repr(value)): answer.text
            for name, values in GENERATION.items()
            if name not in OWN_FORMS.get(path, ())
            for value in values
            if (answer := http.post(path, json=BASES[path] | {name: value})).status_code != 200
        }
        assert refused == {}
        chat = BASES[path] | {"logprobs": False, "top_logprobs": 0}
        assert http.post(path, json=chat).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/messages", {"enable_thinking": False}, None),
        ("/v1/messages", {"include_reasoning": False}, None),
        ("/v1/messages", {"n": 2}, None),
        ("/v1/messages", {"presence_penalty": 0.5}, None),
        ("/v1/messages", {"stop": ""}, None),
        ("/v1/messages", {"stop_sequences": [""]}, None),
        ("/v1/messages", {"stop_sequences": ["a", ""]}, None),
        ("/v1/responses", {"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ("/v1/embeddings", {"n": 2}, "n"),
        *((path, {"stop": stop}, "stop") for path in [*BASES][:3] for stop in ("", [""], ["a", ""])),
    ],
)
def test_values_that_ask_for_something_and_empty_stop_strings_are_refused(http, path, fields, field):
    answer = http.post(path, json=BASES[path] | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert next(iter(fields)) in error["message"]
    assert error.get("param") == field


def test_what_asks_for_something_is_still_refused(http):
    for fields in ({"top_logprobs": 1}, {"stream_options": {"include_usage": True}}):
        answer = http.post("/v1/chat/completions", json=CHAT | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(fields))


def test_pages_of_an_allowed_origin_may_read_ids_and_pauses():
    origin = "https://app.example"
    names = "authorization,content-type,x-request-id,anthropic-version,x-stainless-os"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": names}
    with (
        serving(FakeClient(), ServerSettings(cors_origins=(origin,))) as address,
        httpx.Client(base_url=address.url, headers={"origin": origin}, timeout=30) as http,
    ):
        answer = http.post("/v1/completions", json={"prompt": "a"})
        before = http.options("/v1/messages", headers=asked)
    exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert {"x-request-id", "request-id", "retry-after"} <= exposed
    assert before.status_code == 200
    allowed = before.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in names.split(","))


class SmallModel(FakeClient):
    """A model with fewer tokens than its tokenizer: it knows neither "y" nor "z"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tokenizer = byte_tokenizer()
        self.beyond = min(tokenizer.encode("y")[0], tokenizer.encode("z")[0])
        object.__setattr__(self.info, "vocab_size", self.beyond)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"prompt": "xyz"}, "prompt"),
        ("/detokenize", {"tokens": [250]}, "tokens"),
        ("/v1/completions", {"prompt": "xyz"}, "prompt"),
        ("/v1/completions", {"prompt": [250]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [250]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"250": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [250]}, "allowed_token_ids"),
        ("/v1/embeddings", {"input": "xyz"}, "input"),
    ],
)
def test_token_beyond_the_models_vocabulary_is_refused(path, body, field):
    client = SmallModel()
    with serving(client) as address:
        answer = httpx.post(address.url + path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert f"token ids are 0 to {client.beyond - 1}" in error["message"]


def test_bad_word_whose_tokens_the_model_does_not_know_is_refused():
    client = SmallModel()
    request = Request("r", (1,), SamplingParams(bad_words=["xyz"]), 0.0)
    with pytest.raises(RequestError, match=f"bad_words has the token id .*: token ids are 0 to {client.beyond - 1}"):
        check_request(request, client.info, client.tokenizer)
    check_request(request, FakeClient().info, client.tokenizer)
