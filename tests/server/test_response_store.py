"""Responses that are kept: continued, retrieved, listed, deleted, dropped, and separated by API key."""

import asyncio
import json
import threading

import httpx
import openai
import pytest

from jaxserve.core.errors import RequestError
from jaxserve.server.responses import creation, running
from jaxserve.server.responses.store import (
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStore,
    StoredResponse,
    Turn,
)
from jaxserve.server.settings import ServerSettings
from tests.server.answering import REASONING, answering, call, last_prompt, tool
from tests.server.serving import serving
from tests.server.test_disconnect import SlowClient, wait_for

BIG = 10**9


def connect(url: str, key: str = "unused") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def create(client, **fields):
    return client.responses.create(model="fake", **{"input": "hi", **fields})


# -- conversations


def test_conversation_goes_on_from_a_response():
    fake = answering(f"{REASONING}I look.{call('weather', city='x')}")
    with serving(fake) as address, connect(address.url) as client:
        first = create(client, input="Weather?", instructions="Be brief.", tools=[tool("weather")])
        output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "Sun."}
        second = create(client, input=[output], previous_response_id=first.id, tools=[tool("weather")])
        create(client, input="Thanks.", previous_response_id=second.id, tools=[])
    turn = '[assistant]<think>Where is it?</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "x"}}'
    prompt = last_prompt(fake)
    assert prompt.startswith(f"[user]Weather?\n{turn}")  # without the instructions of the earlier request
    assert f"[tool]Sun.\n{turn}" in prompt
    assert prompt.endswith("[user]Thanks.\n[assistant]")
    assert second.previous_response_id == first.id


def test_conversation_goes_on_after_a_stream():
    fake = answering("Sun.")
    with serving(fake) as address, connect(address.url) as client:
        with client.responses.stream(model="fake", input="Weather?") as stream:
            first = stream.get_final_response()
        create(client, input="Thanks.", previous_response_id=first.id)
    assert last_prompt(fake) == "[user]Weather?\n[assistant]Sun.\n[user]Thanks.\n[assistant]"


def test_item_reference_stands_for_an_item_of_a_response():
    fake = answering("Sun.")
    with serving(fake) as address, connect(address.url) as client:
        first = create(client, input="Weather?")
        reference = {"type": "item_reference", "id": first.output[0].id}
        user = {"role": "user", "content": "Weather?"}
        create(client, input=[user, reference, {"role": "user", "content": "Thanks."}])
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, input=[{"id": "msg_unknown"}])
    assert last_prompt(fake) == "[user]Weather?\n[assistant]Sun.\n[user]Thanks.\n[assistant]"
    assert refused.value.param == "input.0.id"


def test_response_that_is_not_kept_cannot_be_continued():
    with serving(answering("ok")) as address, connect(address.url) as client:
        first = create(client, store=False)
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


def test_truncation_auto_leaves_out_the_oldest_turns():
    fake = answering("ok", max_model_len=100)
    turns = [
        {"role": role, "content": f"{role} {number} says"} for number in range(20) for role in ("user", "assistant")
    ]
    conversation = [*turns, {"role": "user", "content": "Last."}]
    with serving(fake) as address, connect(address.url) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, input=conversation)
        create(client, input=conversation, instructions="Be brief.", truncation="auto", max_output_tokens=10)
        with pytest.raises(openai.BadRequestError) as too_long:
            create(client, input="x" * 100, truncation="auto")
    assert refused.value.code == too_long.value.code == "context_length_exceeded"
    assert refused.value.param == "input"
    assert last_prompt(fake) == (
        "[system]Be brief.\n[user]user 19 says\n[assistant]assistant 19 says\n[user]Last.\n[assistant]"
    )


def test_conversation_that_is_kept_may_not_be_larger_than_one_that_is_sent(monkeypatch):
    monkeypatch.setattr(creation, "MAX_ITEMS", 4)
    fake = answering("ok")
    with serving(fake) as address, connect(address.url) as client:
        first = create(client, input="One")
        second = create(client, input="Two", previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, input="Three", previous_response_id=second.id)
        create(client, input="Three", previous_response_id=second.id, truncation="auto")
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "context_length_exceeded")
    assert last_prompt(fake) == "[user]Two\n[assistant]ok\n[user]Three\n[assistant]"


def test_references_may_not_make_a_conversation_larger_than_a_body():
    fake = answering("ok")
    with serving(fake, ServerSettings(max_body_mb=0.02)) as address, connect(address.url) as client:
        first = create(client, input="x" * 6000)
        (item,) = client.responses.input_items.list(first.id)
        create(client, input=[{"id": item.id}])
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, input=[{"id": item.id}] * 4)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")


# -- endpoints


def test_response_is_retrieved_and_deleted():
    with serving(answering("ok")) as address, connect(address.url) as client:
        first = create(client)
        assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
        deleted = httpx.delete(f"{address.url}/v1/responses/{first.id}").json()
        assert deleted == {"id": first.id, "object": "response", "deleted": True}
        for request in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                request(first.id)


