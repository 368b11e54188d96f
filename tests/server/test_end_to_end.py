"""`jaxserve serve` as a user starts it: a real engine with a tiny random model, and the official OpenAI client."""

import json
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import anthropic
import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.process import server_process

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def arguments(random_model, tmp_path_factory):
    """Return a command for a small machine. All its servers share a compilation cache."""
    options = {
        "port": 0,
        "load-format": "dummy",
        "max-num-seqs": 4,
        "max-num-batched-tokens": 132,
        "compile-cache": tmp_path_factory.mktemp("cache"),
    }
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return ["-m", "jaxserve.cli.main", "serve", str(random_model), *given]


@pytest.fixture(scope="module")
def server(arguments):
    with server_process(*arguments) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, prompt="def f(x):", **options):
    options = {"max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}} | options
    return client.completions.create(model=client.models.list().data[0].id, prompt=prompt, **options)


def metric(server, name: str, **labels: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return next(s.value for s in samples if s.name == f"jaxserve_{name}" and labels.items() <= s.labels.items())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_printed_curl_command_works(server):
    wait_for(lambda: server.output.read_text().count("\n") > 1)
    command = server.output.read_text().splitlines()[1]
    body = json.loads(command[command.index("-d '") + 4 : command.rindex("'")])
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert command.startswith(f"curl {server.url}/v1/completions -H 'content-type: application/json' -d ")
    assert answer.status_code == 200


def test_completion_stream_equals_whole_response(client):
    whole = complete(client).choices[0]
    chunks = [chunk.choices[0] for chunk in complete(client, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text != ""
    assert chunks[-1].finish_reason == whole.finish_reason == "length"


def test_chat_stream_equals_whole_response(client):
    name = client.models.list().data[0].id
    options = {"model": name, "messages": CHAT, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole != ""


def test_message_calls_the_tool_that_it_must_call(server):
    city = {"type": "object", "properties": {"city": {"enum": ["Bern", "Rome"]}}, "required": ["city"]}
    fields = {
        "model": httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"],
        "messages": CHAT,
        "max_tokens": 200,
        "tools": [{"name": "weather", "input_schema": city}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 0},
    }
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        (call,) = client.messages.create(**fields).content
        with client.messages.stream(**fields) as stream:
            (streamed,) = stream.get_final_message().content
    assert call.name == streamed.name == "weather"
    assert call.input == streamed.input
    assert call.input["city"] in ("Bern", "Rome")


def test_response_stream_equals_whole_response_and_continues(client):
    options = {"model": client.models.list().data[0].id, "input": "hi", "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**options)
    *_, last = client.responses.create(**options, stream=True)
    assert last.response.output_text == whole.output_text != ""
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    options |= {"input": "Go on.", "previous_response_id": whole.id}
    assert client.responses.create(**options).usage.input_tokens > whole.usage.total_tokens


def test_answers_do_not_depend_on_concurrent_requests(client):
    prompts = [f"prompt {i}" for i in range(8)]
    alone = [complete(client, prompt, seed=i, temperature=1).choices[0].text for i, prompt in enumerate(prompts)]
    with ThreadPoolExecutor(8) as threads:
        run = lambda i: complete(client, prompts[i], seed=i, temperature=1).choices[0].text  # noqa: E731
        together = list(threads.map(run, range(8)))
    assert together == alone
    assert len(set(alone)) == 8


def test_n_sampled_answers_differ(client):
    answer = complete(client, n=3, temperature=1, seed=5)
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage.completion_tokens == 3 * 24


def test_stop_string_ends_the_answer_before_it(client):
    text = complete(client).choices[0].text
    stop = next(character for character in text[3:] if character.isascii())
    for stream in (False, True):
        answer = complete(client, stop=stop, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].stop_reason == stop


def test_logprobs_belong_to_the_sampled_tokens(client):
    logprobs = complete(client, logprobs=3, max_tokens=5).choices[0].logprobs
    assert len(logprobs.tokens) == 5
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value == max(top.values()) == top[token] < 0  # greedy: the sampled token is the likeliest


def test_echo_scores_the_prompt(client):
    choice = complete(client, "abc", echo=True, logprobs=1, max_tokens=0).choices[0]
    assert choice.text == "abc"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])


def test_echo_of_a_single_token_has_no_logprob(client):
    logprobs = complete(client, [65], echo=True, logprobs=1, max_tokens=2).choices[0].logprobs
    assert logprobs.token_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 3


def test_echo_scores_a_prompt_that_needs_several_chunks(client):
    prompt = "".join(chr(33 + i % 90) for i in range(300))
    for _ in range(2):  # the second time its pages are in the prefix cache
        logprobs = complete(client, prompt, echo=True, logprobs=1, max_tokens=3).choices[0].logprobs
        assert "".join(logprobs.tokens[:300]) == prompt
        assert len(logprobs.token_logprobs) == 303
        assert all(value < 0 for value in logprobs.token_logprobs[1:])


def test_logit_bias_forces_a_token(client):
    token = 65
    answer = complete(client, logit_bias={str(token): 100}, max_tokens=4)
    assert len(set(answer.choices[0].text)) == 1


def test_repeated_prompt_is_found_in_the_prefix_cache(client):
    prompt = "a prompt that fills several pages of the cache, and then some more " * 4
    first, second = (complete(client, prompt).usage.prompt_tokens_details.cached_tokens for _ in range(2))
    assert first == 0
    assert second >= len(prompt) - 32
    salted = complete(client, prompt, extra_body={"cache_salt": "another tenant"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_embeddings_have_unit_length(client):
    name = client.models.list().data[0].id
    answer = client.embeddings.create(model=name, input=["a text", "another text"])
    for entry in answer.data:
        assert sum(x * x for x in entry.embedding) == pytest.approx(1, rel=1e-4)
    assert answer.data[0].embedding != answer.data[1].embedding


@pytest.mark.parametrize("options", [{"max_tokens": 10**9}, {"n": 65}, {"logprobs": 21}, {"prompt": "x" * 5000}])
def test_request_beyond_engine_limits_returns_400(client, options):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **options)
    assert caught.value.param in options
    assert caught.value.body["limit"] is not None


LONG = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}


def send(server, body: dict) -> socket.socket:
    """Send a request and return its connection, which can be cut."""
    address = urlsplit(server.url)
    data = json.dumps({"prompt": "abc", **LONG, **body}).encode()
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 3}, {"prompt": ["a", "b"]}], ids=str)
def test_disconnect_frees_kv_pages(server, body):
    aborted = metric(server, "request_success_total", finished_reason="abort")
    connection = send(server, body)
    wait_for(lambda: metric(server, "kv_pages_used") > 0)
    connection.close()
    wait_for(lambda: metric(server, "kv_pages_used") == 0)
    assert metric(server, "num_requests_running") == 0
    wait_for(lambda: metric(server, "request_success_total", finished_reason="abort") > aborted)


def test_disconnect_of_a_queued_request_removes_it_from_the_queue(server):
    running = [send(server, {}) for _ in range(4)]  # as many as run at once
    wait_for(lambda: metric(server, "num_requests_running") == 4)
    queued = [send(server, {}) for _ in range(3)]
    wait_for(lambda: metric(server, "num_requests_waiting") == 3)
    for connection in queued:
        connection.close()
    wait_for(lambda: metric(server, "num_requests_waiting") == 0)
    assert metric(server, "num_requests_running") == 4
    for connection in running:
        connection.close()
    wait_for(lambda: metric(server, "kv_pages_used") == 0)


def test_sigterm_lets_a_stream_end_and_exits_with_0(arguments):
    with server_process(*arguments) as server:
        body = {"prompt": "abc", "stream": True, **LONG, "max_tokens": 600}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            server.signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.wait() == 0


def test_sigterm_lets_a_stream_end_while_the_plan_keeps_changing(arguments):
    body = {"prompt": "abc", "stream": True, **LONG, "max_tokens": 600}
    policy = f"{Path(__file__).with_name('alternating_policy.py')}:Alternating"
    options = ("--no-warmup", "--policy", policy, "--kv-pages", "400", "--max-kv-pages", "420")
    with server_process(*arguments, *options) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            wait_for(lambda: metric(server, "plan_version") > 5)
            server.signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.wait() == 0
        assert "Traceback" not in server.errors.read_text()


def test_metrics_count_a_request(server, client):
    names = ("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds")
    sizes = ("request_params_n", "request_params_max_tokens", "request_max_num_generation_tokens")
    before = {name: metric(server, f"{name}_sum") for name in (*names, *sizes)}
    complete(client, n=2, temperature=1)
    spent = {name: metric(server, f"{name}_sum") - value for name, value in before.items()}
    assert [spent[name] for name in sizes] == [2, 24, 24]
    assert all(spent[name] > 0 for name in names)
    assert spent[names[0]] + spent[names[1]] == pytest.approx(spent[names[2]])
    assert metric(server, "iteration_tokens_count") > 0
    assert metric(server, "cache_config_info", block_size="16", cache_dtype="float32") == 1


def test_truncate_prompt_tokens_cuts_the_prompt(client):
    text = "def f(x):" * 1000
    cut = complete(client, text, extra_body={"truncate_prompt_tokens": 9, "ignore_eos": True})
    assert cut.usage.prompt_tokens == 9
    assert cut.choices[0].text == complete(client, "def f(x):").choices[0].text


def test_top_p_of_zero_is_greedy(client):
    drawn = complete(client, temperature=1, top_p=0, extra_body={"ignore_eos": True})
    assert drawn.choices[0].text == complete(client).choices[0].text


def test_serving_compiles_nothing(server):
    before = metric(server, "compilations_total", tier="block")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client, ThreadPoolExecutor(6) as threads:
        for length in (1, 20, 300):
            list(threads.map(lambda i, n=length: complete(client, "y" * (n + i), logprobs=2, top_p=0.9), range(6)))
    assert metric(server, "compilations_total", tier="block") == before
