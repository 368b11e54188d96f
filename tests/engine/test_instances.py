"""Instances come and go while requests are served: answers stay as they were, and nothing is left of what has gone."""

import asyncio
import itertools
import random
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

from jaxserve.core.clock import SystemClock
from jaxserve.core.errors import EngineFailed, EngineStopped, RequestError
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine import instance_threads as threads_of_instances, sync_engine
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.instances import InstanceSet
from jaxserve.engine.loop import StepLoop
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.telemetry import EngineMetrics
from tests.support.instances import TokenDevice, answer_to, facts, loop_named
from tests.support.internals import assert_no_record_left, directory_of

INFO = facts()
LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=0)


class Changer:
    """What changes the instances of an engine at random: it adds, removes, merges, splits and replaces them."""

    def __init__(self, engine: InstanceSet, metrics: EngineMetrics, *, seed: int = 0):
        self._engine, self._metrics = engine, metrics
        self._random = random.Random(seed)
        self._numbers = itertools.count(100)
        self.quick = threading.Event()  # until it is set, steps of the first instances take 5 ms

    def run(self, changes: int) -> None:
        for _ in range(changes):
            names = list(self._engine.loops)
            before = self._random.sample(names, self._random.randrange(min(3, len(names) + 1)))
            count = self._random.randint(0 if len(names) > max(len(before), 1) else 1, 2 if len(names) < 6 else 1)
            self.change(before, count)

    def change(self, before: list[str], count: int) -> None:
        """Replace instances by `count` new ones, which get their requests, or other instances if there are none."""
        with self._engine.stopped(before):
            states = [state for name in before for state in self._engine.loops[name].core.detach(keep_pages=False)]
            after = [self.new_loop() for _ in range(count)]
            for number, state in enumerate(states if after else ()):
                after[number % count].core.attach([state], None, 0.0)
            if not after:
                self._engine.place(states)
            self._engine.replace(before, {steps.core.name: steps for steps in after})

    def new_loop(self) -> StepLoop:
        return loop_named(str(next(self._numbers)), self._metrics, INFO)


@asynccontextmanager
async def serving(count: int = 3) -> AsyncIterator[tuple[AsyncEngine, Changer]]:
    """Yield an engine of some instances, and what changes them."""
    metrics = EngineMetrics("tokens")
    loops = {str(number): loop_named(str(number), metrics, INFO) for number in range(count)}
    engine = AsyncEngine(loops, INFO, None, metrics, SystemClock())
    changer = Changer(engine, metrics)
    for number in loops:
        device_of(engine, number).on_fetch = lambda: changer.quick.wait(0.005)
    yield engine, changer
    await engine.shutdown()
    assert instance_threads() == []


def device_of(engine: InstanceSet, name: str) -> TokenDevice:
    device = engine.loops[name].executor
    assert isinstance(device, TokenDevice)
    return device


def instance_threads() -> list[str]:
    """Return the names of all instances' threads."""
    return sorted(thread.name for thread in threading.enumerate() if re.fullmatch(r"jaxserve-\d+", thread.name))


def prompt(seed: int, length: int = 10) -> TokensPrompt:
    return TokensPrompt(tuple(random.Random(seed).choices(range(5000), k=length)))


async def ask(engine: AsyncEngine, seed: int, length: int, *, n: int = 1, **options: str) -> None:
    """Send a request, and check its answers."""
    params = SamplingParams(max_tokens=length, ignore_eos=True, seed=seed, n=n)
    tokens: list[tuple[int, ...]] = [()] * n
    async for output in engine.generate(prompt(seed, 5 + seed % 30), params, **options):
        for answer in output.outputs:
            tokens[answer.index] += answer.token_ids
    for index in range(n):
        assert tokens[index] == answer_to(prompt(seed, 5 + seed % 30).token_ids, length, seed + index)


async def settled(engine: AsyncEngine) -> None:
    """Wait until nothing runs, and check that nothing is left of any request."""
    while any(not steps.idle for steps in engine.loops.values()) or len(directory_of(engine)):
        await asyncio.sleep(0.005)
    assert_no_record_left(engine)
    for steps in engine.loops.values():
        assert steps.core.scheduler.pages.used == 0
        assert not steps.core.request_ids


