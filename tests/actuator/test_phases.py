"""Clients that leave, and engines that are closed, in the middle of a transition."""

import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from jax import Array

from jaxserve.build import BuiltEngine, build
from jaxserve.control.plan import Plan
from jaxserve.core.config import EngineConfig
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.executor.blocks import LoadedBlock
from jaxserve.executor.pools import Growth
from tests.actuator.adapted import (
    GREEDY,
    OPTIONS,
    PATIENCE,
    Adapted,
    pools_of,
    prompt,
    start_transitions,
    target_of,
    with_layer_precisions,
)


class HeldTransition:
    """A transition that stops in one of its phases until the test lets it continue."""

    def __init__(self, built: BuiltEngine, target: Plan, phase: str, monkeypatch: pytest.MonkeyPatch):
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.phase = phase
        self.prepared: list[Array] = []
        (steps,) = built.instances
        prepare, make, call = steps.executor.prepare, steps.executor.pools.prepare, steps.call

        def prepare_slowly(*args: Any, copied: Callable[[int], None], **options: Any) -> LoadedBlock:
            def copied_slowly(size: int) -> None:
                self.wait("during the copy")
                copied(size)

            self.wait("before the copy")
            loaded = prepare(*args, copied=copied_slowly, **options)
            self.prepared += loaded.leaves
            self.wait("after the copy")
            return loaded

        def make_slowly(pages: int) -> Growth:
            self.wait("before the copy")
            growth = make(pages)
            self.prepared += chain.from_iterable(growth)
            self.wait("after the copy")
            return growth

        def call_late(function: Callable[[], None]) -> None:
            self.wait("before the commit")
            call(function)

        monkeypatch.setattr(steps.executor, "prepare", prepare_slowly)
        monkeypatch.setattr(steps.executor.pools, "prepare", make_slowly)
        monkeypatch.setattr(steps, "call", call_late)
        start_transitions(built, target)
        assert self.reached.wait(PATIENCE)

    def wait(self, phase: str) -> None:
        if phase == self.phase:
            self.reached.set()
            assert self.go_on.wait(PATIENCE)


PHASES = [
    ("swap", "before the copy"),
    ("swap", "after the copy"),
    ("swap", "before the commit"),
    ("swap back", "before the copy"),
    ("swap back", "during the copy"),
    ("swap back", "after the copy"),
    ("swap back", "before the commit"),
    ("grow", "before the copy"),
    ("grow", "after the copy"),
    ("grow", "before the commit"),
    ("shrink", "before the commit"),
]


def origin_of(change: str, plan: Plan) -> Plan:
    """Return a plan from which one transition leads to `target_of` the same plan."""
    return target_of("swap", plan) if change == "swap back" else plan


@pytest.mark.parametrize(("change", "phase"), PHASES)
def test_abort_in_any_phase_of_a_transition_frees_the_requests_pages(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, change: str, phase: str
) -> None:
    tokens: dict[str, tuple[int, ...]] = {}
    wanted = target_of(change, adapted.start)
    adapted.change(origin_of(change, adapted.start))
    gone, stays = (adapted.add(prompt(seed, 40), GREEDY) for seed in (11, 12))
    for _ in range(5):
        adapted.step(tokens)
    held = HeldTransition(adapted.built, wanted, phase, monkeypatch)
    adapted.engine.abort(gone)
    adapted.step(tokens)
    held.go_on.set()
    adapted.run(tokens)
    adapted.wait()
    monkeypatch.undo()
    assert adapted.plan.instances == wanted.instances
    assert not any(array.is_deleted() for array in held.prepared if change != "grow"), "pools are donated to steps"
    assert len(tokens[stays]) == GREEDY.max_tokens
    assert adapted.steps.core.scheduler.pages.used == 0


@pytest.mark.parametrize(("change", "phase"), PHASES)
def test_close_in_any_phase_of_a_transition_frees_prepared_arrays(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, change: str, phase: str
) -> None:
    with pools_of("segments"):
        built = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
    adapted = Adapted(built)
    adapted.change(origin_of(change, adapted.start))
    built.instances[0].wake = lambda: None  # nobody steps any more
    before, wanted = adapted.plan, target_of(change, adapted.start)
    held = HeldTransition(built, wanted, phase, monkeypatch)
    closing = threading.Thread(target=built.close)
    closing.start()
    held.go_on.set()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert bool(held.prepared) == (change != "shrink")
    assert all(array.is_deleted() for array in held.prepared)
    adapted.outcomes.clear()
    assert adapted.settled()
    (outcome,) = adapted.outcomes
    assert "Cancelled" in (outcome.error or "")
    assert adapted.plan == before


@pytest.mark.parametrize("end", ["a stop", "a failure"])
@pytest.mark.parametrize("change", ["swap", "shrink"])
def test_close_after_a_commit_without_a_next_step_ends_the_thread(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, change: str, end: str
) -> None:
    """The step that was dispatched before the commit is never fetched."""
    built = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
    assert built.control is not None
    built.control.close()
    (steps,) = built.instances
    engine = SyncEngine(built.loops, built.info, None, built.clock)
    engine.add(TokensPrompt(prompt(1, 40)), GREEDY)
    for _ in range(3):
        engine.step()
    assert steps.in_flight
    steps.wake = lambda: None  # calls wait for the next step
    start, old = built.in_force.plan, steps.executor.blocks[1]
    wanted = (
        with_layer_precisions(start, ("int4", "float32", "float32"))
        if change == "swap"
        else start.with_kv_pages("0", 30)
    )
    start_transitions(built, wanted)
    deadline = time.monotonic() + PATIENCE
    while not steps.has_calls:
        assert time.monotonic() < deadline, "the actuator makes no progress"
        time.sleep(0.001)
    if end == "a stop":
        steps.run_calls()
    else:
        monkeypatch.setattr(steps.executor, "execute", lambda work: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert built.in_force.plan.instances == wanted.instances, "it is committed"
    closing = threading.Thread(target=built.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert all(leaf.is_deleted() for leaf in old.leaves)
    assert all(leaf.is_deleted() for loaded in steps.executor.blocks for leaf in loaded.leaves)
