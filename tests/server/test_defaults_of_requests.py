"""Defaults of the server for what requests leave out: variables of the chat template, and sampling parameters."""

import json

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from jaxserve.cli.main import _print_ready, app
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.planning.resolve import resolve
from jaxserve.server.app import create_app
from jaxserve.server.options import read_config, resolve as resolve_options
from jaxserve.server.runner import run_server
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient, byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    " thinking={{ enable_thinking }} tone={{ tone }} effort={{ reasoning_effort }}"
)
USER = [{"role": "user", "content": "hi"}]
DEFAULTS = '{"enable_thinking": false, "tone": "dry"}'


@pytest.fixture(scope="module")
def served():
    engine = FakeClient("ok", tokenizer=byte_tokenizer(TEMPLATE), max_model_len=4096)
    return TestClient(create_app(engine, ServerSettings(default_chat_template_kwargs=DEFAULTS))), engine


PATHS = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 5},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "hi thinking=False tone=dry effort="),
        ({"chat_template_kwargs": {"tone": "warm"}}, "hi thinking=False tone=warm effort="),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "hi thinking=True tone=dry effort="),
    ],
)
def test_variables_of_a_request_come_before_the_defaults(served, path, fields, expected):
    http, engine = served
    assert http.post(path, json=PATHS[path] | fields).status_code == 200
    assert engine.seen[-1][0].text == expected


def test_fields_for_variables_come_before_the_defaults(served):
    http, engine = served
    http.post("/v1/chat/completions", json={"messages": USER, "enable_thinking": True, "reasoning_effort": "low"})
    assert engine.seen[-1][0].text == "hi thinking=True tone=dry effort=low"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    http.post("/v1/messages", json={"messages": USER, "max_tokens": 5, "thinking": thinking})
    assert engine.seen[-1][0].text == "hi thinking=True tone=dry effort="


def test_tokens_are_counted_with_the_defaults(served):
    http, _ = served
    expected = len("hi thinking=False tone=dry effort=")
    assert http.post("/tokenize", json={"messages": USER}).json()["count"] == expected
    answer = http.post("/v1/messages/count_tokens", json={"messages": USER}).json()
    assert answer["input_tokens"] == expected
    assert http.post("/v1/responses/input_tokens", json={"input": "hi"}).json()["input_tokens"] == expected
    assert http.post("/v1/embeddings", json={"messages": USER}).json()["usage"]["prompt_tokens"] == expected


def test_variable_that_many_applications_set_may_be_unknown_to_the_template():
    engine = FakeClient("ok", tokenizer=byte_tokenizer("{{ messages[0].content }}"))
    http = TestClient(create_app(engine, ServerSettings(default_chat_template_kwargs={"enable_thinking": False})))
    assert http.post("/v1/chat/completions", json={"messages": USER}).status_code == 200
    assert engine.seen[-1][0].text == "hi"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ({"messages": []}, "may not set 'messages'"),
        ({"chat_template": "x"}, "may not set 'chat_template'"),
        ({"a b": 1}, "may not set 'a b'"),
    ],
)
def test_default_that_cannot_be_is_refused_with_the_options_name(given, message):
    with pytest.raises(ConfigError, match=message) as error:
        ServerSettings(default_chat_template_kwargs=given)
    assert "--default-chat-template-kwargs" in str(error.value)


def test_default_that_the_template_does_not_read_ends_the_start():
    engine = FakeClient(tokenizer=byte_tokenizer(TEMPLATE))
    settings = ServerSettings(port=0, default_chat_template_kwargs={"tune": "dry"})
    with pytest.raises(ConfigError, match=r"does not read 'tune': did you mean tone\? \(--default-chat-template-kwar"):
        run_server(lambda: engine, settings, lambda urls, client: pytest.fail("it is ready"))
    assert engine.stopped


def test_defaults_are_mappings_in_a_file_and_json_on_the_command_line(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("default-chat-template-kwargs: {tone: dry}\noverride-generation-config:\n  top_k: 5\n")
    engine, server = resolve_options(read_config(file), {"override_generation_config": None})
    assert (server.template_defaults, engine.override_generation_config) == ({"tone": "dry"}, {"top_k": 5})
    engine, server = resolve_options(read_config(file), {"override_generation_config": '{"top_p": 0.5}'})
    assert engine.override_generation_config == {"top_p": 0.5}
    for option in ("--default-chat-template-kwargs", "--override-generation-config"):
        result = CliRunner().invoke(app, ["serve", option, "{"])
        assert result.exit_code == 1
        assert f"{option} is not valid JSON" in result.output


def test_defaults_of_the_model_may_be_changed_replaced_or_left_out(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 9, "max_new_tokens": 77}')

    def defaults(**options) -> tuple[dict, int | None]:
        info = resolve(EngineConfig(**options)).info
        return dict(info.default_sampling), info.max_new_tokens

    own = {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.15}
    assert defaults() == (own, None)
    assert defaults(generation_config="vllm") == ({}, None)
    assert defaults(generation_config=tmp_path) == ({"top_k": 9}, 77)
    changes = {"top_p": None, "temperature": 0, "max_new_tokens": 5}
    assert defaults(override_generation_config=changes) == ({"temperature": 0, "repetition_penalty": 1.15}, 5)
    with pytest.raises(ConfigError, match="--generation-config"):
        defaults(generation_config=tmp_path / "absent")


def test_start_says_which_defaults_are_in_force(capsys):
    engine = FakeClient(default_sampling={"temperature": 0.6, "top_k": 20}, tokenizer=byte_tokenizer(TEMPLATE))
    _print_ready(["http://x"], engine, ServerSettings(default_chat_template_kwargs={"tone": "dry"}))
    printed = capsys.readouterr().out
    assert "defaults of requests (--generation-config): temperature 0.6, top_k 20\n" in printed
    assert f"defaults of the chat template: {json.dumps({'tone': 'dry'})}\n" in printed
    _print_ready(["http://x"], FakeClient(), ServerSettings())
    assert "(--generation-config): those of the API\n" in capsys.readouterr().out
