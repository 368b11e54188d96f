"""GET /load: what balancers and autoscalers read."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from starlette.testclient import TestClient

from jaxserve.engine.client import InstanceState
from jaxserve.server.app import create_app
from jaxserve.server.settings import ServerSettings
from jaxserve.telemetry import ControlState, KVCapacity, Snapshot, WaitingRoom, combine
from tests.server.fake import FakeClient
from tests.server.fake_control import FakeControl
from tests.server.serving import serving

FIRST = Snapshot(num_running=3, num_waiting=2, waiting_tokens=70, kv_pages_total=400, kv_pages_used=100, plan_version=4)
SECOND = replace(FIRST, num_running=1, num_waiting=0, waiting_tokens=0, kv_pages_used=0, plan_version=6)


def load(client: FakeClient) -> dict:
    answer = TestClient(create_app(client, ServerSettings())).get("/load")
    assert answer.status_code == 200
    return answer.json()


def engine(*snapshots: Snapshot, capacities: list[KVCapacity]) -> FakeClient:
    """Return an engine of several instances."""
    control = FakeControl()
    control.state = lambda: ControlState({str(number): capacity for number, capacity in enumerate(capacities)})
    client = FakeClient(control=control)
    client.instances = lambda: [InstanceState(str(i), i, snapshot) for i, snapshot in enumerate(snapshots)]
    client.snapshot = lambda: combine(snapshots)
    return client


def test_load_of_one_instance():
    assert load(engine(FIRST, capacities=[KVCapacity(6400, 9600, 0.5)])) == {
        "server_load": 0,
        "running": 3,
        "waiting": 2,
        "waiting_tokens": 70,
        "kv_usage": 0.25,
        "kv_capacity_tokens": 6400,
        "kv_capacity_max_tokens": 9600,
        "kv_capacity_max_seconds": 0.5,
        "plan_version": 4,
        "waiting_room": {"requests": 0, "tokens": 0, "longest_tokens": 0, "oldest_seconds": 0.0},
        "policy": "morph",
    }


def test_load_of_several_instances_is_their_sum_and_lists_each():
    capacities = [KVCapacity(6400, 9600, 0.5), KVCapacity(8000, 9600, 0.25)]
    found = load(engine(FIRST, SECOND, capacities=capacities))
    assert (found["running"], found["waiting"], found["waiting_tokens"]) == (4, 2, 70)
    assert found["kv_usage"] == 0.125
    assert found["kv_capacity_tokens"] == 14400
    assert found["kv_capacity_max_tokens"] == 19200
    assert found["kv_capacity_max_seconds"] == 0.5, "they change at the same time"
    assert found["plan_version"] == 6
    assert [each["engine"] for each in found["instances"]] == ["0", "1"]
    assert [each["kv_capacity_tokens"] for each in found["instances"]] == [6400, 8000]
    assert [each["running"] for each in found["instances"]] == [3, 1]


def test_load_names_instances_that_have_come_with_the_numbers_of_their_metrics():
    client = engine(capacities=[])
    client.control.state = lambda: ControlState({"7": KVCapacity(800, 900, 1.0), "4": KVCapacity(400, 500, 1.0)})
    client.instances = lambda: [InstanceState("4", 1, FIRST), InstanceState("7", 0, SECOND)]
    found = load(client)["instances"]
    assert [(each["instance"], each["engine"]) for each in found] == [("4", "1"), ("7", "0")]
    assert [each["kv_capacity_tokens"] for each in found] == [400, 800]


def test_load_shows_the_requests_that_wait_for_a_change_of_the_plan():
    client = engine(FIRST, capacities=[])
    client.waiting_room = lambda: WaitingRoom(9.0, 2, 150, longest=110, oldest_wait=1.5)
    waiting = {"requests": 2, "tokens": 150, "longest_tokens": 110, "oldest_seconds": 1.5}
    assert load(client)["waiting_room"] == waiting


def test_engine_without_a_control_plane_has_a_load_without_capacities():
    found = load(FakeClient())
    assert found["running"] == 0
    assert found["kv_capacity_tokens"] is found["kv_capacity_max_tokens"] is found["policy"] is None


def test_load_needs_an_api_key():
    with serving(FakeClient(), ServerSettings(api_keys=("a-key",))) as address:
        assert httpx.get(f"{address.url}/load").status_code == 401
        assert httpx.get(f"{address.url}/load", headers={"authorization": "Bearer a-key"}).status_code == 200


def test_load_while_loading_returns_503_and_while_draining_the_load():
    app = create_app(None, ServerSettings())
    http = TestClient(app)
    assert http.get("/load").status_code == 503
    app.state.server.attach(FakeClient())
    app.state.server.start_draining()
    assert http.get("/load").json()["server_load"] == 0


@pytest.fixture
def gated() -> Iterator[tuple[FakeClient, str]]:
    """Yield an engine that generates nothing before its gate is opened, and the URL of its server."""
    client = FakeClient(gate=asyncio.Event())
    with serving(client) as address:
        yield client, address.url
        client.gate.set()


@pytest.mark.parametrize("stream", [False, True])
def test_server_load_counts_requests_until_their_answers_end(gated, stream):
    client, url = gated

    async def main() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:

            async def in_flight() -> int:
                return (await http.get("/load")).json()["server_load"]

            async def ask() -> None:
                answer = await http.post("/v1/completions", json={"prompt": "a", "stream": stream})
                assert answer.status_code == 200

            asked = [asyncio.create_task(ask()) for _ in range(3)]
            while await in_flight() < 3:
                await asyncio.sleep(0.01)
            asked.pop().cancel()  # the client goes away
            while await in_flight() > 2:
                await asyncio.sleep(0.01)
            client.gate.set()
            await asyncio.gather(*asked)
            while await in_flight():
                await asyncio.sleep(0.01)
            assert (await http.post("/v1/completions", json={"prompt": 5})).status_code == 400
            assert await in_flight() == 0

    asyncio.run(main())
