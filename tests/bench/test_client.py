"""The client, against a server that follows a script."""

import asyncio
import json
import time

import pytest

from jaxserve.bench.client import Client, Target
from jaxserve.bench.record import RequestRecord
from jaxserve.bench.workload import Sample
from tests.bench.fake_server import Exchange, FakeServer, Script, answer

SAMPLE = Sample((1, 2, 3), input_tokens=3, output_tokens=4)
CHAT = "/v1/chat/completions"
SLACK = 0.25  # seconds: how late a busy machine may see what was written


def ask(script: Script, *samples: Sample, **target) -> tuple[list[RequestRecord], list[Exchange]]:
    """Send samples one after the other, and return their records and what the server received."""

    async def run():
        async with FakeServer(script) as server, Client(Target(server.url, "fake", **target)) as client:
            records = []
            for index, sample in enumerate(samples or (SAMPLE,)):
                now = time.monotonic()
                records.append(RequestRecord(index, due_s=now, arrival_s=now, input_tokens=sample.input_tokens))
                await client.send(sample, records[-1])
            return records, server.exchanges

    return asyncio.run(run())


def error_of(script: Script, **target) -> str | None:
    """Return the error of one request, which must have an end."""
    (record,), _ = ask(script, **target)
    assert record.end_s is not None
    assert not record.ok
    return record.error


def assert_seen(times_s: list[float], written_s: list[float]) -> None:
    """Assert that every token was seen after it was written and not much later."""
    assert len(times_s) == len(written_s)
    for seen, written in zip(times_s, written_s, strict=True):
        assert written <= seen < written + SLACK


def test_chunk_times_are_when_the_server_wrote():
    (record,), (exchange,) = ask(lambda e: answer(e, tokens=5, first_s=0.06, every_s=0.03))
    assert record.ok
    assert record.status == 200
    assert_seen(record.chunk_times_s, exchange.written_s)
    assert 0.06 <= record.ttft_s < 0.06 + SLACK
    assert sum(record.itl_s) == pytest.approx(record.chunk_times_s[-1] - record.chunk_times_s[0])
    assert record.tpot_s == pytest.approx(sum(record.itl_s) / 4)
    assert record.due_s <= record.sent_s <= record.chunk_times_s[0] < record.chunk_times_s[-1] <= record.end_s


def test_stall_is_in_the_gap_where_it_happened():
    async def script(exchange):
        await exchange.head()
        for index in range(4):
            await asyncio.sleep(0.3 if index == 2 else 0)
            await exchange.token()
        await exchange.done()

    (record,), _ = ask(script)
    assert record.itl_s[1] == max(record.itl_s) >= 0.3 - 0.05


def test_usage_overrides_counted_tokens():
    async def script(exchange):
        await exchange.head()
        await exchange.token("two tokens")
        await exchange.token("two more")
        await exchange.usage(prompt_tokens=11, completion_tokens=4)
        await exchange.done()

    (record,), _ = ask(script)
    assert (record.input_tokens, record.output_tokens, len(record.chunk_times_s)) == (11, 4, 2)
    assert record.text == "two tokenstwo more"


def test_every_chunk_without_usage_counts_as_a_token():
    async def script(exchange):
        await exchange.head()
        for _ in range(3):
            await exchange.token()
        await exchange.done()

    (record,), _ = ask(script)
    assert record.ok
    assert (record.input_tokens, record.output_tokens) == (3, 3)


def test_final_chunk_without_usage_and_text_is_not_a_token():
    async def script(exchange):
        await exchange.head()
        for _ in range(3):
            await exchange.token()
        await exchange.token("", finish_reason="stop")
        await exchange.done()

    (record,), _ = ask(script)
    assert (record.ok, record.output_tokens, len(record.chunk_times_s)) == (True, 3, 3)


@pytest.mark.parametrize("text", ["", "x"])
def test_zero_completion_tokens_in_usage_leave_no_tokens(text):
    async def script(exchange):
        await exchange.head()
        await exchange.token(text)
        await exchange.token("", finish_reason="stop")
        await exchange.usage(prompt_tokens=3, completion_tokens=0)
        await exchange.done()

    (record,), _ = ask(script)
    assert (record.output_tokens, record.chunk_times_s) == (0, [])
    assert record.error == "the stream contained no tokens"


def test_finish_reason_ends_an_answer():
    async def script(exchange):
        await exchange.head()
        await exchange.token(finish_reason="stop")
        await exchange.end()

    (record,), _ = ask(script)
    assert record.ok


def test_stream_with_split_characters_and_comments_is_read():
    text = "naïve 日本"
    event = (
        b": ping\r\n\r\ndata: " + json.dumps({"choices": [{"text": text}]}, ensure_ascii=False).encode() + b"\r\n\r\n"
    )

    async def script(exchange):
        await exchange.head()
        for byte in event:
            await exchange.part(bytes([byte]))
        await exchange.done()

    (record,), _ = ask(script)
    assert record.ok
    assert (record.text, record.output_tokens) == (text, 1)


