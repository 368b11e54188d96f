"""Every bad input gets a 4xx with the field, the value and the limit, and the server goes on serving."""

import json
import re
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from jaxserve.core.errors import RequestError
from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.serving import raw_request, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]
VOCABULARY = FakeClient().info.vocab_size
LENGTH = FakeClient.max_model_len


@pytest.fixture(autouse=True)
def goes_on_serving(http, fake):
    yield
    assert http.post(COMPLETIONS, json={"prompt": "still there?"}).status_code == 200
    assert not fake.active


def error_of(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(response.content) < 5000
    return error


# bodies that are not requests


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'"text"',
        b"[]",
        b"42",
        b"null",
        b"{",
        b"\xff\xfe",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": ' + b"[" * 5000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
    ],
    ids=range(12),
)
def test_body_that_is_not_a_request_is_refused(http, path, body):
    error_of(http.post(path, content=body, headers=JSON))


@pytest.mark.parametrize("media_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_body_of_another_media_type_is_refused(http, media_type):
    headers = {} if media_type is None else {"content-type": media_type}
    error = error_of(http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers), 415)
    given = "missing" if media_type is None else repr(media_type)
    assert error["message"] == f"the header content-type is {given}: it must be application/json"


def test_json_media_type_with_charset_is_accepted(http):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers).status_code == 200


def test_unknown_paths_and_methods_return_404_and_405(http):
    error_of(http.get("/v1/nothing"), 404)
    error_of(http.get(CHAT), 405)


# sampling parameters of both endpoints


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1_000_000),
        ("n", 10**30),
        ("n", 1.5),
        ("n", "1"),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", 1e30),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("top_k", 1.5),
        ("top_k", 2.0),
        ("top_k", -2),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("seed", 2**64),
        ("seed", "abc"),
        ("max_tokens", -2),
        ("max_tokens", 10**9),
        ("max_tokens", LENGTH),
        ("min_tokens", -1),
        ("min_tokens", 10**9),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", [str(i) for i in range(17)]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [VOCABULARY]),
        ("stop_token_ids", list(range(65))),
        ("logit_bias", {"five": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"\u0665": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {str(VOCABULARY): 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "much"}),
        ("logit_bias", [5]),
        ("logit_bias", {str(i): 1 for i in range(301)}),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", "5"),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [5, VOCABULARY]),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", [10**30]),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("ignore_eos", "yes"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("priority", 2**40),
        ("cache_salt", "x" * 300),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
        ("tools", [{"type": "web_search"}]),
        ("guided_regex", 5),
        ("guided_choice", [5]),
        ("json_schema", 5),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("structured_outputs", {"choice": "a"}),
        ("model", 5),
    ],
    ids=str,
)
def test_sampling_parameter_out_of_range_is_named(http, path, field, value):
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    body = json.dumps(prompt | {field: value})
    error = error_of(http.post(path, content=body, headers=JSON))
    assert error["param"].split(".")[0] == field


def test_min_tokens_above_max_tokens_is_refused(http):
    error = error_of(http.post(COMPLETIONS, json={"prompt": "a", "min_tokens": 5, "max_tokens": 4}))
    assert (error["param"], error["value"]) == ("min_tokens", 5)


def test_number_that_overflows_to_infinity_is_refused(http):
    error = error_of(http.post(COMPLETIONS, content=b'{"prompt": "a", "temperature": 1e999}', headers=JSON))
    assert error["param"] == "temperature"


