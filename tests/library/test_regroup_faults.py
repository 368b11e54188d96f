"""Errors in every phase of a regroup: the old plan stays, with all requests, and nothing is leaked."""

import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from jaxserve.actuator.host import DeviceHost
from jaxserve.actuator.maker import InstanceMaker
from jaxserve.engine.core import EngineCore
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.executor.blocks import BlockBuilder
from jaxserve.executor.kv_exchange import KVExchange
from jaxserve.executor.pools import PoolPrograms, Pools
from jaxserve.scheduler import Scheduler
from tests.library.test_merge import DENSE, KINDS, prompt_of, written
from tests.support.internals import EXCHANGE_CALL, MAKE_POOLS
from tests.support.regrouped import Regrouped
from tests.support.thorough import some

ASKED = [KINDS[name] for name in ("greedy", "penalised", "several", "log-probabilities", "prompt", "sampled")]


class Broken(Exception):
    """A failure that a test wants."""


def failing(call: int, function: Callable[..., Any], *, afterwards: bool = False) -> Callable[..., Any]:
    """Return a function whose call of this number (from 0) raises, perhaps after it has done its work."""
    calls = iter(range(10**9))

    def run(*args: Any, **options: Any) -> Any:
        fails = next(calls) == call
        if fails and not afterwards:
            raise Broken
        result = function(*args, **options)
        if fails:
            raise Broken
        return result

    return run


# What fails: the owner of a method, its name, and the number of the call.
FAULTS = {
    "merge": [
        (SyncEngine, "stopped", 0),
        (BlockBuilder, "load", 0),
        (BlockBuilder, "load", 2),
        (KVExchange, EXCHANGE_CALL, 0),
        (KVExchange, EXCHANGE_CALL, 1),
        (InstanceMaker, "make", 0),
        (EngineCore, "__init__", 0),
        (EngineCore, "attach", 0),
        (EngineCore, "attach", 1),
        (EngineCore, "replan", 0),
        (DeviceHost, "replace", 0),
        (SyncEngine, "replace", 0),
    ],
    "split": [
        (KVExchange, EXCHANGE_CALL, 1),
        (Pools, "move", 0),
        (BlockBuilder, "load", 0),
        (BlockBuilder, "load", 3),
        (InstanceMaker, "make", 1),
        (Scheduler, "attach", 1),
        (SyncEngine, "replace", 0),
    ],
    "drop": [
        (SyncEngine, "stopped", 0),
        (BlockBuilder, "load", 0),
        (BlockBuilder, "load", 3),
        (Pools, "prepare", 0),
        (InstanceMaker, "make", 0),
        (EngineCore, "attach", 1),
        (EngineCore, "withhold", 0),
        (SyncEngine, "replace", 0),
    ],
    "restore": [
        (BlockBuilder, "load", 0),
        (Pools, "move", 1),  # after the one with which the pool becomes smaller
        (BlockBuilder, "load", 9),
        (InstanceMaker, "make", 1),
        (Scheduler, "attach", 1),
        (EngineCore, "withhold", 1),
        (SyncEngine, "replace", 0),
    ],
    "add": [
        (BlockBuilder, "load", 0),
        (BlockBuilder, "load", 2),
        (InstanceMaker, MAKE_POOLS, 0),
        (EngineCore, "__init__", 0),
        (SyncEngine, "replace", 0),
    ],
    "remove": [
        (PoolPrograms, "take", 0),
        (PoolPrograms, "put", 1),
        (EngineCore, "attach", 1),
        (SyncEngine, "replace", 0),
    ],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Regrouped]:
    model = written(tmp_path_factory.mktemp("faults"), DENSE)
    made = Regrouped(model, dp=2, max_tp=2, max_pp=2, max_num_seqs=3, max_num_batched_tokens=3 + 32)
    yield made
    made.close()


def ask(engine: Regrouped, count: int) -> list[str]:
    return [engine.add(prompt_of(number, 4 + 17 * number), ASKED[number]) for number in range(count)]


def found(engine: Regrouped, ids: list[str]) -> list[Any]:
    return [[answer.token_ids for answer in engine.answers.pop(name).outputs] for name in ids]


def prepare(engine: Regrouped, change: str) -> Callable[[], object]:
    """Bring the engine to the plan that a change starts from, and return the change."""
    grouped = engine.plan.instances[0].lanes > 1
    if grouped and change != "restore":
        engine.edit("restore", *engine.names)
    if change == "restore" and not grouped:
        prepare(engine, "drop")()
    while len(engine.names) > 1 and change in ("split", "add"):
        engine.merge(*engine.names) if change == "split" else engine.remove(engine.names[-1])
    (first, *rest) = (engine.plan.instance(name) for name in engine.names)
    if change in ("merge", "remove", "drop") and not rest:
        engine.split(first.name) if first.tp > 1 else engine.add_instance(first, 1 - first.stages[0].devices[0])
    if change == "add" and first.tp > 1:
        engine.split(first.name)
        engine.remove(engine.names[-1])
        (first,) = (engine.plan.instance(name) for name in engine.names)
    return {
        "merge": lambda: engine.merge(*engine.names),
        "split": lambda: engine.split(engine.names[0]),
        "drop": lambda: engine.edit("drop", *engine.names),
        "restore": lambda: engine.edit("restore", *engine.names),
        "add": lambda: engine.add_instance(first, 1 - first.stages[0].devices[0]),
        "remove": lambda: engine.remove(engine.names[0]),
    }[change]


def held() -> tuple[int, int]:
    """Return the bytes of all buffers on devices, which several arrays may show, and the number of threads."""
    gc.collect()
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        if not array.is_deleted()
        for shard in array.addressable_shards
    }
    return sum(buffers.values()), threading.active_count()


@pytest.mark.parametrize("change", some(FAULTS, 3))
def test_change_that_fails_leaves_the_plan_and_all_requests(
    engine: Regrouped, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    carry_out = prepare(engine, change)
    count = 3 if change == "remove" else len(ASKED)  # so that the other instance has room for them
    expected = found(engine, (ask(engine, count), engine.run())[0])
    before = held()
    for owner, name, call in FAULTS[change]:
        where = f"{owner.__name__}.{name} {call}"
        plan, ids = engine.plan, ask(engine, count)
        for _ in range(6):
            engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(call, getattr(owner, name)))
            with pytest.raises(Broken) as caught:
                carry_out()
        assert engine.plan.instances == plan.instances, where
        traceback.clear_frames(caught.tb)  # the log that pytest keeps has it too
        engine.check_ledgers()
        engine.run()
        assert found(engine, ids) == expected, where
        engine.check_idle()
        assert held() == before, where
    ids = ask(engine, count)
    for _ in range(6):
        engine.step()
    carry_out()
    engine.run()
    assert found(engine, ids) == expected
    engine.check_idle()