def test_tokens_that_arrive_together_have_one_time():
    async def script(exchange):
        await exchange.head()
        await exchange.part(b'data: {"choices": [{"text": "x"}]}\n\n' * 3)
        await exchange.done()

    (record,), _ = ask(script)
    assert record.itl_s == [0.0, 0.0]


def test_chat_counts_chunks_with_content():
    async def script(exchange):
        await exchange.head()
        await exchange.delta(role="assistant", content="")
        await exchange.delta(reasoning_content="hm")
        await exchange.delta(content="Hello")
        await exchange.delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}])
        await exchange.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await exchange.done()

    (record,), (exchange,) = ask(script, Sample("Hi", 1, 8), endpoint=CHAT)
    assert record.ok
    assert len(record.chunk_times_s) == 3
    assert record.text == "Hello"
    assert exchange.path == CHAT
    assert exchange.body["messages"] == [{"role": "user", "content": "Hi"}]


def test_request_body_holds_the_fields_of_the_target():
    _, (exchange,) = ask(answer, api_key="secret", ignore_eos=True, extra_body={"temperature": 0, "max_tokens": 9})
    assert exchange.path == "/v1/completions"
    assert exchange.headers["authorization"] == "Bearer secret"
    assert exchange.body == {
        "model": "fake",
        "prompt": [1, 2, 3],
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }


def test_api_key_is_not_in_the_repr_of_the_target():
    assert "secret" not in repr(Target("http://host", "model", api_key="secret"))


def test_connection_is_reused_by_consecutive_requests():
    records, exchanges = ask(answer, SAMPLE, SAMPLE, SAMPLE)
    assert all(record.ok for record in records)
    assert {exchange.connection for exchange in exchanges} == {0}


def test_concurrent_requests_use_separate_connections():
    together = 40

    async def run():
        everyone_is_here = asyncio.Event()

        async def script(exchange):
            if len(server.exchanges) == together:
                everyone_is_here.set()
            await everyone_is_here.wait()
            await answer(exchange)

        async with FakeServer(script) as server, Client(Target(server.url, "fake")) as client:
            records = [RequestRecord(i, 0.0, 0.0, 3) for i in range(together)]
            for _ in range(2):  # again on the connections of the first time
                await asyncio.gather(*(client.send(SAMPLE, record) for record in records))
            return records, server.connections

    records, connections = asyncio.run(run())
    assert all(record.ok for record in records)
    assert connections == together


def test_request_after_a_failure_succeeds():
    async def script(exchange):
        if exchange.index == 0:
            exchange.reset()
        else:
            await answer(exchange)

    (broken, fine), _ = ask(script, SAMPLE, SAMPLE)
    assert not broken.ok
    assert fine.ok


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "the queue is full", "type": "overloaded"}}', "HTTP 503: the queue is full"),
        (b'{"detail": "no"}', "HTTP 503: no"),
        (b'{"error": "no"}', "HTTP 503: no"),
        (b"<h1>Bad\n gateway</h1>", "HTTP 503: <h1>Bad gateway</h1>"),
        (b"", "HTTP 503"),
    ],
)
def test_refused_request_has_status_and_message(body, message):
    (record,), _ = ask(lambda exchange: exchange.whole(503, body))
    assert (record.status, record.error) == (503, message)
    assert record.ttft_s is None
    assert not record.ok


async def _reset_at_once(exchange):
    exchange.reset()


async def _reset_midway(exchange):
    await exchange.head()
    await exchange.token()
    await asyncio.sleep(0.02)
    exchange.reset()


async def _close_midway(exchange):
    await exchange.head()
    await exchange.token()
    exchange.writer.close()


async def _never_answer(exchange):
    await asyncio.sleep(60)


async def _stall_midway(exchange):
    await exchange.head()
    await exchange.token()
    await asyncio.sleep(60)


async def _error_midway(exchange):
    await exchange.head()
    await exchange.token()
    await exchange.event({"error": {"message": "the engine failed", "code": 500}})
    await exchange.done()


async def _malformed(exchange):
    await exchange.head()
    await exchange.token()
    await exchange.event(b'{"choices": [{"te')
    await exchange.done()


async def _odd_json(exchange):
    await exchange.head()
    await exchange.event({"choices": "none"})
    await exchange.done()


async def _no_end(exchange):
    await exchange.head()
    await exchange.token()
    await exchange.end()


async def _no_tokens(exchange):
    await exchange.head()
    await exchange.done()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (_error_midway, "error in the stream: the engine failed"),
        (_malformed, 'malformed event: {"choices": [{"te'),
        (_odd_json, 'malformed event: {"choices": "none"}'),
        (_no_end, "the stream ended without [DONE] or a finish_reason"),
        (_no_tokens, "the stream contained no tokens"),
        (_close_midway, "connection closed before the answer was complete"),
    ],
)
def test_broken_stream_has_a_reason(script, reason):
    assert error_of(script) == reason


