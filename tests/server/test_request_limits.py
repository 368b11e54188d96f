"""Limits on whole requests hold inclusively: bytes, levels, digits, items, and those of batches and of operators."""

import gzip
import json
import socket

import httpx
import pytest

from jaxserve.core.errors import QueueFull, RequestError
from jaxserve.core.request import Request
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.admission import check_room
from jaxserve.server.batch.files import read_lines
from jaxserve.server.http.body import MAX_DEPTH, MAX_DIGITS, MAX_ITEMS, parse_body
from jaxserve.server.http.connections import MAX_HEAD_BYTES
from jaxserve.server.responses import creation
from jaxserve.server.routes.admin import MAX_DECISIONS, MAX_PLAN_BYTES, MAX_PLAN_DEPTH
from jaxserve.server.schemas.admin import MAX_DEVICES, MAX_INSTANCE_NAME, MAX_INSTANCES, MAX_POLICY_NAME
from jaxserve.server.settings import ServerSettings
from jaxserve.structured.structural_tag import MAX_REPEAT, StructuralTagError, structural_tag_grammar
from jaxserve.structured.turns import Turns, TurnsFull
from tests.server.answering import answering
from tests.server.fake import FakeClient
from tests.server.fake_control import FakeControl
from tests.server.serving import serving

COMPLETIONS, RESPONSES, SCORE = "/v1/completions", "/v1/responses", "/v1/score"
JSON = {"content-type": "application/json"}
YAML = {"content-type": "application/yaml"}
BODY_BYTES = 64 * 1024


