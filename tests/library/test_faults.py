"""Devices that fail in the middle of streams: the answers are those of an engine that nothing happens to."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.build import BuiltEngine, async_engine, build
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import EngineFailed
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.executor.faults import Fault
from jaxserve.executor.host_memory import PINNED, HostMemory, pinned_memory
from tests.library.adapting import until
from tests.library.test_merge import DENSE, written
from tests.library.test_merge_while_serving import collect
from tests.support.internals import assert_no_record_left, store_of, wrap_block_reads
from tests.support.regrouped import OPTIONS

STREAMS = 8
GROUPS = {"dp": 2, "max_tp": None, "max_pp": 2, "memory_gb": 1, "kv_pages": None}
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 4 + 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("faults"), DENSE)


def built_of(model: Path, *, host_memory: HostMemory = pinned_memory, **options: Any) -> BuiltEngine:
    config = EngineConfig(model=model, **(OPTIONS | GROUPS | SMALL | options))
    return build(config, controlled=True, host_memory=host_memory)


async def drop(built: BuiltEngine) -> None:
    assert built.control is not None
    names = tuple(instance.name for instance in built.in_force.plan.instances)
    built.control.edit_plan("drop", names)
    await until(lambda: len(built.in_force.plan.instances) == 1)


def ask(engine: AsyncEngine) -> list[asyncio.Task]:
    return [asyncio.create_task(collect(engine, number)) for number in range(STREAMS)]


async def check_served(built: BuiltEngine, engine: AsyncEngine) -> None:
    """Check that the engine has recovered, and nothing is left of requests and failed instances."""
    assert built.control is not None
    await until(lambda: not built.control.status()["busy"] and not engine.failed)
    await until(lambda: not any(steps.core.request_ids for steps in engine.loops.values()))
    assert_no_record_left(engine)
    assert all(steps.core.scheduler.pages.used == 0 for steps in engine.loops.values())
    assert engine.ready
    engine.check_health()
    expected = built.resolved.limits.device_entries(*built.in_force.plan.instances)
    for device, ledger in built.resolved.ledgers.items():
        entries = {name: size for name, size in ledger.entries.items() if size and name != "runtime"}
        assert entries == expected.get(device, {}), device


async def survived(built: BuiltEngine, *, asked_first: bool = False) -> list:
    """Return the answers to requests after or before a drop, of which the instance on device 0 survives."""
    engine = async_engine(built)
    try:
        if not asked_first:
            await drop(built)
        streams = ask(engine)
        if asked_first:
            await until(lambda: sum(len(steps.core.request_ids) for steps in engine.loops.values()) == STREAMS)
            await drop(built)
        found = await asyncio.gather(*streams)
        (survivor,) = built.in_force.plan.instances
        assert survivor.devices == {0}
        await check_served(built, engine)
        return found
    finally:
        await engine.shutdown()


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    async def serve() -> list[list[int]]:
        engine = async_engine(built_of(model))
        try:
            return await asyncio.gather(*ask(engine))
        finally:
            await engine.shutdown()

    return asyncio.run(serve())


@pytest.mark.parametrize("device", [0, 1])
def test_the_survivor_of_a_group_answers_everything(model: Path, expected: list, device: int) -> None:
    built = built_of(model, inject_fault=f"{device}:20")

    async def serve() -> list:
        engine = async_engine(built)
        try:
            await drop(built)
            found = await asyncio.gather(*ask(engine))
            (survivor,) = built.in_force.plan.instances
            assert survivor.devices == {1 - device}
            assert len(survivor.stages) == survivor.lanes == 1
            await check_served(built, engine)
            failures = r"^jaxserve_instance_failures_total\{.*\} (\d+)"
            counted = re.findall(failures, engine.metrics_text().decode(), re.MULTILINE)
            assert sum(map(int, counted)) == 1
            assert built.control is not None
            last = built.control.decisions(1)[0]
            assert last["outcome"] == "done"
            assert f"has failed: stage {device}: InjectedFault" in last["reason"]
            return found
        finally:
            await engine.shutdown()

    assert asyncio.run(serve()) == expected


def test_a_survivor_reads_no_file_where_devices_have_memory_of_their_own(
    model: Path, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has a copy of all layers. CPU devices list pinned memory as GPUs do; the test tells them to use it."""
    built = built_of(model, host_memory=lambda device: PINNED, inject_fault="1:20")

    def fail(*arguments: Any) -> Any:
        raise AssertionError("a file is read")

    wrap_block_reads(monkeypatch, store_of(built.instances[0].executor), lambda read: fail)

    assert asyncio.run(survived(built)) == expected


def test_others_answer_the_requests_of_an_instance_that_fails(model: Path, expected: list) -> None:
    built = built_of(model, inject_fault="1:10")

    async def serve() -> list:
        engine = async_engine(built)
        try:
            found = await asyncio.gather(*ask(engine))
            assert [instance.name for instance in built.in_force.plan.instances] == ["0"]
            await check_served(built, engine)
            return found
        finally:
            await engine.shutdown()

    assert asyncio.run(serve()) == expected


def test_the_last_instance_that_fails_ends_its_requests_with_errors(model: Path) -> None:
    built = built_of(model, dp=1, max_pp=None, inject_fault="0:10")

    async def serve() -> list:
        engine = async_engine(built)
        try:
            return await asyncio.gather(*ask(engine), return_exceptions=True)
        finally:
            await engine.shutdown()

    assert {type(answer) for answer in asyncio.run(serve())} == {EngineFailed}


def failing(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """Return a function whose call of this number, from 0, raises."""
    calls = iter(range(10**9))

    def run(*arguments: Any) -> Any:
        if next(calls) == call:
            raise RuntimeError("the host has failed")
        return function(*arguments)

    return run


def test_all_members_of_a_group_go_on_when_its_thread_fails(model: Path, expected: list) -> None:
    built = built_of(model)

    async def serve() -> list:
        engine = async_engine(built)
        try:
            await drop(built)
            (group,) = engine.loops.values()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group.core, "update", failing(group.core.update, 20))
                found = await asyncio.gather(*ask(engine))
            # The operator's plan has the group, which forms again: no device is lost.
            assert {device for instance in built.in_force.plan.instances for device in instance.devices} == {0, 1}
            assert engine.snapshot().num_running == 0
            await check_served(built, engine)
            return found
        finally:
            await engine.shutdown()

    assert asyncio.run(serve()) == expected


@pytest.mark.parametrize("action", ["send", "receive"])
def test_a_device_that_fails_in_an_exchange_costs_no_answer(
    model: Path, expected: list, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """The KV of running requests is under way when the group's second stage fails at its next step."""
    built = built_of(model)
    assert built.host is not None

    carry_out = getattr(built.host, action)

    def fail(groups: Any, *arguments: Any) -> Any:
        groups[0].executor._faults = {1: Fault(1, 1)}
        return carry_out(groups, *arguments)

    monkeypatch.setattr(built.host, action, fail)

    assert asyncio.run(survived(built, asked_first=True)) == expected
