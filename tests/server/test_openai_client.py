"""The official OpenAI client against the server with a fake engine."""

import asyncio
import base64
import math
import struct
from collections import Counter

import openai
import pytest

from jaxserve.core.errors import NonFiniteOutput
from tests.server.fake import END, FakeClient
from tests.server.serving import Address, serving

TEXT = FakeClient.script
CHAT = [{"role": "user", "content": "hi"}]


def connect(address: Address) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def client(address):
    with connect(address) as client:
        yield client


def test_chat_returns_message_and_usage(client):
    answer = client.chat.completions.create(model="fake", messages=CHAT)
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "fake"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(TEXT.encode())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_chat_stream_returns_role_content_and_finish_reason(client):
    chunks = list(client.chat.completions.create(model="fake", messages=CHAT, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert not any(chunk.choices[0].finish_reason for chunk in chunks[:-1])
    assert chunks[-1].choices[0].delta.model_dump(exclude_none=True) == {}
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_chat_stream_with_include_usage_ends_with_usage(client):
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(model="fake", messages=CHAT, stream=True, stream_options=options)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == len(TEXT.encode())


def test_chat_stream_with_continuous_usage_has_usage_in_every_event(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(model="fake", messages=CHAT, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(TEXT.encode())


def test_chat_with_n_returns_n_choices(client):
    answer = client.chat.completions.create(model="fake", messages=CHAT, n=3)
    assert [choice.message.content for choice in answer.choices] == [TEXT[i:] for i in range(3)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_chat_stream_with_n_returns_n_choices(client):
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(model="fake", messages=CHAT, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {i: TEXT[i:] for i in range(3)}


def test_chat_max_tokens_limits_the_answer(client):
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 9}):
        answer = client.chat.completions.create(model="fake", messages=CHAT, **limit)
        assert answer.choices[0].message.content == TEXT[:3]
        assert answer.choices[0].finish_reason == "length"


def test_chat_logprobs_have_top_alternatives(client):
    answer = client.chat.completions.create(model="fake", messages=CHAT, logprobs=True, top_logprobs=5, max_tokens=8)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content) == TEXT.encode()[:8]
    assert all(len(entry.top_logprobs) == 5 for entry in content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in content)
    assert math.isfinite(min(top.logprob for entry in content for top in entry.top_logprobs))


def test_chat_stream_has_logprobs(client):
    stream = client.chat.completions.create(model="fake", messages=CHAT, logprobs=True, max_tokens=8, stream=True)
    content = [entry for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert b"".join(bytes(entry.bytes) for entry in content) == TEXT.encode()[:8]
    assert all(entry.top_logprobs == [] for entry in content)


def test_chat_content_parts_are_joined(client, fake):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    client.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}])
    assert fake.seen[-1][0].text == "User: a\nb\nAssistant:"


def test_every_sampling_parameter_reaches_the_engine(client, fake):
    extra = {
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5],
        "include_stop_str_in_output": True,
        "bad_words": ["no"],
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
        "priority": -3,
        "cache_salt": "tenant",
    }
    client.chat.completions.create(
        model="fake",
        messages=CHAT,
        n=2,
        temperature=0.5,
        top_p=0.9,
        seed=11,
        stop=["x", "y"],
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        logit_bias={"5": -100},
        max_completion_tokens=20,
        extra_body=extra,
    )
    _, params, priority, salt = fake.seen[-1]
    assert (priority, salt) == (-3, "tenant")
    for name in extra.keys() - {"priority", "cache_salt"}:
        assert getattr(params, name) == extra[name]
    assert (params.n, params.temperature, params.top_p, params.seed) == (2, 0.5, 0.9, 11)
    assert params.stop_strings == ("x", "y")
    assert (params.presence_penalty, params.frequency_penalty) == (0.25, -0.25)
    assert params.logit_bias == {5: -100}
    assert params.max_tokens == 20


def test_completion_returns_text_and_usage(client):
    answer = client.completions.create(model="fake", prompt="def f")
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == TEXT.encode()[:16].decode(errors="replace")  # OpenAI's default of 16 tokens
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 5