def test_unknown_model_returns_404(http):
    error = error_of(http.post(CHAT, json={"model": "../../etc/passwd", "messages": MESSAGES}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_error_has_value_and_limit(http):
    error = error_of(http.post(COMPLETIONS, json={"prompt": "a", "n": 1_000_000}))
    assert (error["value"], error["limit"]) == (1_000_000, 64)


@pytest.mark.parametrize(
    ("path", "body", "param", "start"),
    [
        (COMPLETIONS, {"prompt": "a", "best_of": 65}, "best_of", "best_of is 65, the limit is 64 (max_n)"),
        (
            CHAT,
            {"messages": MESSAGES, "max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens is 0",
        ),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        ("/v1/embeddings", {"input": [VOCABULARY]}, "input", "input has the token id"),
    ],
)
def test_error_names_the_field_that_the_client_sent(http, path, body, param, start):
    error = error_of(http.post(path, json=body))
    assert error["param"] == param
    assert error["message"].startswith(start)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": [65] * LENGTH}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "x" * LENGTH]}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 10_000_000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * LENGTH}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 10_000_000}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "max_tokens": LENGTH}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": LENGTH}, "max_completion_tokens"),
        (CHAT, {"messages": MESSAGES, "min_tokens": LENGTH}, "min_tokens"),
        ("/v1/embeddings", {"input": [65] * (LENGTH + 1)}, "input"),
        ("/v1/embeddings", {"input": ["a", "x" * 10_000_000]}, "input"),
        ("/tokenize", {"prompt": "x" * 10_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 10_000_000}]}, "messages"),
    ],
    ids=range(12),
)
def test_context_overflow_has_the_message_that_clients_look_for(http, path, body, param):
    error = error_of(http.post(path, json=body))
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert f"This model's maximum context length is {LENGTH} tokens" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": [65] * LENGTH}, "prompt"), ({"prompt": [65] * 200, "max_tokens": LENGTH}, "max_tokens")],
    ids=["prompt", "max_tokens"],
)
def test_context_overflow_names_what_instances_hold_now_and_at_best(http, fake, monkeypatch, body, param):
    monkeypatch.setattr(fake, "info", replace(fake.info, instance_len=100))
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == LENGTH
    assert http.post(COMPLETIONS, json={"prompt": [65] * 200}).status_code == 200
    error = error_of(http.post(COMPLETIONS, json=body))
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert f"This model's maximum context length is {LENGTH} tokens" in error["message"]
    assert "Its instances can hold 100 tokens now" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", 5]}, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": {}}, "stop"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (CHAT, {"messages": [*MESSAGES, {"role": "user", "content": [5]}]}, "messages.1.content"),
        ("/tokenize", {"messages": [{"role": "user", "content": {}}]}, "messages.0.content"),
    ],
    ids=range(6),
)
def test_error_of_union_names_the_field_and_allowed_types(http, path, body, param):
    error = error_of(http.post(path, json=body))
    assert error["param"] == param
    assert re.fullmatch(
        f"{param} is (5|a list|an object): it must be a string or a list of (strings|content parts)", error["message"]
    )


SALT, ROLE = "cache_salt has 9999 characters", "messages.0.role has 0 characters"
FORMAT = "encoding_format is \"x\": it must be 'float' or 'base64'"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {"prompt": "a", "top_k": 1.5}, "top_k is 1.5: it must be an integer"),
        (COMPLETIONS, {"prompt": "a", "n": True}, "n is true: it must be an integer"),
        (COMPLETIONS, {"prompt": "a", "temperature": "0.7"}, 'temperature is "0.7": it must be a number'),
        (COMPLETIONS, {"prompt": "a", "temperature": {}}, "temperature is an object: it must be a number"),
        (COMPLETIONS, {"prompt": "a", "echo": 1}, "echo is 1: it must be true or false"),
        (COMPLETIONS, {"prompt": "a", "model": 5}, "model is 5: it must be a string"),
        (COMPLETIONS, {"prompt": "a", "model": ["x" * 100]}, "model is a list: it must be a string"),
        (COMPLETIONS, {"prompt": "a", "user": 10**99}, "user is a large integer: it must be a string"),
        (COMPLETIONS, {"prompt": "a", "bad_words": "x" * 99}, "bad_words is a string: it must be a list"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1, None]}, "stop_token_ids.1 is null: it must be an integer"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": []}, "logit_bias is a list: it must be an object"),
        (COMPLETIONS, {"prompt": "a", "stream_options": 5}, "stream_options is 5: it must be an object"),
        (COMPLETIONS, {"prompt": "a", "priority": 2**31}, f"priority is {2**31}: it must be at most {2**31 - 1}"),
        (
            COMPLETIONS,
            {"prompt": "a", "cache_salt": "é" * 257},
            "cache_salt has 257 characters: it must have at most 256",
        ),
        (COMPLETIONS, {}, "prompt is missing"),
        (COMPLETIONS, [], "the body is a list: it must be an object"),
        (CHAT, {"messages": []}, "messages has 0 entries: it must have at least 1"),
        (CHAT, {"messages": ["a"]}, 'messages.0 is "a": it must be an object'),
        (
            CHAT,
            {"messages": [{"role": "", "content": "a"}]},
            f"{ROLE}: it must have at least 1",
        ),
        (CHAT, {"messages": [{"content": "a"}]}, "messages.0.role is missing"),
        (
            "/v1/embeddings",
            {"input": "a", "encoding_format": "x"},
            FORMAT,
        ),
    ],
    ids=range(21),
)
def test_error_says_what_was_given_and_what_is_allowed(http, path, body, message):
    assert error_of(http.post(path, json=body))["message"] == message


