"""The lines that a server logs about its load: while there is work, of all instances, and none while it is idle."""

import asyncio
import logging
import time
from dataclasses import dataclass, field

import httpx
import pytest

from jaxserve.engine.client import InstanceState
from jaxserve.server.activity import Activity, log_activity
from jaxserve.telemetry import Snapshot, WaitingRoom
from jaxserve.telemetry.snapshot import combine
from tests.server.process import server_process

LAYERS = {"layers_by_precision": {"int4": 12, "bfloat16": 18}, "kv_pages_total": 200}


@dataclass
class Engine:
    """An engine of several instances, whose snapshots a test sets."""

    snapshots: list[Snapshot] = field(default_factory=lambda: [Snapshot(**LAYERS)])
    room: int = 0

    def instances(self) -> list[InstanceState]:
        return [InstanceState(str(index), index, each) for index, each in enumerate(self.snapshots)]

    def snapshot(self) -> Snapshot:
        return combine(self.snapshots)

    def waiting_room(self) -> WaitingRoom:
        return WaitingRoom(count=self.room)


def test_line_has_the_load_and_the_plan() -> None:
    engine = Engine([Snapshot(generated_tokens=1000, steps=7, prefix_queries=50, prefix_hits=50, **LAYERS)])
    activity = Activity(engine, 0.0)
    engine.snapshots = [
        Snapshot(
            num_running=8, num_waiting=3, kv_pages_used=50, generated_tokens=1512, prefill_tokens=40, steps=20,
            prefix_queries=150, prefix_hits=75, preemptions=2, **LAYERS,
        )
    ]  # fmt: skip
    engine.room = 1
    assert activity.line(10.0) == (
        "running 8, waiting 4, prompt 4.0 tok/s, generation 51.2 tok/s, KV 25.0%, prefix cache 25.0%, preempted 2, "
        "layers: 18 bfloat16, 12 int4"
    )


def test_line_counts_all_instances() -> None:
    engine = Engine()
    activity = Activity(engine, 0.0)
    engine.snapshots = [Snapshot(num_running=n, generated_tokens=20 * n, steps=1, **LAYERS) for n in (1, 3)]
    line = activity.line(4.0)
    assert line is not None
    assert line.startswith("running 4, waiting 0, prompt 0.0 tok/s, generation 20.0 tok/s, KV 0.0%, layers: 36 bf")
    assert line.endswith(", instances: 2")


def test_nothing_is_said_while_idle_except_once_when_work_has_ended() -> None:
    engine = Engine()
    activity = Activity(engine, 0.0)
    assert activity.line(10.0) is None
    engine.snapshots = [Snapshot(num_running=1, steps=4, **LAYERS)]
    assert activity.line(20.0)
    assert activity.line(30.0), "a step that takes long is work as well"
    engine.snapshots = [Snapshot(steps=9, **LAYERS)]
    assert str(activity.line(40.0)).startswith("running 0")
    assert activity.line(50.0) is None


def test_lines_are_logged_until_the_task_ends(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()

    async def run() -> None:
        task = asyncio.create_task(log_activity(engine, 0.001, asyncio.get_running_loop().time))
        await asyncio.sleep(0.02)
        assert not caplog.messages
        engine.snapshots = [Snapshot(num_running=1, steps=1, **LAYERS)]
        while not caplog.messages:
            await asyncio.sleep(0.001)
        task.cancel()

    with caplog.at_level(logging.INFO, "jaxserve"):
        asyncio.run(asyncio.wait_for(run(), 30))
    assert caplog.messages[0].startswith("running 1, waiting 0")


SERVE = """
import logging
from jaxserve.server.runner import run_server
from jaxserve.server.settings import ServerSettings
from tests.server.fake import FakeClient
logging.basicConfig(level=logging.INFO)
load = lambda: FakeClient(script="x" * 400, delay=3600, delay_after=3)
run_server(load, ServerSettings(port=0, log_interval={interval}), lambda urls, client: print(*urls, flush=True))
"""


@pytest.mark.parametrize("interval", [0.05, 0])
def test_server_logs_its_load_unless_the_interval_is_zero(interval: float) -> None:
    with server_process("-c", SERVE.format(interval=interval)) as server:
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        with httpx.Client(timeout=60) as http, http.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # kept, because the stream ends with it
            next(lines)
            deadline = time.monotonic() + (30 if interval else 0.3)
            while "running 1, waiting 0" not in server.errors.read_text() and time.monotonic() < deadline:
                time.sleep(0.02)
        assert ("INFO:jaxserve.server.activity:running 1" in server.errors.read_text()) == bool(interval)
