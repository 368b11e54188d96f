"""Fields that would change the answer are supported or refused by name. Only harmless ones are ignored."""

import base64
import math

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from jaxserve.core.bundled import bundled_model_path
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.server.answers.embedding import first_values
from jaxserve.server.app import create_app
from jaxserve.server.http.body import MAX_ITEMS
from jaxserve.server.schemas.chat import ChatBody
from jaxserve.server.schemas.completions import CompletionBody
from jaxserve.server.schemas.harmless import HARMLESS, HARMLESS_IN_MESSAGES, HARMLESS_IN_PARTS
from jaxserve.server.schemas.other import TokenizeBody
from jaxserve.server.schemas.unsupported import UNSUPPORTED, UNSUPPORTED_IN_MESSAGES, UNSUPPORTED_IN_TOKENIZE
from jaxserve.server.settings import ServerSettings
from tests.server.answering import answering
from tests.server.fake import FakeClient, byte_tokenizer
from tests.server.serving import serving

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "hi"}, EMBEDDINGS: {"input": "hi"}}
LONG = {CHAT: {"messages": [{"role": "user", "content": "x" * 1000}]}, COMPLETIONS: {"prompt": "x" * 1000}}
GENERATE = (CHAT, COMPLETIONS)
FIELDS = {CHAT: ChatBody.model_fields.keys(), COMPLETIONS: CompletionBody.model_fields.keys()}
TRUNCATED = "truncate_prompt_tokens"


