"""The number of sequences that run at once changes while requests run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.build import build
from jaxserve.control.plan import Plan
from jaxserve.control.plan_yaml import from_yaml, to_yaml
from jaxserve.core.config import EngineConfig
from tests.actuator.adapted import GREEDY, OPTIONS, Adapted, prompt


@pytest.fixture
def adapted(tiny_model: Path) -> Iterator[Adapted]:
    built = build(EngineConfig(model=tiny_model, warmup=False, **OPTIONS))
    adapted = Adapted(built)
    yield adapted
    adapted.close()
    built.close()


def limited_to(count: int | None, plan: Plan) -> Plan:
    """Return the plan as operators limit it, in YAML."""
    text = to_yaml(plan.with_instance(plan.instance("0").with_max_num_seqs(count)))
    assert ("max_num_seqs" in text) == (count is not None)
    return from_yaml(text)


def running(adapted: Adapted) -> int:
    return len(adapted.steps.core.scheduler.running)


def test_lower_limit_lets_running_sequences_go_on_and_admits_no_others(adapted: Adapted) -> None:
    tokens: dict[str, tuple[int, ...]] = {}
    asked = [adapted.add(prompt(seed, 20), GREEDY) for seed in range(6)]
    while running(adapted) < 4:
        adapted.step(tokens)
    first = [sequence.request.id for sequence in adapted.steps.core.scheduler.running]
    adapted.commit_behind_a_step(limited_to(1, adapted.start), tokens)
    assert running(adapted) == 4, "those that run are not stopped"
    seen = []
    while not adapted.engine.idle:
        adapted.step(tokens)
        seen.append({sequence.request.id for sequence in adapted.steps.core.scheduler.running})
    others = [now for now in seen if now - set(first)]
    assert all(len(now) == 1 for now in others), "the others run one by one, when the first have ended"
    assert [len(tokens[request]) for request in asked] == [GREEDY.max_tokens] * 6
    adapted.wait()
    assert [outcome.error for outcome in adapted.outcomes] == [None]


def test_higher_limit_admits_waiting_sequences_at_the_next_step(adapted: Adapted) -> None:
    adapted.change(limited_to(1, adapted.start))
    tokens: dict[str, tuple[int, ...]] = {}
    asked = [adapted.add(prompt(seed, 8), GREEDY) for seed in range(4)]
    for _ in range(5):
        adapted.step(tokens)
        assert running(adapted) == 1
    adapted.commit_behind_a_step(limited_to(None, adapted.plan), tokens)
    assert running(adapted) == 1
    adapted.step(tokens)
    assert running(adapted) > 1
    adapted.run(tokens)
    assert [len(tokens[request]) for request in asked] == [GREEDY.max_tokens] * 4


def test_limit_comes_into_force_with_other_changes_of_the_plan(adapted: Adapted) -> None:
    """A lower limit comes before the pool shrinks, and a higher one after it has grown."""
    smaller = limited_to(2, adapted.start.with_kv_pages("0", 30))
    adapted.change(smaller)
    adapted.change(adapted.start)
    kinds = [type(outcome.transition).__name__ for outcome in adapted.outcomes]
    assert kinds == ["LimitSequences", "ResizeKVPool", "ResizeKVPool", "LimitSequences"]
    assert adapted.plan.instances == adapted.start.instances
