"""Requests that no instance can hold now wait in front of the instances, if one could after a change of the plan."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.core.clock import SystemClock
from jaxserve.core.errors import ContextLengthExceeded, EngineStopped, PromptTooLong, QueueFull, RequestError
from jaxserve.core.request import Request, RequestOutput
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import ModelInfo, TokensPrompt
from jaxserve.engine.core import EngineCore
from jaxserve.engine.outputs import RequestState, merge
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.scheduler.routing import Route
from jaxserve.telemetry import EngineMetrics, WaitingRoom
from tests.support.instances import answer_to, facts, loop_named
from tests.support.internals import assert_no_record_left, requests_in

SMALL, LARGE = 50, 256  # tokens


class LimitedCore(EngineCore):
    """A core that hands requests back that have reached a number of tokens."""

    limit = SMALL

    def take_outgrown(self) -> list[RequestState]:
        requests = [state for state in requests_in(self).values() if state.request.generates]
        longest = {state.request.id: max(len(s.tokens) for s in state.sequences) for state in requests}
        return self.detach(
            [request_id for request_id, length in longest.items() if length >= self.limit], keep_pages=False
        )


@dataclass
class Service:
    """An engine, and what its instances can hold."""

    info: ModelInfo = field(default_factory=lambda: facts(LARGE))
    capacities: dict[str, int] = field(default_factory=lambda: {"0": SMALL})
    best: int = LARGE
    metrics: EngineMetrics = field(default_factory=lambda: EngineMetrics("tokens"))

    def __post_init__(self) -> None:
        self.loops = {
            name: loop_named(
                name,
                self.metrics,
                self.info,
                overlap=capacity > SMALL,
                make_core=EngineCore if capacity > SMALL else LimitedCore,
            )
            for name, capacity in self.capacities.items()
        }

    def route(self, name: str) -> Route | None:
        return Route(name, self.capacities[name]) if name in self.capacities else None

    def grow(self) -> None:
        """Let the first instance hold more."""
        self.capacities["0"], core = LARGE, self.loops["0"].core
        assert isinstance(core, LimitedCore)
        core.limit = LARGE

    @asynccontextmanager
    async def running(self) -> AsyncIterator[AsyncEngine]:
        engine = AsyncEngine(
            self.loops, self.info, None, self.metrics, SystemClock(), route=self.route, max_model_len=lambda: self.best
        )
        self.engine = engine
        yield engine
        await engine.shutdown()
        assert_no_record_left(engine)

    async def ask(self, prompt: int, max_tokens: int | None, **options: str) -> RequestOutput:
        """Send a request for one answer and return the whole output."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
        whole: RequestOutput | None = None
        async for output in self.engine.generate(TokensPrompt(tuple(range(prompt))), params, **options):
            whole = merge(whole, output)
        assert whole is not None
        return whole

    async def waiting(self, count: int) -> None:
        """Return when a number of requests wait."""
        while self.engine.waiting_room().count != count:
            await asyncio.sleep(0.001)