def test_answers_are_the_same_while_instances_change_200_times() -> None:
    async def main() -> None:
        async with serving() as (engine, changer):
            changer.quick.set()
            changes = asyncio.create_task(asyncio.to_thread(changer.run, 200))
            seeds, served, aborted = itertools.count(), 0, 0

            async def client() -> None:
                nonlocal served, aborted
                while not changes.done():
                    seed = next(seeds)
                    asked = asyncio.create_task(ask(engine, seed, 20 + seed % 50, n=1 + seed % 2))
                    if seed % 5:
                        await asked
                        served += 1
                        continue
                    await asyncio.sleep(0.001 * (seed % 7))
                    asked.cancel()
                    with suppress(asyncio.CancelledError):
                        await asked
                    aborted += 1

            await asyncio.gather(changes, *(client() for _ in range(12)))
            assert served > 50
            assert aborted > 10
            await settled(engine)
            assert instance_threads() == sorted(f"jaxserve-{name}" for name in engine.loops)
            engine.check_health()

    asyncio.run(main())


def test_request_continues_on_the_instance_that_replaced_its_own() -> None:
    async def main() -> None:
        async with serving(1) as (engine, changer):
            stream = engine.generate(prompt(1), LONG, request_id="moved")
            tokens = [token async for token in first_tokens(stream, 20)]
            await asyncio.to_thread(changer.change, ["0"], 2)
            assert "0" not in engine.loops
            tokens += [t async for output in stream for answer in output.outputs for t in answer.token_ids]
            assert tuple(tokens) == answer_to(prompt(1).token_ids, 200)
            await settled(engine)

    asyncio.run(main())


async def first_tokens(stream: AsyncIterator, count: int) -> AsyncIterator[int]:
    for _ in range(count):
        for answer in (await anext(stream)).outputs:
            for token in answer.token_ids:
                yield token


def test_abort_after_a_move_ends_the_request() -> None:
    async def main() -> None:
        async with serving(1) as (engine, changer):
            stream = engine.generate(prompt(1), LONG)
            await anext(stream)
            await asyncio.to_thread(changer.change, ["0"], 1)
            await stream.aclose()
            await settled(engine)

    asyncio.run(main())


def test_abort_and_new_requests_during_a_stop_take_effect_after_it() -> None:
    async def main() -> None:
        async with serving(1) as (engine, changer):
            stream = engine.generate(prompt(1), LONG)
            await anext(stream)
            stopped, go_on = threading.Event(), threading.Event()

            def replace() -> None:
                with engine.stopped(["0"]):
                    stopped.set()
                    go_on.wait(30)
                    states, new = engine.loops["0"].core.detach(keep_pages=False), changer.new_loop()
                    new.core.attach(states, None, 0.0)
                    engine.replace(["0"], {new.core.name: new})

            change = asyncio.create_task(asyncio.to_thread(replace))
            await asyncio.to_thread(stopped.wait, 30)
            await stream.aclose()
            coming = [asyncio.create_task(ask(engine, seed, 30)) for seed in range(5)]
            await asyncio.sleep(0.01)
            assert len(directory_of(engine)) == 6, "the aborted request ends when its instance goes on"
            go_on.set()
            await asyncio.gather(change, *coming)
            await settled(engine)

    asyncio.run(main())


def test_instances_are_drained_and_idle_ones_stop_too() -> None:
    async def main() -> None:
        async with serving(2) as (engine, changer):
            running = asyncio.create_task(ask(engine, 1, 200))
            await asyncio.sleep(0.01)

            def look() -> list[int]:
                with engine.stopped(["0", "1"]):
                    assert not any(steps.in_flight for steps in engine.loops.values())
                    return [steps.core.snapshot.steps for steps in engine.loops.values() for _ in range(2)]

            first, again, idle, _ = await asyncio.to_thread(look)
            assert first == again > 0
            assert idle == 0
            changer.quick.set()
            await running

    asyncio.run(main())


def test_fault_while_instances_are_stopped_lets_all_go_on() -> None:
    async def main() -> None:
        async with serving(2) as (engine, changer):
            running = [asyncio.create_task(ask(engine, seed, 150)) for seed in range(4)]
            await asyncio.sleep(0.01)
            loops = dict(engine.loops)

            def fail_to_replace() -> None:
                with engine.stopped(["0", "1"]):
                    broken = changer.new_loop()
                    broken.core = None  # type: ignore[assignment]
                    engine.replace(["0", "1"], {"100": broken})

            with pytest.raises(AttributeError):
                await asyncio.to_thread(fail_to_replace)
            assert engine.loops == loops
            changer.quick.set()
            await asyncio.gather(*running)
            await settled(engine)

    asyncio.run(main())