def test_completion_stream_equals_the_text(client):
    stream = client.completions.create(model="fake", prompt="def f", max_tokens=50, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == TEXT
    assert [choice.finish_reason for choice in choices] == [None] * len(TEXT) + ["stop"]
    assert choices[-1].text == ""


def test_more_prompts_than_the_queue_holds_are_all_answered():
    prompts = ["ab"] * 7
    with (
        serving(FakeClient(capacity=4, max_queued_requests=4)) as few,
        serving(FakeClient(capacity=4, max_queued_tokens=8)) as short,
    ):
        for address in (few, short):
            with connect(address) as client:
                answer = client.embeddings.create(model="fake", input=prompts)
                assert [entry.index for entry in answer.data] == list(range(7))
                answer = client.completions.create(model="fake", prompt=prompts, max_tokens=50)
                assert [choice.text for choice in answer.choices] == [TEXT] * 7
                stream = client.completions.create(model="fake", prompt=prompts, max_tokens=1, stream=True)
                assert Counter(chunk.choices[0].index for chunk in stream) == dict.fromkeys(range(7), 2)


def test_maximum_number_of_openai_embedding_inputs_is_answered():
    with serving(FakeClient(capacity=1024)) as address, connect(address) as client:
        assert len(client.embeddings.create(model="fake", input=["a"] * 2048).data) == 2048
        with pytest.raises(openai.BadRequestError, match="2049"):
            client.embeddings.create(model="fake", input=["a"] * 2049)


def test_embedding_input_may_fill_the_context(client):
    answer = client.embeddings.create(model="fake", input=[65] * FakeClient.max_model_len)
    assert answer.usage.prompt_tokens == FakeClient.max_model_len


@pytest.mark.parametrize("prompt", [["a", "bc"], [[65], [66, 67]], ["a", [66, 67]]])
def test_completion_of_several_prompts_returns_a_choice_each(client, prompt):
    answer = client.completions.create(model="fake", prompt=prompt, n=2, max_tokens=50)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [TEXT, TEXT[1:], TEXT, TEXT[1:]]
    assert answer.usage.prompt_tokens == 3


def test_completion_accepts_token_ids(client, fake):
    client.completions.create(model="fake", prompt=[1, 2, 3], max_tokens=2)
    assert fake.seen[-1][0].token_ids == (1, 2, 3)


def test_completion_of_several_prompts_streams(client):
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=50, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: TEXT, 1: TEXT[1:], 2: TEXT, 3: TEXT[1:]}


def test_completion_echo_with_logprobs_scores_the_prompt(client):
    answer = client.completions.create(model="fake", prompt="ab", max_tokens=3, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert choice.text == "ab" + TEXT[:3]
    assert choice.logprobs.tokens == list("ab" + TEXT[:3])
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.token_logprobs[0] is choice.logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs[1:])


def test_completion_stream_has_logprobs(client):
    stream = client.completions.create(model="fake", prompt="ab", max_tokens=3, logprobs=2, stream=True)
    logprobs = [chunk.choices[0].logprobs for chunk in stream if not chunk.choices[0].finish_reason]
    assert [token for part in logprobs for token in part.tokens] == list(TEXT[:3])
    assert [offset for part in logprobs for offset in part.text_offset] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_are_positions_in_the_text(client, stream):
    options = {"model": "fake", "prompt": [256, 65], "max_tokens": 17, "logprobs": 0, "echo": True}
    answer = client.completions.create(**options, stream=stream)
    choices = [chunk.choices[0] for chunk in answer][:-1] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert len(tokens) == len(offsets) == 19
    for token, offset in zip(tokens, offsets, strict=True):
        assert token == END or token.startswith("bytes:\\x") or text[offset] == token