def refusal(response):
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("path", GENERATE)
def test_every_unsupported_field_is_refused_by_name(http, path):
    for name in UNSUPPORTED.keys() - FIELDS[path]:
        error = refusal(http.post(path, json=BODIES[path] | {name: {"a": 5}}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert error["message"].startswith(f"{name} is not supported")


@pytest.mark.parametrize("path", GENERATE)
def test_neutral_values_of_unsupported_fields_are_accepted(http, path):
    refused = {name: field for name, field in UNSUPPORTED.items() if name not in FIELDS[path]}
    neutral = {name: field.neutral[0] if field.neutral else None for name, field in refused.items()}
    assert http.post(path, json=BODIES[path] | neutral).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("n_predict", 5, "max_tokens"),
        ("max_new_tokens", 5, "max_tokens"),
        ("min_new_tokens", 5, "min_tokens"),
        ("stop_sequences", ["a"], "stop"),
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("suppress_tokens", [5], "logit_bias"),
        ("do_sample", False, "temperature 0"),
        ("options", {"temperature": 0}, "top level"),
        ("extra_body", {"top_k": 1}, "top level"),
    ],
)
@pytest.mark.parametrize("path", GENERATE)
def test_refusal_names_the_field_to_send_instead(http, path, field, value, instead):
    assert instead in refusal(http.post(path, json=BODIES[path] | {field: value}))["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "repeat_penalty": 1, "top_n_sigma": -1.0},
        {"length_penalty": 1.0, "use_beam_search": False, "early_stopping": False, "detokenize": True},
        {"xtc_probability": 0.0, "dry_multiplier": 0, "grammar": "", "samplers": []},
        {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "parallel_tool_calls": True},
        {"prompt_cache_key": "a", "safety_identifier": "b", "num_ctx": 4096, "keep_alive": "5m", "cache_prompt": True},
        {"tool_choice": "none", "tools": [], "function_call": "auto", "modalities": ["text"]},
        {"response_format": {"type": None}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"response_format": {}},
        {"response_format": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", GENERATE)
def test_fields_that_change_nothing_are_accepted(http, path, fields):
    assert http.post(path, json=BODIES[path] | fields).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [("mirostat", True), ("num_beams", True), ("typical_p", 0), ("repeat_penalty", 0), ("format", {})],
)
def test_value_that_only_looks_neutral_is_refused(http, field, value):
    assert refusal(http.post(COMPLETIONS, json={"prompt": "a", field: value}))["param"] == field


@pytest.mark.parametrize(
    ("response_format", "place"),
    [
        ({"type": "text", "schema": {"type": "object"}}, "response_format.schema"),
        ({"json_schema": {"name": "a"}}, "response_format.json_schema"),
        ({"type": 5}, "response_format.type"),
        ({"type": "poem"}, "response_format.type"),
    ],
    ids=str,
)
def test_unknown_response_format_is_refused(http, response_format, place):
    error = refusal(http.post(CHAT, json=BODIES[CHAT] | {"response_format": response_format}))
    assert (error["param"], error["code"]) == (place, "unsupported_parameter")


@pytest.mark.parametrize(("field", "value"), [("echo", True), ("best_of", 2), ("suffix", "end"), ("documents", [{}])])
def test_chat_refuses_fields_of_completions(http, field, value):
    assert refusal(http.post(CHAT, json=BODIES[CHAT] | {field: value}))["param"] == field


@pytest.mark.parametrize("name", UNSUPPORTED_IN_MESSAGES)
def test_unsupported_message_field_is_refused(http, name):
    messages = [*MESSAGES, {"role": "assistant", "content": "a", name: [{"a": 5}]}]
    assert refusal(http.post(CHAT, json={"messages": messages}))["param"] == f"messages.1.{name}"


def test_empty_and_harmless_message_fields_are_accepted(http):
    empty = {name: [] for name in UNSUPPORTED_IN_MESSAGES} | {"annotations": [], "cache_control": {"type": "ephemeral"}}
    messages = [*MESSAGES, {"role": "assistant", "content": "a", **empty}, *MESSAGES]
    assert http.post(CHAT, json={"messages": messages}).status_code == 200


def test_tokenize_refuses_only_fields_that_change_the_tokens(http):
    body = {"messages": MESSAGES, "max_completion_tokens": 5, "top_logprobs": 2, "grammar": "a", "temperature": 0}
    assert http.post("/tokenize", json=body).status_code == 200
    for name in UNSUPPORTED_IN_TOKENIZE.keys() - TokenizeBody.model_fields.keys():
        assert refusal(http.post("/tokenize", json={"messages": MESSAGES, name: [5]}))["param"] == name


@pytest.mark.parametrize("body", [{"tokens": [1], "token_ids": [1]}, {"tokens": [1], "skip_special_tokens": True}])
def test_detokenize_refuses_fields_that_change_the_text(http, body):
    assert refusal(http.post("/detokenize", json=body))["param"] == list(body)[1]


# harmless and unknown fields

ALL_BODIES = BODIES | {"/tokenize": {"prompt": "hi"}, "/detokenize": {"tokens": [1]}}


@pytest.mark.parametrize("path", ALL_BODIES)
def test_harmless_fields_are_accepted_whatever_their_value(http, path):
    harmless = {name: {"a": [5]} for name in HARMLESS - {"user", "parallel_tool_calls"}}
    assert http.post(path, json=ALL_BODIES[path] | harmless).status_code == 200


@pytest.mark.parametrize("path", ALL_BODIES)
def test_unknown_field_is_refused_by_name(http, path):
    error = refusal(http.post(path, json=ALL_BODIES[path] | {"made_up": [5]}))
    assert (error["param"], error["code"]) == ("made_up", "unsupported_parameter")
    assert error["message"] == "made_up is not a known field"
    assert http.post(path, json=ALL_BODIES[path] | {"made_up": None}).status_code == 200


def test_harmless_fields_of_nested_objects_are_accepted(http):
    part = {"type": "text", "text": "hi"} | {name: {"type": "ephemeral"} for name in HARMLESS_IN_PARTS}
    message = {"role": "user", "content": [part]} | dict.fromkeys(HARMLESS_IN_MESSAGES, "a")
    options = {"include_usage": True, "include_obfuscation": False}
    assert http.post(CHAT, json={"messages": [message], "stream": True, "stream_options": options}).status_code == 200


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"messages": [*MESSAGES, {"role": "user", "content": "a", "made_up": 1}]}, "messages.1.made_up"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "made_up": 1}]}]},
            "messages.0.content.0.made_up",
        ),
        ({"response_format": SCHEMA | {"made_up": 1}}, "response_format.made_up"),
        (
            {"response_format": {**SCHEMA, "json_schema": {"schema": {}, "made_up": 1}}},
            "response_format.json_schema.made_up",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_field_of_a_nested_object_is_refused_with_its_place(http, fields, param):
    error = refusal(http.post(CHAT, json=BODIES[CHAT] | fields))
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        (CHAT, "temprature", "temperature"),
        (CHAT, "max_completions_tokens", "max_completion_tokens"),
        (COMPLETIONS, "logprob", "logprobs"),
        (EMBEDDINGS, "dimension", "dimensions"),
        ("/tokenize", "return_token_str", "return_token_strs"),
    ],
)
def test_refusal_of_a_misspelt_field_names_the_nearest_one(http, path, name, meant):
    message = refusal(http.post(path, json=ALL_BODIES[path] | {name: 1}))["message"]
    assert message == f"{name} is not a known field: did you mean {meant}?"


