"""A transition that fails at any point leaves no trace, and the next one succeeds."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.build import build
from jaxserve.control import reconfigure
from jaxserve.control.ledger import DeviceEntries
from jaxserve.control.plan import Plan
from jaxserve.control.reconfigure import SHRINK_PATIENCE
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import MemoryBudgetError
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.kernels import Pool
from tests.actuator.adapted import (
    GREEDY,
    OPTIONS,
    Adapted,
    in_all_instances,
    pools_of,
    prompt,
    target_of,
    with_layer_precisions,
)
from tests.support.internals import references_in, wrap_block_reads, wrap_move_batch, wrap_pool_maker
from tests.support.sizes import page_bytes
from tests.support.thorough import some


@pytest.mark.parametrize("broken", some(["shrink_pools", "prepare", "replace"], 1))
def test_failed_transition_leaves_the_previous_plan_in_force(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    executor, start = adapted.steps.executor, adapted.plan
    failed, done = adapted.ended("failed"), adapted.ended("done")
    entries, loaded_blocks = dict(adapted.ledger.entries), list(executor.blocks)

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(executor, broken, fail)
    p, tokens = prompt(7, 60), {}
    request = adapted.add(p, GREEDY)
    wanted = start.with_kv_pages("0", 30) if broken == "shrink_pools" else with_layer_precisions(start, ("int4",) * 3)
    adapted.run(tokens, [wanted])
    adapted.wait()
    (outcome,) = [outcome for outcome in adapted.outcomes if outcome.error is not None]
    assert "none left" in outcome.error
    assert adapted.plan.instances == start.instances
    assert [loaded is other for loaded, other in zip(executor.blocks, loaded_blocks, strict=True)] == [True] * len(
        loaded_blocks
    )
    assert adapted.ledger.entries == entries
    assert len(tokens[request]) == 60
    assert adapted.steps.core.scheduler.pages.num_pages == 41
    assert (adapted.ended("failed"), adapted.ended("done")) == (failed + 1, done)
    assert "the plan stays in force: instance 0: " in caplog.text
    assert "none left" in caplog.text
    monkeypatch.undo()
    adapted.change(wanted)
    assert (adapted.ended("failed"), adapted.ended("done")) == (failed + 1, done + len(adapted.outcomes) - 1)
    assert adapted.plan.instances == wanted.instances, "the next attempt succeeds"


@pytest.mark.parametrize("broken", ["prepare", "replace"])
def test_failed_batch_of_swaps_changes_no_layer(adapted: Adapted, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """The last of three layers cannot be prepared or put in place, and those prepared before it are freed."""
    executor, small = adapted.steps.executor, with_layer_precisions(adapted.plan, ("int4",) * 3)
    adapted.change(small)
    before, original, made = state_of(adapted), executor.prepare, list[LoadedBlock]()

    def prepare(block: str, *args: Any, **kwargs: Any) -> LoadedBlock:
        if broken == "prepare" and block == "layers.2":
            raise MemoryError("none left")
        loaded = original(block, *args, **kwargs)
        made.append(replace(loaded, placement=None) if broken == "replace" and block == "layers.2" else loaded)
        return made[-1]

    monkeypatch.setattr(executor, "prepare", prepare)
    adapted.change(adapted.start)
    *_, outcome = adapted.outcomes
    assert outcome.error is not None
    assert state_of(adapted) == before
    assert len(made) == (2 if broken == "prepare" else 3)
    assert all(leaf.is_deleted() for loaded in made for leaf in loaded.leaves)
    monkeypatch.undo()
    adapted.change(adapted.start)
    assert adapted.plan.instances == adapted.start.instances, "the next attempt succeeds"


def state_of(adapted: Adapted) -> dict[str, Any]:
    """Return everything that a transition changes."""
    core, executor = adapted.steps.core, adapted.steps.executor
    gauges = [line for line in adapted.built.metrics.render().decode().splitlines() if "jaxserve_plan_version" in line]
    return {
        "plan": adapted.plan,
        "blocks": [id(loaded) for loaded in executor.blocks],
        "freed": [leaf.is_deleted() for loaded in executor.blocks for leaf in loaded.leaves],
        "segments": (executor.pools.segments, executor.pools.nbytes),
        "pages": core.scheduler.pages.num_pages,
        "ledger": dict(adapted.ledger.entries),
        "names": (core.salt, core.plan_fields),
        "shown": (core.snapshot.plan_version, core.snapshot.layers_by_precision, core.snapshot.kv_pages_total, gauges),
    }


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        *[(change, broken) for change in ("swap", "grow", "shrink") for broken in ("use", "replan")],
        ("grow", "extend"),
    ],
)
def test_commit_failing_halfway_is_undone(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, change: str, broken: str
) -> None:
    core, p, still, tokens = adapted.steps.core, prompt(31, 60), {}, {}
    first = adapted.add(p, GREEDY)
    adapted.run(still)
    before, replan = state_of(adapted), core.replan

    def fail(*args: Any) -> None:
        monkeypatch.undo()
        if broken == "replan":
            replan(*args)
        raise MemoryError("none left")

    owner, name = {
        "use": (adapted.actuator.instance, "use"),
        "replan": (core, "replan"),
        "extend": (adapted.steps.executor.pools, "extend"),
    }[broken]
    wanted = target_of(change, adapted.plan)
    monkeypatch.setattr(owner, name, fail)
    request = adapted.add(p, GREEDY)
    for _ in range(3):
        adapted.step(tokens)
    adapted.begin(wanted)
    while not adapted.settled():
        adapted.step(tokens)
    adapted.run(tokens)
    (outcome,) = [outcome for outcome in adapted.outcomes if outcome.error is not None]
    assert "none left" in outcome.error
    assert state_of(adapted) == before
    assert tokens[request] == still[first]
    assert core.scheduler.pages.used == 0
    adapted.change(wanted)
    assert adapted.plan.instances == wanted.instances, "the next attempt succeeds"


def test_failed_page_move_leaves_pages_in_every_layer(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of the first layer have been copied when those of the second one fail."""
    pools, scheduler = adapted.steps.executor.pools, adapted.steps.core.scheduler
    p, still, tokens, calls = prompt(32, 60), {}, {}, []
    alone = adapted.add(p, GREEDY)
    adapted.run(still)

    def second_call_fails(move: Callable[..., Pool]) -> Callable[..., Pool]:
        def failing(*args: Any) -> Pool:
            calls.append(args)
            if len(calls) == 2:
                raise MemoryError("none left")
            return move(*args)

        return failing

    scheduler.pages.clear_cache()
    filling, last = adapted.add(prompt(33, 200), replace(GREEDY, max_tokens=8)), adapted.add(p, GREEDY)
    while len(tokens.get(filling, ())) < 8:
        adapted.step(tokens)
    scheduler.pages.clear_cache()  # what is in use lies behind what is free
    wrap_move_batch(monkeypatch, pools, second_call_fails)
    adapted.begin(adapted.plan.with_kv_pages("0", 17))
    while not adapted.settled():
        adapted.step(tokens)
    adapted.run(tokens)
    assert len(calls) == 2
    assert "none left" in (adapted.outcomes[-1].error or "")
    assert adapted.plan == adapted.start
    assert tokens[last] == still[alone]


