"""Random regroups under load: every answer is that of an instance that stays, and nothing is leaked.

REGROUP_EXAMPLES asks for more histories than a run of all tests has time for (make test-regroups).
"""

import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.core.errors import EngineFailed, PlanError
from jaxserve.engine import core, sync_engine
from tests.engine.test_moves import requests_of, result_of, unmoved
from tests.support.paged_host import (
    DEVICES,
    LAYERS,
    LENGTHS,
    MAX_LANES,
    MAX_PAGES,
    MAX_TP,
    NUM_LAYERS,
    Broken,
    PagedService,
)

EXAMPLES = int(os.environ.get("REGROUP_EXAMPLES", "40"))
REGROUPS = 25  # attempts in each history
FAULTS = (
    *("stage", "open", "merge", "merged", "split", "move pages", "copy pages", "replace", "release"),
    *("drop", "dropped", "stage layers", "restore", "send", "arrival", "receive"),
    *("begin apart", "begun apart", "know members", "load layers", "change layers"),  # layer by layer
)


@pytest.fixture(autouse=True, scope="module")
def do_not_pause() -> Iterator[None]:
    """Let an engine whose requests all wait for another plan not wait with them, and none of them end by failures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync_engine, "PAUSE_SECONDS", 0)
        patch.setattr(core, "MAX_FAILURES", 1000)  # more than there are in a history
        yield


class History:
    """A service with requests that come and go, whose plan changes at random."""

    def __init__(self, seed: int):
        self.rng, self.service = random.Random(seed), PagedService()
        self.service.meanwhile = self.serve
        self.requests = requests_of(self.rng, 25)
        self.waiting, self.aborted = list(self.requests), set[str]()
        self.failed = Counter[str]()

    def run(self) -> None:
        while sum(self.service.regroups.values()) + sum(self.failed.values()) < REGROUPS:
            for _ in range(self.rng.randint(1, 6)):
                self.serve()
            self.change()
            self.service.check()
            if self.rng.random() < 0.15:
                self.die()
        while self.waiting:
            self.serve()
        self.service.finish()
        self.service.check_idle()

    def serve(self) -> None:
        if self.waiting and self.rng.random() < 0.5:
            self.service.engine.accept(self.waiting.pop(0))
        if self.rng.random() < 0.03:
            request = self.rng.choice(self.requests)
            if request not in self.waiting:
                self.service.engine.abort(request.id)
                self.aborted.add(request.id)
        self.service.step()

    def change(self) -> None:
        """Change the plan at random, or try to: something may fail at any of its actions."""
        kind = self.rng.choice((*("merge", "split", "drop", "restore") * 2, "add", "remove", "pages", "precision"))
        faults = [self.rng.choice(FAULTS)] if self.rng.random() < 0.15 else []

        def before(action: str) -> None:
            if action in faults:
                faults.clear()
                raise Broken(action)

        plan = self.service.plan
        wanted = getattr(self, f"_{kind}")()
        if wanted is None:
            return
        self.service.host.before = before
        try:
            self.service.change(wanted, gradual=self.rng.random() < 0.5)
        except Broken as error:
            self.failed[str(error)] += 1
            names = [{instance.name for instance in each.instances} for each in (plan, self.service.plan)]
            assert names[0] == names[1]
        except (PlanError, ValueError, EngineFailed) as error:  # more pages are in use than the parts would have
            self.failed[type(error).__name__] += 1
        finally:
            self.service.host.before = lambda action: None

    def die(self) -> None:
        """Let an instance fail if others can go on for it, perhaps in the middle of a change."""
        groups = [plan for plan in self.service.plan.instances if plan.lanes > 1]
        if not groups and len(self.service.plan.instances) < 2:
            return
        plan = self.rng.choice(groups or self.service.plan.instances)
        mend = self.service.break_soon(plan.name, self.rng.choice([None, *range(len(plan.stages))]))
        if self.rng.random() < 0.5:
            self.change()
        for _ in range(3):
            self.serve()
        mend()
        self.service.recover()
        self.service.check()

    def _merge(self):
        by_degree: dict[int, list[str]] = {}
        for plan in self.service.plan.instances:
            if plan.lanes == 1:
                by_degree.setdefault(plan.tp, []).append(plan.name)
        if not by_degree:
            return None
        degree = self.rng.choice(list(by_degree))
        names = by_degree[degree]
        count = self.rng.choice([count for count in (2, 4) if count * degree <= MAX_TP] or [0])
        if not count or len(names) < count:
            return None
        self.rng.shuffle(names)
        members = [self.service.plan.instance(name) for name in names[:count]]
        return self.service.merged(names[:count], self.rng.choice(members).precisions)

    def _split(self):
        merged = [plan for plan in self.service.plan.instances if plan.tp > 1]
        if not merged:
            return None
        whole = self.rng.choice(merged)
        return self.service.split(whole.name, self.rng.choice([n for n in (2, 4) if n <= whole.tp]))

    def _drop(self):
        names = [plan.name for plan in self.service.plan.instances if plan.tp == 1]
        self.rng.shuffle(names)
        names = names[: self.rng.randint(2, 3)]
        lanes = sum(self.service.plan.instance(name).lanes for name in names)
        if len(names) < 2 or lanes > MAX_LANES:
            return None
        return self.service.grouped(names, self.rng.randint(0, 2 * lanes * MAX_PAGES))

    def _restore(self):
        groups = [plan for plan in self.service.plan.instances if plan.lanes > 1]
        return self.service.restored(self.rng.choice(groups).name, self.rng.randint(9, MAX_PAGES)) if groups else None

    def _add(self):
        used = sum(len(plan.devices) for plan in self.service.plan.instances)
        return self.service.added(self.rng.randrange(DEVICES)) if used < DEVICES else None

    def _remove(self):
        names = [plan.name for plan in self.service.plan.instances]
        return self.service.without([self.rng.choice(names)]) if len(names) > 1 else None

    def _pages(self):
        instance = self.rng.choice(self.service.plan.instances)
        limits = self.service.resources.limits_of(instance.tp, instance.lanes)
        pages = self.rng.randint(limits.min_pages, limits.max_pages)
        return self.service.plan.with_instance(instance.with_kv_pages(-(-pages // instance.lanes) * instance.lanes))

    def _precision(self):
        instance = self.rng.choice(self.service.plan.instances)
        layer, precision = f"layers.{self.rng.randrange(NUM_LAYERS)}", self.rng.choice(list(LAYERS))
        return self.service.plan.with_precisions(instance.name, {layer: precision})


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 2**32))
def test_random_regroups_change_no_answer_and_leak_nothing(seed: int) -> None:
    history = History(seed)
    history.run()
    wanted = unmoved(history.requests)
    for request in history.requests:
        if request.id not in history.aborted:
            assert result_of(history.service.answers[request.id]) == wanted[request.id], request.id


def test_histories_have_all_kinds_of_regroups_and_faults() -> None:
    kinds, failed = Counter[str](), Counter[str]()
    for seed in range(12):
        history = History(seed)
        history.run()
        kinds += history.service.regroups
        failed += history.failed
    assert {"2 -> 1", "4 -> 1", "1 -> 2", "1 -> 4", "0 -> 1", "1 -> 0"} <= kinds.keys()
    assert sum(failed[fault] for fault in FAULTS) > 5
    assert {"group fails", "instance fails"} <= kinds.keys()


def test_an_instance_holds_no_longer_requests_than_its_members_while_its_pages_are_divided() -> None:
    """A request that needs a whole instance waits in front of it, and does not keep others from their pages."""
    service, longest = PagedService(), list[int]()
    one, two = LENGTHS[1], LENGTHS[2]

    def note(action: str) -> None:
        if action == "change layers":
            longest.append(service.engine.info.instance_len)

    def fail_late(action: str) -> None:
        note(action)
        if action == "split":
            raise Broken(action)

    service.host.before = note
    service.change(service.merged([plan.name for plan in service.plan.instances[:2]]), gradual=True)
    assert (set(longest), service.engine.info.instance_len) == ({one}, two)

    (whole,) = [plan.name for plan in service.plan.instances if plan.tp == 2]
    service.host.before = fail_late
    with pytest.raises(Broken):
        service.change(service.split(whole, 2), gradual=True)
    assert (set(longest), service.engine.info.instance_len) == ({one}, two), "its pages are joined again at last"
    assert service.host.instance(whole).core.capacity == two