def test_long_name_of_an_unknown_field_is_cut(http):
    error = refusal(http.post(COMPLETIONS, json={"prompt": "a", "x" * 1_000_000: 1}))
    assert len(error["message"]) < 100
    assert len(error["param"]) == 200


@pytest.fixture(scope="module")
def lenient(fake):
    with (
        serving(FakeClient(), ServerSettings(ignore_unknown_fields=True)) as address,
        httpx.Client(base_url=address.url, timeout=30) as client,
    ):
        yield client


@pytest.mark.parametrize("path", ALL_BODIES)
def test_ignore_unknown_fields_ignores_names_on_neither_list(lenient, path, caplog):
    fields = {f"made_up_{i}": "a secret" for i in range(100)}
    with caplog.at_level("INFO", logger="jaxserve"):
        assert lenient.post(path, json=ALL_BODIES[path] | fields).status_code == 200
    assert "ignored 100 unknown fields: 'made_up_0'" in caplog.text
    assert "a secret" not in caplog.text
    assert len(caplog.text) < 1000


def test_ignore_unknown_fields_ignores_them_in_nested_objects(lenient):
    message = {"role": "user", "content": [{"type": "text", "text": "a", "made_up": 1}], "made_up": 1}
    body = {"messages": [message], "stream": True, "stream_options": {"made_up": 1}}
    assert lenient.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize("path", GENERATE)
def test_ignore_unknown_fields_never_ignores_a_field_that_would_change_the_answer(lenient, path):
    assert refusal(lenient.post(path, json=BODIES[path] | {"mirostat": 2}))["param"] == "mirostat"
    assert (
        refusal(lenient.post(CHAT, json={"messages": [MESSAGES[0] | {"prefix": True}]}))["param"] == "messages.0.prefix"
    )


# supported fields


@pytest.mark.parametrize("effort", [{"enable_thinking": False}, {"reasoning_effort": "low"}])
def test_template_variables_at_the_top_level_reach_the_template(http, fake, effort, monkeypatch):
    seen = []
    monkeypatch.setattr(
        fake.tokenizer, "conversation_text", lambda messages, **given: seen.append(given) or "a", raising=True
    )
    assert http.post(CHAT, json=BODIES[CHAT] | effort).status_code == 200
    assert seen[0].items() >= effort.items()
    (name,) = effort
    assert http.post(CHAT, json=BODIES[CHAT] | effort | {"chat_template_kwargs": {name: "x"}}).status_code == 200
    assert seen[1][name] == "x"


CONVERSATIONS = {
    CHAT: BODIES[CHAT],
    "/v1/messages": {**BODIES[CHAT], "model": "fake", "max_tokens": 5},
    "/v1/responses": {"input": "hi"},
}
TEMPLATE = "{{ messages[0].content }}{% if mood is defined %}{{ mood }}{% endif %}"


def template_client() -> FakeClient:
    tokenizer = byte_tokenizer(TEMPLATE)
    return FakeClient(tokenizer=tokenizer)


@pytest.mark.parametrize("path", CONVERSATIONS)
def test_variable_that_the_template_does_not_read_is_refused_unless_it_is_common(path, caplog):
    client = template_client()
    with serving(client) as address, httpx.Client(base_url=address.url, timeout=30) as http:

        def answer(**variables):
            return http.post(path, json=CONVERSATIONS[path] | {"chat_template_kwargs": variables})

        assert answer(mood="!").status_code == 200
        prompt, *_ = client.seen[-1]
        assert client.tokenizer.decode(prompt.token_ids).endswith("!")
        error = refusal(answer(moood="!"))
        assert error["message"].endswith("'moood': did you mean 'mood'?")
        with caplog.at_level("INFO", logger="jaxserve"):
            for _ in range(3):
                assert answer(enable_thinking=False).status_code == 200
        assert caplog.text.count("does not read 'enable_thinking'") == 1