def test_empty_body_is_named(http):
    error = error_of(http.post(COMPLETIONS, content=b"", headers=JSON))
    assert error["message"] == "the body is missing"


def test_error_names_the_message_of_the_conversation(http):
    messages = [*MESSAGES, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert error_of(http.post(CHAT, json={"messages": messages}))["param"] == "messages.1.content"
    assert error_of(http.post(CHAT, json={"messages": [{"role": "function"}]}))["param"] == "messages.0.role"


def test_missing_field_has_its_own_error_code(http):
    error = error_of(http.post(CHAT, json={}))
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")


# completions


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        ["a", None],
        ["a", 1],
        [1, "a"],
        [1, 2.0],
        [True],
        [[1], ["a"]],
        {"text": "a"},
        5,
        [-1],
        [VOCABULARY],
        [[65], [10**30]],
        "x" * LENGTH,
        [65] * LENGTH,
        "x" * 10_000_000,
        ["x"] * 100_000,
    ],
    ids=range(21),
)
def test_invalid_prompt_is_refused(http, prompt):
    error = error_of(http.post(COMPLETIONS, json={"prompt": prompt}))
    assert error["param"] == "prompt"


def test_completion_without_prompt_is_refused(http):
    assert error_of(http.post(COMPLETIONS, json={}))["param"] == "prompt"


def test_longest_prompt_that_fits_is_answered(http):
    answer = http.post(COMPLETIONS, json={"prompt": "x" * (LENGTH - 1)})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": True},
        {"suffix": "end"},
        {"best_of": 1, "n": 2},
        {"best_of": 3, "stream": True},
        {"best_of": 1000},
        {"best_of": 0},
        {"max_tokens": 0},
    ],
    ids=str,
)
def test_invalid_completion_field_is_refused(http, fields):
    error_of(http.post(COMPLETIONS, json={"prompt": "a", **fields}))


# chat


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        {},
        [None],
        ["hi"],
        [{"content": "hi"}],
        [{"role": "", "content": "hi"}],
        [{"role": 5, "content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["hi"]}],
        [{"role": "user", "content": "x" * 1000}],
        [{"role": "user"}] * 5 + [{"rule": "user"}] * 50_000,
    ],
    ids=range(16),
)
def test_invalid_messages_are_refused(http, messages):
    error = error_of(http.post(CHAT, json={"messages": messages}))
    assert error["param"].split(".")[0] in ("messages", "prompt")


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ 7 * 7 }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"self": 1}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"chat_template_kwargs": 5},
        {"continue_final_message": True},
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": 5},
        {"max_completion_tokens": 0},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
    ],
    ids=str,
)
def test_invalid_chat_field_is_refused(http, fields):
    error_of(http.post(CHAT, json={"messages": MESSAGES, **fields}))


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [*MESSAGES, {"role": "function", "name": "f", "content": "5"}]},
        {"messages": MESSAGES, "tools": [{"type": "web_search"}]},
        {"messages": MESSAGES, "modalities": ["text", "audio"]},
        {"messages": MESSAGES, "web_search_options": {"search_context_size": "low"}},
        {"messages": MESSAGES, "web_search_options": {}},
    ],
)
def test_unsupported_chat_feature_is_refused(http, body):
    assert "not supported" in error_of(http.post(CHAT, json=body))["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tools": []},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"json": None, "regex": None, "json_object": False}},
    ],
)
def test_fields_that_change_nothing_are_accepted(http, fields):
    assert http.post(CHAT, json={"messages": MESSAGES, **fields}).status_code == 200