@pytest.fixture(scope="module")
def http():
    settings = ServerSettings(max_body_mb=BODY_BYTES / 2**20, max_prompts=5)
    fake = answering("x", max_model_len=1_000_000, control=FakeControl())
    with serving(fake, settings) as address, httpx.Client(base_url=address.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def roomy():
    fake = answering("x", max_model_len=1_000_000, control=FakeControl())
    with serving(fake) as address, httpx.Client(base_url=address.url, timeout=60) as client:
        yield client


def message_of(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


# -- bytes


def body_of(size: int) -> bytes:
    start = b'{"max_tokens": 1, "prompt": "'
    return start + b"a" * (size - len(start) - 2) + b'"}'


def whole(size: int) -> dict:
    return {"content": body_of(size)}


def in_chunks(size: int) -> dict:
    return {"content": iter([body_of(size)[:1000], body_of(size)[1000:]])}


def compressed(size: int) -> dict:
    return {"content": gzip.compress(body_of(size)), "headers": JSON | {"content-encoding": "gzip"}}


@pytest.mark.parametrize("send", [whole, in_chunks, compressed])
def test_body_may_have_as_many_bytes_as_the_limit(http, send):
    def post(size: int) -> httpx.Response:
        return http.post(COMPLETIONS, **{"headers": JSON} | send(size))

    assert post(BODY_BYTES).status_code == 200
    got = BODY_BYTES + 1 if send is whole else f"more than {BODY_BYTES}"
    assert message_of(post(BODY_BYTES + 1), 413) == (
        f"the body has {got} bytes, the limit is {BODY_BYTES} (--max-body-mb)"
    )


def status_of_head(url: httpx.URL, size: int, pieces: tuple[int, ...], target: bytes = b"") -> bytes:
    """Return the first line of the answer to a request whose head has `size` bytes and arrives in pieces."""
    head = b"GET /health%b HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-long: " % target
    head += b"a" * (size - len(head) - 4) + b"\r\n\r\n"
    assert len(head) == size
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        for start, end in zip((0, *pieces), (*pieces, size), strict=True):
            connection.sendall(head[start:end])
        return connection.makefile("rb").readline().rstrip()


@pytest.mark.parametrize("pieces", [(), (1,), (40_000,), (MAX_HEAD_BYTES - 1,), (MAX_HEAD_BYTES,)])
@pytest.mark.parametrize("target", [b"", b"?" + b"q" * 50_000], ids=["header", "target"])
def test_head_may_have_as_many_bytes_as_the_limit_however_it_arrives(roomy, pieces, target):
    within = tuple(piece for piece in pieces if piece < MAX_HEAD_BYTES)
    assert status_of_head(roomy.base_url, MAX_HEAD_BYTES, within, target) == b"HTTP/1.1 200 OK"
    refused = status_of_head(roomy.base_url, MAX_HEAD_BYTES + 1, pieces, target)
    assert refused == b"HTTP/1.1 431 Request Header Fields Too Large"


# -- levels, digits and items


def nested(levels: int) -> bytes:
    inner = levels - 1  # the body is an object
    return b'{"prompt": "a", "max_tokens": 1, "user_id": %b%b}' % (b"[" * inner, b"]" * inner)


def test_body_may_have_as_many_levels_as_the_limit(http):
    assert http.post(COMPLETIONS, content=nested(MAX_DEPTH), headers=JSON).status_code == 200
    refused = http.post(COMPLETIONS, content=nested(MAX_DEPTH + 1), headers=JSON)
    assert f"more than {MAX_DEPTH} levels" in message_of(refused)


def test_number_of_a_large_body_may_have_as_many_digits_as_the_limit(roomy):
    def post(digits: int) -> httpx.Response:
        text = b'{"prompt": "a", "max_tokens": 1, "user_id": %b, "tags": "%b"}' % (b"7" * digits, b"7" * 100_000)
        return roomy.post(COMPLETIONS, content=text, headers=JSON)

    assert post(MAX_DIGITS).status_code == 200
    assert f"more than {MAX_DIGITS} digits" in message_of(post(MAX_DIGITS + 1))


def items(count: int) -> bytes:
    """Return a body of `count` items: the object, a field besides the first, the list, and its other entries."""
    return b'{"prompt": "%b", "tags": [%b]}' % (b"a" * 70_000, b",".join([b"1"] * (count - 2)))


def test_body_may_have_as_many_items_as_the_limit():
    parse_body(items(MAX_ITEMS), 0)
    with pytest.raises(RequestError, match=f"has {MAX_ITEMS + 1} items.* in tags: the limit is {MAX_ITEMS}"):
        parse_body(items(MAX_ITEMS + 1), 1000)


@pytest.mark.parametrize("field", ["text_1", "text_2", "queries", "documents", "items", "data_1", "data_2", "input"])
def test_token_ids_of_all_endpoints_are_no_items(field):
    ids = [5] * MAX_ITEMS
    assert parse_body(json.dumps({field: ids}).encode(), 2 * MAX_ITEMS)[field] == ids
    assert parse_body(json.dumps({field: [ids]}).encode(), 2 * MAX_ITEMS)[field] == [ids]


def test_documents_of_a_ranking_are_items(roomy):
    answer = roomy.post("/v1/rerank", json={"query": "a", "documents": ["b"] * (MAX_ITEMS + 1)})
    assert f"the limit is {MAX_ITEMS}" in message_of(answer)


def test_pair_of_long_ids_is_scored_as_it_is_embedded(roomy):
    ids = [65] * (MAX_ITEMS + 1)
    assert roomy.post("/v1/embeddings", json={"input": ids}).status_code == 200
    assert roomy.post(SCORE, json={"text_1": ids, "text_2": ids}).status_code == 200


# -- conversations and pages of items


def test_conversation_may_have_as_many_items_as_the_limit(roomy, monkeypatch):
    monkeypatch.setattr(creation, "MAX_ITEMS", 4)
    item = {"role": "user", "content": "hi"}
    assert roomy.post(RESPONSES, json={"input": [item] * 4}).status_code == 200
    message = message_of(roomy.post(RESPONSES, json={"input": [item] * 5}))
    assert "has at least 5 items" in message
    assert "the limits are 4 items and 33554432 bytes (--max-body-mb)" in message


def test_page_of_items_has_as_many_as_the_limit(roomy):
    low, high = 1, 100
    id = roomy.post(RESPONSES, json={"input": "hi"}).json()["id"]

    def page(limit: int) -> httpx.Response:
        return roomy.get(f"{RESPONSES}/{id}/input_items", params={"limit": limit})

    assert page(low).status_code == page(high).status_code == 200
    assert f"at least {low}" in message_of(page(low - 1))
    assert f"at most {high}" in message_of(page(high + 1))


def test_as_many_responses_are_kept_as_the_limit():
    with (
        serving(answering("x"), ServerSettings(max_stored_responses=2)) as address,
        httpx.Client(base_url=address.url, timeout=60) as client,
    ):
        ids = [client.post(RESPONSES, json={"input": "hi"}).json()["id"] for _ in range(3)]
        assert [client.get(f"{RESPONSES}/{id}").status_code for id in ids] == [404, 200, 200]


# -- queues


def request(tokens: int, n: int = 1) -> Request:
    return Request("r", (1,) * tokens, SamplingParams(n=n, max_tokens=1), arrival=0.0)


def test_queue_takes_as_many_sequences_and_tokens_as_the_limits():
    info = FakeClient(max_queued_requests=8, max_queued_tokens=100).info
    check_room(request(1, n=5), 3, 0, info)
    with pytest.raises(QueueFull, match=r"4 sequences are waiting, the limit is 8 \(max_queued_requests\)"):
        check_room(request(1, n=5), 4, 0, info)
    check_room(request(40), 1, 60, info)
    with pytest.raises(QueueFull, match=r"41 more would exceed the limit of 100 \(max_queued_tokens\)"):
        check_room(request(41), 1, 60, info)


def test_queue_of_grammars_takes_as_many_as_the_limits():
    turns = Turns[str](limit=3, limit_of_client=2)
    turns.add("a", 1, "first")
    turns.add("a", 1, "second")
    with pytest.raises(TurnsFull, match="2 are waiting for this client"):
        turns.add("a", 1, "third")
    turns.add("b", 1, "third")
    with pytest.raises(TurnsFull, match="3 are waiting"):
        turns.add("c", 1, "fourth")


def test_structural_tag_may_repeat_as_often_as_the_limit():
    def tag(times: int) -> dict:
        return {"format": {"type": "repeat", "min": 1, "max": times, "content": {"type": "const_string", "value": "a"}}}

    structural_tag_grammar(tag(MAX_REPEAT), {}, False)
    with pytest.raises(StructuralTagError, match=f"1 and {MAX_REPEAT + 1}: they must be numbers up to {MAX_REPEAT}"):
        structural_tag_grammar(tag(MAX_REPEAT + 1), {}, False)


# -- batches


@pytest.mark.parametrize("end", [b"", b"\n", b"\nnext"])
def test_line_of_a_batch_may_have_as_many_bytes_as_the_limit(tmp_path, end):
    file = tmp_path / "in.jsonl"
    for size in (100, 101):
        file.write_bytes(b"a" * size + end)
        first, *_ = read_lines(file, 100)
        assert first.text == (b"a" * 100 if size == 100 else None)


# -- operators


def edit(http: httpx.Client, **fields) -> str:
    answer = http.patch("/admin/plan", json=fields)
    return message_of(answer)


@pytest.mark.parametrize(
    ("fields", "limit", "says"),
    [
        (lambda n: {"action": "drain", "instances": ["i" * n]}, MAX_INSTANCE_NAME, "characters"),
        (lambda n: {"action": "merge", "instances": ["0"] * n}, MAX_INSTANCES, "entries"),
        (lambda n: {"action": "split", "instances": ["0"], "into": n}, MAX_INSTANCES, "into is"),
        (lambda n: {"action": "add", "devices": [0] * n}, MAX_DEVICES, "entries"),
    ],
)
def test_edit_of_the_plan_may_be_as_large_as_the_limits(roomy, fields, limit, says):
    assert f"at most {limit}" not in roomy.patch("/admin/plan", json=fields(limit)).text
    message = edit(roomy, **fields(limit + 1))
    assert says in message
    assert f"{limit + 1}" in message
    assert f"at most {limit}" in message


def test_policy_decisions_and_plan_may_be_as_large_as_the_limits(roomy):
    for size, kept in ((MAX_POLICY_NAME, True), (MAX_POLICY_NAME + 1, False)):
        message = message_of(roomy.put("/admin/policy", json={"policy": "p" * size}))
        assert (f"at most {MAX_POLICY_NAME}" not in message) == kept
    assert roomy.get("/admin/decisions", params={"limit": MAX_DECISIONS}).status_code == 200
    assert f"at most {MAX_DECISIONS}" in message_of(roomy.get("/admin/decisions", params={"limit": MAX_DECISIONS + 1}))
    for size, status in ((MAX_PLAN_BYTES, 400), (MAX_PLAN_BYTES + 1, 413)):
        answer = roomy.put("/admin/plan", content=b"#" * size, headers=YAML)
        message = message_of(answer, status)
        assert (f"has {size} bytes: the limit is {MAX_PLAN_BYTES}" in message) == (status == 413)


def test_plan_may_have_as_many_levels_as_the_limit(roomy):
    def post(levels: int) -> str:
        plan = "[" * (levels - 1) + "]" * (levels - 1)
        return message_of(roomy.put("/admin/plan", content=f"instances: {plan}", headers=YAML))

    assert "levels" not in post(MAX_PLAN_DEPTH)
    assert f"more than {MAX_PLAN_DEPTH} levels" in post(MAX_PLAN_DEPTH + 1)
