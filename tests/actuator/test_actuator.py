"""Transitions while requests run: nothing is lost, mixed up or compiled, and what fails leaves no trace."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from jax import Array

from jaxserve.checkpoint import Checkpoint
from jaxserve.control.diff import diff
from jaxserve.control.plan import Plan
from jaxserve.core.config import EngineConfig, ModelConfig
from jaxserve.core.errors import MemoryBudgetError
from jaxserve.core.sampling import SamplingParams
from jaxserve.engine.client import TokensPrompt
from jaxserve.engine.sync_engine import SyncEngine
from jaxserve.executor.blocks import Row
from jaxserve.executor.pools import Growth
from jaxserve.factory import Built, build
from jaxserve.kernels import Pool
from jaxserve.kernels.native import pool as native
from jaxserve.memory_plan import COPY_SHARES
from jaxserve.resolution import resolve
from tests.actuator.adapted import PATIENCE, Adapted
from tests.actuator.mixed import MixedReference

OPTIONS = {
    "load_format": "dummy",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 4 + 32,
    "memory_gb": 4,
    "kv_pages": 40,
    "max_kv_pages": 80,
    "max_model_len": 256,
    "policy": "manual",
    "variants": ("int8", "int4"),
}
PRECISIONS = ("float32", "int8", "int4")
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 499, length).tolist())


def mixture(plan: Plan, precisions: tuple[str, ...]) -> Plan:
    return plan.with_precisions(0, {f"layers.{layer}": precision for layer, precision in enumerate(precisions)})


@contextmanager
def pools_of(kind: str) -> Iterator[None]:
    """Pools that take memory page by page, where the machine has such, or in segments, as on GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "segments":
            patch.setattr(native, "supported", lambda: False)
        yield


@pytest.fixture(scope="module", autouse=True)
def many_transitions_in_an_answer() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COPY_SHARES, "cpu", 1.0)
        yield