def test_ignore_unknown_fields_ignores_variables_that_the_template_does_not_read():
    with (
        serving(template_client(), ServerSettings(ignore_unknown_fields=True)) as address,
        httpx.Client(base_url=address.url, timeout=30) as http,
    ):
        body = BODIES[CHAT] | {"chat_template_kwargs": {"moood": 1}}
        assert http.post(CHAT, json=body).status_code == 200


def test_reasoning_of_earlier_answers_reaches_the_template(http, fake, monkeypatch):
    seen = []
    monkeypatch.setattr(fake.tokenizer, "conversation_text", lambda messages, **_: seen.extend(messages) or "a")
    for name in ("reasoning_content", "reasoning"):
        message = {"role": "assistant", "content": "a", name: "b"}
        assert http.post(CHAT, json={"messages": [message, *MESSAGES]}).status_code == 200
        assert seen.pop(0) == {"role": "assistant", "content": "a", "reasoning_content": "b"}
        seen.clear()


@pytest.mark.parametrize(("asked", "kept"), [(3, [3, 4, 5]), (5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5])])
def test_truncate_prompt_tokens_keeps_the_last_token_ids(http, fake, asked, kept):
    answer = http.post(COMPLETIONS, json={"prompt": [1, 2, 3, 4, 5], TRUNCATED: asked}).json()
    assert list(fake.seen[-1][0].token_ids) == kept
    assert answer["usage"]["prompt_tokens"] == len(kept)


def test_echo_of_a_truncated_text_is_the_kept_part(http):
    answer = http.post(COMPLETIONS, json={"prompt": "abcdef", TRUNCATED: 2, "echo": True, "max_tokens": 1}).json()
    assert answer["choices"][0]["text"] == "efH"


@pytest.mark.parametrize("length", [1000, 100_000])
def test_truncation_makes_long_prompts_fit(http, fake, length):
    most = fake.max_model_len
    text = "x" * length + "yz"
    left = (({}, 16), ({"max_tokens": 12}, 12), ({"max_tokens": -1}, 1), ({"min_tokens": 20}, 20))
    for body, kept in ((body, most - tokens) for body, tokens in left):
        assert http.post(COMPLETIONS, json={"prompt": text, TRUNCATED: -1, **body}).status_code == 200
        assert len(fake.seen[-1][0].token_ids) == kept
        assert fake.tokenizer.decode(fake.seen[-1][0].token_ids).endswith("xyz")
    messages = [{"role": "user", "content": text}]
    for body, kept in (({"max_tokens": 12}, most - 12), ({}, most - 1), ({"min_tokens": 20}, most - 20)):
        assert http.post(CHAT, json={"messages": messages, TRUNCATED: -1, **body}).status_code == 200
        assert len(fake.seen[-1][0].token_ids) == kept
    answer = http.post(EMBEDDINGS, json={"input": [text, "abc"], TRUNCATED: -1}).json()
    assert [entry["embedding"][0] for entry in answer["data"]] == [most, 3]
    answer = http.post(EMBEDDINGS, json={"input": [text, "abc"], TRUNCATED: 2}).json()
    assert [entry["embedding"][0] for entry in answer["data"]] == [2, 2]


@pytest.mark.parametrize("keep", [600, 10**30])
def test_truncation_to_more_than_the_context_refuses_what_does_not_fit(http, fake, keep):
    most = fake.max_model_len
    fits = http.post(COMPLETIONS, json={"prompt": "x" * (most - 1), TRUNCATED: keep, "echo": True, "max_tokens": 1})
    assert fits.json()["choices"][0]["text"] == "x" * (most - 1) + "H"
    for prompt in ("x" * most, "x" * 100_000, [5] * most, [5] * 100_000):
        error = refusal(http.post(COMPLETIONS, json={"prompt": prompt, TRUNCATED: keep}))
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_no_more_text_is_tokenized_than_a_context_can_hold(http, fake, monkeypatch):
    encode, lengths = fake.tokenizer.encode, []

    def watched(text, *given):
        lengths.append(len(text))
        return encode(text, *given)

    monkeypatch.setattr(fake.tokenizer, "encode", watched)
    for keep in (1, -1, 10**30):
        http.post(COMPLETIONS, json={"prompt": "x" * 1_000_000, TRUNCATED: keep})
    assert max(lengths) == fake.tokenizer.max_characters(fake.max_model_len + 1)


