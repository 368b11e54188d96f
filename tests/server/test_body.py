"""The cost of bodies: too many items are refused before parsing, and large bodies are parsed off the event loop."""

import asyncio
import json
import threading

import pytest
from pydantic_core import from_json
from starlette.testclient import TestClient

from jaxserve.core.errors import RequestError
from jaxserve.server.answers.generation import GenerationResponse
from jaxserve.server.app import create_app
from jaxserve.server.http import body as body_module, offload
from jaxserve.server.http.body import MAX_ITEMS, count_items, parse_body
from jaxserve.server.http.offload import off_loop
from jaxserve.server.routes import embeddings, json_route
from jaxserve.server.routes.json_route import MAX_INLINE_BODY
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
from tests.server.fake_control import FakeControl

JSON = {"content-type": "application/json"}
PROMPT_ITEMS = 1_000_000 + FakeClient().info.vocab_size  # the queue's tokens, and the vocabulary
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def repeated(before: bytes, entry: bytes, times: int, after: bytes) -> bytes:
    return before + b",".join([entry] * times) + after


FIELDS = b",".join(b'"k%d":1' % i for i in range(1_500_000))
TOO_MANY = {  # path, body, field named in the error
    "messages": (CHAT, repeated(b'{"messages":[', b'{"role":"user","content":"a"}', 1_000_000, b"]}"), "messages"),
    "fewer messages": (CHAT, repeated(b'{"messages":[', b'{"role":"user","content":"a"}', 100_000, b"]}"), "messages"),
    "parts": (
        CHAT,
        repeated(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}', 600_000, b"]}]}"),
        "messages",
    ),
    "numbers for parts": (
        CHAT,
        repeated(b'{"messages":[{"role":"user","content":[', b"1", 900_000, b"]}]}"),
        "messages",
    ),
    "fields": (COMPLETIONS, b'{"prompt":"a",' + FIELDS + b"}", None),
    "the same field": (COMPLETIONS, repeated(b'{"prompt":"a",', b'"k":1', 1_500_000, b"}"), None),
    "nested fields": (CHAT, b'{"messages":[{"role":"user","content":"a"}],"metadata":{' + FIELDS + b"}}", "metadata"),
    "ids": (COMPLETIONS, repeated(b'{"prompt":[', b"5", 10_000_000, b"]}"), "prompt"),
    "ids to decode": ("/detokenize", repeated(b'{"tokens":[', b"5", 10_000_000, b"]}"), "tokens"),
    "prompts": (COMPLETIONS, repeated(b'{"prompt":[', b'""', 8_000_000, b"]}"), "prompt"),
    "objects for prompts": (COMPLETIONS, repeated(b'{"prompt":[', b"{}", 10_000_000, b"]}"), "prompt"),
    "few objects for prompts": (COMPLETIONS, repeated(b'{"prompt":[', b"{}", 200_000, b"]}"), "prompt"),
    "inputs": ("/v1/embeddings", repeated(b'{"input":[', b"[5]", 5_000_000, b"]}"), "input"),
    "stops": (COMPLETIONS, repeated(b'{"prompt":"a","stop":[', b"1", 900_000, b"]}"), "stop"),
    "stops at the end": (
        COMPLETIONS,
        repeated(b'{"prompt":"' + b"a" * 100_000 + b'","stop":[', b'"s"', 100_000, b"]}"),
        "stop",
    ),
    "biases": (
        COMPLETIONS,
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":"x"' % i for i in range(200_000)) + b"}}",
        "logit_bias",
    ),
    "brackets": (COMPLETIONS, repeated(b'{"prompt":"a","x":[', b"[[[[[]]]]]", 500_000, b"]}"), "x"),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_body_with_too_many_items_is_refused_before_validation(http, monkeypatch, name):
    path, body, field = TOO_MANY[name]
    parsed = []
    monkeypatch.setattr(
        body_module, "from_json", lambda data, **options: parsed.append(len(data)) or from_json(data, **options)
    )
    answer = http.post(path, content=body, headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["limit"] in (MAX_ITEMS, MAX_ITEMS + PROMPT_ITEMS)
    assert error["value"] > error["limit"]
    assert len(answer.content) < 1000
    whole = len(body) in parsed
    assert whole == (error["limit"] == MAX_ITEMS)  # above the limit with prompts only the beginning is parsed


@pytest.mark.parametrize(
    "entry", [b"9" * 4000, b"1." + b"3" * 4000, b"-" + b"1" * 401], ids=["integer", "float", "401"]
)
def test_number_with_too_many_digits_is_refused_before_parsing(http, monkeypatch, entry):
    monkeypatch.setattr(body_module, "from_json", None)
    body = repeated(b'{"prompt":[', entry, 1000, b"]}")
    answer = http.post(COMPLETIONS, content=body, headers=JSON)
    assert answer.status_code == 400
    assert "more than 400 digits" in answer.json()["error"]["message"]


def test_many_digits_in_a_string_are_accepted():
    assert parse_body(json.dumps({"prompt": "9" * 100_000}).encode(), PROMPT_ITEMS) == {"prompt": "9" * 100_000}


def test_prompt_that_does_not_fit_stops_tokenizing(http, fake, monkeypatch):
    encode, texts = fake.tokenizer.encode, []
    monkeypatch.setattr(fake.tokenizer, "encode", lambda text, special: texts.append(text) or encode(text, special))
    answer = http.post(COMPLETIONS, json={"prompt": ["fits", "x" * 5000, "a", "b"]})
    assert answer.status_code == 400
    assert texts == ["fits", "x" * 5000]


def test_item_count_ignores_delimiters_in_strings():
    text = json.dumps({"prompt": 'a, {"b": [1, 2]}\\" \\', "stop": [",,,", '\\"', "[{"], "n": 1}).encode()
    many = b"[" + b",".join([text] * MAX_ITEMS) + b"]"  # enough to be counted exactly
    of_text = 1 + 2 + 1 + 2  # object and its commas, list and its commas
    assert count_items(many, 10**7) == 1 + (MAX_ITEMS - 1) + MAX_ITEMS * of_text


def test_prompts_with_as_many_ids_as_the_queue_takes_are_accepted():
    ids = [5] * (PROMPT_ITEMS // 2)
    body = json.dumps({"prompt": [ids, ids], "n": 1}).encode()
    assert parse_body(body, PROMPT_ITEMS) == {"prompt": [ids, ids], "n": 1}
    with pytest.raises(RequestError, match="most of them in other"):
        parse_body(json.dumps({"other": [ids, ids]}).encode(), PROMPT_ITEMS)


def test_string_full_of_delimiters_is_accepted():
    text = '[{"a": [1, 2, 3]}, "\\""]' * 100_000
    assert parse_body(json.dumps({"prompt": text}).encode(), PROMPT_ITEMS) == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_large_body_is_parsed_off_the_event_loop(http, monkeypatch, path, body):
    threads = []

    def read(*given):
        threads.append(threading.current_thread())
        return parse(*given)

    parse = json_route.parse_body
    monkeypatch.setattr(json_route, "parse_body", read)
    for padding in ("", "x" * MAX_INLINE_BODY):
        assert http.post(path, json=body | {"user": padding}).status_code == 200
    assert [thread.name.startswith("jaxserve-request") for thread in threads] == [False, True]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "a"}] * 40,
        [{"role": "user", "content": "a" * 5000}],
        [{"role": "user", "content": [{"type": "text", "text": "a" * 5000}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}] * 40}],
    ],
    ids=["many messages", "long text", "long part", "many parts"],
)
def test_long_conversations_are_rendered_off_the_event_loop(http, fake, monkeypatch, messages):
    render, threads = fake.tokenizer.conversation_text, []

    def watched(*given, **options):
        threads.append(threading.current_thread().name)
        return render(*given, **options)

    monkeypatch.setattr(fake.tokenizer, "conversation_text", watched)
    http.post(CHAT, json={"messages": messages})
    http.post(CHAT, json={"messages": [{"role": "user", "content": "a"}]})
    assert [name.startswith("jaxserve-request") for name in threads] == [True, False]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a" * 500] * 3, "echo": True, "max_tokens": 0, "logprobs": 20}),
        (COMPLETIONS, {"prompt": "a" * 500, "prompt_logprobs": 20}),
        (COMPLETIONS, {"prompt": "a", "n": 60, "logprobs": 20}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 400}], "prompt_logprobs": 20}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 60, "logprobs": True, "top_logprobs": 20}),
    ],
    ids=range(5),
)
def test_large_response_is_written_off_the_event_loop(http, monkeypatch, path, body):
    threads = []

    def watched(response, result):
        threads.append(threading.current_thread().name.startswith("jaxserve-request"))
        return write(response, result)

    write = GenerationResponse._write
    monkeypatch.setattr(GenerationResponse, "_write", watched)
    answer = http.post(path, json=body)
    assert answer.status_code == 200
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(body.get("n", prompts)))
    assert threads == [True] * prompts
    http.post(COMPLETIONS, json={"prompt": "a", "logprobs": 1})
    assert threads[prompts:] == [False]


