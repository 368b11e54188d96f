"""AsyncEngine: concurrent requests, cancellation in every phase, bounded queues, failures, draining."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve import AsyncLLM
from jaxserve.build import build_async_engine
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import EngineFailed, EngineStopped, PromptTooLong, QueueFull, RequestError
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import TokensPrompt
from tests.support.internals import assert_no_record_left, instance_threads_of, wrap_take_commands
from tests.support.reference import Reference

LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
OPTIONS = {"load_format": "dummy", "warmup": False, "max_num_seqs": 4, "max_queued_requests": 6}


def prompt(seed: int, length: int) -> TokensPrompt:
    return TokensPrompt(tuple(np.random.default_rng(seed).integers(3, 500, length).tolist()))


async def collect(engine: AsyncEngine, p: TokensPrompt, params: SamplingParams, **kwargs) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    async for output in engine.generate(p, params, **kwargs):
        for answer in output.outputs:
            tokens += answer.token_ids
    return tokens


async def settled(engine: AsyncEngine) -> None:
    """Wait until nothing runs, and check that no page is held."""
    for _ in range(500):
        if all(thread.steps.idle for thread in instance_threads_of(engine)):
            break
        await asyncio.sleep(0.01)
    for thread in instance_threads_of(engine):
        assert thread.steps.idle
        assert thread.steps.core.scheduler.pages.used == 0
    assert_no_record_left(engine)


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[AsyncEngine]:
    engine = build_async_engine(EngineConfig(model=tiny_model, **OPTIONS))
    yield engine
    asyncio.run(engine.shutdown())


def test_concurrent_requests_get_their_own_answers(engine: AsyncEngine, reference: Reference) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def main() -> None:
        prompts = [prompt(i, 5 + 13 * i) for i in range(6)]
        answers = await asyncio.gather(*(collect(engine, p, greedy) for p in prompts))
        assert answers == [reference.greedy(list(p.token_ids), 8) for p in prompts]
        await settled(engine)

    asyncio.run(main())


def test_answer_without_streaming_arrives_in_one_piece(engine: AsyncEngine, reference: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=2)

    async def main() -> None:
        p, told = prompt(1, 20), []
        async for output in engine.generate(p, params, stream=False):
            told += output.outputs
        assert [answer.index for answer in sorted(told, key=lambda answer: answer.index)] == [0, 1]
        assert {answer.token_ids for answer in told} == {reference.greedy(list(p.token_ids), 8)}
        assert {answer.finish_reason for answer in told} == {"length"}
        await settled(engine)

    asyncio.run(main())


def test_cancelled_requests_free_their_pages_in_every_stage(engine: AsyncEngine) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(collect(engine, prompt(i, 90), LONG)) for i in range(6)]
        for tick, task in enumerate(tasks):  # some decode by now, some are in prefill, two wait for a slot
            await asyncio.sleep(0.003 * tick)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await settled(engine)
        assert b'request_success_total{engine="0",finished_reason="abort"' in engine.metrics_text()

    asyncio.run(main())


def test_closed_stream_aborts_its_request(engine: AsyncEngine) -> None:
    async def main() -> None:
        stream = engine.generate(prompt(1, 40), LONG)
        first = await anext(stream)
        assert not first.finished
        await stream.aclose()
        await settled(engine)

    asyncio.run(main())


def test_snapshot_after_an_abort_without_a_next_step_is_empty(tiny_model: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(tiny_model, overlap=False, **OPTIONS) as llm:
            for _ in range(5):
                stream = llm.stream([3] * 40, LONG)
                await anext(stream)
                await stream.aclose()
                await settled(llm.engine)
                await asyncio.sleep(0.05)  # the thread that freed the pages tells of it
                assert llm.engine.snapshot().num_running == llm.engine.snapshot().kv_pages_used == 0

    asyncio.run(main())


def test_full_queue_refuses_requests(engine: AsyncEngine) -> None:
    async def main() -> None:
        with pytest.raises(RequestError, match="n is 7, the limit is 6"):  # it would never fit: no use in trying again
            await collect(engine, prompt(0, 5), SamplingParams(n=7, max_tokens=2))
        tasks = [asyncio.create_task(collect(engine, prompt(i, 60), LONG)) for i in range(20)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [r for r in results if isinstance(r, QueueFull)]
        assert refused
        assert all(len(r) == 150 for r in results if not isinstance(r, QueueFull))
        assert len(refused) < 20
        await settled(engine)

    asyncio.run(main())


def test_invalid_request_is_refused_before_it_is_queued(engine: AsyncEngine) -> None:
    async def main() -> None:
        with pytest.raises(PromptTooLong):
            await collect(engine, prompt(0, 256), LONG)
        assert engine.snapshot().num_waiting == 0
        await settled(engine)

    asyncio.run(main())


def test_refused_request_with_a_used_id_leaves_the_first_one_running(engine: AsyncEngine) -> None:
    async def main() -> None:
        first = asyncio.create_task(collect(engine, prompt(0, 5), LONG, request_id="twin"))
        await asyncio.sleep(0)  # it asks first
        with pytest.raises(RequestError, match="already in flight"):
            await collect(engine, prompt(1, 5), LONG, request_id="twin")
        assert len(await asyncio.wait_for(first, 60)) == 150
        await settled(engine)

    asyncio.run(main())


def test_request_with_smaller_priority_goes_first(engine: AsyncEngine) -> None:
    finished: list[int] = []

    async def one(priority: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        await collect(engine, prompt(priority, 30), params, priority=priority)
        finished.append(priority)

    async def main() -> None:
        busy = [asyncio.create_task(collect(engine, prompt(9, 10), LONG)) for _ in range(4)]
        await asyncio.sleep(0.05)
        await asyncio.gather(one(2), one(0), one(1))
        await asyncio.gather(*busy)

    asyncio.run(main())
    assert finished[0] == 0


def test_failed_step_ends_every_request_with_the_error(engine: AsyncEngine) -> None:
    def explode(work):
        raise RuntimeError("device lost")

    async def main() -> None:
        engine.check_health()
        tasks = [asyncio.create_task(collect(engine, prompt(i, 20), LONG)) for i in range(5)]
        await asyncio.sleep(0.05)
        instance_threads_of(engine)[0].steps.executor.execute = explode
        results = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [result for result in results if not isinstance(result, tuple)]
        assert failures, "every request ended before the step failed"
        assert all(isinstance(failure, EngineFailed) and "device lost" in str(failure) for failure in failures)
        with pytest.raises(EngineFailed):
            engine.check_health()
        assert not engine.ready
        with pytest.raises(EngineFailed):
            await collect(engine, prompt(0, 5), LONG)

    asyncio.run(main())


def test_request_arriving_while_a_failed_loop_ends_gets_the_error(engine: AsyncEngine) -> None:
    thread = instance_threads_of(engine)[0]
    taken, go_on = threading.Event(), threading.Event()

    def stay_after_a_failure(take_commands: Callable[[], None]) -> Callable[[], None]:
        def take_commands_and_stay() -> None:
            take_commands()
            if thread.failure is not None:
                taken.set()
                go_on.wait(30)

        return take_commands_and_stay

    async def main() -> None:
        wrap_take_commands(thread, stay_after_a_failure)
        thread.steps.executor.execute = lambda work: 1 / 0
        try:
            for seed in range(2):
                with pytest.raises(EngineFailed):
                    await asyncio.wait_for(collect(engine, prompt(seed, 5), LONG), 30)
                assert await asyncio.to_thread(taken.wait, 30)
                assert thread.alive
        finally:
            go_on.set()

    asyncio.run(main())


def test_drain_finishes_running_requests_and_refuses_new_ones(engine: AsyncEngine) -> None:
    async def main() -> None:
        running = asyncio.create_task(collect(engine, prompt(0, 20), LONG))
        await asyncio.sleep(0.05)
        drained = asyncio.create_task(engine.drain(60))
        await asyncio.sleep(0)
        assert not engine.ready
        with pytest.raises(EngineStopped):
            await collect(engine, prompt(1, 5), LONG)
        assert len(await running) == 150
        assert await drained

    asyncio.run(main())


def test_shutdown_ends_requests_in_flight(engine: AsyncEngine) -> None:
    async def main() -> None:
        running = asyncio.create_task(collect(engine, prompt(0, 20), LONG))
        await asyncio.sleep(0.05)
        assert not await engine.drain(0.0)
        await engine.shutdown()
        with pytest.raises(EngineStopped):
            await running
        assert engine.snapshot().num_running == engine.snapshot().kv_pages_used == 0  # whoever still looks
        await engine.shutdown()

    asyncio.run(main())


def test_instances_share_the_load(tiny_model: Path, reference: Reference) -> None:
    engine = build_async_engine(EngineConfig(model=tiny_model, **OPTIONS, dp=2))
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)

    async def main() -> None:
        prompts = [prompt(i, 30) for i in range(8)]
        answers = await asyncio.gather(*(collect(engine, p, greedy) for p in prompts))
        assert answers == [reference.greedy(list(p.token_ids), 10) for p in prompts]
        assert all(thread.steps.core.snapshot.steps > 0 for thread in instance_threads_of(engine))
        await engine.shutdown()

    asyncio.run(main())


def test_async_llm_streams_and_embeds(tiny_model: Path, reference: Reference) -> None:
    p = list(range(5, 30))

    async def main() -> None:
        async with AsyncLLM(tiny_model, **OPTIONS) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            tokens = [token async for o in llm.stream(p, greedy) for a in o.outputs for token in a.token_ids]
            assert tuple(tokens) == reference.greedy(p, 6)
            assert (await llm.embed(p)).shape == (64,)

    asyncio.run(main())


def test_reset_of_the_prefix_cache_lets_running_requests_go_on(engine: AsyncEngine, reference: Reference) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    again = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    async def cached(p: TokensPrompt) -> int:
        return [output.num_cached_tokens async for output in engine.generate(p, again)][-1]

    async def main() -> None:
        p = prompt(1, 100)
        running = engine.generate(p, greedy)
        tokens = list((await anext(running)).outputs[0].token_ids)
        before = await cached(p)
        assert before > 0
        engine.reset_prefix_cache()
        assert await cached(p) == 0
        assert await cached(p) == before  # it is cached again
        async for output in running:
            tokens += output.outputs[0].token_ids
        assert tuple(tokens) == reference.greedy(list(p.token_ids), 40)
        await settled(engine)

    asyncio.run(main())
