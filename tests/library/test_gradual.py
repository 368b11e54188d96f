"""Merges and splits that go layer by layer: what a fault leaves, and how long they stop instances."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from jaxserve.executor.fused import FusedTier
from tests.library.test_merge import DENSE, GREEDY, answers, check_same, prompt_of, written
from tests.support.internals import fused_tier_of, sought_keys
from tests.support.regrouped import Regrouped


class Fault(Exception):
    """A fault that a test wants."""


def failing_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises at one of its calls, the first being 1."""
    calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Fault(f"at call {call}")
        return function(*arguments, **options)

    return counted


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    engine = Regrouped(written(tmp_path_factory.mktemp("gradual"), DENSE), gradual=True, dp=2, max_tp=2)
    yield engine
    engine.close()


def answers_of(engine: Regrouped, change: Callable[[Regrouped], object] | None) -> list[Any]:
    """Return the answers to some requests, with a change in their middle."""
    names = [engine.add(prompt_of(number, 5 + 17 * number), GREEDY) for number in range(7)]
    engine.run([] if change is None else [change], every=4)
    engine.check_idle()
    return [engine.answers.pop(name).outputs[0].token_ids for name in names]


@pytest.mark.parametrize("where", ["load_layers", "change_layers", "end_apart", "begin_apart"])
def test_fault_leaves_the_instances_and_their_answers(engine: Regrouped, where: str) -> None:
    expected, host = answers_of(engine, None), engine.built.host
    assert host is not None

    def faulty(change: Callable[[], object]) -> Callable[[Regrouped], object]:
        def run(_: Regrouped) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(host, where, failing_at(1, getattr(host, where)))
                with pytest.raises(Fault):
                    change()

        return run

    if where != "end_apart":
        before = engine.plan.instances
        assert answers_of(engine, faulty(lambda: engine.merge(*engine.names))) == expected
        assert engine.plan.instances == before
    assert answers_of(engine, lambda e: e.merge(*e.names)) == expected
    if where != "begin_apart":
        before = engine.plan.instances
        assert answers_of(engine, faulty(lambda: engine.split(engine.names[0]))) == expected
        assert engine.plan.instances == before
    assert answers_of(engine, lambda e: e.split(e.names[0])) == expected


def test_requests_arrive_and_end_while_layers_change(engine: Regrouped) -> None:
    expected, host = answers_of(engine, None), engine.built.host
    assert host is not None
    later = [engine.add(prompt_of(number, 9 + number), GREEDY) for number in range(20, 26)]
    engine.run()
    late = [engine.answers.pop(name).outputs[0].token_ids for name in later]
    change, asked = host.change_layers, []

    def ask_too(*arguments: Any) -> Any:
        if len(asked) < 6:
            number = 20 + len(asked)
            asked.append(engine.add(prompt_of(number, 9 + number), GREEDY))
        return change(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "change_layers", ask_too)
        for regroup in (lambda e: e.merge(*e.names), lambda e: e.split(e.names[0])):
            assert answers_of(engine, regroup) == expected
    assert len(asked) >= 2
    assert [engine.answers.pop(name).outputs[0].token_ids for name in asked] == late[: len(asked)]


def test_steps_are_not_fused_before_all_layers_are_joint(engine: Regrouped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are apart have pools of another sharding."""
    host = engine.built.host
    fused: list[Any] = []  # before each change of layers
    assert host is not None
    change, new_tier = host.change_layers, partial(FusedTier, engine.built.compilations)
    monkeypatch.setattr(engine.built.maker, "fused_tier", new_tier)

    def change_after_steps(instance: Any, loaded: Any) -> Any:
        tier = fused_tier_of(instance.executor)
        engine.step()
        engine.step()
        fused.append(sought_keys(tier))
        return change(instance, loaded)

    monkeypatch.setattr(host, "change_layers", change_after_steps)
    params = replace(GREEDY, max_tokens=12)
    expected, found = (
        answers(engine, lambda e: [e.add(prompt_of(1, 20), params)], changes)
        for changes in ((), [lambda e: e.merge(*e.names)])
    )
    check_same(found, expected)
    monkeypatch.setattr(host, "change_layers", change)
    engine.split(engine.names[0])
    assert fused
    assert not any(fused)