def test_input_items_are_listed_in_pages():
    with serving(answering("ok")) as address, connect(address.url) as client:
        first = create(client, input="One")
        second = create(client, input=[{"role": "user", "content": "Two"}], previous_response_id=first.id)
        items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
        newest = client.responses.input_items.list(second.id, limit=1)
        url = f"{address.url}/v1/responses/{second.id}/input_items"
        refused = httpx.get(url, params={"after": "msg_x"})
        too_many = httpx.get(url, params={"limit": 101})
    assert [item.content[0].text for item in items] == ["One", "ok", "Two"]
    assert items[1].id == first.output[0].id
    assert len({item.id for item in items}) == 3
    assert newest.data[0].content[0].text == "Two"
    assert newest.has_more
    assert refused.json()["error"]["param"] == "after"
    assert too_many.json()["error"]["param"] == "limit"


def test_client_sees_only_the_responses_of_its_key():
    settings = ServerSettings(api_keys=("one", "two"))
    fake = answering("ok")
    with serving(fake, settings) as address, connect(address.url, "one") as one, connect(address.url, "two") as two:
        first = create(one)
        assert one.responses.retrieve(first.id).id == first.id
        for request in (two.responses.retrieve, two.responses.delete, two.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                request(first.id)
        with pytest.raises(openai.NotFoundError):
            two.responses.input_items.list(first.id)
        with pytest.raises(openai.BadRequestError):
            create(two, previous_response_id=first.id)
        with pytest.raises(openai.BadRequestError):
            create(two, input=[{"id": first.output[0].id}])
        assert create(one, previous_response_id=first.id).status == "completed"


def test_server_that_keeps_nothing_says_so():
    with serving(answering("ok"), ServerSettings(max_stored_responses=0)) as address, connect(address.url) as client:
        first = create(client)
        assert first.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as refused:
            create(client, background=True)
    assert refused.value.param == "background"


# -- responses in the background


def test_response_in_the_background_is_retrieved_later():
    fake = SlowClient(3)
    fake.tokenizer = answering("").tokenizer
    with serving(fake) as address, connect(address.url) as client:
        queued = create(client, background=True)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        assert fake.waiting.wait(20)
        running = client.responses.retrieve(queued.id)
        assert (running.status, running.output_text) == ("in_progress", "Hel")
        with pytest.raises(openai.BadRequestError):
            create(client, previous_response_id=queued.id)
        cancelled = client.responses.cancel(queued.id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
        assert client.responses.cancel(queued.id).status == "cancelled"
        wait_for(lambda: not fake.active, "the request is still in the engine")
        assert client.responses.retrieve(queued.id).status == "cancelled"


def test_response_in_the_background_completes():
    with serving(answering("Sun.")) as address, connect(address.url) as client:
        queued = create(client, background=True)
        wait_for(lambda: client.responses.retrieve(queued.id).status == "completed", "it does not complete")
        done = client.responses.retrieve(queued.id)
        assert done.output_text == "Sun."
        assert done.usage.output_tokens == 4
        assert create(client, previous_response_id=queued.id).status == "completed"


def test_response_in_the_background_that_fails_says_why():
    with serving(answering("Sun.", capacity=0)) as address, connect(address.url) as client:
        queued = create(client, background=True)
        wait_for(lambda: client.responses.retrieve(queued.id).status == "failed", "it does not fail")
        failed = client.responses.retrieve(queued.id)
    assert failed.error.code == "rate_limit_exceeded"
    assert failed.error.message == "the queue is full"


def test_response_in_the_background_needs_memory():
    fake = SlowClient(0)
    fake.tokenizer = answering("").tokenizer
    large = {"background": True, "tools": [tool("f", description="x" * 6000)], "tool_choice": "none"}
    with serving(fake, ServerSettings(stored_responses_mb=0.03)) as address, connect(address.url) as client:
        first = create(client, **large)
        create(client, **large)
        with pytest.raises(openai.InternalServerError) as refused:
            create(client, **large)
        client.responses.cancel(first.id)
        create(client, **large)
    assert (refused.value.status_code, refused.value.code) == (503, "background_full")
    assert refused.value.response.headers["retry-after"]


def test_response_in_the_background_fails_if_its_events_take_too_much_memory():
    fake = answering("x" * 1000)
    with serving(fake, ServerSettings(stored_responses_mb=0.1)) as address, connect(address.url) as client:
        with create(client, background=True, stream=True) as stream:
            events = list(stream)
        assert not fake.active
        assert fake.aborted
        failed = client.responses.retrieve(events[0].response.id)
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert failed.error.code == "rate_limit_exceeded"
    assert "--stored-responses-mb" in failed.error.message


@pytest.mark.parametrize("tools", [[], [tool("f")]], ids=["small", "large"])
@pytest.mark.parametrize("background", [False, True])
def test_events_that_repeat_a_large_request_are_written_off_the_event_loop(monkeypatch, background, tools):
    write, threads = running._written_events, {}

    def watched(events):
        name = threading.current_thread().name
        threads.update((event["type"], name.startswith("jaxserve-request")) for event in events)
        return write(events)

    monkeypatch.setattr(running, "_written_events", watched)
    with serving(answering("Hello")) as address, connect(address.url) as client:
        list(create(client, tools=tools, stream=True, background=background))
    snapshots = ["response.created", "response.in_progress", "response.completed"]
    assert [threads[kind] for kind in snapshots] == [bool(tools)] * 3


def test_events_that_repeat_a_large_answer_are_written_off_the_event_loop(monkeypatch):
    write, threads = running._written_events, {}

    def watched(events):
        name = threading.current_thread().name
        threads.update((event["type"], name.startswith("jaxserve-request")) for event in events)
        return write(events)

    monkeypatch.setattr(running, "_written_events", watched)
    with serving(answering("x" * 100)) as address, connect(address.url) as client:
        list(create(client, top_logprobs=5, stream=True))
    assert not threads["response.created"]
    assert threads["response.output_text.done"]
    assert threads["response.completed"]


def test_deleting_a_response_in_the_background_ends_it():
    fake = SlowClient(3)
    with serving(fake) as address, connect(address.url) as client:
        queued = create(client, background=True)
        assert fake.waiting.wait(20)
        client.responses.delete(queued.id)
        wait_for(lambda: not fake.active, "the request is still in the engine")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(queued.id)


def test_stream_of_a_response_in_the_background_goes_on_after_a_disconnect():
    fake = answering("Hello", gate=asyncio.Event())
    with serving(fake) as address, connect(address.url) as client:
        with create(client, background=True, stream=True) as stream:
            begin = [next(stream), next(stream)]
        assert [event.type for event in begin] == ["response.created", "response.queued"]
        id = begin[0].response.id
        fake.gate.set()
        rest = list(client.responses.retrieve(id, stream=True, starting_after=1))
        again = list(client.responses.retrieve(id, stream=True))
        none = list(client.responses.retrieve(id, stream=True, starting_after=again[-1].sequence_number))
        with client.responses.stream(response_id=id) as stream:
            final = stream.get_final_response()
        plain = create(client, background=True)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.retrieve(plain.id, stream=True)
    assert rest[0].type == "response.in_progress"
    assert rest[-1].type == "response.completed"
    assert [event.sequence_number for event in again] == list(range(len(rest) + 2))
    assert again[2:] == rest
    assert none == []
    assert final.output_text == "Hello"
    assert refused.value.param == "stream"


def test_only_responses_in_the_background_are_cancelled():
    with serving(answering("ok")) as address, connect(address.url) as client:
        first = create(client)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.cancel(first.id)
    assert "background" in refused.value.message


# -- limits of the store


def stored(id: str, owner=None, previous: Turn | None = None, size: int = 100) -> StoredResponse:
    turn = Turn(owner, previous)
    turn.add([{"id": f"msg_{id}", "text": "x" * size}])
    return StoredResponse(id, turn, 1, data=b"{}", continuable=True)


def test_least_recently_used_response_is_dropped():
    store = ResponseStore(2, BIG)
    store.put(stored("a"))
    store.put(stored("b"))
    store.get("a", None)
    store.put(stored("c"))
    assert store.get("a", None).id == "a"
    with pytest.raises(ResponseNotFound):
        store.get("b", None)
    assert store.item("msg_b", None) is None
    assert len(store) == 2


def test_memory_is_bounded_and_returned():
    store = ResponseStore(1000, 20_000)
    for number in range(100):
        store.put(stored(str(number), size=1000))
        assert store.size <= 20_000
    assert 5 < len(store) < 20
    for number in range(100 - len(store), 100):
        store.delete(str(number), None)
    assert (len(store), store.size) == (0, 0)


def test_response_larger_than_the_memory_displaces_nothing():
    store = ResponseStore(1000, 20_000)
    store.put(stored("small"))
    store.put(stored("large", size=30_000))
    assert store.get("small", None).id == "small"
    with pytest.raises(ResponseNotFound):
        store.get("large", None)


def test_earlier_turns_stay_as_long_as_a_conversation_needs_them():
    store = ResponseStore(1000, BIG)
    first = stored("a")
    second = stored("b", previous=first.turn)
    store.put(first)
    store.put(second)
    both = store.size
    store.delete("a", None)
    assert [json.loads(item)["id"] for item in second.given()[1]] == ["msg_a", "msg_b"]
    assert store.previous("b", None) is second.turn
    with pytest.raises(PreviousResponseNotFound):
        store.previous("a", None)
    assert store.size < both
    store.delete("b", None)
    assert store.size == 0


def test_client_that_keeps_much_does_not_displace_others():
    store = ResponseStore(10, BIG)
    store.put(stored("mine", owner=0))
    for number in range(50):
        store.put(stored(f"theirs {number}", owner=1))
    assert store.get("mine", 0).id == "mine"
    assert len(store) == 10


def test_response_without_an_answer_cannot_be_continued():
    store = ResponseStore(10, BIG)
    failed = stored("a")
    failed.continuable = False
    store.put(failed)
    with pytest.raises(RequestError) as refused:
        store.previous("a", None)
    assert refused.value.field == "previous_response_id"