def test_answer_that_is_not_http_is_a_failure():
    reason = error_of(lambda exchange: exchange.raw(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"))
    assert reason.startswith("the answer is not HTTP: ")


def test_requests_share_no_cookies():
    async def script(exchange):
        await exchange.raw(b"HTTP/1.1 503 Busy\r\nset-cookie: route=1\r\ncontent-length: 0\r\n\r\n")

    _, exchanges = ask(script, SAMPLE, SAMPLE)
    assert all("cookie" not in exchange.headers for exchange in exchanges)


def test_redirection_is_a_failure():
    async def script(exchange):
        await exchange.raw(b"HTTP/1.1 307 Elsewhere\r\nlocation: /other\r\ncontent-length: 0\r\n\r\n")

    (record,), exchanges = ask(script)
    assert (record.status, record.error, len(exchanges)) == (307, "HTTP 307", 1)


@pytest.mark.parametrize("script", [_reset_at_once, _reset_midway])
def test_reset_connection_is_a_failure(script):
    assert error_of(script) in ("connection reset", "connection closed before the answer was complete")


@pytest.mark.parametrize("script", [_never_answer, _stall_midway])
def test_request_beyond_its_timeout_fails(script):
    assert error_of(script, timeout_s=0.3) == "timeout after 0.3 s"


def test_tokens_before_a_failure_are_kept():
    (record,), _ = ask(_reset_midway)
    assert (len(record.chunk_times_s), record.output_tokens, record.text) == (1, 1, "x")
    assert record.e2el_s is None


def send_to(url: str, sample: Sample = SAMPLE, **target) -> RequestRecord:
    async def run():
        record = RequestRecord(0, 0.0, 0.0, 3)
        async with Client(Target(url, "fake", **target)) as client:
            await client.send(sample, record)
        return record

    return asyncio.run(run())


def test_request_to_a_closed_port_fails():
    async def free_url():
        async with FakeServer(answer) as server:
            return server.url

    assert send_to(asyncio.run(free_url())).error == "connection refused"


def test_request_to_a_wrong_address_fails():
    assert send_to("ftp://127.0.0.1").error
    assert send_to("http://127.0.0.1:port").error.startswith("cannot send the request")


def test_chat_request_with_token_ids_fails():
    record = send_to("http://127.0.0.1:9", endpoint=CHAT)
    assert record.error == "cannot send the request: a chat endpoint takes text, not token ids"


def test_cancelled_request_has_no_error_and_no_end():
    async def run():
        async with FakeServer(_stall_midway) as server, Client(Target(server.url, "fake")) as client:
            record = RequestRecord(0, 0.0, 0.0, 3)
            task = asyncio.create_task(client.send(SAMPLE, record))
            while not record.chunk_times_s:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return record

    record = asyncio.run(run())
    assert (record.end_s, record.error, record.ok) == (None, None, False)
    assert record.output_tokens == 1


@pytest.mark.parametrize(("tokens", "times"), [(2, 2), (3, 3)])
def test_chunk_with_only_a_finish_reason_is_not_a_token(tokens, times):
    async def bare_end(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.token("a")
        await exchange.token("b")
        await exchange.token("", finish_reason="stop")
        await exchange.usage(prompt_tokens=3, completion_tokens=tokens)  # 3: the end was a token, such as eos
        await exchange.done()

    (record,), (exchange,) = ask(bare_end)
    assert record.output_tokens == tokens
    assert_seen(record.chunk_times_s, exchange.written_s[:times])


def test_api_key_repeated_by_the_server_is_masked():
    async def repeats(exchange: Exchange) -> None:
        await exchange.whole(401, b'{"error": {"message": "no such key: ' + b"x" * 170 + b' my-long-secret-key"}}')

    reason = error_of(repeats, api_key="my-long-secret-key")
    assert reason.startswith("HTTP 401: no such key")
    assert "my-" not in reason


def test_error_has_no_terminal_control_characters():
    assert error_of(lambda e: e.whole(500, b"\x1b[31mred\x00\nalert")) == "HTTP 500: \ufffd[31mred\ufffd alert"


def test_unstreamed_answer_is_a_failure():
    async def whole(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")

    assert error_of(whole) == "the answer is not a stream of events: application/json"


@pytest.mark.parametrize("usage", ["many", [1], {"prompt_tokens": -5, "completion_tokens": "many"}, {"x": 1}])
def test_usage_without_valid_counts_is_ignored(usage):
    async def script(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.token()
        await exchange.token(finish_reason="length")
        await exchange.event({"choices": [], "usage": usage})
        await exchange.done()

    (record,), _ = ask(script)
    assert record.ok
    assert (record.input_tokens, record.output_tokens) == (3, 2)


def test_text_of_another_type_is_malformed():
    async def script(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.token(text=5)
        await exchange.done()

    assert error_of(script).startswith("malformed event")