@pytest.fixture(scope="module")
def words():
    """Return a client of a server whose tokens have several characters, and its fake engine."""
    fake = FakeClient(tokenizer=Tokenizer.load(bundled_model_path()))
    with serving(fake) as address, httpx.Client(base_url=address.url, timeout=30) as client:
        yield client, fake


@pytest.mark.parametrize("text", ["x" * 1003, "=" * 1001, " " * 1003 + "a", "def f(x):\n    return x" * 30])
@pytest.mark.parametrize("keep", [1, 3, 30])
def test_kept_tokens_are_the_last_of_the_whole_text(words, text, keep):
    http, fake = words
    assert http.post(COMPLETIONS, json={"prompt": text, TRUNCATED: keep}).status_code == 200
    assert list(fake.seen[-1][0].token_ids) == fake.tokenizer.encode(text)[-keep:]
    conversation = {"messages": [{"role": "user", "content": text}]}
    assert http.post(CHAT, json=conversation | {TRUNCATED: keep, "n": 2}).status_code == 200
    rendered = http.post("/tokenize", json=conversation).json()["tokens"]
    assert list(fake.seen[-1][0].token_ids) == rendered[-keep:]


def test_echo_of_a_text_that_needs_no_truncation_is_the_text(words):
    http, _ = words
    body = {"prompt": "<|endoftext|>a", "echo": True, "max_tokens": 1}
    texts = {http.post(COMPLETIONS, json=body | more).json()["choices"][0]["text"] for more in ({}, {TRUNCATED: 50})}
    assert len(texts) == 1
    assert texts.pop().startswith("<|endoftext|>a")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [0, -2, "all", 1.5])
def test_invalid_truncate_prompt_tokens_is_refused(http, path, value):
    assert refusal(http.post(path, json=BODIES[path] | {TRUNCATED: value}))["param"] == TRUNCATED


def test_max_tokens_of_minus_one_generates_as_much_as_fits(http, fake):
    for path, body in ((COMPLETIONS, {}), (CHAT, {}), (CHAT, {"max_completion_tokens": -1})):
        assert http.post(path, json=BODIES[path] | {"max_tokens": -1} | body).status_code == 200
        assert fake.seen[-1][1].max_tokens is None


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
def test_refusal_of_too_many_tokens_has_both_numbers(http, fake, field, stream):
    path, length = (COMPLETIONS, 2) if field == "max_tokens" else (CHAT, len("User: hi\nAssistant:"))
    room = fake.max_model_len - length
    error = refusal(http.post(path, json=BODIES[path] | {field: room + 1, "stream": stream}))
    assert (error["param"], error["value"], error["limit"]) == (field, room + 1, room)
    assert error["message"].startswith(f"{field} is {room + 1}, the limit is {room}. ")
    assert f"The prompt has {length} tokens and leaves {room}" in error["message"]
    assert http.post(path, json=BODIES[path] | {field: room}).status_code == 200


def test_max_tokens_is_clamped_only_with_clamp_max_tokens(http):
    client = FakeClient(max_model_len=64)
    with (
        serving(client, ServerSettings(clamp_max_tokens=True)) as address,
        httpx.Client(base_url=address.url) as clamping,
    ):
        for path in GENERATE:
            body = BODIES[path] | {"max_tokens": 10_000}
            assert refusal(http.post(path, json=body))["param"] == "max_tokens"
            assert clamping.post(path, json=body).status_code == 200
            prompt, params, *_ = client.seen[-1]
            assert params.max_tokens == 64 - len(prompt.token_ids)
            assert clamping.post(path, json=body | {"max_tokens": 3}).status_code == 200
            assert client.seen[-1][1].max_tokens == 3
            assert refusal(clamping.post(path, json=body | {"max_tokens": 0}))["param"] == "max_tokens"
            assert refusal(clamping.post(path, json=body | {"min_tokens": 64}))["param"] == "min_tokens"
            streamed = clamping.post(path, json=body | {"stream": True}).text
            assert '"finish_reason":"stop"' in streamed
            assert clamping.post(path, json=body | {TRUNCATED: -1, **LONG[path]}).status_code == 200
            prompt, params, *_ = client.seen[-1]
            assert (len(prompt.token_ids), params.max_tokens) == (63, 1)  # not a prompt of one token
        assert clamping.post(COMPLETIONS, json={"prompt": ["a", "b" * 30], "max_tokens": 99}).status_code == 200
        assert [params.max_tokens for _, params, *_ in client.seen[-2:]] == [63, 34]