def test_null_field_means_the_default(http):
    nothing = dict.fromkeys(
        ("echo", "suffix", "priority", "add_special_tokens", "best_of", "user", "stream", "n", "stop")
    )
    assert http.post(COMPLETIONS, json={"prompt": "a", **nothing}).status_code == 200


# embeddings and tokens


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": None},
        {"input": ""},
        {"input": []},
        {"input": ["a", ""]},
        {"input": [VOCABULARY]},
        {"input": "a", "dimensions": 5},
        {"input": "a", "encoding_format": "int8"},
        {"input": ["a"] * 100_000},
        {"input": "x" * (LENGTH + 1)},
        {"input": "a", "normalize": False},
        {"input": "a", "input_type": "query"},
    ],
    ids=range(12),
)
def test_invalid_embedding_body_is_refused(http, body):
    error_of(http.post("/v1/embeddings", json=body))


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": MESSAGES}, {"prompt": 5}, {"prompt": "x" * 10**7}])
def test_invalid_tokenize_body_is_refused(http, body):
    error_of(http.post("/tokenize", json=body))


@pytest.mark.parametrize("tokens", [None, "a", [-1], [VOCABULARY], [1.5], ["a"], [True], [10**30], [None] * 50_000])
def test_invalid_detokenize_tokens_are_refused(http, tokens):
    error_of(http.post("/detokenize", json={"tokens": tokens}))


# the connection


def test_content_length_of_a_gigabyte_is_refused_before_the_body_is_read(address):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1073741824"
    answer = raw_request(address, head)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer


def test_chunked_body_is_refused_at_the_size_limit():
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
    with serving(FakeClient(), ServerSettings(max_body_mb=1)) as small:
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        answer = raw_request(small, head, chunk * 16 + b"1\r\n \r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_slow_body_returns_408():
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100"
    with serving(FakeClient(), ServerSettings(body_timeout=0.05)) as impatient:
        answer = raw_request(impatient, head, b'{"prompt"')
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_huge_headers_are_refused(address):
    try:
        answer = raw_request(address, b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 200_000)
    except ConnectionError:
        return  # the server closed while the headers were still being sent
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_garbage_instead_of_http_returns_400(address):
    assert raw_request(address, b"\x16\x03\x01\x02\x00\x01").startswith(b"HTTP/1.1 400 ")


SCHEMA = {"type": "object", "properties": {"a": {"not": {}}}}
STRICT = {"name": "f", "parameters": SCHEMA, "strict": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked", "engines", "own"),
    [
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
            "text.format.schema",
        ),
        (
            "/v1/responses",
            {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **STRICT}]}]},
            "tools.0.function.parameters",
            "tools.0.tools.0.parameters",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
            "output_config.format.schema",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "tools": [{"name": "f", "input_schema": SCHEMA}]},
            "tools.0.function.parameters",
            "tools.0.input_schema",
        ),
        ("/v1/chat/completions", {}, "reasoning.max_tokens", "thinking_token_budget"),
    ],
)
def test_error_of_the_engine_names_the_field_of_the_client(path, asked, engines, own, stream):
    fake = FakeClient(fail_after=0, failure=RequestError(f"{engines} cannot be used: why", field=engines))
    messages = {} if "input" in asked else {"messages": [{"role": "user", "content": "hi"}]}
    text = TestClient(create_app(fake, ServerSettings())).post(path, json={**messages, **asked, "stream": stream}).text
    assert f"{own} cannot be used: why" in text
    assert f"{engines} cannot" not in text
