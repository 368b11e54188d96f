"""An engine with threads whose operator, or policy, merges and splits instances while clients stream."""

import asyncio
from pathlib import Path
from typing import Any

from jaxserve.build import BuiltEngine, async_engine, build
from jaxserve.control.plan import Plan
from jaxserve.control.plan_yaml import to_yaml
from jaxserve.control.regroup import merged_plan, split_plans
from jaxserve.core.config import EngineConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.client import TokensPrompt
from tests.library.adapting import until
from tests.library.test_merge import DENSE, GREEDY, KINDS, SMALL, prompt_of, written
from tests.support.internals import assert_no_record_left
from tests.support.regrouped import OPTIONS

SERVED = [KINDS[name] for name in ("greedy", "sampled", "penalised", "log-probabilities")]


def change_plans(built: BuiltEngine) -> list[Plan]:
    """Return the plans 1 -> 2 -> 4 -> 2 -> 1, and one with an instance less."""
    start = built.in_force.plan
    first, second, third, fourth = start.instances
    left, right = merged_plan([first, second], "4"), merged_plan([third, fourth], "5")
    whole = merged_plan([left, right], "6")
    halves = split_plans(whole, ("7", "8"))
    sides = ((left, third, fourth), (left, right), (whole,), halves, (halves[0],), start.instances)
    return [Plan(1, instances) for instances in sides]


async def collect(engine: AsyncEngine, number: int) -> list[int]:
    tokens: list[int] = []
    async for output in engine.generate(
        TokensPrompt(tuple(prompt_of(number, 5 + 11 * (number % 8)))), SERVED[number % 4]
    ):
        for answer in output.outputs:
            tokens += answer.token_ids
    return tokens


async def leave(engine: AsyncEngine, number: int, after: int) -> None:
    """Disconnect after some outputs."""
    stream = engine.generate(TokensPrompt(tuple(prompt_of(number, 30))), GREEDY)
    async for _ in stream:
        after -= 1
        if after == 0:
            break
    await stream.aclose()


async def settle(built: BuiltEngine, plan: Plan) -> None:
    assert built.control is not None
    built.control.set_plan(to_yaml(plan))
    await until(lambda: places(built.in_force.plan) == places(plan) and not built.control.status()["busy"])


def places(plan: Plan) -> set[tuple]:
    """Return what a plan says of its instances, except for their KV pages."""
    return {(instance.name, instance.stages[0].devices, instance.layer_precisions) for instance in plan.instances}


def test_streams_go_on_while_an_operator_changes_the_instances(tmp_path: Path) -> None:
    built = build(EngineConfig(model=written(tmp_path, DENSE), **(OPTIONS | SMALL)), controlled=True)

    async def serve() -> tuple[list, list]:
        engine = async_engine(built)
        try:
            expected = await asyncio.gather(*(collect(engine, number) for number in range(8)))
            found: list[Any] = []
            leaving: list[asyncio.Task] = []
            for turn, plan in enumerate(change_plans(built)):
                streams = [asyncio.create_task(collect(engine, number)) for number in range(8)]
                leaving += [asyncio.create_task(leave(engine, number, 1 + 9 * (number % 3))) for number in range(3)]
                await asyncio.sleep(0.02 * turn)
                await settle(built, plan)
                found.append(await asyncio.gather(*streams))
            await asyncio.gather(*leaving)
            await until(lambda: not any(steps.core.request_ids for steps in engine.loops.values()))
            assert_no_record_left(engine)
            assert all(steps.core.scheduler.pages.used == 0 for steps in engine.loops.values())
            return expected, found
        finally:
            await engine.shutdown()

    expected, found = asyncio.run(serve())
    for answers in found:
        assert answers == expected


def test_policy_merges_for_a_long_request_while_short_ones_stream_and_splits_again(tmp_path: Path) -> None:
    options = OPTIONS | SMALL | {"policy": "tp_transform", "kv_pages": 6, "max_kv_pages": 6}
    built = build(EngineConfig(model=written(tmp_path, DENSE), **options), controlled=True)

    async def serve() -> None:
        engine = async_engine(built)
        try:
            assert (engine.info.instance_len, engine.info.max_model_len) == (96, 256)
            short = [asyncio.create_task(collect(engine, number)) for number in (0, 1, 2)]
            prompt = TokensPrompt(tuple(prompt_of(9, 180)))
            answer = [output async for output in engine.generate(prompt, GREEDY)]
            assert sum(len(part.token_ids) for output in answer for part in output.outputs) == 30
            assert answer[-1].finished
            assert all(len(tokens) == 30 for tokens in await asyncio.gather(*short))
            assert max(instance.tp for instance in built.in_force.plan.instances) == 4
            await until(lambda: len(built.in_force.plan.instances) == 4)
        finally:
            await engine.shutdown()

    asyncio.run(serve())


def test_layers_of_a_merged_instance_change_while_it_serves(tmp_path: Path) -> None:
    options = OPTIONS | SMALL | {"dp": 2, "max_tp": 2, "variants": ("int4",)}
    built = build(EngineConfig(model=written(tmp_path, DENSE), **options), controlled=True)

    async def serve() -> None:
        engine, start = async_engine(built), built.in_force.plan
        whole = merged_plan(start.instances, "2")
        mixed = whole.with_precisions({"layers.1": "int4"})
        try:
            for plan in (Plan(1, (whole,)), Plan(1, (mixed,)), start):
                streams = [asyncio.create_task(collect(engine, number)) for number in range(8)]
                await settle(built, plan)
                (first, *_) = engine.loops.values()
                precisions = [block.precision for block in first.executor.blocks]  # type: ignore[attr-defined]
                assert precisions == list(plan.instances[0].precisions.values())
                assert all(len(tokens) == 30 for tokens in await asyncio.gather(*streams))
        finally:
            await engine.shutdown()

    asyncio.run(serve())
