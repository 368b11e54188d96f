"""Fields that would change the answer are supported or refused by name. Other fields are ignored."""

import httpx
import pytest

from jaxserve.server.schemas.unsupported import UNSUPPORTED, UNSUPPORTED_IN_MESSAGES, UNSUPPORTED_IN_PROMPTS
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.serving import serving

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "hi"}, EMBEDDINGS: {"input": "hi"}}
GENERATE = (CHAT, COMPLETIONS)
OWN_FIELDS = {  # by endpoint; bodies of other endpoints lack them
    CHAT: {"top_logprobs", "max_completion_tokens", "enable_thinking", "chat_template_kwargs", "continue_final_message"}
    | {"add_generation_prompt", "tools", "tool_choice", "thinking_token_budget", "include_reasoning"},
    COMPLETIONS: {"echo", "suffix", "best_of"},
}
TRUNCATED = "truncate_prompt_tokens"


def refusal(response):
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize("path", GENERATE)
def test_every_unsupported_field_is_refused_by_name(http, path):
    served = OWN_FIELDS[path] | {"return_token_ids", "return_tokens_as_token_ids", TRUNCATED}
    for name in UNSUPPORTED.keys() - served:
        error = refusal(http.post(path, json=BODIES[path] | {name: {"a": 5}}))
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert error["message"].startswith(f"{name} is not supported")


@pytest.mark.parametrize("path", GENERATE)
def test_neutral_values_of_unsupported_fields_are_accepted(http, path):
    neutral = {name: field.neutral[0] for name, field in UNSUPPORTED.items() if field.neutral}
    neutral |= {name: None for name, field in UNSUPPORTED.items() if not field.neutral}
    for name in OWN_FIELDS[path] | {TRUNCATED, "return_token_ids", "return_tokens_as_token_ids"}:
        del neutral[name]
    assert http.post(path, json=BODIES[path] | neutral).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("n_predict", 5, "max_tokens"),
        ("max_new_tokens", 5, "max_tokens"),
        ("min_new_tokens", 5, "min_tokens"),
        ("stop_sequences", ["a"], "stop"),
        ("repeat_penalty", 1.1, "repetition_penalty"),
        ("allowed_token_ids", [5], "logit_bias"),
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


def test_empty_and_unknown_message_fields_are_accepted(http):
    empty = {name: [] for name in UNSUPPORTED_IN_MESSAGES} | {"annotations": [], "cache_control": {"type": "ephemeral"}}
    messages = [*MESSAGES, {"role": "assistant", "content": "a", **empty}, *MESSAGES]
    assert http.post(CHAT, json={"messages": messages}).status_code == 200


def test_tokenize_refuses_only_fields_that_change_the_tokens(http):
    body = {"messages": MESSAGES, "max_completion_tokens": 5, "top_logprobs": 2, "grammar": "a", "temperature": 0}
    assert http.post("/tokenize", json=body).status_code == 200
    for name in UNSUPPORTED_IN_PROMPTS.keys() - OWN_FIELDS[CHAT]:
        assert refusal(http.post("/tokenize", json={"messages": MESSAGES, name: [5]}))["param"] == name


# supported fields


@pytest.mark.parametrize("effort", [{"enable_thinking": False}, {"reasoning_effort": "low"}])
def test_template_variables_at_the_top_level_reach_the_template(http, fake, effort, monkeypatch):
    seen = []
    monkeypatch.setattr(
        fake.tokenizer, "apply_chat_template", lambda messages, **given: seen.append(given) or "a", raising=True
    )
    assert http.post(CHAT, json=BODIES[CHAT] | effort).status_code == 200
    assert seen[0].items() >= effort.items()
    (name,) = effort
    assert http.post(CHAT, json=BODIES[CHAT] | effort | {"chat_template_kwargs": {name: "x"}}).status_code == 200
    assert seen[1][name] == "x"


def test_reasoning_of_earlier_answers_reaches_the_template(http, fake, monkeypatch):
    seen = []
    monkeypatch.setattr(fake.tokenizer, "apply_chat_template", lambda messages, **_: seen.extend(messages) or "a")
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
    for body, kept in (({}, most - 1), ({"max_tokens": 12}, most - 12)):
        assert http.post(COMPLETIONS, json={"prompt": text, TRUNCATED: -1, **body}).status_code == 200
        assert len(fake.seen[-1][0].token_ids) == kept
        assert fake.tokenizer.decode(fake.seen[-1][0].token_ids).endswith("xyz")
    messages = [{"role": "user", "content": text}]
    assert http.post(CHAT, json={"messages": messages, TRUNCATED: -1, "max_tokens": 12}).status_code == 200
    assert len(fake.seen[-1][0].token_ids) == most - 12
    answer = http.post(EMBEDDINGS, json={"input": [text, "abc"], TRUNCATED: -1}).json()
    assert [entry["embedding"][0] for entry in answer["data"]] == [most, 3]
    answer = http.post(EMBEDDINGS, json={"input": [text, "abc"], TRUNCATED: 2}).json()
    assert [entry["embedding"][0] for entry in answer["data"]] == [2, 2]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [0, -2, "all", 1.5])
def test_invalid_truncate_prompt_tokens_is_refused(http, path, value):
    assert refusal(http.post(path, json=BODIES[path] | {TRUNCATED: value}))["param"] == TRUNCATED


def test_max_tokens_of_minus_one_generates_as_much_as_fits(http, fake):
    for path, body in ((COMPLETIONS, {}), (CHAT, {}), (CHAT, {"max_completion_tokens": -1})):
        assert http.post(path, json=BODIES[path] | {"max_tokens": -1} | body).status_code == 200
        assert fake.seen[-1][1].max_tokens is None


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


def test_embedding_dimensions_equal_to_the_models_are_accepted(http, fake):
    size = fake.info.hidden_size
    assert http.post(EMBEDDINGS, json={"input": "a", "dimensions": size}).status_code == 200
    error = refusal(http.post(EMBEDDINGS, json={"input": "a", "dimensions": size - 1}))
    assert (error["param"], error["value"], error["limit"]) == ("dimensions", size - 1, size)