def test_completion_logprobs_distinguish_tokens_with_equal_text(client, fake):
    answer = client.completions.create(model="fake", prompt="é🦊", max_tokens=17, logprobs=3, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens[:6] == [rf"bytes:\x{byte:02x}" for byte in "é🦊".encode()]
    assert logprobs.top_logprobs[0] is None
    for token, value, top in list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[
        1:
    ]:
        assert len(top) == 3  # includes the sampled token
        assert top[token] == value


@pytest.mark.parametrize("stream", [False, True])
def test_return_tokens_as_token_ids_writes_tokens_as_ids(client, fake, stream):
    ids = fake.tokenizer.encode("é" + TEXT[:3])
    extra = {"return_tokens_as_token_ids": True}
    answer = client.completions.create(
        model="fake", prompt="é", max_tokens=3, logprobs=2, echo=True, stream=stream, extra_body=extra
    )
    choices = [chunk.choices[0] for chunk in answer][:-1] if stream else answer.choices
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    assert tokens == [f"token_id:{token}" for token in ids]
    for choice in choices:
        for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
            assert top is None or (token in top and all(key.startswith("token_id:") for key in top))
    answer = client.chat.completions.create(
        model="fake", messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=1, extra_body=extra
    )
    for entry, token in zip(answer.choices[0].logprobs.content, ids[2:], strict=True):
        assert entry.token == entry.top_logprobs[0].token == f"token_id:{token}"
        assert bytes(entry.bytes) == fake.tokenizer.token_bytes(token)


def test_completion_returns_token_ids(client, fake):
    extra, ids = {"return_token_ids": True}, fake.tokenizer.encode(TEXT)
    asked = {"model": "fake", "max_tokens": 50, "n": 2, "extra_body": extra}
    answer = client.completions.create(prompt=["ab", [67]], **asked)
    assert [choice.prompt_token_ids for choice in answer.choices] == [fake.tokenizer.encode("ab")] * 2 + [[67]] * 2
    assert [choice.token_ids for choice in answer.choices] == [ids, ids[1:]] * 2
    prompts, tokens = dict[int, list](), dict[int, list[int]]()
    for chunk in client.completions.create(prompt=["ab", [67]], stream=True, **asked):
        choice = chunk.choices[0]
        if not choice.finish_reason:
            prompts.setdefault(choice.index, []).append(choice.prompt_token_ids)
            tokens.setdefault(choice.index, []).extend(choice.token_ids)
    assert tokens == {0: ids, 1: ids[1:], 2: ids, 3: ids[1:]}
    assert [prompts[i][0] for i in range(4)] == [fake.tokenizer.encode("ab")] * 2 + [[67]] * 2
    assert {tuple(rest) for _, *rest in prompts.values()} <= {(None,) * i for i in range(50)}


def test_chat_returns_token_ids(client, fake):
    extra, ids = {"return_token_ids": True}, fake.tokenizer.encode(TEXT)
    answer = client.chat.completions.create(model="fake", messages=CHAT, n=2, extra_body=extra)
    prompt = list(fake.seen[-1][0].token_ids)
    assert answer.prompt_token_ids == prompt
    assert [choice.token_ids for choice in answer.choices] == [ids, ids[1:]]
    chunks = list(client.chat.completions.create(model="fake", messages=CHAT, n=2, stream=True, extra_body=extra))
    prompts = [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")]
    assert prompts == [prompt]
    tokens = {0: [], 1: []}
    for choice in (chunk.choices[0] for chunk in chunks):
        tokens[choice.index] += getattr(choice, "token_ids", [])
    assert tokens == {0: ids, 1: ids[1:]}


def test_seed_of_minus_one_means_no_seed(client, fake):
    client.completions.create(model="fake", prompt="a", seed=-1)
    assert fake.seen[-1][1].seed is None


def test_completion_echo_streams_the_prompt_once(client):
    stream = client.completions.create(model="fake", prompt=["ab", [67]], n=2, max_tokens=2, echo=True, stream=True)
    texts = dict.fromkeys(range(4), "")
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    third = client.completions.create(model="fake", prompt=[67], max_tokens=1, echo=True).choices[0].text[:-1]
    assert texts == {0: "abHe", 1: "abel", 2: third + "He", 3: third + "el"}


def test_completion_scores_a_prompt_without_generating(client):
    answer = client.completions.create(model="fake", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.usage.completion_tokens == 0


def joined(stream):
    """Return the choices of a completion's stream, each as the whole choice that its events add up to, by index."""
    whole = {}
    for event in stream:
        for choice in event.model_dump()["choices"]:
            known = whole.setdefault(choice["index"], {"text": "", "logprobs": None, "token_ids": []})
            known["text"] += choice["text"]
            known["token_ids"] += choice.get("token_ids") or []
            known["finish_reason"] = choice["finish_reason"]
            for name in ("prompt_logprobs", "prompt_token_ids"):
                if choice.get(name) is not None:
                    assert name not in known
                    known[name] = choice[name]
            if (new := choice["logprobs"]) is not None:
                old = known["logprobs"] or {name: [] for name in new}
                known["logprobs"] = {name: None if new[name] is None else old[name] + new[name] for name in new}
    return whole


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"echo": True, "max_tokens": 0},
        {"echo": True, "logprobs": 20, "n": 3, "prompt": "é" * 200},
        {"echo": True, "logprobs": 1, "prompt": [256]},
        {"echo": True, "logprobs": 1, "extra_body": {"prompt_logprobs": 3, "return_token_ids": True}},
        {"extra_body": {"prompt_logprobs": 0, "return_token_ids": True}, "n": 2},
        {"extra_body": {"prompt_logprobs": 2, "truncate_prompt_tokens": 2}, "echo": True},
        {"prompt": ["ab", [256, 67]], "n": 2, "logprobs": 1, "echo": True},
    ],
    ids=str,
)
def test_what_a_stream_says_of_the_prompt_equals_the_whole_answer(client, fields):
    asked = {"model": "fake", "prompt": "abü", "max_tokens": 17} | fields
    whole = client.completions.create(**asked).model_dump()
    stream = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    names = ("text", "logprobs", "finish_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")
    for choice in whole["choices"]:
        found = joined(stream)[choice["index"]]
        assert {name: found.get(name) or None for name in names} == {name: choice.get(name) or None for name in names}
    assert stream[-1].usage.model_dump() == whole["usage"]