@pytest.mark.parametrize("n", [1, 3])
def test_long_prompt_of_a_stream_is_written_off_the_event_loop(http, monkeypatch, n):
    threads = []

    def watched(response, *given):
        threads.append(threading.current_thread().name.startswith("jaxserve-request"))
        return write(response, *given)

    write = GenerationResponse._write_chunks
    monkeypatch.setattr(GenerationResponse, "_write_chunks", watched)
    body = {"prompt": "a" * 500, "logprobs": 20, "echo": True, "stream": True, "n": n}
    events = [json.loads(line[6:]) for line in http.post(COMPLETIONS, json=body).text.split("\n\n")[:-2]]
    assert threads == [True] * n
    firsts = [event["choices"][0] for event in events if len(event["choices"][0]["text"]) > 500]
    assert [choice["index"] for choice in firsts] == list(range(n))
    assert all(len(choice["logprobs"]["tokens"]) == 501 for choice in firsts)
    http.post(COMPLETIONS, json=body | {"prompt": "a"})
    assert len(threads) == n


def test_large_embeddings_are_written_off_the_event_loop(http, monkeypatch):
    threads = []

    def watched(*given):
        threads.append(threading.current_thread().name.startswith("jaxserve-request"))
        return write(*given)

    write = embeddings._with_embeddings
    monkeypatch.setattr(embeddings, "_with_embeddings", watched)
    monkeypatch.setattr(offload, "MAX_INLINE_SIZE", 100)
    for count in (1, 50):
        data = http.post("/v1/embeddings", json={"input": ["a"] * count}).json()["data"]
        assert [(entry["object"], entry["index"], len(entry["embedding"])) for entry in data] == [
            ("embedding", i, 4) for i in range(count)
        ]
    assert threads == [False, True]