def tokens_of(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def test_long_request_waits_until_the_plan_has_changed_and_lets_others_pass() -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            long = asyncio.create_task(service.ask(60, 20))
            await service.waiting(1)
            assert tokens_of(await service.ask(10, 20)) == answer_to(range(10), 20)
            assert not long.done()
            service.grow()
            engine.reroute()
            assert tokens_of(await long) == answer_to(range(60), 20)

    asyncio.run(main())


def test_long_request_goes_to_an_instance_that_comes() -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            long = asyncio.create_task(service.ask(60, 20))
            await service.waiting(1)

            def add() -> None:
                service.capacities["1"] = LARGE
                with engine.stopped([]):
                    engine.replace([], {"1": loop_named("1", service.metrics, service.info)})

            await asyncio.to_thread(add)
            assert tokens_of(await long) == answer_to(range(60), 20)
            assert engine.snapshots()["0"].steps == 0

    asyncio.run(main())


def test_instance_outside_the_plan_in_force_gets_no_request() -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:

            def add() -> None:
                with engine.stopped([]):
                    engine.replace([], {"1": loop_named("1", service.metrics, service.info)})

            await asyncio.to_thread(add)
            long = asyncio.create_task(service.ask(60, 20))
            await service.waiting(1)
            service.capacities["1"] = LARGE  # now it is in force
            await asyncio.to_thread(engine.reroute)
            await long

    asyncio.run(main())


def test_waiting_request_can_be_given_up() -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            long = asyncio.create_task(service.ask(60, 20))
            await service.waiting(1)
            long.cancel()
            with suppress(asyncio.CancelledError):
                await long
            assert engine.waiting_room().count == 0
            assert_no_record_left(engine)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "end", "reason"),
    [
        (60, 20, "given up", "abort"),
        (10, None, "given up", "abort"),
        (60, 20, "another plan", "error"),
        (10, None, "another plan", "length"),
        (60, 20, "shutdown", "abort"),
    ],
)
def test_end_of_a_waiting_request_is_counted_and_traced(
    prompt: int, max_tokens: int | None, end: str, reason: str
) -> None:
    """A request counts once, whether it has been on an instance before or not."""

    async def main() -> None:
        service, traced = Service(), []
        service.loops["0"].core.trace = traced.append
        async with service.running() as engine:
            waiting = asyncio.create_task(service.ask(prompt, max_tokens))
            await service.waiting(1)
            if end == "given up":
                waiting.cancel()
            elif end == "another plan":
                service.best = SMALL
                engine.reroute()
            else:
                await engine.shutdown()
            await asyncio.gather(waiting, return_exceptions=True)
            assert ended_requests(service.metrics) == {reason: 1}
            (request,) = traced
            generated = 0 if max_tokens else SMALL - prompt
            assert (request.reason, request.reasons, request.output_tokens) == (reason, [reason], generated)

    asyncio.run(main())