@pytest.mark.parametrize("path", GENERATE)
def test_allowed_token_ids_may_be_as_many_as_the_vocabulary_has(http, fake, path):
    assert http.post(path, json=BODIES[path] | {"allowed_token_ids": [7, 5]}).status_code == 200
    assert list(fake.seen[-1][1].allowed_token_ids) == [5, 7]
    many = [5] * (MAX_ITEMS + fake.info.vocab_size)
    assert http.post(path, json=BODIES[path] | {"allowed_token_ids": many}).status_code == 200


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings_of_fewer_dimensions_have_length_one(http, encoding):
    whole = [3, 1, -0.5, 0.25]  # of the engine
    for dimensions, expected in {4: whole, 2: [3 / math.hypot(3, 1), 1 / math.hypot(3, 1)], 1: [1]}.items():
        asked = {"input": ["abc", "abc"], "dimensions": dimensions, "encoding_format": encoding}
        for entry in http.post(EMBEDDINGS, json=asked).json()["data"]:
            given = entry["embedding"]
            values = np.frombuffer(base64.b64decode(given), "<f4") if encoding == "base64" else given
            assert [*values] == pytest.approx(expected, rel=1e-6)
    for wrong, limit in ((5, 4), (0, 1), (-1, 1)):
        error = refusal(http.post(EMBEDDINGS, json={"input": "a", "dimensions": wrong}))
        assert (error["param"], error["value"], error["limit"]) == ("dimensions", wrong, limit)


def test_first_values_that_are_all_zero_stay_zero():
    assert first_values(np.array([0, 0, 1], np.float32), 2).tolist() == [0, 0]


def test_conversation_is_embedded_by_the_chat_template():
    engine = answering("")
    http = TestClient(create_app(engine, ServerSettings()))
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for fields, expected in (
        ({}, "[user]hi\n[assistant]ho\n"),
        ({"add_generation_prompt": True}, "[user]hi\n[assistant]ho\n[assistant]"),
        ({"truncate_prompt_tokens": 3}, "ho\n"),
    ):
        answer = http.post(EMBEDDINGS, json={"messages": conversation, **fields}).json()
        assert answer["usage"]["prompt_tokens"] == len(expected)
        assert answer["data"][0]["embedding"][0] == len(expected)
    assert http.post(EMBEDDINGS, json={"messages": conversation, "chat_template_kwargs": {"x": 1}}).status_code == 400
    long = [{"role": "user", "content": "x" * 9000}]
    for wrong, field in (
        ({"messages": conversation, "input": "a"}, "input"),
        ({}, "input"),
        ({"messages": conversation, "tools": [{}]}, "tools"),
        ({"input": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"input": "a", "continue_final_message": True}, "continue_final_message"),
        ({"messages": long}, "messages"),
    ):
        assert refusal(http.post(EMBEDDINGS, json=wrong))["param"] == field


@pytest.mark.parametrize(
    ("path", "own", "foreign"),
    [
        (CHAT, {"type": "function", "function": {"name": "f"}}, {"type": "web_search"}),
        ("/v1/responses", {"type": "function", "name": "f"}, {"type": "web_search", "external_web_access": False}),
        ("/v1/messages", {"name": "f", "input_schema": {}}, {"type": "web_search_20250305", "name": "web_search"}),
    ],
)
def test_ignore_unknown_fields_leaves_out_tools_that_a_server_would_run(path, own, foreign):
    body = {**BODIES[CHAT], "max_tokens": 4} if path != "/v1/responses" else {"input": "hi"}
    engine = FakeClient()
    with TestClient(create_app(engine, ServerSettings(ignore_unknown_fields=True))) as http:
        answer = http.post(path, json=body | {"tools": [own, foreign]})
    assert answer.status_code == 200, answer.text
    prompt = engine.tokenizer.decode(engine.seen[-1][0].token_ids)
    assert '"name": "f"' in prompt
    assert "web_search" not in prompt
    with TestClient(create_app(FakeClient(), ServerSettings())) as http:
        assert http.post(path, json=body | {"tools": [own, foreign]}).status_code == 400