@pytest.fixture(scope="module", params=["elastic", "segments"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def built(tiny_model: Path, kind: str) -> Iterator[Built]:
    with pools_of(kind):
        built = build(EngineConfig(model=tiny_model, **OPTIONS))
    yield built
    built.close()


@pytest.fixture
def adapted(built: Built, kind: str) -> Iterator[Adapted]:
    with pools_of(kind):
        adapted = Adapted(built)
        yield adapted
        adapted.close()


@pytest.fixture(scope="module")
def mixed(tiny_model: Path) -> MixedReference:
    return MixedReference(tiny_model, PRECISIONS)


def check_tokens(
    adapted: Adapted,
    mixed: MixedReference,
    p: tuple[int, ...],
    request: str,
    tokens: tuple,
    params: SamplingParams = GREEDY,
) -> None:
    """Every token is the likeliest one by the precisions that were in force at its step."""
    assert len(tokens) == params.max_tokens
    whole, runs = (*p, *tokens), adapted.runs[request]
    ends = [*(run.known for run in runs[1:]), len(whole)]
    for run, end in zip(runs, ends, strict=True):
        logits = mixed.logits(whole[: end - 1], run.in_force[: end - 1])[run.known - 1 :]
        chosen = logits[np.arange(end - run.known), list(whole[run.known : end])]
        np.testing.assert_allclose(chosen, logits.max(-1), atol=2e-4)


def test_a_layer_changes_its_precision_in_the_middle_of_an_answer(adapted: Adapted, mixed: MixedReference) -> None:
    compiled = dict(adapted.built.compilations.counts)
    tokens: dict[str, tuple[int, ...]] = {}
    p = prompt(1, 50)
    long = replace(GREEDY, max_tokens=180)  # for an actuator that gets little of the machine
    request = adapted.add(p, long)
    adapted.run(tokens, [mixture(adapted.plan, ("int4", "float32", "int8"))])
    assert adapted.built.compilations.counts == compiled
    check_tokens(adapted, mixed, p, request, tokens[request], long)
    (run,) = adapted.runs[request]
    assert len({tuple(sorted(precisions.items())) for precisions in run.in_force}) > 1, "it did change"
    assert [outcome.error for outcome in adapted.outcomes] == [None, None]


targets = st.lists(
    st.tuples(st.tuples(*[st.sampled_from(PRECISIONS)] * 3), st.integers(25, 80)), min_size=1, max_size=12
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(targets, st.integers(1, 6), st.integers(0, 2**16))
def test_any_sequence_of_plans_under_load(
    adapted: Adapted, mixed: MixedReference, wanted: list, requests: int, seed: int
) -> None:
    rng, tokens = np.random.default_rng(seed), {}
    prompts = {}
    for number in range(requests):
        p = prompt(seed + number, int(rng.integers(1, 120)))
        prompts[adapted.add(p, GREEDY)] = p
    plans = [mixture(adapted.plan, precisions).with_kv_pages(0, pages) for precisions, pages in wanted]
    adapted.run(tokens, plans)
    for request, p in prompts.items():
        check_tokens(adapted, mixed, p, request, tokens[request])
    errors = {outcome.error for outcome in adapted.outcomes if outcome.error}
    assert all("pages" in error or "budget" in error for error in errors), errors  # in use; beyond the budget
    scheduler = adapted.steps.core.scheduler
    assert scheduler.pages.used == 0
    assert scheduler.idle


def test_tokens_do_not_change_where_only_pages_do(adapted: Adapted) -> None:
    prompts = [prompt(seed, 30 + 10 * seed) for seed in range(6)]
    still: dict[str, tuple[int, ...]] = {}
    ids = [adapted.add(p, GREEDY) for p in prompts]
    adapted.run(still)
    moving: dict[str, tuple[int, ...]] = {}
    others = [adapted.add(p, GREEDY) for p in prompts]
    adapted.run(moving, [adapted.plan.with_kv_pages(0, pages) for pages in (80, 44, 61, 40, 72)])
    assert [moving[i] for i in others] == [still[i] for i in ids]


def test_what_is_computed_after_a_change_of_pages_alone_is_shared(adapted: Adapted) -> None:
    p, tokens = prompt(21, 50), {}
    request = adapted.add(p, GREEDY)
    for _ in range(5):
        adapted.step(tokens)
    assert len(tokens[request]) < 14, "the fifth page is not full yet"
    adapted.run(tokens, [adapted.plan.with_kv_pages(0, 60)])
    adapted.add((*p, *tokens[request]), SamplingParams(max_tokens=1))
    while not (outputs := adapted.engine.step()):
        pass
    assert outputs[0].num_cached_tokens == 96, "all full pages of 110 tokens"
    assert adapted.plan.instances[0].kv_pages == 60


def test_a_quantised_layer_is_used_where_it_is_kept(adapted: Adapted) -> None:
    """The host is the device: nothing is copied, and what a layer leaves behind is there for the next time."""
    executor, used = adapted.steps.executor, []
    for _ in range(2):
        adapted.change(mixture(adapted.plan, ("float32", "int4", "float32")))
        used.append(executor.rows[2])
        adapted.change(adapted.start)
    assert [row.owned for row in used] == [(), ()]
    assert [id(leaf) for leaf in used[0].leaves] == [id(leaf) for leaf in used[1].leaves]
    assert not any(leaf.is_deleted() for leaf in used[0].leaves)
    assert executor.rows[2].owned


@pytest.mark.parametrize("start", ["float32", "int8"])
def test_every_byte_of_a_layer_is_counted_once(tiny_model: Path, start: str) -> None:
    """What runs is among the weights, what is kept beside it among the variants: also where layers start with fewer
    bits, which are not loaded a second time to be kept.
    """
    built = build(EngineConfig(model=tiny_model, warmup=False, layer_precision=f"0-1:{start}", **OPTIONS))
    adapted, entries = Adapted(built), built.resolved.ledger.entries
    mixtures = [(start, start, "float32"), ("int4", start, "int8"), ("int4",) * 3, ("float32",) * 3]
    for precisions in [*mixtures, mixtures[0]]:
        adapted.change(mixture(adapted.plan, precisions))
        rows = adapted.steps.executor.rows
        running = {id(leaf): leaf.nbytes for row in rows for leaf in row.leaves}
        kept = {id(leaf): leaf.nbytes for leaf in adapted.kept_arrays()}
        assert len(adapted.kept) == 6
        assert entries["weights"] == sum(running.values())
        assert entries["weights"] + entries["variants"] == sum((running | kept).values())
        assert all(row.owned == (() if row.precision in ("int8", "int4") else row.leaves) for row in rows)
    assert [outcome.error for outcome in adapted.outcomes if outcome.error] == []
    adapted.close()
    built.close()


@pytest.mark.parametrize("tp", [1, 2])
def test_full_precision_is_there_once_on_its_way_back(tiny_model: Path, tp: int) -> None:
    """What has been read becomes the row. Where it is split there is room for both, which `Adapted` looks at."""
    options = {"tp": tp, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 32, "memory_gb": 8, "warmup": False}
    built = build(EngineConfig(model=tiny_model, **(OPTIONS | options)))
    adapted, source = Adapted(built), built.actuator._source
    adapted.change(mixture(adapted.plan, ("float32", "int4", "float32")))
    read, found = source.parameters, []

    def parameters(block: str, precision: str) -> Mapping[str, Any]:
        found.append(read(block, precision))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "parameters", parameters)
        adapted.change(adapted.start)
    assert [outcome.error for outcome in adapted.outcomes] == [None, None]
    if tp == 1:
        (arrays,) = found
        leaves = adapted.steps.executor.rows[2].leaves
        assert {leaf.unsafe_buffer_pointer() for leaf in leaves} == {array.ctypes.data for array in arrays.values()}
    adapted.close()
    built.close()


def test_snapshots_and_the_ledger_follow_the_plan(adapted: Adapted) -> None:
    core, ledger = adapted.steps.core, adapted.built.resolved.ledger
    full = dict(ledger.entries)
    freed = adapted.resources.kv_capacity(mixture(adapted.plan, ("int4",) * 3).instances[0])
    adapted.change(mixture(adapted.plan, ("int4",) * 3).with_kv_pages(0, freed))
    assert core.snapshot.layers_by_precision == {"int4": 3}
    assert core.snapshot.kv_pages_total == freed - 1
    assert core.snapshot.plan_version == adapted.plan.version
    assert core.snapshot.weight_bytes == sum(row.nbytes for row in adapted.steps.executor.rows)
    assert ledger.entries["weights"] < full["weights"]
    assert ledger.entries["weights"] == core.snapshot.weight_bytes
    adapted.change(adapted.start)
    assert ledger.entries == full


@pytest.mark.parametrize("dp", [1, 2])
def test_pools_grow_by_what_the_layers_gave_to_the_page(tiny_model: Path, dp: int) -> None:
    """All of a layer where the one that replaces it is used where it is kept; else what that takes less."""
    room = {"max_kv_pages": None, "max_num_seqs": 8, "max_num_batched_tokens": 8 + 32}
    resolved = resolve(EngineConfig(model=tiny_model, dp=dp, **(OPTIONS | room)))
    resources, start = resolved.resources(copy_rate=1e9), resolved.plan
    small = replace(start, instances=mixture(start, ("int4",) * 3).instances[:1] * dp)

    def beside_pages(plan: Plan) -> int:
        entries = resolved.ledger_entries(plan)
        return sum(entries.values()) - entries["kv"]

    freed, sizes = beside_pages(start) - beside_pages(small), resolved.layer_bytes
    copied = 0 if dp == 1 else 3 * sizes["layers.0", "int4"]
    assert freed == 3 * sizes["layers.0", "float32"] - copied
    assert resources.kv_capacity(start.instances[0]) == 41
    assert resources.kv_capacity(small.instances[0]) == 41 + freed // resources.page_bytes[0]
    assert resources.most_pages == resources.kv_capacity(small.instances[0]), "and have room for as many"


@pytest.mark.parametrize("broken", ["prepare", "replace", "shrink_pools"])
def test_what_fails_leaves_the_plan_before_it_in_force(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    executor, start = adapted.steps.executor, adapted.plan
    failed, done = adapted.ended("failed"), adapted.ended("done")
    entries, rows = dict(adapted.built.resolved.ledger.entries), list(executor.rows)

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(executor, broken, fail)
    p, tokens = prompt(7, 60), {}
    request = adapted.add(p, GREEDY)
    wanted = start.with_kv_pages(0, 30) if broken == "shrink_pools" else mixture(start, ("int4",) * 3)
    adapted.run(tokens, [wanted])
    adapted.wait()
    (outcome,) = [outcome for outcome in adapted.outcomes if outcome.error is not None]
    assert "none left" in outcome.error
    assert adapted.plan.instances == start.instances
    assert [row is other for row, other in zip(executor.rows, rows, strict=True)] == [True] * len(rows)
    assert adapted.built.resolved.ledger.entries == entries
    assert len(tokens[request]) == 60
    assert adapted.steps.core.scheduler.pages.num_pages == 41
    assert (adapted.ended("failed"), adapted.ended("done")) == (failed + 1, done)
    assert f"plan {start.version} stays in force" in caplog.text
    assert "none left" in caplog.text
    monkeypatch.undo()
    adapted.change(wanted)
    assert (adapted.ended("failed"), adapted.ended("done")) == (failed + 1, done + len(adapted.outcomes) - 1)
    assert adapted.plan.instances == wanted.instances, "the next attempt succeeds"


def target_of(change: str, plan: Plan) -> Plan:
    """A plan that one transition leads to."""
    return {
        "swap": plan.with_precisions(0, {"layers.1": "int4"}),
        "swap back": plan.with_precisions(0, {"layers.1": "float32"}),
        "grow": plan.with_kv_pages(0, 61),
        "shrink": plan.with_kv_pages(0, 30),
    }[change]


def state_of(adapted: Adapted) -> dict[str, Any]:
    """What a transition changes."""
    core, executor = adapted.steps.core, adapted.steps.executor
    gauges = [line for line in adapted.built.metrics.render().decode().splitlines() if "jaxserve_plan_version" in line]
    return {
        "plan": adapted.plan,
        "rows": [id(row) for row in executor.rows],
        "freed": [leaf.is_deleted() for row in executor.rows for leaf in row.leaves],
        "segments": (executor.pools.segments, executor.pools.nbytes),
        "pages": core.scheduler.pages.num_pages,
        "ledger": dict(adapted.built.resolved.ledger.entries),
        "names": (core.salt, core.static),
        "shown": (core.snapshot.plan_version, core.snapshot.layers_by_precision, core.snapshot.kv_pages_total, gauges),
    }


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        *[(change, broken) for change in ("swap", "grow", "shrink") for broken in ("describe", "replan")],
        ("grow", "extend"),
    ],
)
def test_a_commit_that_fails_halfway_is_taken_back(
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
        "describe": (adapted.actuator, "_describe"),
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


def test_pages_that_cannot_be_moved_stay_in_every_layer(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's are copied when the second one's fail."""
    pools, scheduler = adapted.steps.executor.pools, adapted.steps.core.scheduler
    p, still, tokens, calls = prompt(32, 60), {}, {}, []
    alone = adapted.add(p, GREEDY)
    adapted.run(still)
    move = pools._move_batch

    def failing(*args: Any) -> Pool:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("none left")
        return move(*args)

    scheduler.pages.clear_cache()
    filling, last = adapted.add(prompt(33, 200), replace(GREEDY, max_tokens=8)), adapted.add(p, GREEDY)
    while len(tokens.get(filling, ())) < 8:
        adapted.step(tokens)
    scheduler.pages.clear_cache()  # what is in use lies behind what is free
    monkeypatch.setattr(pools, "_move_batch", failing)
    adapted.begin(adapted.plan.with_kv_pages(0, 17))
    while not adapted.settled():
        adapted.step(tokens)
    adapted.run(tokens)
    assert len(calls) == 2
    assert "none left" in (adapted.outcomes[-1].error or "")
    assert adapted.plan == adapted.start
    assert tokens[last] == still[alone]


def target_of_both(plan: Plan, precision: str) -> Plan:
    """Layer 1 of two instances in a precision."""
    return plan.with_precisions(0, {"layers.1": precision}).with_precisions(1, {"layers.1": precision})


@pytest.mark.parametrize("to", ["int4", "float32"])
def test_parameters_that_cannot_be_read_leave_the_plan_before_them_in_force(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, to: str
) -> None:
    """Of two instances, where a quantised layer is copied too."""
    built = build(EngineConfig(model=tiny_model, warmup=False, **(OPTIONS | {"dp": 2, "memory_gb": 8})))
    adapted, tokens = Adapted(built), {}
    full, small = (target_of_both(adapted.start, precision) for precision in ("float32", "int4"))
    wanted = small if to == "int4" else full
    if to == "float32":
        adapted.change(small)
        assert [outcome.error for outcome in adapted.outcomes] == [None, None]
        adapted.outcomes.clear()
    start, done = adapted.plan, adapted.ended("done")
    entries, rows = dict(built.resolved.ledger.entries), [steps.executor.rows[2] for steps in built.instances]

    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(adapted.actuator._source, "parameters", fail)
    requests = [adapted.add(prompt(seed, 40), GREEDY) for seed in (35, 36)]
    adapted.run(tokens, [wanted])
    adapted.wait()
    (outcome,) = adapted.outcomes
    assert "Input/output error" in (outcome.error or "")
    assert (adapted.ended("failed"), adapted.ended("done")) == (1, done)
    assert f"plan {start.version} stays in force" in caplog.text
    assert adapted.plan == start
    assert [steps.executor.rows[2] is row for steps, row in zip(built.instances, rows, strict=True)] == [True, True]
    assert not any(leaf.is_deleted() for row in rows for leaf in row.leaves)
    assert built.resolved.ledger.entries == entries
    assert [len(tokens[request]) for request in requests] == [60, 60]
    monkeypatch.undo()
    adapted.change(wanted)
    assert adapted.plan.instances == wanted.instances, "the next attempt succeeds"
    assert [row.owned for row in rows] == [row.leaves for row in rows], "each was a copy"
    assert all(leaf.is_deleted() for row in rows for leaf in row.leaves)
    adapted.close()
    built.close()


def commit_behind_a_step(adapted: Adapted, wanted: Plan, tokens: dict[str, tuple[int, ...]]) -> None:
    """Has a plan put in force while a step is on the device that is not fetched before the next one."""
    for _ in range(3):
        adapted.step(tokens)
    assert adapted.steps.in_flight
    adapted.begin(wanted)
    deadline = time.monotonic() + PATIENCE
    while adapted.plan.instances != wanted.instances:
        assert time.monotonic() < deadline, "the actuator makes no progress"
        time.sleep(0.001)
    with adapted.engine._turn:  # the commit has ended
        assert adapted.steps.in_flight


@pytest.mark.parametrize(("change", "steps"), [("swap", 1), ("shrink", 2)])
def test_what_is_replaced_is_freed_after_the_steps_that_use_it(adapted: Adapted, change: str, steps: int) -> None:
    """To shrink, after the step too that the device runs once it has given the memory back."""
    adapted.change(adapted.plan.with_kv_pages(0, 80))
    ledger, old, tokens = adapted.built.resolved.ledger, adapted.steps.executor.rows[2], {}
    entries, wanted = dict(ledger.entries), target_of(change, adapted.plan)
    less = entries | adapted.built.resolved.ledger_entries(wanted)
    assert old.owned == old.leaves, "it is in nobody else's use"
    request = adapted.add(prompt(37, 60), GREEDY)
    commit_behind_a_step(adapted, wanted, tokens)
    for _ in range(steps):
        assert not adapted.settled()
        assert not any(leaf.is_deleted() for leaf in old.leaves)
        assert ledger.entries == entries
        adapted.step(tokens)
    adapted.wait()
    assert [leaf.is_deleted() for leaf in old.leaves] == [change == "swap"] * len(old.leaves)
    assert ledger.entries == less
    adapted.run(tokens)
    assert len(tokens[request]) == 60


@pytest.mark.parametrize("change", ["swap", "shrink"])
def test_where_freeing_fails_the_plan_is_in_force_and_steps_go_on(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    ledger, tokens, failed = adapted.built.resolved.ledger, {}, []
    entries, wanted = dict(ledger.entries), target_of(change, adapted.plan)
    update = ledger.update

    def failing(entries: Mapping[str, int]) -> None:
        if adapted.plan.instances == wanted.instances:
            failed.append(threading.current_thread())
            raise MemoryBudgetError("less than there was")
        update(entries)

    monkeypatch.setattr(ledger, "update", failing)
    request = adapted.add(prompt(34, 60), GREEDY)
    commit_behind_a_step(adapted, wanted, tokens)
    while not adapted.settled():
        adapted.step(tokens)
    adapted.run(tokens)
    assert failed == [threading.current_thread()], "where steps are made"
    assert [outcome.error for outcome in adapted.outcomes] == [None], "what is in force has not failed"
    assert adapted.plan.instances == wanted.instances
    assert len(tokens[request]) == 60
    assert "may not be freed" in caplog.text
    assert ledger.entries == entries
    monkeypatch.undo()
    adapted.change(adapted.start)
    assert adapted.plan.instances == adapted.start.instances
    assert ledger.entries == entries


def test_segments_that_cannot_be_made_leave_nothing_behind(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pools_of("segments"):
        built = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
        adapted = Adapted(built)
        pools, entries, made = adapted.steps.executor.pools, dict(built.resolved.ledger.entries), []
        first, second, third = pools._make
        bytes_held = pools.nbytes

        def failing(pages: int) -> Pool:
            made.append(second(pages))
            if len(made) > 1:
                raise MemoryError("none left")
            return made[-1]

        monkeypatch.setattr(pools, "_make", (first, failing, third))
        adapted.change(adapted.plan.with_kv_pages(0, 81))
        assert "none left" in (adapted.outcomes[-1].error or "")
        assert adapted.plan == adapted.start
        assert (pools.nbytes, built.resolved.ledger.entries) == (bytes_held, entries)
        assert made[0][0].is_deleted()
        monkeypatch.undo()
        adapted.change(adapted.plan.with_kv_pages(0, 81))
        assert pools.nbytes == 81 * built.resolved.stages[0].page
        adapted.close()
        assert pools.nbytes == bytes_held
        built.close()


def test_a_plan_that_the_ledger_has_no_room_for_is_not_begun(adapted: Adapted) -> None:
    ledger, small = adapted.built.resolved.ledger, mixture(adapted.plan, ("int4",) * 3)
    adapted.change(small)
    budget, ledger.budget = ledger.budget, ledger.used
    adapted.change(adapted.start)
    ledger.budget = budget
    assert "more than the budget" in (adapted.outcomes[-1].error or "")
    assert adapted.plan.instances == small.instances


class Held:
    """The way to a plan, stopped in one of its transition's phases until it is let go."""

    def __init__(self, built: Built, target: Plan, phase: str, monkeypatch: pytest.MonkeyPatch):
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.phase = phase
        self.prepared: list[Array] = []
        (steps,), actuator = built.instances, built.actuator
        assert actuator is not None
        prepare, make, call = steps.executor.prepare, steps.executor.pools.prepare, steps.call

        def prepare_slowly(*args: Any, copied: Callable[[int], None]) -> Row:
            def copied_slowly(size: int) -> None:
                self.wait("during the copy")
                copied(size)

            self.wait("before the copy")
            row = prepare(*args, copied=copied_slowly)
            self.prepared += row.leaves
            self.wait("after the copy")
            return row

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
        actuator.start(diff(actuator.plan, target, built.resolved.resources(copy_rate=1e9)))
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
    """A plan from which one transition leads to `target_of` the same plan."""
    return target_of("swap", plan) if change == "swap back" else plan


@pytest.mark.parametrize(("change", "phase"), PHASES)
def test_a_client_that_goes_away_in_any_phase_takes_its_pages_along(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, change: str, phase: str
) -> None:
    tokens: dict[str, tuple[int, ...]] = {}
    wanted = target_of(change, adapted.start)
    adapted.change(origin_of(change, adapted.start))
    gone, stays = (adapted.add(prompt(seed, 40), GREEDY) for seed in (11, 12))
    for _ in range(5):
        adapted.step(tokens)
    held = Held(adapted.built, wanted, phase, monkeypatch)
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
def test_closing_in_any_phase_ends_the_thread_and_frees_what_was_prepared(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, change: str, phase: str
) -> None:
    with pools_of("segments"):
        built = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
    adapted = Adapted(built)
    adapted.change(origin_of(change, adapted.start))
    built.instances[0].wake = lambda: None  # nobody steps any more
    before, wanted = adapted.plan, target_of(change, adapted.start)
    held = Held(built, wanted, phase, monkeypatch)
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
def test_closing_ends_the_thread_though_no_step_follows_the_commit(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, change: str, end: str
) -> None:
    """The step that was dispatched before the commit is never fetched."""
    built = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
    assert built.control is not None
    assert built.actuator is not None
    built.control.close()
    (steps,), actuator = built.instances, built.actuator
    engine = SyncEngine(built.instances, built.info, None, built.clock)
    engine.add(TokensPrompt(prompt(1, 40)), GREEDY)
    for _ in range(3):
        engine.step()
    assert steps.in_flight
    steps.wake = lambda: None  # calls wait for the next step
    start, old = actuator.plan, steps.executor.rows[1]
    wanted = mixture(start, ("int4", "float32", "float32")) if change == "swap" else start.with_kv_pages(0, 30)
    actuator.start(diff(start, wanted, built.resolved.resources(copy_rate=1e9)))
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
    assert actuator.plan.instances == wanted.instances, "it is committed"
    closing = threading.Thread(target=built.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert all(leaf.is_deleted() for leaf in old.leaves)
    assert all(leaf.is_deleted() for row in steps.executor.rows for leaf in row.owned)


@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 2}, {"dp": 2}])
def test_layers_that_are_split_staged_or_replicated_change_too(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, degrees: dict[str, int]
) -> None:
    """Every instance to another plan and back, in the middle of answers, without compiling.

    Each quantised layer is read once for all instances, beside the one that each stage is warmed with.
    """
    reads: Counter[str] = Counter()
    variant = Checkpoint.variant

    def counted(checkpoint: Checkpoint, block: str, precision: str, physical: ModelConfig) -> dict[str, Any]:
        reads[block] += precision == "int4"
        return variant(checkpoint, block, precision, physical)

    monkeypatch.setattr(Checkpoint, "variant", counted)
    options = OPTIONS | {"memory_gb": 8, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 32, "variants": ("int4",)}
    built = build(EngineConfig(model=tiny_model, **(options | degrees)))
    adapted, compiled = Adapted(built), dict(built.compilations.counts)
    start, other = adapted.start, adapted.start
    layers = [
        [block.block for block in stage.blocks if block.block.startswith("layers.")]
        for instance in start.instances
        for stage in instance.stages
    ]
    once = Counter({block for stage in layers for block in stage})
    assert +reads == once + Counter(stage[0] for stage in layers)
    reads.clear()
    for number in range(len(start.instances)):
        other = other.with_precisions(number, {f"layers.{layer}": "int4" for layer in range(3)})
        other = other.with_kv_pages(number, 55)
    tokens: dict[str, tuple[int, ...]] = {}
    ids = [adapted.add(prompt(seed, 40), GREEDY) for seed in range(6)]
    adapted.run(tokens, [other, start])
    assert {len(tokens[request]) for request in ids} == {60}
    assert [outcome.error for outcome in adapted.outcomes if outcome.error] == []
    adapted.close()
    assert adapted.plan.instances == start.instances
    assert +reads == Counter(), "what is kept is copied"
    assert built.compilations.counts == compiled
    for steps in built.instances:
        assert steps.core.snapshot.layers_by_precision == {"float32": 3}
        assert steps.core.scheduler.pages.num_pages == 41
        assert steps.core.scheduler.pages.used == 0
    built.close()