def ended_requests(metrics: EngineMetrics) -> dict[str, float]:
    """Return the number of requests that have ended, by reason."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families if family.name == "jaxserve_request_success" for sample in family.samples]
    return {sample.labels["finished_reason"]: sample.value for sample in samples if sample.value}


def test_duplicate_id_of_a_waiting_request_is_refused() -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            long = asyncio.create_task(service.ask(60, 20, request_id="twin"))
            await service.waiting(1)
            with pytest.raises(RequestError, match="already in flight"):
                await service.ask(10, 20, request_id="twin")
            assert engine.waiting_room().count == 1
            long.cancel()

    asyncio.run(main())


def test_waiting_room_is_limited_like_the_queue_of_an_instance() -> None:
    async def main() -> None:
        service = Service(facts(LARGE, max_queued_requests=2))
        async with service.running():
            waiting = [asyncio.create_task(service.ask(60, 20)) for _ in range(2)]
            await service.waiting(2)
            with pytest.raises(QueueFull, match="2 sequences are waiting, the limit is 2"):
                await service.ask(60, 20)
            assert (
                b'admission_rejections_total{model_name="tokens",reason="queue_full"} 1.0' in service.metrics.render()
            )
            for task in waiting:
                task.cancel()
        service = Service(facts(LARGE, max_queued_tokens=100))
        async with service.running():
            first = asyncio.create_task(service.ask(200, 20))  # an empty room takes every request
            await service.waiting(1)
            with pytest.raises(QueueFull, match="max_queued_tokens"):
                await service.ask(60, 20)
            first.cancel()

    asyncio.run(main())


def test_request_that_no_plan_can_hold_is_refused_with_both_limits() -> None:
    async def main() -> None:
        service = Service(best=200)
        async with service.running() as engine:
            with pytest.raises(PromptTooLong, match=r"context length is 200 tokens.* can hold 50 tokens now"):
                await service.ask(230, None)
            with pytest.raises(
                ContextLengthExceeded, match=r"max_tokens is 150, the limit is 140.*200.* 50 tokens now"
            ):
                await service.ask(60, 150)
            assert engine.info.max_model_len == 200
            service.best = 240
            assert engine.info.max_model_len == 240
            assert engine.waiting_room().count == 0
            assert b'admission_rejections_total{model_name="tokens",reason="invalid"} 2.0' in service.metrics.render()

    asyncio.run(main())


def test_request_that_no_plan_can_hold_any_more_ends_with_an_error() -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            long = asyncio.create_task(service.ask(60, 20))
            await service.waiting(1)
            service.best = SMALL
            engine.reroute()
            with pytest.raises(PromptTooLong):
                await long

    asyncio.run(main())


@pytest.mark.parametrize("end", ["drain", "shutdown"])
def test_waiting_requests_end_with_an_error_when_the_server_ends(end: str) -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            long = asyncio.create_task(service.ask(60, 20))
            await service.waiting(1)
            assert await engine.drain(10) if end == "drain" else await engine.shutdown() is None
            with pytest.raises(EngineStopped):
                await long

    asyncio.run(main())


def test_policies_and_metrics_see_what_waits() -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            waiting = [asyncio.create_task(service.ask(prompt, 20)) for prompt in (60, 90)]
            await service.waiting(2)
            seen = engine.waiting_room()
            assert (seen.count, seen.tokens, seen.longest) == (2, 150, 110)
            assert 0 < seen.oldest_wait < seen.time
            families = text_string_to_metric_families(engine.metrics_text().decode())
            gauges = {f.name: f.samples[0].value for f in families if f.name.startswith("jaxserve_waiting_room")}
            assert gauges.pop("jaxserve_waiting_room_oldest_seconds") >= seen.oldest_wait
            assert gauges == {
                "jaxserve_waiting_room_requests": 2,
                "jaxserve_waiting_room_tokens": 150,
                "jaxserve_waiting_room_longest_tokens": 110,
            }
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert replace(engine.waiting_room(), time=0) == WaitingRoom()

    asyncio.run(main())


@pytest.mark.parametrize("length", [SMALL, SMALL + 1, LARGE])
def test_prompt_without_an_answer_may_fill_an_instance(length: int) -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            asked = asyncio.create_task(service.ask(length, 0))
            if length > SMALL:
                await service.waiting(1)
                assert engine.waiting_room().longest == length
                service.grow()
                engine.reroute()
            assert tokens_of(await asked) == ()
            assert service.loops["0"].core.idle

    asyncio.run(main())


def test_longest_sequence_needs_no_token_beyond_its_end() -> None:
    core = Service(capacities={"0": LARGE}).loops["0"].core
    core.add(Request("full", tuple(range(LARGE)), SamplingParams(max_tokens=0), 0.0))
    assert core.scheduler.longest == LARGE
    core.add(Request("embedding", tuple(range(LARGE)), SamplingParams(max_tokens=1), 0.0, embed=True))
    assert core.scheduler.longest == LARGE


def test_request_that_outgrows_its_instance_goes_on_where_it_fits() -> None:
    async def main() -> None:
        service = Service(capacities={"0": SMALL, "1": LARGE})
        async with service.running() as engine:
            output = await service.ask(10, None)
            assert tokens_of(output) == answer_to(range(10), LARGE - 10)
            assert output.outputs[0].finish_reason == "length"
            steps = {name: snapshot.steps for name, snapshot in engine.snapshots().items()}
            assert steps["0"] >= SMALL - 10
            assert steps["1"] >= LARGE - SMALL

    asyncio.run(main())


def test_request_that_outgrows_every_instance_waits_and_then_goes_on() -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            growing = asyncio.create_task(service.ask(10, None))
            await service.waiting(1)
            assert engine.waiting_room().longest == SMALL + 1
            service.grow()
            engine.reroute()
            assert tokens_of(await growing) == answer_to(range(10), LARGE - 10)

    asyncio.run(main())


def test_request_that_outgrows_what_any_plan_can_hold_ends_by_its_length() -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            growing = asyncio.create_task(service.ask(10, None))
            await service.waiting(1)
            service.best = SMALL
            engine.reroute()
            output = await growing
            assert tokens_of(output) == answer_to(range(10), SMALL - 10)
            assert output.outputs[0].finish_reason == "length"

    asyncio.run(main())


def test_outgrown_request_that_waits_can_be_given_up() -> None:
    async def main() -> None:
        service = Service()
        async with service.running() as engine:
            growing = asyncio.create_task(service.ask(10, None))
            await service.waiting(1)
            growing.cancel()
            await asyncio.gather(growing, return_exceptions=True)
            assert_no_record_left(engine)
            assert engine.loops["0"].core.scheduler.pages.used == 0

    asyncio.run(main())


def test_waiting_request_needs_no_room_in_the_queue_of_its_instance() -> None:
    async def main() -> None:
        service = Service(facts(LARGE, max_queued_requests=3))
        async with service.running() as engine:
            waiting = [asyncio.create_task(service.ask(60 + number, 20)) for number in range(3)]
            await service.waiting(3)
            service.grow()
            busy = [asyncio.create_task(service.ask(10, 20)) for _ in range(3)]
            await asyncio.sleep(0)
            engine.reroute()
            for number, task in enumerate(waiting):
                assert tokens_of(await task) == answer_to(range(60 + number), 20)
            await asyncio.gather(*busy)

    asyncio.run(main())


# -- SyncEngine


def sync_engine(service: Service) -> SyncEngine:
    return SyncEngine(
        service.loops, service.info, None, SystemClock(), route=service.route, max_model_len=lambda: service.best
    )


def test_caller_that_steps_gets_the_answer_after_another_thread_has_changed_the_plan() -> None:
    service = Service()
    engine = sync_engine(service)
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=0)
    engine.add(TokensPrompt(tuple(range(60))), params)
    assert engine.step() == []
    assert not engine.idle
    assert engine.waiting_room().count == 1

    def change() -> None:
        with engine.stopped(["0"]):
            service.grow()

    thread = threading.Thread(target=change)
    thread.start()
    tokens = [t for _ in iter(lambda: engine.idle, True) for o in engine.step() for a in o.outputs for t in a.token_ids]
    thread.join()
    assert tuple(tokens) == answer_to(range(60), 20)
    assert_no_record_left(engine)


def test_caller_that_steps_gets_an_error_if_no_plan_can_hold_its_request_any_more() -> None:
    service = Service()
    engine = sync_engine(service)
    request_id = engine.add(TokensPrompt(tuple(range(60))), SamplingParams(max_tokens=20))
    service.best = SMALL
    engine.reroute()
    (output,) = engine.step()
    assert output.request_id == request_id
    assert isinstance(output.error, PromptTooLong)
    assert engine.idle


def test_caller_that_steps_can_abort_a_waiting_request() -> None:
    service = Service()
    engine = sync_engine(service)
    engine.abort(engine.add(TokensPrompt(tuple(range(60))), SamplingParams(max_tokens=20)))
    assert engine.idle
    assert ended_requests(service.metrics) == {"abort": 1}
    assert_no_record_left(engine)


def test_waiting_requests_of_a_caller_that_steps_are_limited() -> None:
    service = Service(facts(LARGE, max_queued_requests=1))
    engine, params = sync_engine(service), SamplingParams(max_tokens=20)
    engine.add(TokensPrompt(tuple(range(60))), params)
    assert not engine.has_room(engine.request(TokensPrompt(tuple(range(60))), params))
    assert engine.has_room(engine.request(TokensPrompt(tuple(range(10))), params))
    with pytest.raises(QueueFull):
        engine.add(TokensPrompt(tuple(range(60))), params)
