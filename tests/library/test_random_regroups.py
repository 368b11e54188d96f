"""Random regroups of real instances under load, with aborts, KV that changes its size, and precisions that change.

REGROUP_EXAMPLES asks for more than a run of all tests has time for (make test-regroups).
"""

import os
import random
from pathlib import Path

from jaxserve.core.errors import PlanError
from tests.library.test_merge import DENSE, KINDS, SMALL, answers, check_same, prompt_of, written
from tests.library.test_regroup_faults import held
from tests.support.regrouped import Regrouped
from tests.support.thorough import THOROUGH

REGROUPS = max(24 if THOROUGH else 12, int(os.environ.get("REGROUP_EXAMPLES", "0")) // 10)


def all_answers(engine: Regrouped, count: int) -> list[str]:
    kinds = list(KINDS.values())
    return [engine.add(prompt_of(n, 3 + 17 * (n % 7), 32 * (n % 2)), kinds[n % len(kinds)]) for n in range(count)]


def change(engine: Regrouped, rng: random.Random) -> None:
    """Change the instances at random, as far as that is possible."""
    plans = list(engine.plan.instances)
    kind = rng.choice((*("merge", "split", "drop", "restore") * 2, "add", "remove", "pages"))
    instance = rng.choice(plans)
    if kind == "merge":
        # On few placements, each of which has programs of its own.
        first = rng.choice((0, 2))
        wanted = {first, first + 1} if instance.tp == 1 else set(range(4))
        members = sorted((plan for plan in plans if plan.devices <= wanted), key=lambda plan: plan.stages[0].devices)
        if len(members) == 2 and all(2 * plan.tp == len(wanted) for plan in members):
            engine.merge(*(plan.name for plan in members))
    elif kind == "drop":
        # Pairs, or these together, for the same reason.
        among = rng.choice(({0, 1}, {2, 3}, {0, 1, 2, 3}))
        pair = [plan for plan in plans if plan.tp == 1 and plan.devices <= among]
        if len(pair) == 2 and pair[0].lanes == pair[1].lanes:
            engine.edit("drop", *(plan.name for plan in pair))
    elif kind == "restore" and instance.lanes > 1:
        engine.edit("restore", instance.name)
    elif kind == "split" and instance.tp > 1:
        engine.split(instance.name, rng.choice([count for count in (2, 4) if count <= instance.tp]))
    elif kind == "remove" and len(plans) > 2:
        engine.remove(instance.name)
    elif kind == "add" and instance.tp == instance.lanes == 1:
        free = set(range(4)) - {device for plan in plans for device in plan.devices}
        if free:
            engine.add_instance(instance, rng.choice(sorted(free)))
    elif kind == "pages":
        least, size = engine.resources.limits_of(instance.tp, instance.lanes).min_pages, instance.tp * instance.lanes
        pages = -(-max(least, 41 * size) // size) + rng.choice([0, 8])
        engine.adapt({instance.name: instance.with_kv_pages(pages * size)})


def test_random_regroups_change_no_answer_and_leak_nothing(tmp_path: Path) -> None:
    model, rng = written(tmp_path, DENSE | {"num_hidden_layers": 4}), random.Random(4)
    engine = Regrouped(model, max_pp=4, max_kv_pages=60, **SMALL)
    try:
        expected = answers(engine, lambda e: all_answers(e, 20))
        engine.change(engine.start)
        before, done = held(), 0
        while done < REGROUPS:
            ids = all_answers(engine, 20)
            aborted = set(rng.sample(ids, 3))
            while not engine.engine.idle:
                for _ in range(rng.randint(2, 8)):
                    engine.step()
                    if rng.random() < 0.05:
                        engine.engine.abort(rng.choice(sorted(aborted)))
                count = len(engine.outcomes)
                try:
                    change(engine, rng)
                except (PlanError, ValueError, AssertionError) as error:
                    if "pages" not in str(error):
                        raise
                engine.check_ledgers()
                done += len(engine.outcomes) - count
            engine.check_idle()
            found = {name: engine.answers.pop(name, None) for name in ids}
            kept = [number for number, name in enumerate(ids) if name not in aborted]
            check_same([found[ids[number]] for number in kept], [expected[number] for number in kept])
        engine.change(engine.start)
        engine.check_idle()
        arrays, threads = held()
        assert arrays <= before[0]  # samplers make some constants at first use
        assert threads == before[1]
    finally:
        engine.close()