def test_change_that_fails_after_the_replacement_can_be_undone() -> None:
    async def main() -> None:
        async with serving(1) as (engine, changer):
            running = asyncio.create_task(ask(engine, 1, 150))
            await asyncio.sleep(0.01)

            def undo() -> None:
                with engine.stopped(["0"]):
                    old, new = engine.loops["0"], changer.new_loop()
                    new.core.attach(old.core.detach(keep_pages=False), None, 0.0)
                    engine.replace(["0"], {"100": new})
                    old.core.attach(new.core.detach(keep_pages=False), None, 0.0)
                    engine.replace(["100"], {"0": old})

            await asyncio.to_thread(undo)
            assert list(engine.loops) == ["0"]
            changer.quick.set()
            await running
            await settled(engine)
            assert b'instance_info{engine="0",model_name="tokens",name="0"}' in engine.metrics_text()
            assert b'name="100"' not in engine.metrics_text()

    asyncio.run(main())


def test_instance_that_does_not_end_its_step_lets_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_of_instances, "STALL_SECONDS", 0.2)

    async def main() -> None:
        async with serving(2) as (engine, changer):
            stuck, go_on = threading.Event(), threading.Event()
            device = device_of(engine, "0")
            device.on_fetch = lambda: (stuck.set(), go_on.wait(30))
            waiting = asyncio.create_task(ask(engine, 1, 20))
            await asyncio.to_thread(stuck.wait, 30)
            with pytest.raises(EngineFailed, match="instance 0 has not ended its step"):
                await asyncio.to_thread(changer.change, ["1", "0"], 1)
            assert set(engine.loops) == {"0", "1"}
            await ask(engine, 2, 20)  # on the other one
            go_on.set()
            await waiting
            await asyncio.to_thread(changer.change, ["1", "0"], 1)
            await settled(engine)

    asyncio.run(main())


def test_request_that_a_change_loses_ends_with_an_error() -> None:
    async def main() -> None:
        async with serving(1) as (engine, changer):
            running = asyncio.create_task(ask(engine, 1, 150))
            await asyncio.sleep(0.01)

            def lose() -> None:
                with engine.stopped(["0"]):
                    engine.loops["0"].core.detach(keep_pages=False)
                    engine.replace(["0"], {"1": changer.new_loop()})

            await asyncio.to_thread(lose)
            with pytest.raises(EngineFailed, match="was lost"):
                await running
            await ask(engine, 2, 20)
            await settled(engine)

    asyncio.run(main())


def test_request_without_an_instance_goes_on_after_the_replacement() -> None:
    async def main() -> None:
        async with serving(1) as (engine, changer):
            running = asyncio.create_task(ask(engine, 1, 150))
            await asyncio.sleep(0.01)

            def change() -> None:
                with engine.stopped(["0"]):
                    states = engine.loops["0"].core.detach(keep_pages=False)
                    engine.replace(["0"], {"1": changer.new_loop()}, states)

            await asyncio.to_thread(change)
            await running
            await settled(engine)

    asyncio.run(main())


def test_totals_stay_when_instances_end_and_gauges_go() -> None:
    async def main() -> None:
        async with serving(2) as (engine, changer):
            changer.quick.set()
            await asyncio.gather(*(ask(engine, seed, 20) for seed in range(4)))
            before = engine.snapshot()
            await asyncio.to_thread(changer.change, ["0", "1"], 1)
            after = engine.snapshot()
            assert (after.finished, after.generated_tokens, after.steps) == (4, 80, before.steps)
            assert after.kv_pages_total == before.kv_pages_total // 2
            await ask(engine, 4, 20)
            assert engine.snapshot().generated_tokens == 100

    asyncio.run(main())


def test_duplicate_id_is_refused_on_every_instance() -> None:
    async def main() -> None:
        async with serving(3) as (engine, _):
            first = engine.generate(prompt(1), LONG, request_id="twin")
            await anext(first)
            for _ in range(3):
                with pytest.raises(RequestError, match="already in flight"):
                    await ask(engine, 2, 10, request_id="twin")
            await first.aclose()
            await ask(engine, 2, 10, request_id="twin")  # it is free again at once
            await settled(engine)

    asyncio.run(main())


def test_shutdown_during_a_change_ends_all_requests() -> None:
    async def main() -> None:
        async with serving(2) as (engine, changer):
            running = [asyncio.create_task(ask(engine, seed, 200)) for seed in range(8)]
            await asyncio.sleep(0.005)
            stopped, go_on = threading.Event(), threading.Event()

            def replace() -> None:
                with engine.stopped(["0", "1"]):
                    stopped.set()
                    go_on.wait(30)
                    states = [s for steps in engine.loops.values() for s in steps.core.detach(keep_pages=False)]
                    new = changer.new_loop()
                    new.core.attach(states, None, 0.0)
                    engine.replace(["0", "1"], {new.core.name: new})

            change = asyncio.create_task(asyncio.to_thread(replace))
            await asyncio.to_thread(stopped.wait, 30)
            ending = asyncio.create_task(engine.shutdown())
            await asyncio.sleep(0.01)
            go_on.set()
            await asyncio.gather(change, ending)
            ended = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(each, EngineStopped) for each in ended)
            assert_no_record_left(engine)

    asyncio.run(main())