def target_of_both(plan: Plan, precision: str) -> Plan:
    """Return the plan with layer 1 of all instances in a precision."""
    return in_all_instances(plan, lambda instance: instance.with_precisions({"layers.1": precision}))


def test_unreadable_parameters_leave_the_previous_plan_in_force(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = build(EngineConfig(model=tiny_model, warmup=False, **(OPTIONS | {"dp": 2, "memory_gb": 8})))
    adapted, tokens = Adapted(built), {}
    full, small = (target_of_both(adapted.start, precision) for precision in ("float32", "int4"))
    adapted.change(small)
    assert [outcome.error for outcome in adapted.outcomes] == [None, None]
    adapted.outcomes.clear()
    start, done = adapted.plan, adapted.ended("done")
    entries, loaded_blocks = (
        dict(adapted.ledger.entries),
        [steps.executor.blocks[2] for steps in built.instances],
    )

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(5, "Input/output error")

    wrap_block_reads(monkeypatch, adapted.store, lambda read: fail)
    requests = [adapted.add(prompt(seed, 40), GREEDY) for seed in (35, 36)]
    adapted.run(tokens, [full])
    adapted.wait()
    assert ["Input/output error" in (outcome.error or "") for outcome in adapted.outcomes] == [True, True]
    assert (adapted.ended("failed"), adapted.ended("done")) == (2, done)
    assert "the plan stays in force: instance 0: " in caplog.text
    assert adapted.plan == start
    assert [
        steps.executor.blocks[2] is loaded for steps, loaded in zip(built.instances, loaded_blocks, strict=True)
    ] == [True, True]
    assert not any(leaf.is_deleted() for loaded in loaded_blocks for leaf in loaded.leaves)
    assert adapted.ledger.entries == entries
    assert [len(tokens[request]) for request in requests] == [60, 60]
    monkeypatch.undo()
    adapted.change(full)
    assert adapted.plan.instances == full.instances, "the next attempt succeeds"
    assert {precision for _, precision, _ in references_in(adapted.store)} == {"float32"}
    adapted.close()
    built.close()


@pytest.mark.parametrize("patience", [SHRINK_PATIENCE, 0.0])
def test_shrink_waits_for_pages_in_use_until_patience_ends(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """Steps have taken pages since the decision. The actuator's patience is endless or zero."""
    monkeypatch.setattr(reconfigure, "SHRINK_PATIENCE", 1000 * patience)
    before, scheduler, tokens, tries = state_of(adapted), adapted.steps.core.scheduler, {}, []
    shrink = scheduler.shrink

    def tried(*args: Any) -> None:
        tries.append(scheduler.pages.available)
        shrink(*args)

    monkeypatch.setattr(scheduler, "shrink", tried)
    requests = [adapted.add(prompt(seed, 100), GREEDY) for seed in (41, 42, 43)]
    while scheduler.pages.used < 20:
        adapted.step(tokens)
    wanted = adapted.plan.with_kv_pages("0", 20)
    adapted.begin(wanted)
    while not tries:
        adapted.step(tokens)
    assert tries[0] < 21
    assert state_of(adapted) == before
    adapted.run(tokens)
    adapted.wait()
    (outcome,) = adapted.outcomes
    assert [len(tokens[request]) for request in requests] == [60, 60, 60]
    if patience:
        assert (outcome.error, adapted.plan.instances) == (None, wanted.instances)
        assert len(tries) > 1
    else:
        assert outcome.error == f"PagesInUse: 41 pages cannot shrink by 21: only {tries[0]} are not in use"
        assert (len(tries), state_of(adapted)) == (1, before)


@pytest.mark.parametrize("change", ["swap", "shrink"])
def test_failed_freeing_leaves_the_new_plan_in_force(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    ledgers, tokens, failed = adapted.built.resolved.ledgers, {}, []
    ledger, wanted = ledgers[0], target_of(change, adapted.plan)
    entries, update = ledger.entries, ledgers.update

    def failing(owner: str, entries: DeviceEntries) -> None:
        if adapted.plan.instances == wanted.instances:
            failed.append(threading.current_thread())
            raise MemoryBudgetError("less than there was")
        update(owner, entries)

    monkeypatch.setattr(ledgers, "update", failing)
    request = adapted.add(prompt(34, 60), GREEDY)
    adapted.commit_behind_a_step(wanted, tokens)
    while not adapted.settled():
        adapted.step(tokens)
    adapted.run(tokens)
    (thread,) = failed
    assert thread is not threading.current_thread(), "what takes long is not done between steps"
    assert [outcome.error for outcome in adapted.outcomes] == [None], "what is in force has not failed"
    assert adapted.plan.instances == wanted.instances
    assert len(tokens[request]) == 60
    assert "what it replaced may not have been freed" in caplog.text
    assert ledger.entries == entries
    monkeypatch.undo()
    adapted.change(adapted.start)
    assert adapted.plan.instances == adapted.start.instances
    assert ledger.entries == entries


def test_failed_segment_allocation_frees_the_segments_made_before(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pools_of("segments"):
        built = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
        adapted = Adapted(built)
        pools, entries, made = adapted.steps.executor.pools, dict(adapted.ledger.entries), []
        bytes_held = pools.nbytes

        def second_call_fails(make: Callable[[int], Pool]) -> Callable[[int], Pool]:
            def failing(pages: int) -> Pool:
                made.append(make(pages))
                if len(made) > 1:
                    raise MemoryError("none left")
                return made[-1]

            return failing

        wrap_pool_maker(monkeypatch, pools, 1, second_call_fails)
        adapted.change(adapted.plan.with_kv_pages("0", 81))
        assert "none left" in (adapted.outcomes[-1].error or "")
        assert adapted.plan == adapted.start
        assert (pools.nbytes, adapted.ledger.entries) == (bytes_held, entries)
        assert made[0][0].is_deleted()
        monkeypatch.undo()
        adapted.change(adapted.plan.with_kv_pages("0", 81))
        assert pools.nbytes == 81 * page_bytes(built.resolved)
        adapted.close()
        assert pools.nbytes == bytes_held
        built.close()


def test_transition_beyond_the_ledgers_budget_is_not_started(adapted: Adapted) -> None:
    ledger, small = adapted.ledger, with_layer_precisions(adapted.plan, ("int4",) * 3)
    adapted.change(small)
    budget, ledger.budget = ledger.budget, ledger.used
    adapted.change(adapted.start)
    ledger.budget = budget
    assert "more than the budget" in (adapted.outcomes[-1].error or "")
    assert adapted.plan.instances == small.instances
