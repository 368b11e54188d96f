"""Several instances change at the same time, each with an actuator of its own, and one that fails holds up no other."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.build import build
from jaxserve.control.plan import InstancePlan, Plan
from jaxserve.core.config import EngineConfig
from jaxserve.executor.blocks import LoadedBlock
from tests.actuator.adapted import GREEDY, OPTIONS, PATIENCE, Adapted, in_all_instances, prompt, start_transitions
from tests.support.internals import references_in

SMALL = {f"layers.{layer}": "int4" for layer in range(3)}
TWO = {"dp": 2, "memory_gb": 8, "max_num_seqs": 2, "max_num_batched_tokens": 2 + 32, "variants": ("int4",)}


@pytest.fixture
def adapted(tiny_model: Path) -> Iterator[Adapted]:
    built = build(EngineConfig(model=tiny_model, warmup=False, **(OPTIONS | TWO)))
    yield Adapted(built)
    built.close()


def small(plan: Plan) -> Plan:
    """Return the plan with all layers of all instances in int4, and more pages."""
    return in_all_instances(plan, lambda instance: instance.with_precisions(SMALL).with_kv_pages(55))


def precisions_of(adapted: Adapted) -> list[tuple[str, ...]]:
    """Return the precisions of the loaded layers by instance."""
    return [tuple(loaded.precision for loaded in steps.executor.blocks[1:-1]) for steps in adapted.built.instances]


def test_instance_adapts_while_all_transitions_of_another_fail(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, working = adapted.built.instances
    before = adapted.start.instance("0")

    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(failing.executor, "prepare", fail)
    tokens: dict[str, tuple[int, ...]] = {}
    asked = [adapted.add(prompt(seed, 40), GREEDY) for seed in range(4)]
    adapted.run(tokens, [small(adapted.start), adapted.start, small(adapted.start)])
    adapted.wait()
    assert [len(tokens[request]) for request in asked] == [GREEDY.max_tokens] * 4
    failed = [outcome.transition.instance for outcome in adapted.outcomes if outcome.error]
    assert set(failed) == {"0"}
    assert adapted.plan.instance("0") == before
    assert adapted.plan.instance("1") == small(adapted.start).instance("1")
    assert precisions_of(adapted) == [("float32",) * 3, ("int4",) * 3]
    assert failing.core.snapshot.layers_by_precision == {"float32": 3}
    assert working.core.snapshot.kv_pages_total == 54


def test_instances_that_change_together_give_the_tokens_of_one_that_changes_alone(adapted: Adapted) -> None:
    """Both have the same requests; their plans, ledgers and versions are those of two changes in turn."""
    tokens: dict[str, tuple[int, ...]] = {}
    alone = [adapted.add(prompt(seed, 40), GREEDY) for seed in (1, 1)]
    adapted.run(tokens)
    assert tokens[alone[0]] == tokens[alone[1]]
    adapted.change(small(adapted.start))
    together = [adapted.add(prompt(seed, 40), GREEDY) for seed in (2, 2)]
    adapted.run(tokens)
    assert tokens[together[0]] == tokens[together[1]]
    adapted.change(adapted.start)
    assert [outcome.error for outcome in adapted.outcomes] == [None] * (4 * 4)
    assert adapted.plan.version == adapted.start.version + 4 * 4
    again = [adapted.add(prompt(seed, 40), GREEDY) for seed in (1, 1)]
    adapted.run(tokens)
    assert [tokens[request] for request in again] == [tokens[request] for request in alone]
    ledgers = adapted.built.resolved.ledgers
    assert ledgers[0].entries == ledgers[1].entries


def test_commits_of_two_instances_have_distinct_versions(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second instance commits in the middle of the first one's commit, and does not wait for it."""
    first, second = adapted.built.instances
    replan, threads = first.core.replan, list[threading.Thread]()

    def told_late(*args: object) -> None:
        if not threads:
            threads.append(threading.Thread(target=second.run_calls))
            threads[0].start()
            threads[0].join(PATIENCE)
            assert adapted.plan.version == adapted.start.version + 1
        replan(*args)

    for steps in (first, second):
        steps.wake = lambda: None  # the test runs the calls
    monkeypatch.setattr(first.core, "replan", told_late)
    pages = in_all_instances(adapted.start, lambda instance: instance.with_kv_pages(55))
    start_transitions(adapted.built, pages)
    wait_for_calls(adapted)
    first.run_calls()
    adapted.wait()
    versions = {steps.core.plan_fields.plan_version for steps in (first, second)}
    assert versions == {adapted.start.version + 1, adapted.start.version + 2}
    assert adapted.plan.version == adapted.start.version + 2
    for steps in (first, second):
        steps.wake = steps.run_calls


def wait_for_calls(adapted: Adapted) -> None:
    """Wait until all actuators wait for a moment between two steps."""
    pause, checks = threading.Event(), int(PATIENCE / 0.001)
    for _ in range(checks):
        if all(steps.has_calls for steps in adapted.built.instances):
            return
        pause.wait(0.001)
    raise AssertionError("an actuator makes no progress")


def test_close_cancels_transitions_of_all_instances(adapted: Adapted) -> None:
    """A swap of one instance, a limit on sequences of the other."""
    built, made = adapted.built, list[LoadedBlock]()
    prepare = built.instances[0].executor.prepare

    def noted(*args: object, **options: object) -> LoadedBlock:
        made.append(prepare(*args, **options))
        return made[-1]

    built.instances[0].executor.prepare = noted
    for steps in built.instances:
        steps.wake = lambda: None  # nobody steps any more
    swap: InstancePlan = adapted.start.instance("0").with_precisions(SMALL)
    limited = adapted.start.instance("1").with_max_num_seqs(1)
    start_transitions(built, adapted.start.with_instance(swap).with_instance(limited))
    wait_for_calls(adapted)
    for actuator in built.actuators.values():
        actuator.close()
    assert adapted.settled()
    assert {outcome.transition.instance for outcome in adapted.outcomes} == {"0", "1"}
    assert all("Cancelled" in (outcome.error or "") for outcome in adapted.outcomes)
    assert adapted.plan == adapted.start
    assert made
    assert {precision for _, precision, _ in references_in(adapted.store)} == {"float32"}


def test_commit_that_runs_while_the_engine_closes_is_in_force(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    (steps, _), built = adapted.built.instances, adapted.built
    steps.wake = lambda: None
    replaced, begun, go_on = steps.executor.replace, threading.Event(), threading.Event()

    def replace_slowly(layers: list[LoadedBlock]) -> list[LoadedBlock]:
        begun.set()
        assert go_on.wait(PATIENCE)
        return replaced(layers)

    monkeypatch.setattr(steps.executor, "replace", replace_slowly)
    wanted = adapted.start.with_precisions("0", SMALL)
    start_transitions(built, wanted)
    for _ in range(int(PATIENCE / 0.001)):
        if steps.has_calls:
            break
        threading.Event().wait(0.001)
    committing = threading.Thread(target=steps.run_calls)
    committing.start()
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=adapted.actuator.close)
    closing.start()
    closing.join(0.5)  # longer than the actuator takes to see that it is being closed
    go_on.set()
    closing.join(PATIENCE)
    committing.join(PATIENCE)
    assert adapted.settled()
    assert [outcome.error for outcome in adapted.outcomes] == [None] * 3
    assert adapted.plan.instances == wanted.instances