def test_off_loop_work_does_not_block_the_event_loop():
    async def main() -> None:
        go = threading.Event()
        waiting = asyncio.ensure_future(off_loop(go.wait, 30))
        await asyncio.sleep(0)
        assert not waiting.done()
        go.set()
        assert await waiting

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "x" * 2_000_000: 1}),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"x" * 2_000_000: 1}}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x" * 2_000_000: 1}}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(20_000)}}),
        (COMPLETIONS, {"prompt": "a", "stop": [1] * 20_000}),
        (COMPLETIONS, {"prompt": "a", "model": "x" * 2_000_000}),
        (COMPLETIONS, {"prompt": "a", "response_format": {"type": "x" * 2_000_000}}),
        (COMPLETIONS, {"prompt": [["x" * 500_000] * 2] * 4}),
        (CHAT, {"messages": [{"role": "x" * 2_000_000, "content": "a"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "x" * 2_000_000}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x" * 2_000_000 + "!": 1}}),
    ],
    ids=range(11),
)
def test_error_for_large_body_stays_short(http, path, body):
    answer = http.post(path, json=body)
    assert answer.status_code in (200, 400, 404)
    assert len(answer.content) < 5000


def test_admin_body_with_too_many_items_is_refused():
    http = TestClient(create_app(FakeClient(control=FakeControl()), ServerSettings()), base_url="http://127.0.0.1")
    answer = http.put("/admin/policy", content=b'{"policy":"manual",' + FIELDS + b"}", headers=JSON)
    assert answer.status_code == 400
    answer = http.put("/admin/policy", json={"policy": "manual", "x" * 2_000_000: 1})
    assert answer.status_code == 400
    assert len(answer.content) < 5000


@pytest.mark.parametrize("lenient", [False, True])
def test_unknown_field_of_an_admin_body_is_always_refused(lenient):
    app = create_app(FakeClient(control=FakeControl()), ServerSettings(ignore_unknown_fields=lenient))
    http = TestClient(app, base_url="http://127.0.0.1")
    answer = http.put("/admin/policy", json={"policy": "manual", "setings": {}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "setings", "unsupported_parameter")
    assert error["message"] == "setings is not a known field: did you mean settings?"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_body_encoding_other_than_utf8_is_named(http, encoding):
    answer = http.post(COMPLETIONS, content='{"prompt": "a"}'.encode(encoding), headers=JSON)
    assert answer.status_code == 400
    assert "UTF-8" in answer.json()["error"]["message"]
    assert encoding[:6].upper() in answer.json()["error"]["message"]


def test_byte_order_mark_is_ignored(http):
    assert http.post(COMPLETIONS, content='{"prompt": "a"}'.encode("utf-8-sig"), headers=JSON).status_code == 200
