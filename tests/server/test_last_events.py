"""Every kind of response ends with a last event, or is an error in the form of its API, whatever fails inside."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pydantic_core
import pytest
from starlette.testclient import TestClient

from jaxserve.core.errors import EngineFailed
from jaxserve.parsing.source import Incremental
from jaxserve.server.answers.chat import ChatResponse
from jaxserve.server.messages.content_blocks import ContentBlocks
from jaxserve.server.responses.events import ResponseEvents
from jaxserve.server.responses.items import OutputItem
from jaxserve.server.responses.store import ResponseStore, Turn
from tests.server.conversations import ASK, FUNCTION, TOOL, conversing, hermes
from tests.support.thorough import THOROUGH

TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call></tool_call></think>"
SCRIPT = f"<think>\nhm\n</think>\n\nLet me see.\n{hermes('{}')}"
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}]}),
    "responses": ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}),
    "messages": ("/v1/messages", {"messages": ASK, "max_tokens": 4000, "tools": [TOOL]}),
}
FAULTS: dict[str, tuple[object, str]] = {
    "parser": (Incremental, "push"),
    "end of the parser": (Incremental, "finish"),
    "chat's formatter": (ChatResponse, "_delta"),
    "chat's calls": (ChatResponse, "_begin_call"),
    "blocks": (ContentBlocks, "_events"),
    "items": (OutputItem, "as_dict"),
    "events": (ResponseEvents, "_fold"),
    "end of an item": (ResponseEvents, "_close"),
    "the response": (ResponseEvents, "response"),
    "writer": (pydantic_core, "to_json"),
    "store": (ResponseStore, "put"),
    "end in the store": (ResponseStore, "end"),
    "growth in the store": (ResponseStore, "grow"),
    "kept items": (Turn, "add"),
}
ERRORS = [RuntimeError("it broke"), RecursionError("too deep"), ValueError("no value")]


class Fault:
    """A function that raises in its calls from number `first` on, as often as `times`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, place: tuple[object, str], error: BaseException, first: int):
        owner, name = place
        original: Callable[..., Any] = getattr(owner, name)
        self.calls, self.times = 0, 1

        def faulty(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if first <= self.calls < first + self.times:
                raise error
            return original(*args, **options)

        monkeypatch.setattr(owner, name, faulty)


def events_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def is_error(api: str, body: Any) -> bool:
    return isinstance(body["error"]["message"], str) and (api != "messages" or body["type"] == "error")


def check_stream(api: str, text: str) -> bool:
    """Assert that a stream has a last event, and return whether it tells of an error."""
    events = events_in(text)
    if api == "chat":
        assert text.endswith("data: [DONE]\n\n")
        return "error" in events[-1]
    if api == "messages":
        assert events[-1]["type"] in ("message_stop", "error")
        return events[-1]["type"] == "error"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] in ("response.completed", "response.failed")
    assert events[-1]["response"]["status"] == events[-1]["type"].removeprefix("response.")
    begun = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    ended = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert set(ended) <= set(begun)
    assert len(ended) == len(set(ended))
    return events[-1]["type"] == "response.failed"


def run(http: TestClient, api: str, mode: str) -> bool:
    """Assert that a response ends, and return whether it failed."""
    path, body = BODIES[api]
    answer = http.post(path, json=body | {"stream": "stream" in mode, "background": True if "back" in mode else None})
    if answer.status_code != 200:
        assert answer.status_code == 500
        assert is_error(api, answer.json())
        return True
    if mode == "whole":
        return False
    if mode == "stream":
        return check_stream(api, answer.text)
    if mode == "background stream":
        check_stream(api, answer.text)
        answered = events_in(answer.text)[0]["response"]
    else:
        answered = answer.json()
    for _ in range(1000):  # the fault may be in the retrieval itself, as long as the response runs
        kept = http.get(f"{path}/{answered['id']}")
        if kept.status_code == 404:  # the store has failed
            return True
        if kept.status_code == 200 and kept.json()["status"] in ("completed", "failed"):
            return bool(kept.json()["status"] == "failed")
    raise AssertionError("the response has not ended")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("api", "mode"),
    [(api, mode) for api in BODIES for mode in ("whole", "stream")]
    + [("responses", "background"), ("responses", "background stream")],
)
def test_response_ends_whatever_fails(monkeypatch, fault, api, mode):
    with conversing(SCRIPT, TEMPLATE) as (http, _), monkeypatch.context() as patch:
        counter = Fault(patch, FAULTS[fault], ERRORS[0], 10**9)
        assert run(http, api, mode) is False
        last = counter.calls
    faults = {(1, 10**9), (last, 1)} if last else set()  # from which call on, how often
    if last and THOROUGH:
        faults |= {(last // 2, 1), (last, 10**9)}
    for number, (first, times) in enumerate(sorted(faults)):
        with conversing(SCRIPT, TEMPLATE) as (http, _), monkeypatch.context() as patch:
            counter = Fault(patch, FAULTS[fault], ERRORS[(number + len(fault)) % len(ERRORS)], first)
            counter.times = times
            run(http, api, mode)
            assert counter.calls >= first or "background" in mode  # the number of retrievals varies


@pytest.mark.parametrize(
    "failure", [EngineFailed("broken"), RuntimeError("a bug"), asyncio.CancelledError("inside")], ids=str
)
@pytest.mark.parametrize("mode", ["whole", "stream", "background", "background stream"])
@pytest.mark.parametrize("api", BODIES)
def test_response_ends_when_the_engine_fails(api, mode, failure):
    if api != "responses" and "background" in mode:
        pytest.skip("only responses run in the background")
    with conversing(SCRIPT, TEMPLATE) as (http, engine):
        engine.fail_after, engine.failure = 20, failure
        assert run(http, api, mode) is True


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK, "tool_choice": "x\ud83d"}),
        ("/v1/chat/completions", {"messages": ASK, "\ud83d": 1}),
        ("/v1/responses", {"input": [{"type": "\ud83d"}]}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 5, "tools": [{"type": "\ud83d"}]}),
        ("/v1/messages", {"messages": [{"role": "\ud83d", "content": ""}], "max_tokens": 5}),
    ],
)
def test_refusal_that_repeats_a_lone_surrogate_is_a_refusal(path, body):
    with conversing("ok", TEMPLATE) as (http, _):
        answer = http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "error" in answer.json()


@pytest.mark.parametrize("mode", ["stream", "background"])
def test_response_that_failed_can_be_continued(mode):
    path, body = BODIES["responses"]
    with conversing(SCRIPT, TEMPLATE) as (http, engine):
        engine.fail_after = 30
        if mode == "stream":
            id = events_in(http.post(path, json=body | {"stream": True}).text)[-1]["response"]["id"]
        else:
            id = http.post(path, json=body | {"background": True}).json()["id"]
            while http.get(f"{path}/{id}").json()["status"] != "failed":
                pass
        engine.fail_after = None
        answer = http.post(path, json={"input": "go on", "previous_response_id": id})
    assert answer.status_code == 200, answer.text


def test_metadata_with_a_lone_surrogate_is_repeated():
    data = json.dumps({"input": "hi", "metadata": {"a\ud83d": "b\udc00"}, "user": "\ud83d"})
    with conversing("ok", TEMPLATE) as (http, _):
        answer = http.post("/v1/responses", content=data, headers={"content-type": "application/json"})
    assert answer.json()["metadata"] == {"a\ufffd": "b\ufffd"}