def test_chat_stream_has_prompt_logprobs_in_its_first_event(client):
    asked = {"model": "fake", "messages": CHAT, "n": 2, "extra_body": {"prompt_logprobs": 2}}
    whole = client.chat.completions.create(**asked)
    first, *rest = client.chat.completions.create(**asked, stream=True)
    assert first.prompt_logprobs == whole.prompt_logprobs
    assert first.choices[0].delta.role == "assistant"
    assert not any(hasattr(event, "prompt_logprobs") for event in rest)


def test_best_of_returns_the_likeliest(client, fake):
    answer = client.completions.create(model="fake", prompt="a", n=1, best_of=4, max_tokens=1)
    assert fake.seen[-1][1].n == 4
    odd = [text for text in TEXT[:4] if fake.tokenizer.encode(text)[0] % 2]
    assert [choice.text for choice in answer.choices] == odd[:1]
    assert answer.choices[0].index == 0


def test_embeddings_return_a_vector_per_input(client):
    answer = client.embeddings.create(model="fake", input=["abc", "d"], encoding_format="float")
    assert [entry.embedding for entry in answer.data] == [[3, 1, -0.5, 0.25], [1, 1, -0.5, 0.25]]
    assert answer.usage.prompt_tokens == 4


def test_embeddings_as_base64_decode_to_the_floats(client, http):
    assert client.embeddings.create(model="fake", input="abc").data[0].embedding == [3, 1, -0.5, 0.25]
    raw = http.post("/v1/embeddings", json={"input": "abc", "encoding_format": "base64"}).json()
    data = base64.b64decode(raw["data"][0]["embedding"])
    assert struct.unpack("<4f", data) == (3, 1, -0.5, 0.25)


def test_models_list_and_retrieve_the_served_model(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").max_model_len == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


def test_client_error_has_parameter_and_code(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=CHAT, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.body["value"] == -1
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=CHAT)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("create", ["chat", "completions"])
def test_error_in_a_stream_raises_in_the_client_and_ends_it(create):
    with (
        serving(FakeClient(fail_after=3)) as address,
        openai.OpenAI(base_url=f"{address.url}/v1", api_key="x") as client,
    ):
        if create == "chat":
            stream = client.chat.completions.create(model="fake", messages=CHAT, stream=True)
        else:
            stream = client.completions.create(model="fake", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="a step raised"):
            list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_non_finite_output_is_a_server_error_that_names_the_option(stream):
    with serving(FakeClient(fail_after=0, failure=NonFiniteOutput("logits"))) as address, connect(address) as client:
        with pytest.raises(openai.InternalServerError, match="--dtype bfloat16") as caught:
            client.chat.completions.create(model="fake", messages=CHAT, stream=stream)
        assert (caught.value.status_code, caught.value.code) == (500, "non_finite_output")


def test_full_queue_returns_503_with_retry_after():
    with serving(FakeClient(capacity=0)) as address, connect(address) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(model="fake", messages=CHAT, stream=stream)
            assert caught.value.status_code == 503
            assert caught.value.response.headers["retry-after"] == "3"
            assert caught.value.code == "queue_full"


def test_async_client_gets_an_answer(address):
    async def run() -> str:
        async with openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key="x") as client:
            stream = await client.chat.completions.create(model="fake", messages=CHAT, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(run()) == TEXT