def test_instance_whose_loop_has_failed_cannot_be_stopped() -> None:
    async def main() -> None:
        async with serving(2) as (engine, changer):
            device = device_of(engine, "0")
            device.on_fetch = lambda: 1 / 0
            failing, other = (asyncio.create_task(ask(engine, seed, 200)) for seed in range(2))
            with pytest.raises(EngineFailed):
                await failing
            with pytest.raises(EngineFailed, match="division by zero"):
                await asyncio.to_thread(changer.change, ["1", "0"], 1)
            changer.quick.set()
            await other

    asyncio.run(main())


# -- SyncEngine


@pytest.fixture
def sync() -> Iterator[tuple[SyncEngine, Changer]]:
    metrics = EngineMetrics("tokens")
    loops = {str(number): loop_named(str(number), metrics, INFO) for number in range(2)}
    engine = SyncEngine(loops, INFO, None, SystemClock())
    yield engine, Changer(engine, metrics)
    engine.close()


def served(engine: SyncEngine, between: Callable[[], None] = lambda: None) -> dict[str, tuple[int, ...]]:
    """Step until the engine is idle, and return the tokens of each request."""
    tokens: dict[str, tuple[int, ...]] = {}
    while not engine.idle:
        for output in engine.step():
            for answer in output.outputs:
                tokens[output.request_id] = tokens.get(output.request_id, ()) + answer.token_ids
        between()
    return tokens


def test_engine_that_its_caller_steps_serves_while_instances_change(sync: tuple[SyncEngine, Changer]) -> None:
    engine, changer = sync
    thread = threading.Thread(target=changer.run, args=(200,))
    thread.start()
    seed, rounds = 0, 0
    while thread.is_alive() or rounds < 3:
        asked = {}
        for _ in range(10):
            params = SamplingParams(max_tokens=20 + seed % 40, ignore_eos=True, seed=seed)
            asked[engine.add(prompt(seed), params)] = answer_to(prompt(seed).token_ids, 20 + seed % 40, seed)
            seed += 1
        aborted = engine.add(prompt(seed), LONG)
        engine.step()
        engine.abort(aborted)
        assert served(engine) == asked
        rounds += 1
    thread.join()
    assert_no_record_left(engine)
    assert all(steps.core.scheduler.pages.used == 0 for steps in engine.loops.values())


def test_request_without_an_instance_is_answered_after_the_replacement(sync: tuple[SyncEngine, Changer]) -> None:
    engine, changer = sync
    request_id = engine.add(prompt(1), LONG)
    engine.step()
    with engine.stopped(["0", "1"]):
        states = [state for steps in engine.loops.values() for state in steps.core.detach(keep_pages=False)]
        engine.replace(["0", "1"], {"100": changer.new_loop()}, states)
    assert served(engine) == {request_id: answer_to(prompt(1).token_ids, 200)}


def test_idle_engine_can_be_changed_by_another_thread(sync: tuple[SyncEngine, Changer]) -> None:
    engine, changer = sync
    thread = threading.Thread(target=changer.change, args=(["0", "1"], 1))
    thread.start()
    thread.join()
    assert list(engine.loops) == ["100"]
    request_id = engine.add(prompt(1), LONG)
    assert served(engine) == {request_id: answer_to(prompt(1).token_ids, 200)}


def test_aborted_request_gets_none_of_the_outputs_of_a_stop(sync: tuple[SyncEngine, Changer]) -> None:
    engine, changer = sync
    request_id = engine.add(prompt(1), LONG)
    engine.step()
    engine.step()
    changer.change(["0"], 1)
    engine.abort(request_id)
    assert served(engine) == {}


def test_step_that_does_not_end_makes_a_stop_fail(
    sync: tuple[SyncEngine, Changer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, changer = sync
    monkeypatch.setattr(sync_engine, "STALL_SECONDS", 0.05)
    device = device_of(engine, "0")
    failures: list[BaseException] = []

    def change() -> None:
        try:
            changer.change(["0"], 1)
        except EngineFailed as error:
            failures.append(error)

    def stay() -> None:
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()

    request_id = engine.add(prompt(1), SamplingParams(max_tokens=2, ignore_eos=True, seed=0))
    device.on_fetch = stay
    assert served(engine) == {request_id: answer_to(prompt(1).token_ids, 2)}
    assert failures
    assert set(engine.loops) == {"0", "1"}
